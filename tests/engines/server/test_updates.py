"""New weights, and pauses, while turns are under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.server.asking import PROMPT, serving, turn
from tests.engines.server.fakes import FakeServer, FakeSGLang, FakeVLLM
from unspool import ServerEngine
from unspool.types import EngineError, InvalidTypeError


def by_weights(prompt: list[int], weights: str) -> list[int]:
    """100, 101, ... with weights 1, and 200, 201, ... with weights 2, for the place behind the prompt."""
    return [100 * int(weights) + place for place in range(10)]


@pytest.fixture(params=[FakeVLLM, FakeSGLang], ids=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with request.param(reply=by_weights) as server:
        server.weights = "1"
        yield server


def prompt_of(body: dict[str, Any]) -> list[int]:
    prompt: list[int] = body.get("prompt") or body["input_ids"]
    return prompt


def limit_of(body: dict[str, Any]) -> int:
    limit: int = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
    return limit


def seed_of(body: dict[str, Any]) -> int:
    seed: int = body["seed"] if "seed" in body else body["sampling_params"]["sampling_seed"]
    return seed


async def held(engine: ServerEngine, server: FakeServer, after: int, **options: Any) -> asyncio.Task[Any]:
    """A turn that stands in the server after so many tokens."""
    server.block_after = after
    under_way = asyncio.create_task(engine.generate(turn("a", **options)))
    await server.has(lambda: any(len(job.tokens) == after for job in server.jobs.values()))
    return under_way


async def test_an_interrupted_turn_goes_on_behind_its_tokens_and_its_versions_change_at_the_seam(
    server: FakeServer,
) -> None:
    async with serving(server, version=3) as engine:
        under_way = await held(engine, server, 2, max_tokens=4, seed=9)
        server.block_after = None
        await engine.update_weights("/checkpoints/2")
        answer = await under_way
        assert engine.version == 4
    assert answer.tokens == [100, 101, 200, 201]
    assert answer.versions == [3, 3, 4, 4]
    assert answer.logprobs == pytest.approx([-1.0100, -1.0101, -1.0200, -1.0201])
    assert answer.stop_reason == "length"
    first, second = server.bodies
    assert prompt_of(second) == [*PROMPT, 100, 101]
    assert (limit_of(first), limit_of(second)) == (4, 2)
    assert seed_of(first) == 9 != seed_of(second)
    [retry] = answer.extra["retries"]
    assert retry["kept"] == 2
    assert "abort" in retry["error"]


async def test_a_turn_interrupted_before_its_first_token_is_asked_for_again_as_it_was(server: FakeServer) -> None:
    async with serving(server) as engine:
        under_way = await held(engine, server, 0, max_tokens=2, seed=9)
        server.block_after = None
        await engine.update_weights(Path("/checkpoints/2"), version=40)
        answer = await under_way
        assert engine.version == 40
    assert (answer.tokens, answer.versions) == ([200, 201], [40, 40])
    first, second = ({**body, "rid": ""} for body in server.bodies)
    assert first == second


async def test_a_turn_interrupted_after_all_its_tokens_is_whole(server: FakeServer) -> None:
    async with serving(server) as engine:
        under_way = await held(engine, server, 3, max_tokens=3)
        await engine.update_weights("/checkpoints/2")
        answer = await under_way
    assert (answer.tokens, answer.stop_reason) == ([100, 101, 102], "length")
    assert len(server.bodies) == 1


async def test_a_turn_interrupted_at_its_stop_token_is_whole(server: FakeServer) -> None:
    async with serving(server) as engine:
        server.block_after = 2
        under_way = asyncio.create_task(engine.generate(turn("a", max_tokens=9, stop_token_ids=(999,))))
        await server.has(lambda: any(len(job.tokens) == 2 for job in server.jobs.values()))

        def at_the_stop() -> None:
            for job in server.jobs.values():
                job.tokens[-1] = 999

        server.soon(at_the_stop)
        await engine.update_weights("/checkpoints/2")
        answer = await under_way
    assert (answer.tokens, answer.stop_reason) == ([100, 999], "stop")


@pytest.mark.parametrize(
    "options", [{"stop": "\n"}, {"extra": {"structured_outputs": {"regex": "a+"}}}], ids=["stop string", "grammar"]
)
async def test_what_the_server_would_have_to_remember_is_sampled_whole_again(
    server: FakeServer, options: dict[str, Any]
) -> None:
    async with serving(server) as engine:
        under_way = await held(engine, server, 2, max_tokens=4, **options)
        server.block_after = None
        await engine.update_weights("/checkpoints/2")
        answer = await under_way
    assert (answer.tokens, answer.versions) == ([200, 201, 202, 203], [1, 1, 1, 1])
    assert answer.extra["retries"][0]["kept"] == 0


async def test_new_requests_wait_during_an_update_and_get_the_new_weights(server: FakeServer) -> None:
    async with serving(server) as engine:
        await engine.pause()
        waits = asyncio.create_task(engine.generate(turn("b", max_tokens=2)))
        await engine.update_weights("/checkpoints/2")
        await asyncio.sleep(0.05)
        assert not waits.done()
        assert server.bodies == []
        await engine.resume()
        answer = await waits
    assert (answer.tokens, answer.versions) == ([200, 201], [1, 1])
    assert "retries" not in answer.extra


async def test_a_request_that_a_paused_server_has_not_begun_is_not_left_to_the_new_weights_unsaid(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unspool.engines.server.control._LAST_ANSWERS", 0.1)
    async with serving(server, version=3) as engine:
        server.paused = True  # somebody else's doing: it stands in the server's queue, begun by nobody
        under_way = asyncio.create_task(engine.generate(turn("a", max_tokens=2)))
        await server.has(lambda: len(server.jobs) == 1)
        await engine.update_weights("/checkpoints/2")
        answer = await under_way
    assert (answer.tokens, answer.versions) == ([200, 201], [4, 4])
    assert "had not begun" in answer.extra["retries"][0]["error"]


async def test_a_pause_holds_and_resume_goes_on_with_the_same_weights(server: FakeServer) -> None:
    async with serving(server) as engine:
        under_way = await held(engine, server, 2, max_tokens=4)
        server.block_after = None
        await engine.pause()
        assert not server.jobs
        assert not under_way.done()
        await engine.resume()
        answer = await under_way
    assert (answer.tokens, answer.versions) == ([100, 101, 100, 101], [0, 0, 0, 0])


async def test_weights_that_no_server_takes_change_nothing(server: FakeServer) -> None:
    async with serving(server, version=3) as engine:
        server.refuses_weights = True
        with pytest.raises(EngineError, match=r"took no new weights: .*no such weights"):
            await engine.update_weights("/checkpoints/2")
        assert engine.version == 3
        answer = await engine.generate(turn(max_tokens=2))
    assert (answer.tokens, answer.versions) == ([100, 101], [3, 3])


async def test_a_server_that_takes_no_new_weights_is_out_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with FakeVLLM(reply=by_weights) as good, FakeVLLM(reply=by_weights) as bad:
        good.weights = bad.weights = "1"
        async with serving(good, bad) as engine:
            await engine.generate(turn("a"))
            await engine.generate(turn("b"))
            bad.refuses_weights = True
            with caplog.at_level(logging.WARNING):
                await engine.update_weights("/checkpoints/2")
            assert f"{bad.url} is lost: it took no new weights" in caplog.text
            answer = await engine.generate(turn("b", max_tokens=2))
            assert (answer.tokens, answer.versions, len(bad.bodies)) == ([200, 201], [1, 1], 1)
            bad.refuses_weights = False
            await engine._fleet.server_changed.until(lambda: len(engine._fleet.live) == 2, 10)
            assert (bad.weights, bad.paused) == ("2", False)
            answer = await engine.generate(turn("c", max_tokens=2))
            assert (answer.tokens, len(bad.bodies)) == ([200, 201], 2)


async def test_a_server_that_was_started_again_gets_the_latest_weights_before_it_serves(server: FakeServer) -> None:
    async with serving(server) as engine:
        await engine.update_weights("/checkpoints/2")
        under_way = await held(engine, server, 1, max_tokens=2)
        server.kill()
        server.block_after = None
        server.start()
        assert server.weights == "0"
        answer = await under_way
    assert server.weights == "2"
    assert (answer.tokens, answer.versions) == ([200, 201], [1, 1])


async def test_a_restart_that_no_request_noticed_is_found_before_the_next_one(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unspool.engines.server.control._QUIET", 0.0)
    async with serving(server) as engine:
        await engine.update_weights("/checkpoints/2")
        server.soon(server._fresh)  # as if it had been started again behind a load balancer
        answer = await engine.generate(turn("a", max_tokens=2))
    assert (answer.tokens, answer.versions) == ([200, 201], [1, 1])
    assert "retries" not in answer.extra


async def test_a_vllm_server_without_developer_mode_says_how_to_get_it() -> None:
    with FakeVLLM(developer=False) as server:
        async with serving(server) as engine:
            for change in (engine.pause, lambda: engine.update_weights("/checkpoints/2")):
                with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
                    await change()
            assert (await engine.generate(turn(max_tokens=1))).versions == [0]


@pytest.mark.parametrize("source", [None, 3, {"a": 1}])
async def test_weights_are_the_path_of_a_folder(server: FakeServer, source: Any) -> None:
    async with serving(server) as engine:
        with pytest.raises(InvalidTypeError, match="checkpoint folder that its servers can read"):
            await engine.update_weights(source)


async def test_a_cancelled_update_is_done_all_the_same(server: FakeServer) -> None:
    async with serving(server) as engine:
        server.may_load.clear()
        update = asyncio.create_task(engine.update_weights("/checkpoints/2"))
        await server.has(lambda: bool({"/collective_rpc", "/update_weights_from_disk"}.intersection(server.paths)))
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        server.may_load.set()
        answer = await engine.generate(turn(max_tokens=2))
    assert (answer.tokens, answer.versions) == ([200, 201], [1, 1])


async def test_a_server_that_interrupts_without_end_is_an_error() -> None:
    with FakeSGLang(reply=by_weights) as server:
        async with serving(server, max_retries=2) as engine:
            server.block_after = 0

            async def abort_all() -> None:
                while True:
                    server.soon(server.stop_all)
                    await asyncio.sleep(0.01)

            aborting = asyncio.create_task(abort_all())
            with pytest.raises(EngineError, match="interrupted a turn 3 times before it had sampled a token"):
                await engine.generate(turn())
            aborting.cancel()
