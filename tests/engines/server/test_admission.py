"""How many episodes a server gets at once, by a number or by its own queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.engines.server.asking import serving, turn
from tests.engines.server.fakes import FakeSGLang, FakeVLLM
from unspool import ServerEngine
from unspool.types import EngineError


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


async def queued(engine: ServerEngine, count: int) -> None:
    """Return when so many episodes wait."""
    for _ in range(10_000):
        if engine._fleet.queue == count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{engine._fleet.queue} episodes wait, not {count}")


async def test_at_most_max_episodes_are_with_a_server_and_the_others_come_in_their_order(server: FakeVLLM) -> None:
    async with serving(server, max_episodes=2) as engine:

        async def episode(number: int) -> None:
            for _ in range(2):
                await engine.generate(turn(f"{number}", prompt=[100 + number]))
            engine.end_session(f"{number}")

        await asyncio.gather(*(episode(number) for number in range(8)))
    first = list(dict.fromkeys(body["prompt"][0] for body in server.bodies))
    assert first == [100, 101, 102, 103, 104, 105, 106, 107]
    assert server.most_running <= 2


async def test_an_episode_keeps_its_place_between_its_turns(server: FakeVLLM) -> None:
    async with serving(server, max_episodes=1) as engine:
        await engine.generate(turn("a"))
        waits = asyncio.create_task(engine.generate(turn("b", prompt=[99])))
        await engine.generate(turn("a"))
        await engine.generate(turn("a"))
        assert [body["prompt"] for body in server.bodies] == [[11, 12, 13]] * 3
        engine.end_session("a")
        await waits
        assert server.bodies[-1]["prompt"] == [99]


async def test_who_waits_holds_no_connection(server: FakeVLLM) -> None:
    async with serving(server, max_episodes=2) as engine:
        server.block_after = 1
        server.connections.clear()
        under_way = [asyncio.create_task(engine.generate(turn())) for _ in range(10)]
        await server.has(lambda: len(server.jobs) == 2)
        assert engine._fleet.queue == 8
        assert len(server.connections) == 2
        server.go()
        await asyncio.gather(*under_way)


async def test_who_gives_up_waiting_leaves_the_queue(server: FakeVLLM) -> None:
    async with serving(server, max_episodes=1) as engine:
        await engine.generate(turn("a"))
        second, third = (
            asyncio.create_task(engine.generate(turn(name, prompt=[place]))) for place, name in enumerate("bc", 50)
        )
        await queued(engine, 2)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        engine.end_session("a")
        await third
    assert [body["prompt"] for body in server.bodies] == [[11, 12, 13], [51]]


async def test_an_idle_episode_that_nobody_ended_gives_way_to_one_that_waits(
    server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unspool.engines.server.replicas.IDLE_SECONDS", 0.05)
    monkeypatch.setattr("unspool.engines.server.control._TIDY_EVERY", 0.05)
    async with serving(server, max_episodes=1) as engine:
        await engine.generate(turn("a"))
        await asyncio.wait_for(engine.generate(turn("b")), 10)
        assert list(engine._fleet._seats) == ["b"]


@pytest.mark.parametrize("kind", [FakeVLLM, FakeSGLang], ids=["vllm", "sglang"])
async def test_auto_lets_no_new_episode_in_while_requests_wait_in_the_server(kind: type[FakeVLLM]) -> None:
    with kind() as server:
        async with serving(server, max_episodes="auto") as engine:
            server.waiting = 3
            first = [asyncio.create_task(engine.generate(turn(f"{number}"))) for number in range(20)]
            done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            polled = server.paths.count("/metrics")
            await server.has(lambda: server.paths.count("/metrics") >= polled + 3)
            assert len(server.bodies) == 8
            running = next(task for task in done)
            assert (await engine.generate(turn("0"))).tokens == running.result().tokens
            server.waiting = 0
            await asyncio.gather(*first)
    assert len(server.bodies) == 21


async def test_auto_with_a_server_without_metrics_says_so_at_the_start() -> None:
    with FakeSGLang(metrics=False) as server:
        engine = ServerEngine(server.url, "sglang", max_episodes="auto")
        with pytest.raises(EngineError, match=r"max_episodes='auto' needs; start the server with --enable-metrics"):
            await engine.start()
        await engine.close()


async def test_an_episode_that_lost_its_server_comes_before_new_ones() -> None:
    with FakeVLLM() as one, FakeVLLM() as two:
        async with serving(one, two, max_episodes=1) as engine:
            await engine.generate(turn("a", prompt=[50]))
            await engine.generate(turn("b", prompt=[60]))
            new = asyncio.create_task(engine.generate(turn("new", prompt=[70])))
            await queued(engine, 1)
            one.kill()
            moved = asyncio.create_task(engine.generate(turn("a", prompt=[51])))
            await engine._fleet.server_changed.until(lambda: len(engine._fleet.live) == 1, 10)
            await queued(engine, 2)
            engine.end_session("b")
            await moved
            assert not new.done()
            engine.end_session("a")
            await new
    assert [body["prompt"] for body in two.bodies] == [[60], [51], [70]]
