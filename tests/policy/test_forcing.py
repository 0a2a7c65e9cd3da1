"""`tool_choice` with a token-level engine: turned into a form before the engine sees it, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.small import CALC, rollout, script, small_template, user
from unspool import TokenPolicy, calculator
from unspool.policy.forcing import with_form
from unspool.types import InvalidValueError

TOOLS = [calculator.info()]
NAMED = {"type": "function", "function": {"name": "calculator"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_asked_for_becomes_a_form(choice: Any) -> None:
    extra = {"tool_choice": choice, "adapter": "mine"}
    sent = with_form(extra, small_template(), TOOLS, [])
    assert sent == {
        "adapter": "mine",
        "structured_outputs": {"structural_tag": small_template().one_call(TOOLS)},
    }
    assert extra == {"tool_choice": choice, "adapter": "mine"}


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_free_choice_holds_the_turn_to_nothing(choice: Any) -> None:
    assert with_form({"tool_choice": choice, "adapter": "mine"}, small_template(), TOOLS, []) == {"adapter": "mine"}
    assert with_form({"adapter": "mine"}, small_template(), TOOLS, []) == {"adapter": "mine"}


def test_only_the_named_tool_fits() -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    sent = with_form({"tool_choice": NAMED}, small_template(), [*TOOLS, other], [])
    assert len(json.loads(sent["structured_outputs"]["structural_tag"])["format"]["elements"]) == 1


@pytest.mark.parametrize(
    ("extra", "tools", "said"),
    [
        ({"tool_choice": "required"}, [], "no tools are on offer"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, TOOLS, "'x'; on offer are: calculator"),
        ({"tool_choice": "always"}, TOOLS, "must be 'auto', 'none', 'required' or .* not 'always'"),
        ({"tool_choice": ["required"]}, TOOLS, r"not \['required'\]"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, TOOLS, "two forms for one turn"),
    ],
)
def test_what_cannot_be_held_to_is_refused(extra: dict[str, Any], tools: list[Any], said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        with_form(extra, small_template(), tools, [])


def test_a_choice_by_the_turn_holds_the_first_one_alone() -> None:
    engine = script(CALC, "19")
    policy = TokenPolicy(
        engine, small_template(), extra=lambda turn: {"tool_choice": "required" if turn == 0 else "auto"}
    )
    [out] = rollout(engine, extra=policy.extra)([user("12 + 7?")])
    assert out["error"] is None
    assert ["structured_outputs" in asked.extra for asked in engine.requests] == [True, False]
    assert not any("tool_choice" in asked.extra for asked in engine.requests)


def test_an_engine_that_cannot_obey_says_so_on_the_trajectory() -> None:
    pytest.importorskip("torch")
    from tests.engines.tiny_models import tiny_llama
    from unspool.engines.torch import TorchEngine

    with rollout(TorchEngine(tiny_llama()), extra={"tool_choice": "required"}) as episodes:
        [out] = episodes([user("12 + 7?")])
    assert out["stop_reason"] == "api_error"
    assert "VLLMEngine, VLLMSampler and ServerEngine can" in out["error"]
