"""Prompts of tools, and what is put in front of a conversation."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from unspool.template import tool_prompt, with_examples, with_system
from unspool.template.parsers import PARSERS
from unspool.types import InvalidTypeError, InvalidValueError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A {city}."}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"name": "now"},
]
USER = {"role": "user", "content": "Hi."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("format", ["hermes", "react", "cline"])
def test_a_prompt_names_every_tool_and_shows_calls_that_its_parser_reads(format: str) -> None:
    prompt = tool_prompt(TOOLS, format)
    assert "get_weather" in prompt and "now" in prompt and "A {city}." in prompt and "Tells the weather." in prompt
    shown = {"hermes": "<tool_call>\n{", "react": "Action: ", "cline": "<get_weather>\n<city>...</city>"}
    assert shown[format] in prompt
    assert format in PARSERS


def test_the_hermes_prompt_holds_the_tools_as_json() -> None:
    lines = tool_prompt(TOOLS).split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert json.loads(lines[0]) == TOOLS[0]
    assert json.loads(lines[1])["function"]["name"] == "now"
    [call] = PARSERS["hermes"].parse(tool_prompt(TOOLS).split("message:\n\n")[1]).calls
    assert (call.status, call.arguments) == ("ok", {"the parameter's name": "its value"})


def test_the_example_call_in_the_cline_prompt_is_a_call() -> None:
    [call, _] = PARSERS["cline"].parse(tool_prompt(TOOLS, "cline").split("# Tools")[1], TOOLS).calls
    assert (call.name, call.arguments) == ("get_weather", {"city": "...", "days": "..."})


def test_formats_without_a_prompt_and_tools_without_a_name_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="'mistral': choose one of hermes, react, cline"):
        tool_prompt(TOOLS, "mistral")
    for format in ("hermes", "react", "cline"):
        with pytest.raises(InvalidValueError, match="a tool must be a dict with a name"):
            tool_prompt([{"type": "function", "function": {}}], format)


def test_a_system_text_stands_in_front_or_behind_what_is_there() -> None:
    assert with_system([USER], "Use tools.") == [{"role": "system", "content": "Use tools."}, USER]
    assert with_system([], "Use tools.") == [{"role": "system", "content": "Use tools."}]
    assert with_system([SYSTEM, USER], "Use tools.")[0]["content"] == "Be brief.\n\nUse tools."
    developer: dict[str, Any] = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    told = with_system([developer, USER], "Use tools.")
    assert told[0] == {"role": "developer", "content": [*developer["content"], {"type": "text", "text": "Use tools."}]}
    assert with_system(told, "Use tools.") == told, "twice is once"
    with pytest.raises(InvalidTypeError, match="must be a string, not NoneType"):
        with_system([USER], None)  # type: ignore[arg-type]


def test_examples_stand_behind_the_system_message_in_their_order() -> None:
    one = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]
    two = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "two"}]
    assert with_examples([SYSTEM, USER], [one, two]) == [SYSTEM, *one, *two, USER]
    assert with_examples([USER], [one]) == [*one, USER]
    assert with_examples([USER], []) == [USER]
    with pytest.raises(InvalidTypeError, match="put it into a list"):
        with_examples([USER], one)  # type: ignore[arg-type]
    for wrong, said in ((None, "not NoneType"), ([3], "each a list of messages")):
        with pytest.raises(InvalidTypeError, match=said):
            with_examples([USER], wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="messages must be a list of messages, not NoneType"):
        with_examples(None, [])  # type: ignore[arg-type]


def test_what_is_given_is_not_changed() -> None:
    given = [copy.deepcopy(SYSTEM), copy.deepcopy(USER)]
    with_system(given, "x")[1]["content"] = "y"
    with_examples(given, [[USER]])[0]["content"] = "y"
    assert given == [SYSTEM, USER]
