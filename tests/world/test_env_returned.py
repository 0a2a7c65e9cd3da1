"""What an environment returns is looked at where it comes in, and an error names who returned what."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.small import call, rollout, script, user
from tests.world.envs_for_tests import GUESS, GuessEnv
from unspool import Env, EnvTool, StepResult, ToolManager
from unspool.types import InvalidTypeError, InvalidValueError
from unspool.world.returned import checked, number


class Returns(Env):
    """Gives what it was told to give, at the reset or the step."""

    def __init__(self, result: Any, at: str = "step") -> None:
        self.result, self.at = result, at

    def reset(self, trajectory: Any = None) -> StepResult:
        return self.result if self.at == "reset" else StepResult()

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return self.result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("reward", "read"),
    [
        (None, None),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
    ],
)
def test_a_reward_is_a_float_behind_the_door(reward: Any, read: Any) -> None:
    found = checked(StepResult("x", reward), "E.step").reward
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize("done", [True, np.bool_(True), np.array(True), torch.tensor(True)])
def test_done_is_a_bool_behind_the_door(done: Any) -> None:
    assert checked(StepResult("x", 0.0, done), "E.step").done is True


@given(st.floats(allow_nan=False, allow_infinity=False), st.dictionaries(st.text(), st.integers()), st.booleans())
def test_good_parts_come_through_unchanged(reward: float, info: dict[str, int], done: bool) -> None:
    result = StepResult("x", reward, done, info)
    assert checked(result, "E.step") == result


BAD = [
    (StepResult("x", "1"), "the reward of Returns.{} must be a number, not '1'"),  # type: ignore[arg-type]
    (StepResult("x", [1]), "the reward of Returns.{} must be a number, not [1]"),  # type: ignore[arg-type]
    (StepResult("x", math.nan), "the reward of Returns.{} must be finite, not nan"),
    (StepResult("x", -math.inf), "the reward of Returns.{} must be finite, not -inf"),
    (StepResult("x", 0.0, "no"), "done of Returns.{} must be True or False, not 'no'"),  # type: ignore[arg-type]
    (StepResult("x", 0.0, None), "done of Returns.{} must be True or False, not None"),  # type: ignore[arg-type]
    (StepResult("x", 0.0, False, [1]), "the info of Returns.{} must be a mapping, not [1]"),  # type: ignore[arg-type]
    (StepResult(None), "the observation of Returns.{} must be a str, not None; write it as text"),  # type: ignore[arg-type]
    (StepResult(b"x"), "the observation of Returns.{} must be a str, not b'x'; write it as text"),  # type: ignore[arg-type]
    (("x", 1.0, True, {}), "Returns.{} must return a StepResult, not ('x', 1.0, True, {{}})"),
]


@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize(("result", "words"), BAD)
def test_what_cannot_be_read_ends_its_own_episode_with_a_sentence(result: Any, words: str, at: str) -> None:
    bad, good = rollout(
        script(call("env_action")), [lambda: Returns(result, at), lambda: Returns(StepResult("x", 1.0, True))]
    )([user("a"), user("b")])
    assert (bad["stop_reason"], good["stop_reason"], good["reward"]) == ("api_error", "env_done", 1.0)
    assert bad["error"].partition(": ")[2] == words.format(at)


def test_an_environment_tool_is_looked_at_as_well() -> None:
    manager = ToolManager([EnvTool(Returns(StepResult("x", "1")))])  # type: ignore[arg-type]
    assert manager("env_action") == "Error: the reward of Returns.step must be a number, not '1'"


def test_no_info_is_an_empty_one() -> None:
    [out] = rollout(script(call("env_action")), Returns(StepResult("x", 1.0, True, None)))([user("Go.")])  # type: ignore[arg-type]
    assert (out["stop_reason"], out["reward"]) == ("env_done", 1.0)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (None, "Offers.tools must return a list of tools ([] for none), not None"),
        ({"name": "x"}, "Offers.tools must return a list of tools ([] for none), not {'name': 'x'}"),
        ("guess", "Offers.tools must return a list of tools ([] for none), not 'guess'"),
        ([GUESS, "guess"], "Offers.tools must return dicts in OpenAI's form, not 'guess' among them"),
        ([{"function": 3}], "Offers.tools must return dicts in OpenAI's form, not {'function': 3} among them"),
    ],
)
def test_tools_that_are_no_list_of_dicts_are_named(tools: Any, words: str) -> None:
    class Offers(GuessEnv):
        def tools(self) -> Any:
            return tools

    [out] = rollout(script("x"), Offers)([user("Go.")])
    assert (out["stop_reason"], out["error"]) == ("api_error", f"InvalidTypeError: {words}")
    with pytest.raises(InvalidTypeError) as raised:
        EnvTool.from_env(Offers())
    assert str(raised.value) == words


@pytest.mark.parametrize(
    ("value", "error"), [("0.5", InvalidTypeError), (None, InvalidTypeError), (math.inf, InvalidValueError)]
)
def test_an_evaluation_is_a_finite_number(value: Any, error: type[Exception]) -> None:
    class Judged(GuessEnv):
        def evaluate(self, trajectories: list[Any], **kwargs: Any) -> list[float]:
            return [value]

    [out] = rollout(script("x"), Judged)([user("Go.")])
    assert out["reward_error"].startswith(f"{error.__name__}: the reward of Judged.evaluate must be ")
    assert "reward" not in out
    with pytest.raises(error, match="the score must be"):
        number(value, "the score")
