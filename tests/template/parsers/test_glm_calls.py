"""`<arg_key>` and `<arg_value>`: GLM's calls, and the types of their values."""

from __future__ import annotations

from typing import Any

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "a": {"type": "array"},
        "n": {"type": ["string", "null"]},
        "any": {},
    },
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def argument(key: str, value: str) -> str:
    return f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"


def call_text(arguments: str, name: str = "f") -> str:
    return f"<tool_call>{name}{arguments}\n</tool_call>"


def parse(text: str) -> ParsedText:
    return PARSERS["glm"].parse(text, TOOLS)


def only(text: str) -> ParsedCall:
    [call] = parse(text).calls
    return call


def test_the_text_around_calls_is_kept_exactly() -> None:
    text = f"\nI look.\n{call_text(argument('s', 'Rome'))}\n{call_text('', 'g')} so"
    read = parse(text)
    assert read.content == "\nI look.\n\n so"
    assert [(call.name, call.arguments, call.status) for call in read.calls] == [
        ("f", {"s": "Rome"}, "ok"),
        ("g", {}, "ok"),
    ]
    assert text[read.calls[0].start : read.calls[0].end] == call_text(argument("s", "Rome"))


def test_line_breaks_between_tags_mean_nothing() -> None:
    packed = call_text(argument("s", "x") + argument("i", "3")).replace("\n", "")
    assert packed.startswith("<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value><arg_key>")
    assert only(packed).arguments == {"s": "x", "i": 3}
    assert only("<tool_call>f</tool_call>").arguments == {}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "42", "42"),
        ("s", "true", "true"),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("s", "", ""),
        ("s", "\n two\nlines \n", "\n two\nlines \n"),
        ("s", 'it\'s "q" \\d </tool_call> <b>&amp;</b>', 'it\'s "q" \\d </tool_call> <b>&amp;</b>'),
        ("i", "42", 42),
        ("i", "forty", "forty"),
        ("x", "-1.5e3", -1500.0),
        ("b", "false", False),
        ("o", '{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
        ("a", "[1, [2]]", [1, [2]]),
        ("n", "null", None),
        ("n", "x", "x"),
        ("any", "42", 42),
        ("any", "[true]", [True]),
        ("any", "null", None),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "Rome, 42", "Rome, 42"),
        ("any", '"quoted"', '"quoted"'),
        ("any", "NaN", "NaN"),
        ("unknown", "42", 42),
    ],
)
def test_values_get_their_types_from_the_schema_or_from_json(key: str, written: str, value: object) -> None:
    call = only(call_text(argument(key, written)))
    assert (call.status, call.arguments) == ("ok", {key: value})
    assert isinstance(call.arguments, dict) and type(call.arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("key", "written"), [("o", "{'a': 1}"), ("o", "[1]"), ("a", '{"a": 1}'), ("o", '{"a": "\\d"}')]
)
def test_an_object_that_is_no_json_is_an_error(key: str, written: str) -> None:
    read = parse(call_text(argument(key, written)) + call_text("", "g"))
    assert [(call.name, call.status) for call in read.calls] == [("f", "bad_json"), ("g", "ok")]
    assert read.calls[0].error is not None and key in read.calls[0].error


def test_no_cut_of_a_call_is_executable() -> None:
    text = call_text(argument("s", "Rome") + argument("i", "3"))
    for end in range(len("<tool_call>"), len(text)):
        call = only(text[:end])
        assert call.status == "unclosed", (text[:end], call)
        assert isinstance(call.arguments, str) and call.error and call.end == end
    assert only("<tool_call>get_wea").name == "", "who knows how the name would have gone on"


@pytest.mark.parametrize(
    ("inside", "name", "sentence"),
    [
        ("", "", "name of the function is missing"),
        ('{"name": "f", "arguments": {}}', "", "name of the function is missing"),
        ("f x", "f", "expected <arg_key>"),
        ("f\n<arg_key>s</arg_key>\n", "f", "expected <arg_key>"),
        ("f\n<arg_value>s</arg_value>\n", "f", "expected <arg_key>"),
        (f"f{argument('s', '1')}{argument('s', '2')}", "f", "s stands twice"),
        (f"f{argument('', '1')}", "f", "key of an argument is missing"),
        (f"f{argument('s', '1')} and", "f", "expected <arg_key>"),
        ("f<arg_key>s</arg_key><arg_value>1", "f", "the value of s is not closed"),
    ],
)
def test_what_is_no_call_says_why(inside: str, name: str, sentence: str) -> None:
    read = parse(f"before <tool_call>{inside}</tool_call> after")
    [call] = read.calls
    assert (read.content, call.name, call.status) == ("before  after", name, "bad_json")
    assert call.error is not None and sentence in call.error


def test_a_forgotten_closing_tag_does_not_swallow_the_next_argument_or_call() -> None:
    forgotten = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a" + argument("i", "1") + "\n</tool_call>"
    assert only(forgotten).status == "bad_json"
    two = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\n</tool_call>\n" + call_text(argument("i", "1"), "rm")
    assert all(call.status != "ok" for call in parse(two).calls)


def test_a_call_quoted_in_a_value_is_not_run() -> None:
    quoted = call_text(argument("i", "1"), "rm")
    text = call_text(argument("s", f"{quoted}\n{quoted}"))
    for end in range(len(text) + 1):
        assert all(call.name != "rm" or call.status != "ok" for call in parse(text[:end]).calls)
    bare = call_text(argument("s", "<tool_call>rm</tool_call>"))
    assert only(bare).arguments == {"s": "<tool_call>rm</tool_call>"}


@pytest.mark.parametrize(
    "text", ["", "Hello.", "Action: search[x]", "<arg_key>s</arg_key>", "</tool_call>", "[f(a=1)]", "[TOOL_CALLS]f{}"]
)
def test_other_formats_are_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])
