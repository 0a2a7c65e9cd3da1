"""What of a failing server is tried again, after how long, how often, and what it says in the turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from tests.engines.server.asking import serving, turn
from tests.engines.server.fakes import FakeVLLM, Fault, drop, hang, status, text, trickle
from unspool.types import EngineError

FULL = [14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 2]


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (status(500), "answered 500: out of order"),
        (status(503), "answered 503: out of order"),
        (status(408), "answered 408: out of order"),
        (status(409), "answered 409: out of order"),
        (status(429, **{"Retry-After": "0"}), "answered 429: out of order"),
        (text('{"choices": [{"token_ids": [14, 15'), "a body that is no JSON"),
        (text(""), "a body that is no JSON"),
        (drop, "RemoteProtocolError"),
    ],
    ids=["500", "503", "408", "409", "429", "cut JSON", "empty", "connection broken"],
)
async def test_what_is_of_the_moment_is_tried_again_and_said(server: FakeVLLM, fault: Fault, says: str) -> None:
    async with serving(server) as engine:
        server.faults = [fault]
        answer = await engine.generate(turn(seed=5))
    assert answer.tokens == FULL
    assert [body["seed"] for body in server.bodies] == [5, 5]
    [retry] = answer.extra["retries"]
    assert says in retry["error"]
    assert retry["kept"] == 0
    assert retry["seconds"] >= 0


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422])
async def test_no_other_refusal_is_tried_again(server: FakeVLLM, code: int) -> None:
    async with serving(server) as engine:
        server.faults = [status(code, "not like this")]
        with pytest.raises(EngineError, match=f"/v1/completions answered {code}: not like this$"):
            await engine.generate(turn())
    assert len(server.bodies) == 1


async def test_retry_after_in_seconds_is_waited_for(server: FakeVLLM) -> None:
    async with serving(server) as engine:
        server.faults = [status(429, **{"Retry-After": "1"})]
        began = time.monotonic()
        answer = await engine.generate(turn())
    assert 1.0 <= time.monotonic() - began < 3.0
    assert 1.0 <= answer.extra["retries"][0]["seconds"] < 3.0


async def test_retry_after_as_a_date_is_waited_for(server: FakeVLLM) -> None:
    async with serving(server) as engine:
        moment = datetime.now(UTC) + timedelta(seconds=2)
        server.faults = [status(503, **{"Retry-After": format_datetime(moment, usegmt=True)})]
        await engine.generate(turn())
    assert datetime.now(UTC) >= moment.replace(microsecond=0)


async def test_a_live_server_is_asked_max_retries_times_more(server: FakeVLLM) -> None:
    async with serving(server, max_retries=2) as engine:
        server.faults = [status(500, "first"), status(500, "second"), status(500, "third"), status(500, "never")]
        with pytest.raises(EngineError, match=r"answered 500: third; it was tried 3 times \(max_retries\)"):
            await engine.generate(turn())
    assert len(server.bodies) == 3


async def test_a_server_that_hangs_costs_request_timeout_and_is_hung_up_on(server: FakeVLLM) -> None:
    async with serving(server, request_timeout=0.3) as engine:
        server.faults = [hang]
        answer = await engine.generate(turn())
        await server.has(lambda: server.hung_up == ["hang"])
    assert answer.tokens == FULL
    assert "did not answer within 0.3 s" in answer.extra["retries"][0]["error"]


async def test_bytes_that_trickle_in_do_not_lengthen_the_time(server: FakeVLLM) -> None:
    async with serving(server, request_timeout=0.4) as engine:
        server.faults = [trickle]
        began = time.monotonic()
        answer = await engine.generate(turn())
    assert answer.tokens == FULL
    assert time.monotonic() - began < 5


async def test_a_server_that_does_not_even_say_that_it_is_healthy_is_lost_long_before_request_timeout() -> None:
    with FakeVLLM() as frozen, FakeVLLM() as other:
        async with serving(frozen, other, health_timeout=0.3) as engine:
            await engine.generate(turn("a"))
            await engine.generate(turn("b"))
            assert (len(frozen.bodies), len(other.bodies)) == (1, 1)
            frozen.frozen = True
            answer = await engine.generate(turn("a"))
        assert answer.tokens == FULL
        assert "is lost" in answer.extra["retries"][0]["error"]
        assert len(other.bodies) == 2


async def test_one_request_that_fails_touches_no_other(server: FakeVLLM) -> None:
    async with serving(server) as engine:
        server.faults = [status(400, "bad"), hang]
        bad = asyncio.create_task(engine.generate(turn("a")))
        with pytest.raises(EngineError):
            await bad
        slow = asyncio.create_task(engine.generate(turn("b")))
        await server.has(lambda: len(server.bodies) == 2)
        assert (await engine.generate(turn("c"))).tokens == FULL
        slow.cancel()


async def test_a_turn_without_failures_says_nothing_of_retries(server: FakeVLLM) -> None:
    async with serving(server) as engine:
        assert "retries" not in (await engine.generate(turn())).extra
