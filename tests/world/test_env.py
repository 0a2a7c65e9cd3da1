"""Environments in episodes: reset, acted on in order, rewarded, ended, closed; and as tools."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

from tests.small import call, rollout, script, small_template, user
from tests.world.envs_for_tests import CountEnv, GuessEnv
from unspool import Env, EnvTool, EnvWorld, StepResult, TextEnv, TokenPolicy, ToolManager, run_episode
from unspool.types import InvalidTypeError, InvalidValueError


def guess(*numbers: int) -> str:
    return "\n".join(call("guess", number=number) for number in numbers)


# ------------------------------------------------------------------ an environment with tools


def test_an_environment_is_reset_acted_on_and_closed() -> None:
    env = GuessEnv(7)
    [out] = rollout(script(guess(3), guess(7)), env)([user("Play.")])
    assert [(m["role"], m["content"]) for m in out["messages"] if m["role"] != "assistant"] == [
        ("user", "Play."),
        ("user", "Guess a number below 10."),
        ("tool", "wrong"),
        ("tool", "right"),
    ]
    assert (out["stop_reason"], out["turns"], out["reward"], out["truncated"]) == ("env_done", 2, 0.75, False)
    assert out["env_info"]["last"] == 7
    assert (env.noted.log, env.noted.closed) == (["reset", "3", "7"], 1)


def test_several_calls_of_a_turn_are_run_in_order_and_none_behind_the_end() -> None:
    env = GuessEnv(7)
    [out] = rollout(script(guess(9, 1, 7, 5)), env)([user("Play.")])
    answers = [m["content"] for m in out["messages"] if m["role"] == "tool"]
    assert answers[:3] == ["wrong", "wrong", "right"]
    assert answers[3] == "Error: not run: an earlier call of this turn ended the episode"
    assert (env.noted.log, env.noted.most_at_once) == (["reset", "9", "1", "7"], 1)
    assert (out["stop_reason"], out["reward"]) == ("env_done", 0.5)
    assert [failure["kind"] for failure in out["tool_errors"]] == ["limit"]


def test_a_call_that_the_model_got_wrong_is_told_to_it_and_not_to_the_environment() -> None:
    env = GuessEnv(7)
    [out] = rollout(script(call("guess", number="x"), call("gues"), guess(7)), env)([user("Play.")])
    kinds = [failure["kind"] for failure in out["tool_errors"]]
    assert (kinds, env.noted.log, out["stop_reason"]) == (["bad_arguments", "unknown_tool"], ["reset", "7"], "env_done")


def test_plain_text_ends_an_environment_of_tools() -> None:
    env = GuessEnv()
    [out] = rollout(script("I give up"), env)([user("Play.")])
    assert (out["stop_reason"], out["turns"], env.noted.closed) == ("stop", 1, 1)


# ------------------------------------------------------------------ an environment of text


def test_text_is_the_action_until_the_environment_is_done() -> None:
    env = CountEnv()
    [out] = rollout(script("one", "two", "done"), env)([user("Say something.")])
    assert (out["stop_reason"], out["turns"], out["reward"]) == ("env_done", 3, 3.0)
    assert (env.noted.log, env.noted.closed) == (["reset", "one", "two", "done"], 1)
    assert [m["content"] for m in out["messages"] if m["role"] == "user"][1:] == [
        "Go on.",
        "heard 1",
        "heard 2",
        "heard 3",
    ]


def test_the_world_may_have_the_first_word() -> None:
    [out] = rollout(script("done"), CountEnv("Begin!"))([{}])
    assert [m["content"] for m in out["messages"]] == ["Begin!", "done", "heard 1"]
    assert (out["stop_reason"], out["error"]) == ("env_done", None)


def test_nothing_to_say_on_either_side_is_an_error_of_that_episode() -> None:
    env = CountEnv("")
    [out] = rollout(script("done"), env)([{}])
    assert (out["stop_reason"], out["turns"], env.noted.closed) == ("api_error", 0, 1)


def test_done_at_the_reset_ends_the_episode_before_its_first_turn() -> None:
    class Over(CountEnv):
        async def reset(self, trajectory: Any = None) -> StepResult:
            return StepResult("Nothing to do.", 0.5, True)

    env, engine = Over(), script("unused")
    [out] = rollout(engine, env)([user("Go.")])
    assert (out["stop_reason"], out["turns"], out["reward"], out["input_ids"]) == ("env_done", 0, 0.5, [])
    assert (engine.requests, env.noted.closed) == ([], 1)


# ------------------------------------------------------------------ one for each episode


def test_what_makes_environments_is_called_once_for_each_episode() -> None:
    made: list[tuple[str, CountEnv]] = []

    def make(trajectory: dict[str, Any]) -> Env:
        made.append((trajectory["messages"][0]["content"], CountEnv()))
        return made[-1][1]

    outs = rollout(script("done"), make, num_generations=2)([user("a"), user("b")])
    assert [out["stop_reason"] for out in outs] == ["env_done"] * 4
    assert sorted(text for text, _ in made) == ["a", "a", "b", "b"]
    assert [env.noted.closed for _, env in made] == [1] * 4


async def _async_maker(trajectory: dict[str, Any]) -> Env:
    return CountEnv()


@pytest.mark.parametrize(
    "maker",
    [
        CountEnv,
        lambda first="x": CountEnv(first["id"]),
        lambda trajectory: EnvWorld(CountEnv()),
        _async_maker,
        [CountEnv(), CountEnv],
    ],
)
def test_a_class_a_function_or_a_coroutine_function_makes_environments(maker: Any) -> None:
    outs = rollout(script("done"), maker)([user("a"), user("b")])
    assert [out["stop_reason"] for out in outs] == ["env_done"] * 2


def test_one_environment_for_several_episodes_is_refused() -> None:
    env = GuessEnv()
    for shared in (env, [env, env], EnvWorld(env), ToolManager(EnvTool.from_env(env))):
        with pytest.raises(InvalidValueError, match="cannot serve several episodes"):
            rollout(script("x"), shared)([user("a"), user("b")])
    assert env.noted.log == []


@pytest.mark.parametrize("wrong", [3, "x", ToolManager, object()])
def test_what_is_no_world_and_makes_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidTypeError, match="tool_manager must be"):
        rollout(script("x"), wrong)


def test_a_maker_that_makes_something_else_costs_its_own_episode() -> None:
    [bad, good] = rollout(script("done"), [lambda: 3, CountEnv])([user("a"), user("b")])
    assert (bad["stop_reason"], good["stop_reason"]) == ("api_error", "env_done")
    assert "must return a World or an Env, not 3" in bad["error"]


def test_the_members_of_a_group_begin_in_the_same_place_and_other_prompts_in_others() -> None:
    def seeds(run: int) -> list[int]:
        outs = rollout(script(guess(7)), GuessEnv, num_generations=2, seed=run)([user("a"), user("b")])
        return [out["env_info"]["seed"] for out in outs]

    a1, a2, b1, b2 = seeds(1)
    assert a1 == a2 != b1 == b2
    assert seeds(1) == [a1, a2, b1, b2]
    assert seeds(2)[0] != a1


# ------------------------------------------------------------------ rewards


def test_an_evaluation_of_the_whole_is_the_reward() -> None:
    seen: list[dict[str, Any]] = []

    class Judged(GuessEnv):
        def evaluate(self, trajectories: list[Any], **kwargs: Any) -> list[float]:
            seen.extend(trajectories)
            assert self.noted.closed == 0
            return [0.125 for _ in trajectories]

    [out] = rollout(script(guess(7)), Judged)([user("Play.", id="mine", ground_truth=7)])
    assert out["reward"] == 0.125
    [trajectory] = seen
    assert (trajectory["id"], trajectory["ground_truth"], trajectory["stop_reason"]) == ("mine", 7, "env_done")
    assert (trajectory["turns"], trajectory["reward"]) == (1, 1.0)
    assert trajectory["messages"][-1]["content"] == "right"


def test_an_evaluation_that_fails_is_said_and_gives_no_reward() -> None:
    class Judged(GuessEnv):
        def evaluate(self, trajectories: list[Any], **kwargs: Any) -> list[float]:
            raise ValueError("no judge")

    [out] = rollout(script(guess(7)), Judged)([user("Play.")])
    assert (out["stop_reason"], out["error"], out["reward_error"]) == ("env_done", None, "ValueError: no judge")
    assert "reward" not in out


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, SystemExit, StopAsyncIteration])
def test_whatever_an_evaluation_raises_is_said(kind: type[BaseException], timeout: float | None) -> None:
    class Judged(GuessEnv):
        async def evaluate(self, trajectories: list[Any], **kwargs: Any) -> list[float]:  # type: ignore[override]
            await asyncio.sleep(0)
            raise kind("no judge")

    [out] = rollout(script(guess(7)), lambda: EnvWorld(Judged(), timeout=timeout))([user("Play.")])
    assert (out["stop_reason"], out["error"]) == ("env_done", None)
    assert out["reward_error"].endswith(f"{kind.__name__}: no judge")
    assert "reward" not in out


async def test_a_cancellation_during_the_evaluation_is_the_episodes() -> None:
    judging = asyncio.Event()

    class Judged(GuessEnv):
        async def evaluate(self, trajectories: list[Any], **kwargs: Any) -> list[float]:  # type: ignore[override]
            judging.set()
            await asyncio.Event().wait()
            raise AssertionError

    env = Judged()
    policy = TokenPolicy(script(guess(7)), small_template())
    task = asyncio.ensure_future(run_episode(policy, env, messages=user("Play.")["messages"]))
    await judging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.noted.closed == 1


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, SystemExit])
def test_a_step_that_raises_what_is_no_exception_costs_its_own_episode(kind: type[BaseException]) -> None:
    class Raises(CountEnv):
        async def act(self, text: str) -> StepResult:
            raise kind("gone")

    bad, good = rollout(script("done"), [Raises, CountEnv])([user("a"), user("b")])
    assert bad["stop_reason"] == "api_error"
    assert bad["error"].endswith(f"{kind.__name__}: gone")
    assert good["stop_reason"] == "env_done"


def test_a_failed_episode_is_not_evaluated() -> None:
    class Judged(CountEnv):
        async def act(self, text: str) -> StepResult:
            if text == "two":
                raise OSError("broken")
            return await super().act(text)

        async def evaluate(self, trajectories: list[Any], **kwargs: Any) -> list[float]:
            raise AssertionError

    [out] = rollout(script("one", "two"), Judged)([user("Play.")])
    assert (out["stop_reason"], out["error"]) == ("api_error", "OSError: broken")
    assert "reward" not in out and "reward_error" not in out


def test_a_step_may_say_nothing_of_rewards() -> None:
    class Silent(CountEnv):
        async def reset(self, trajectory: Any = None) -> StepResult:
            return StepResult("Go.", None)

        async def act(self, text: str) -> StepResult:
            return StepResult("", None, True)

    [out] = rollout(script("x"), Silent)([user("Play.")])
    assert "reward" not in out
    assert out["messages"][-1]["role"] == "assistant"


# ------------------------------------------------------------------ as tools


def test_an_environment_stands_among_other_tools() -> None:
    from unspool import calculator

    with GuessEnv(7) as env:
        tools = EnvTool.from_env(env)
        manager = ToolManager([calculator, *tools])
        [out] = rollout(script(call("calculator", expression="3 + 4") + guess(2), guess(7)), manager)([user("Play.")])
        assert [m["content"] for m in out["messages"] if m["role"] == "tool"] == ["7", "wrong", "right"]
        assert (out["stop_reason"], out["reward"]) == ("env_done", 0.75)
        assert tools[0].done
        assert tools[0].last_result == StepResult("right", 1.0, True, {"last": 7})
        assert tools[0].episode_reward == 0.75
        assert env.noted.closed == 0
    assert env.noted.closed == 1


def test_a_tool_of_an_environment_can_be_called_by_hand_and_pickles() -> None:
    [tool] = EnvTool.from_env(GuessEnv(5))
    assert tool("guess", {"number": 4}) == "wrong"
    assert not tool.done
    again = pickle.loads(pickle.dumps(EnvTool.from_env(GuessEnv(5))[0]))
    assert again("guess", {"number": 5}) == "right"
    assert again.info() == tool.info()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda tool: pickle.loads(pickle.dumps(tool))])
def test_a_copy_of_a_tool_has_all_that_it_was_given(again: Any) -> None:
    tool = EnvTool(GuessEnv(5), "guess", "Guess.", {"type": "object"}, timeout=2.5, max_chars=150)
    other = again(tool)
    assert (other.info(), other.timeout, other.max_chars, other.env.number) == (tool.info(), 2.5, 150, 5)


def test_an_environment_without_tools_takes_any_arguments() -> None:
    class Anything(Env):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            return StepResult(f"{tool_name} {arguments}")

    [tool] = EnvTool.from_env(Anything())
    assert (tool.name, ToolManager([tool])("env_action", {"a": [1]})) == ("env_action", "env_action {'a': [1]}")
    [text] = EnvTool.from_env(CountEnv())
    assert ToolManager([text])("env_action", {"text": "x"}) == "heard 0"


def test_a_step_that_gives_no_result_is_named() -> None:
    class Wrong(GuessEnv):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> Any:
            return "right"

    [out] = rollout(script(guess(7)), Wrong)([user("Play.")])
    assert out["stop_reason"] == "api_error"
    assert "Wrong.step must return a StepResult, not 'right'" in out["error"]


def test_an_empty_observation_does_not_end_a_text_episode() -> None:
    class Quiet(TextEnv):
        def act(self, text: str) -> StepResult:
            return StepResult("", 0.5, text == "three")

    [out] = rollout(script("one", "two", "three"), Quiet)([user("Go.")])
    assert (out["stop_reason"], out["error"], out["turns"], out["reward"]) == ("env_done", None, 3, 1.5)
    assert [(m["role"], m["content"]) for m in out["messages"]] == [
        ("user", "Go."),
        ("assistant", "one"),
        ("user", ""),
        ("assistant", "two"),
        ("user", ""),
        ("assistant", "three"),
    ]
