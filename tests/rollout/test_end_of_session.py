"""Whatever ends an episode, its engine is told that the session is over, once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.small import CALC, rollout, script, small_template, user
from unspool import Generation, Limits, MultiTurnRollout, ScriptedEngine, Step, ToolManager, calculator


class Told(ScriptedEngine):
    """An engine that keeps which sessions were over, when, and fails where it is to."""

    def __init__(self, reply: Any, **options: Any) -> None:
        super().__init__(reply, **options)
        self.ended: list[str] = []

    def end_session(self, session: str) -> None:
        self.ended.append(session)


def told(*turns: Any) -> Told:
    inner = script(*turns)
    return Told(inner._reply)


def sessions(engine: Told) -> list[str]:
    return sorted({request.session for request in engine.requests})


class Raises(ToolManager):
    async def step(self, message: Any) -> Step:
        raise RuntimeError("no world today")


class Over(ToolManager):
    async def step(self, message: Any) -> Step:
        return Step(done=True)


@pytest.mark.parametrize(
    ("turns", "tools", "limits", "reason"),
    [
        (["Hello."], None, Limits(), "stop"),
        ([Generation([1, 2], stop_reason="length")], None, Limits(), "length"),
        ([CALC], ToolManager([calculator]), Limits(max_turns=2), "max_turns"),
        ([CALC], Raises([calculator]), Limits(), "api_error"),
        ([CALC], Over([calculator]), Limits(), "env_done"),
    ],
)
def test_a_session_is_over_once_whatever_ended_the_episode(turns: Any, tools: Any, limits: Limits, reason: str) -> None:
    engine = told(*turns)
    outs = rollout(engine, tools, limits=limits)([user("a"), user("b"), user("c")])
    assert [out["stop_reason"] for out in outs] == [reason] * 3
    assert sorted(engine.ended) == sessions(engine)
    assert len(engine.ended) == 3


def test_a_session_is_over_where_the_engine_itself_failed_or_took_too_long() -> None:
    async def hangs(request: Any) -> Any:
        await asyncio.Event().wait()

    def fails(request: Any) -> Any:
        raise RuntimeError("out of memory")

    for reply, limits, reason in ((fails, Limits(), "api_error"), (hangs, Limits(timeout=0.05), "timeout")):
        engine = Told(reply)
        [out] = rollout(engine, limits=limits)([user("a")])
        assert out["stop_reason"] == reason
        assert engine.ended == sessions(engine)


async def test_a_session_is_over_where_its_rollout_is_cancelled() -> None:
    begun = asyncio.Event()

    async def hangs(request: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    engine = Told(hangs)
    task = asyncio.ensure_future(rollout(engine).acall([user("a"), user("b")]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(engine.ended) == sessions(engine)
    assert len(engine.ended) == 2


def test_an_engine_that_raises_when_it_is_told_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Told):
        def end_session(self, session: str) -> None:
            raise RuntimeError("no such session")

    engine = Bad(script("Hello.")._reply)
    outs = MultiTurnRollout(engine, small_template(), progress=False)([user("a"), user("b")])
    assert [(out["stop_reason"], out["error"]) for out in outs] == [("stop", None)] * 2
    assert "could not be ended" in caplog.text
