"""Starting, closing, what log-probabilities are found to mean, cancelling, pickling, and what is refused outright."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.server.asking import serving, turn
from tests.engines.server.fakes import KEY, FakeServer, FakeSGLang, FakeVLLM
from unspool import ServerEngine
from unspool.engines.meaning import LogprobMeaning
from unspool.types import EngineError, InvalidTypeError, InvalidValueError

FULL = [14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 2]
RAW = LogprobMeaning(temperature=False, truncation=False, penalty=False)
TEMPERATURE_ONLY = LogprobMeaning(temperature=True, truncation=False, penalty=True)


@pytest.fixture(params=[FakeVLLM, FakeSGLang], ids=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with request.param() as server:
        yield server


# ------------------------------------------------------------------ starting


async def test_start_finds_the_model_its_context_and_asks_nothing_twice(server: FakeServer) -> None:
    async with serving(server) as engine:
        assert engine.context_length == 1000
        asked = len(server.probes)
        await engine.start()
        await engine.generate(turn())
        assert len(server.probes) == asked == 5


async def test_a_request_starts_the_engine_where_nobody_did(server: FakeServer) -> None:
    kind: Any = "sglang" if isinstance(server, FakeSGLang) else "vllm"
    engine = ServerEngine(f"{server.url}/v1/", kind, api_key=KEY, start_timeout=10)
    assert (await engine.generate(turn())).tokens == FULL
    await engine.close()


async def test_start_waits_for_a_server_that_is_not_ready_yet() -> None:
    with FakeVLLM() as server:
        server.healthy = False
        engine = ServerEngine(server.url, api_key=KEY, start_timeout=10)
        starting = asyncio.create_task(engine.start())
        await server.has(lambda: server.paths.count("/health") >= 2)
        assert not starting.done()
        server.healthy = True
        await starting
        await engine.close()


async def test_start_gives_up_after_start_timeout_and_names_the_server() -> None:
    engine = ServerEngine("http://127.0.0.1:1", start_timeout=0.3)
    with pytest.raises(EngineError, match=r"no server was ready within start_timeout=0.3 s \(http://127.0.0.1:1: .*"):
        await engine.start()
    await engine.close()


async def test_start_does_not_wait_for_what_waiting_cannot_mend() -> None:
    with FakeVLLM() as server:
        for options, says in (({"api_key": "wrong"}, "401: Unauthorized"), ({"model": "x"}, "no model 'x'; it has m")):
            engine = ServerEngine(server.url, **{"api_key": KEY, "start_timeout": 60.0, **options})
            with pytest.raises(EngineError, match=says):
                await asyncio.wait_for(engine.start(), 10)
            await engine.close()


async def test_a_closed_engine_says_so_and_start_opens_it_again(server: FakeServer) -> None:
    async with serving(server) as engine:
        server.block_after = 1
        under_way = asyncio.create_task(engine.generate(turn("a")))
        await server.has(lambda: len(server.jobs) == 1)
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await asyncio.wait_for(under_way, 10)
        with pytest.raises(EngineError, match=r"the engine was closed; call start\(\) before using it again"):
            await engine.generate(turn("a"))
        server.go()
        await engine.start()
        assert (await engine.generate(turn("a"))).tokens == FULL


async def test_closing_twice_or_before_anything_is_no_error() -> None:
    engine = ServerEngine("http://127.0.0.1:1")
    await engine.close()
    await engine.close()


# ------------------------------------------------------------------ what log-probabilities mean


@pytest.mark.parametrize("kind", [FakeVLLM, FakeSGLang], ids=["vllm", "sglang"])
@pytest.mark.parametrize(
    ("meaning", "options", "wrong"),
    [
        (RAW, {"temperature": 0.7}, "temperature=0.7"),
        (RAW, {"temperature": 0.7, "top_p": 0.9}, "temperature=0.7, top_p=0.9"),
        (RAW, {"top_k": 5}, "top_k=5"),
        (RAW, {"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        (TEMPERATURE_ONLY, {"temperature": 0.7, "top_k": 5}, "with top_k=5"),
        (TEMPERATURE_ONLY, {"top_p": 0.5}, "top_p=0.5"),
    ],
)
async def test_a_request_whose_log_probabilities_would_be_wrong_is_refused_with_the_way_out(
    kind: type[FakeServer], meaning: LogprobMeaning, options: dict[str, Any], wrong: str
) -> None:
    with kind(meaning=meaning) as server:
        async with serving(server) as engine:
            with pytest.raises(EngineError, match=wrong) as refused:
                await engine.generate(turn(**options))
        remedy = "--logprobs-mode processed_logprobs" if kind is FakeVLLM else "SGLANG_RETURN_ORIGINAL_LOGPROB"
        assert remedy in str(refused.value)
        assert server.bodies == []


@pytest.mark.parametrize(
    ("meaning", "options"),
    [
        (RAW, {}),
        (RAW, {"temperature": 0.0, "top_p": 0.5}),
        (TEMPERATURE_ONLY, {"temperature": 0.7, "repetition_penalty": 1.2}),
        (LogprobMeaning(), {"temperature": 0.7, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.2}),
    ],
)
async def test_a_request_whose_log_probabilities_are_right_is_served(
    meaning: LogprobMeaning, options: dict[str, Any]
) -> None:
    with FakeVLLM(meaning=meaning) as server:
        async with serving(server) as engine:
            assert (await engine.generate(turn(**options))).tokens == FULL


async def test_what_extra_does_to_the_distribution_is_refused_too() -> None:
    with FakeVLLM(meaning=RAW) as server:
        async with serving(server) as engine:
            with pytest.raises(EngineError, match="with logit_bias, min_p;"):
                await engine.generate(turn(extra={"min_p": 0.1, "logit_bias": {"5": 1.0}, "priority": 1}))


async def test_of_servers_that_differ_the_weakest_counts() -> None:
    with FakeVLLM() as processed, FakeVLLM(meaning=RAW) as raw:
        async with serving(processed, raw) as engine:
            with pytest.raises(EngineError, match=r"temperature=0.7"):
                await engine.generate(turn(temperature=0.7))


# ------------------------------------------------------------------ cancelling, loops, processes


async def test_cancelling_a_turn_reaches_the_server(server: FakeServer) -> None:
    async with serving(server) as engine:
        server.block_after = 1
        under_way = asyncio.create_task(engine.generate(turn("a")))
        await server.has(lambda: len(server.jobs) == 1)
        [rid] = server.jobs
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        await server.has(lambda: not server.jobs)
        if isinstance(server, FakeSGLang):
            await server.has(lambda: server.aborted == [rid])
        assert engine._fleet.replicas[0].calls == set()


async def test_cancelling_while_a_turn_waits_for_its_next_try_ends_it() -> None:
    from tests.engines.server.fakes import status

    with FakeVLLM() as server:
        async with serving(server) as engine:
            server.faults = [status(429, **{"Retry-After": "60"})]
            under_way = asyncio.create_task(engine.generate(turn("a")))
            await server.has(lambda: len(server.bodies) == 1)
            under_way.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(under_way, 5)


def test_one_engine_serves_two_loops_at_once(server: FakeServer) -> None:
    kind: Any = "sglang" if isinstance(server, FakeSGLang) else "vllm"
    engine = ServerEngine(server.url, kind, api_key=KEY, start_timeout=10)
    answers: list[list[int]] = []

    async def some() -> None:
        for answer in await asyncio.gather(*(engine.generate(turn()) for _ in range(5))):
            answers.append(answer.tokens)

    threads = [threading.Thread(target=lambda: asyncio.run(some())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [FULL] * 10
    asyncio.run(engine.close())


async def test_an_update_from_one_loop_interrupts_a_turn_of_another(server: FakeServer) -> None:
    async with serving(server) as engine:
        server.block_after = 2
        outcome: list[Any] = []
        thread = threading.Thread(target=lambda: outcome.append(asyncio.run(engine.generate(turn("a")))))
        thread.start()
        await server.has(lambda: any(len(job.tokens) == 2 for job in server.jobs.values()))
        server.block_after = None
        await engine.update_weights("/checkpoints/2")
        await asyncio.to_thread(thread.join)
    assert outcome[0].versions[:3] == [0, 0, 1]


async def test_an_engine_pickles_as_its_arguments(server: FakeServer) -> None:
    async with serving(server, version=5) as engine:
        copy = pickle.loads(pickle.dumps(engine))
        assert (copy.urls, copy.version) == (engine.urls, 5)
        assert (await copy.generate(turn())).versions == [5] * 11
        await copy.close()


def test_the_package_loads_httpx_only_when_the_engine_is_asked_for() -> None:
    code = "import sys, unspool; from unspool.engines import Engine; print({'httpx', 'tenacity'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


def test_without_its_packages_it_says_how_to_get_them() -> None:
    code = "import sys; sys.modules['tenacity'] = None\ntry:\n import unspool; unspool.ServerEngine\n"
    code += "except ImportError as error:\n print(type(error).__name__, error)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("MissingExtraError ServerEngine needs the package tenacity")
    assert "pip install 'unspool[server]'" in printed


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("urls", "options", "says"),
    [
        ([], {}, "urls is empty"),
        ("localhost:8000", {}, "must begin with http:// or https://, not 'localhost:8000'"),
        (["http://a", "http://a/v1"], {}, "a server stands twice in urls"),
        ("http://a", {"kind": "tgi"}, "kind must be 'vllm' or 'sglang', not 'tgi'"),
        ("http://a", {"max_episodes": 0}, "max_episodes must be"),
        ("http://a", {"max_retries": -1}, "max_retries must be"),
        ("http://a", {"request_timeout": 0}, "request_timeout must be a number of seconds above 0, not 0"),
        ("http://a", {"recover_timeout": -1.0}, "recover_timeout must be"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(urls: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((InvalidValueError, InvalidTypeError), match=says):
        ServerEngine(urls, **options)
