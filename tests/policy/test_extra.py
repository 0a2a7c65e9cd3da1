"""What goes with requests: the same for every turn, or told by the turn, at construction and with a call."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.small import CALC, script, small_template, user
from unspool import MultiTurnRollout, ToolManager, calculator
from unspool.policy.extra import check_extra, extra_of, merged
from unspool.types import InvalidTypeError


def held_at_first(turn: int) -> dict[str, Any]:
    return {"form": "call"} if turn == 0 else {}


def test_a_mapping_goes_with_every_turn_as_a_copy() -> None:
    given = {"adapter": "a"}
    assert [extra_of(given, turn) for turn in (0, 5)] == [{"adapter": "a"}, {"adapter": "a"}]
    extra_of(given, 0)["adapter"] = "b"
    assert given == {"adapter": "a"}
    assert extra_of(None, 0) == {}


def test_a_function_tells_by_the_turn() -> None:
    assert [extra_of(held_at_first, turn) for turn in range(3)] == [{"form": "call"}, {}, {}]


def test_a_function_that_returns_no_mapping_is_refused_with_the_turn() -> None:
    with pytest.raises(InvalidTypeError, match=r"extra gave 'call' for turn 3; it must be a mapping"):
        extra_of(lambda turn: "call", 3)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("wrong", ["adapter", 7, ["adapter"]])
def test_what_is_neither_mapping_nor_function_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidTypeError, match="extra_body must be a mapping, or a function of the turn"):
        check_extra(wrong, "extra_body")


def test_the_upper_of_two_wins_name_by_name() -> None:
    assert extra_of(merged({"a": 1, "b": 1}, {"b": 2}), 0) == {"a": 1, "b": 2}
    assert merged(None, None) is None
    assert merged({"a": 1}, None) == merged(None, {"a": 1}) == {"a": 1}


def test_a_function_and_a_mapping_are_merged_turn_by_turn_and_pickle() -> None:
    both = pickle.loads(pickle.dumps(merged({"form": "free", "a": 1}, held_at_first)))
    assert [extra_of(both, turn) for turn in (0, 1)] == [{"form": "call", "a": 1}, {"form": "free", "a": 1}]
    assert extra_of(merged(held_at_first, {"form": "mine"}), 0) == {"form": "mine"}


def test_every_turn_of_a_rollout_takes_its_own_extra_and_a_call_adds_to_it() -> None:
    engine = script(CALC, "19")
    run = MultiTurnRollout(
        engine,
        small_template(),
        ToolManager([calculator]),
        progress=False,
        extra=lambda turn: {"turn": turn, "who": "all"},
    )
    run([user("12 + 7?")])
    assert [dict(request.extra) for request in engine.requests] == [
        {"turn": 0, "who": "all"},
        {"turn": 1, "who": "all"},
    ]
    run([user("12 + 7?")], extra={"who": "this call"})
    run([user("12 + 7?")])
    assert [request.extra["who"] for request in engine.requests] == ["all"] * 2 + ["this call"] * 2 + ["all"] * 2


def test_a_call_takes_no_other_name_than_extra() -> None:
    run = MultiTurnRollout(script("unused"), small_template(), progress=False)
    with pytest.raises(InvalidTypeError, match="a call of a rollout has no argument 'extra_body'; it has extra"):
        run([user("a")], extra_body={})
    with pytest.raises(InvalidTypeError, match="extra must be a mapping"):
        run([user("a")], extra="adapter")  # type: ignore[arg-type]
