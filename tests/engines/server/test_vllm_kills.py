"""A real vLLM server is killed in the middle of 32 episodes: all finish, none twice, and each says what it lost.

The model is a tiny random one, so that a server starts quickly and a turn is short.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.server.vllm_parts import Tap, engine_of
from tests.small import small_template, small_tokenizer
from tests.vllm_server import VLLMServer
from unspool import MultiTurnRollout, Step

pytestmark = pytest.mark.vllm
pytest.importorskip("torch")

EPISODES, TURNS, KILL_AFTER = 32, 3, 40


class GoOn:
    """Answers every turn with the same words, until the turn limit ends the episode."""

    def tool_infos(self) -> list[dict[str, Any]]:
        return []

    def wants(self, message: Any) -> bool:
        return True

    async def step(self, message: Any) -> Step:
        return Step([{"role": "user", "content": "And then?"}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines.tiny_models import tiny_llama

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    model = tiny_llama(vocab_size=len(tokenizer), hidden_size=128, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    return folder


def server_of(folder: Path, log: Path) -> VLLMServer:
    return VLLMServer(folder, log, ["--max-model-len", "512", "--served-model-name", "tiny"])


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLMServer, VLLMServer]]:
    logs = tmp_path_factory.mktemp("logs")
    one, two = (server_of(folder, logs / f"{name}.log") for name in ("one", "two"))
    try:
        one.launch()
        two.launch()
        one.wait()
        two.wait()
        yield one, two
    finally:
        one.kill()
        two.kill()


def episodes() -> list[dict[str, Any]]:
    return [{"id": f"{n}", "messages": [{"role": "user", "content": f"Hello {n}."}]} for n in range(EPISODES)]


class KillAfter(Tap):
    """Does something once, when so many answers have come."""

    def __init__(self, engine: Any, count: int, then: Any) -> None:
        super().__init__(engine)
        watched = engine._http.send_json

        async def counted(url: str, body: Any = None, *, seconds: float) -> Any:
            data = await watched(url, body, seconds=seconds)
            if len(self.exchanges) == count:
                then()
            return data

        engine._http.send_json = counted


def check(results: list[dict[str, Any]], tap: Tap) -> int:
    """Every episode is whole and there once; its tokens are what the servers answered. Returns the turns retried."""
    assert [result["id"] for result in results] == [f"{n}" for n in range(EPISODES)]
    assert [result["error"] for result in results] == [None] * EPISODES
    assert [result["turns"] for result in results] == [TURNS] * EPISODES
    answered = Counter((tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])) for _, choice in tap.exchanges)
    retried = 0
    for result in results:
        at = 0
        for span in result["spans"]:
            end = at + span["length"]
            if span["origin"] == "sampled":
                answered[tuple(result["input_ids"][:at]), tuple(result["input_ids"][at:end])] -= 1
                retries = span.get("metadata", {}).get("retries", [])
                assert all(retry["kept"] == 0 and retry["error"] for retry in retries)
                retried += bool(retries)
            at = end
    assert set(answered.values()) == {0}
    return retried


def rollout(engine: Any) -> MultiTurnRollout:
    """Turns of 20 to 30 letters, which a grammar ends: a turn that ends by its length would end the episode."""
    return MultiTurnRollout(
        engine,
        small_template(),
        GoOn(),
        {"max_tokens": 64},
        max_turns=TURNS,
        seed=1,
        extra={"structured_outputs": {"regex": "[a-z]{20,30}"}},
        progress=False,
    )


async def test_the_only_server_is_killed_and_started_again(pair: tuple[VLLMServer, VLLMServer]) -> None:
    server, _ = pair

    def kill_and_start() -> None:
        server.kill()
        server.launch()

    async with engine_of(server) as engine:
        tap = KillAfter(engine, KILL_AFTER, kill_and_start)
        results = await rollout(engine).acall(episodes())
    assert check(results, tap) >= 8


async def test_one_of_two_servers_is_killed(pair: tuple[VLLMServer, VLLMServer]) -> None:
    one, two = pair
    await asyncio.to_thread(one.wait)
    async with engine_of(one, two) as engine:
        tap = KillAfter(engine, KILL_AFTER, one.kill)
        results = await rollout(engine).acall(episodes())
        assert [replica.live for replica in engine._fleet.replicas] == [False, True]
    assert check(results, tap) >= 4
