"""Which of several servers an episode is with, and what becomes of it when that one is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.engines.server.asking import serving, turn
from tests.engines.server.fakes import FakeVLLM, status
from unspool import ServerEngine
from unspool.types import EngineError

FULL = [14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 2]


@pytest.fixture
def pair() -> Iterator[tuple[FakeVLLM, FakeVLLM]]:
    with FakeVLLM() as one, FakeVLLM() as two:
        yield one, two


async def test_an_episode_stays_with_its_server(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    async with serving(*pair) as engine:
        for session in ("a", "b", "a", "b", "a", "a"):
            await engine.generate(turn(session, prompt=[ord(session)]))
    assert [{body["prompt"][0] for body in server.bodies} for server in pair] == [{ord("a")}, {ord("b")}]


async def test_a_new_episode_goes_where_the_fewest_live(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    one, two = pair
    async with serving(*pair) as engine:
        for session in ("a", "b", "c", "d"):
            await engine.generate(turn(session))
        assert (len(one.bodies), len(two.bodies)) == (2, 2)
        engine.end_session("b")
        engine.end_session("d")
        for session in ("e", "f"):
            await engine.generate(turn(session))
    assert (len(one.bodies), len(two.bodies)) == (2, 4)


async def test_requests_without_a_session_count_while_they_run(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    one, two = pair
    async with serving(*pair) as engine:
        one.block_after = two.block_after = 1
        under_way = [asyncio.create_task(engine.generate(turn())) for _ in range(6)]
        await one.has(lambda: len(one.jobs) == 3)
        await two.has(lambda: len(two.jobs) == 3)
        one.go()
        two.go()
        await asyncio.gather(*under_way)
        assert [replica.seats for replica in engine._fleet.replicas] == [0, 0]


async def test_an_overloaded_server_loses_the_episode_to_another_one_at_once(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    one, two = pair
    async with serving(*pair) as engine:
        await engine.generate(turn("a"))
        one.faults = [status(429, "too much", **{"Retry-After": "60"})]
        began = time.monotonic()
        answer = await engine.generate(turn("a"))
        await engine.generate(turn("a"))
    assert time.monotonic() - began < 5
    assert (len(one.bodies), len(two.bodies)) == (2, 2)
    assert "answered 429: too much" in answer.extra["retries"][0]["error"]


async def test_an_episode_whose_server_dies_goes_on_with_the_other(pair: tuple[FakeVLLM, FakeVLLM]) -> None:
    one, two = pair
    async with serving(*pair) as engine:
        one.block_after = 1
        under_way = [asyncio.create_task(engine.generate(turn(f"{number}"))) for number in range(8)]
        await one.has(lambda: len(one.jobs) == 4)
        one.kill()
        answers = await asyncio.gather(*under_way)
    assert [answer.tokens for answer in answers] == [FULL] * 8
    retried = [answer for answer in answers if "retries" in answer.extra]
    assert len(retried) == 4
    assert all(answer.extra["retries"][0]["kept"] == 0 for answer in retried)
    assert len(two.bodies) == 8


async def test_an_episode_waits_for_its_only_server_to_come_back() -> None:
    with FakeVLLM() as server:
        async with serving(server) as engine:
            server.block_after = 1
            under_way = [asyncio.create_task(engine.generate(turn(f"{number}", seed=number))) for number in range(4)]
            await server.has(lambda: len(server.jobs) == 4)
            server.kill()
            await engine._fleet.server_changed.until(lambda: not engine._fleet.live, 5)
            later = asyncio.create_task(engine.generate(turn("later")))
            server.block_after = None
            server.start()
            answers = await asyncio.gather(*under_way, later)
    assert [answer.tokens for answer in answers] == [FULL] * 5
    assert [len(answer.extra.get("retries", ())) for answer in answers] == [1, 1, 1, 1, 0]
    again = [body["seed"] for body in server.bodies[4:]]
    assert sorted(again) == [0, 0, 1, 2, 3]


async def test_where_all_are_gone_for_recover_timeout_the_turn_fails_and_names_them(
    pair: tuple[FakeVLLM, FakeVLLM],
) -> None:
    async with serving(*pair, recover_timeout=0.5) as engine:
        for server in pair:
            server.kill()
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"no server came back within recover_timeout=0.5 s") as failure:
            await engine.generate(turn("a"))
        assert all(server.url in str(failure.value) for server in pair)
        assert "ConnectError" in str(failure.value)
        assert 0.5 <= time.monotonic() - began < 5
        for server in pair:
            server.start()
        await engine._fleet.server_changed.until(lambda: bool(engine._fleet.live), 10)
        assert (await engine.generate(turn("a"))).tokens == FULL


async def test_a_lost_server_is_looked_after_by_one_task_with_growing_pauses() -> None:
    with FakeVLLM() as server:
        async with serving(server) as engine:
            server.healthy = False
            server.paths.clear()
            replica = engine._fleet.replicas[0]
            for _ in range(20):
                engine._control.lost(replica, "said by a test")
            waiting = [asyncio.create_task(engine.generate(turn(f"{number}"))) for number in range(20)]
            await asyncio.sleep(1.0)
            assert 2 <= server.paths.count("/health") <= 8
            server.healthy = True
            assert [(await task).tokens for task in waiting] == [FULL] * 20


async def test_a_server_that_is_not_there_at_the_start_is_taken_in_when_it_comes() -> None:
    late = FakeVLLM()
    with FakeVLLM() as there:
        async with serving(there, late) as engine:
            await engine.generate(turn("a"))
            assert [replica.live for replica in engine._fleet.replicas] == [True, False]
            late.start()
            await engine._fleet.server_changed.until(lambda: len(engine._fleet.live) == 2, 10)
            await engine.generate(turn("b"))
            assert len(late.bodies) == 1
    late.kill()


async def test_seats_that_nobody_gave_back_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.engines.server.replicas.MOST_SEATS", 3)
    with FakeVLLM() as server:
        async with serving(server) as engine:
            for number in range(10):
                await engine.generate(turn(f"{number}"))
            assert list(engine._fleet._seats) == ["7", "8", "9"]
            assert engine._fleet.replicas[0].seats == 3


async def test_ending_a_session_twice_or_one_that_never_was_is_no_error() -> None:
    with FakeVLLM() as server:
        async with serving(server) as engine:
            await engine.generate(turn("a"))
            for session in ("a", "a", "never", ""):
                engine.end_session(session)
            assert engine._fleet.replicas[0].seats == 0


async def test_thousands_of_requests_are_in_flight_at_once() -> None:
    with FakeVLLM() as server:
        async with serving(server) as engine:
            server.block_after = 1
            under_way = [asyncio.create_task(engine.generate(turn(f"{number}"))) for number in range(300)]
            await server.has(lambda: len(server.jobs) == 300)
            server.go()
            answers = await asyncio.gather(*under_way)
    assert all(answer.tokens == FULL for answer in answers)


def test_one_engine_serves_several_event_loops_one_after_another() -> None:
    with FakeVLLM() as server:
        engine = ServerEngine(server.url, api_key="a key for tests", start_timeout=10)
        answers = [asyncio.run(engine.generate(turn("a"))) for _ in range(3)]
        assert [answer.tokens for answer in answers] == [FULL] * 3
        asyncio.run(engine.close())
