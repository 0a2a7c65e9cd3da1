"""Two episodes never share an environment, however it is given to them."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
from typing import Any

import pytest

from tests.small import call, rollout, script, small_template, user
from tests.world.envs_for_tests import GuessEnv
from unspool import Env, EnvTool, EnvWorld, StepResult, TokenPolicy, ToolManager, UserSimulator, run_episode
from unspool.types import InvalidValueError
from unspool.world.envs import GymTextEnv
from unspool.world.taken import give_back, is_taken, take

SERVES = "serves another episode that has not ended; give a maker that makes a new one for each episode"


class Stays(Env):
    """Its first step waits until it is let go."""

    def __init__(self) -> None:
        self.began, self.go_on, self.closed = asyncio.Event(), asyncio.Event(), 0

    async def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.began.set()
        await self.go_on.wait()
        return StepResult("done", 1.0, True)

    async def close(self) -> None:
        self.closed += 1


def _the_same(env: Env) -> Any:
    world = EnvWorld(env)
    return lambda: world


def _tools(env: Env) -> ToolManager:
    return ToolManager([EnvTool(env)])


@pytest.mark.parametrize(
    ("make", "closes"),
    [
        (lambda env: env, 1),
        (lambda env: lambda: env, 1),
        (lambda env: lambda: EnvWorld(env), 1),
        (_the_same, 1),
        (_tools, 0),
        (lambda env: lambda: _tools(env), 0),
        (lambda env: lambda: UserSimulator(lambda seen: "x", tools=EnvWorld(env)), 1),
    ],
)
async def test_a_second_episode_is_refused_an_environment_until_the_first_has_closed_it(make: Any, closes: int) -> None:
    env = Stays()
    given, messages = make(env), user("Go.")["messages"]

    def episode() -> Any:
        policy = TokenPolicy(script(call("env_action")), small_template())
        return asyncio.ensure_future(run_episode(policy, given, messages=messages))

    first = episode()
    await env.began.wait()
    second = await episode()
    assert (second.stop_reason, second.turns) == ("api_error", [])
    assert SERVES in second.error
    assert env.closed == 0  # it is the first one's to close
    env.go_on.set()
    assert ((await first).stop_reason, (await first).reward, env.closed) == ("env_done", 1.0, closes)
    assert (await episode()).stop_reason == "env_done"  # one after another is no sharing


async def test_a_rollout_whose_maker_always_gives_the_same_fails_all_but_one_episode() -> None:
    shared, ends = Stays(), []
    prompts = [user("a"), user("b"), user("c")]
    async for out in rollout(script(call("env_action")), lambda: shared).stream(prompts):
        ends.append(out["stop_reason"])
        if len(ends) == 2:
            shared.go_on.set()
    assert ends == ["api_error", "api_error", "env_done"]
    assert shared.closed == 1


def test_what_a_maker_gives_too_late_is_closed_unless_another_episode_has_it() -> None:
    from unspool.world.making import _close

    env, holder = GuessEnv(), Thing()
    take([env], holder)
    _close(env)
    assert is_taken(env)
    assert env.noted.closed == 0
    give_back([env], holder)
    _close(env)
    assert env.noted.closed == 1


def test_copies_are_environments_of_their_own() -> None:
    shared = GuessEnv(7)
    EnvTool.from_env(shared)
    engine = script(call("guess", number=7))
    outs = rollout(engine, lambda: copy.copy(shared))([user("a"), user("b")])
    assert [out["stop_reason"] for out in outs] == ["env_done"] * 2


def test_an_inner_gym_environment_serves_one_episode_at_a_time() -> None:
    class Inner:
        def __init__(self) -> None:
            self.log: list[str] = []

        def reset(self) -> tuple[str, dict[str, Any]]:
            self.log.append("reset")
            return "Go.", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.log.append(action)
            return "Over.", 1.0, True, False, {}

        def close(self) -> None:
            self.log.append("close")

    inner = Inner()
    first, second = GymTextEnv(inner), GymTextEnv(lambda: inner)
    assert first.reset().observation == first.reset().observation == "Go."
    with pytest.raises(InvalidValueError, match=f"this Inner {SERVES}"):
        second.reset()
    second.close()
    assert inner.log == ["reset", "reset"]
    first.close()
    assert second.reset().observation == "Go."
    del second  # never closed, and yet no longer its holder
    gc.collect()
    [out] = rollout(script("x"), lambda: GymTextEnv(inner))([user("Play.")])
    assert (out["stop_reason"], inner.log[-2:]) == ("env_done", ["x", "close"])


class Thing:
    pass


def test_all_things_are_taken_or_none() -> None:
    things, holders = [Thing() for _ in range(3)], [Thing(), Thing()]
    take(things[:1], holders[0])
    for order in itertools.permutations(things):
        with pytest.raises(InvalidValueError, match="this Thing serves another"):
            take(order, holders[1])
        assert [is_taken(thing) for thing in things] == [True, False, False]
    give_back(things, holders[1])
    assert is_taken(things[0])
    give_back(things, holders[0])
    take(things, holders[1])
    give_back(things, holders[1])
    assert not any(is_taken(thing) for thing in things)
