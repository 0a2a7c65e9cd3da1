"""`<function=...>` and `<parameter=...>`: text that a schema turns into values."""

from __future__ import annotations

from typing import Any

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "z": {"type": "null"},
        "s": {"type": "string"},
        "o": {"type": "object"},
        "l": {"type": "array", "items": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "text_or_none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["integer", "string"]},
        "object_or_text": {"oneOf": [{"type": "object"}, {"type": "string"}]},
        "choice": {"enum": [1, 2, 3]},
        "fixed": {"const": True},
        "nullable": {"type": "integer", "nullable": True},
        "ref": {"$ref": "#/$defs/Point"},
        "loop": {"$ref": "#/$defs/Loop"},
        "any": {},
    },
    "$defs": {"Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def call_text(parameters: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def parse(text: str, tools: Any = (TOOL,)) -> ParsedText:
    return PARSERS["qwen3_coder"].parse(text, tools)


def only(text: str, tools: Any = (TOOL,)) -> ParsedCall:
    (call,) = parse(text, tools).calls
    return call


def value(key: str, text: str, tools: Any = (TOOL,)) -> Any:
    call = only(call_text(f"<parameter={key}>\n{text}\n</parameter>\n"), tools)
    assert call.status == "ok", call.error
    assert isinstance(call.arguments, dict)
    return call.arguments[key]


def same(left: Any, right: Any) -> bool:
    return bool(left == right) and type(left) is type(right)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("i", "42", 42),
        ("i", "-7", -7),
        ("i", " 5 ", 5),
        ("i", "5.0", 5),
        ("i", "5.5", "5.5"),
        ("i", "four", "four"),
        ("i", "9" * 5000, "9" * 5000),
        ("n", "1.5", 1.5),
        ("n", "3", 3),
        ("n", "3.0", 3.0),
        ("n", "-2e3", -2000.0),
        ("n", "nan", "nan"),
        ("n", "1e999", "1e999"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "TRUE", True),
        ("b", "yes", "yes"),
        ("z", "null", None),
        ("s", "42", "42"),
        ("s", "true", "true"),
        ("s", "null", "null"),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("s", " spaced ", " spaced "),
        ("o", '{"a": [1, true, null]}', {"a": [1, True, None]}),
        ("o", "{}", {}),
        ("l", "[1, 2]", [1, 2]),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "3", 3),
        ("text_or_none", "12", "12"),
        ("text_or_none", "null", None),
        ("listed", "12", 12),
        ("listed", "twelve", "twelve"),
        ("object_or_text", '{"a": 1}', {"a": 1}),
        ("object_or_text", "{broken", "{broken"),
        ("choice", "2", 2),
        ("fixed", "true", True),
        ("nullable", "null", None),
        ("ref", '{"x": 1}', {"x": 1}),
        ("loop", "1", "1"),
        ("any", "1", "1"),
        ("unknown_parameter", "1", "1"),
    ],
)
def test_the_schema_gives_a_value_its_type(key: str, text: str, expected: Any) -> None:
    assert same(value(key, text), expected)


@pytest.mark.parametrize("tools", [None, [], [{"type": "function"}], [{"function": {"name": "g"}}], [{"name": "f"}]])
def test_without_a_schema_every_value_stays_a_string(tools: Any) -> None:
    assert value("i", "42", tools) == "42"


def test_a_tool_without_the_envelope_will_do() -> None:
    assert value("i", "42", [{"name": "f", "parameters": SCHEMA}]) == 42


def test_additional_properties_have_a_type_too() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "additionalProperties": {"type": "integer"}}}
    assert value("other", "42", [tool]) == 42


@pytest.mark.parametrize(
    ("key", "text", "sentence"),
    [
        ("o", '{"a"', "parameter o: the JSON was cut off"),
        ("o", "[1]", "parameter o: it must be a JSON object"),
        ("o", "{'a': 1}", "parameter o: invalid JSON"),
        ("o", r'{"a": "C:\path"}', "escape"),
        ("o", '{"a": 1, "a": 2}', "stands twice"),
        ("l", "1, 2", "parameter l: "),
        ("l", "{}", "it must be a JSON array"),
        ("l", "[" * 20000, "nested more than 100 deep"),
    ],
)
def test_an_object_or_list_that_is_not_json_is_a_broken_call(key: str, text: str, sentence: str) -> None:
    read = parse("a" + call_text(f"<parameter={key}>\n{text}\n</parameter>\n") + "b")
    (call,) = read.calls
    assert (read.content, call.name, call.status) == ("ab", "f", "bad_json")
    assert call.error is not None and sentence in call.error


def test_one_line_break_is_trimmed_on_either_side() -> None:
    assert value("s", "\n  x\n\n") == "\n  x\n\n"
    assert only(call_text("<parameter=s>x</parameter>")).arguments == {"s": "x"}


def test_an_empty_parameter_is_kept() -> None:
    assert value("s", "") == ""
    assert only(call_text("<parameter=s></parameter>")).arguments == {"s": ""}
    assert only(call_text("<parameter=s>\n</parameter>")).arguments == {"s": ""}


def test_a_call_without_parameters_has_no_arguments() -> None:
    assert parse(f"x {call_text('')}\ny") == ParsedText("x \ny", [ParsedCall("f", {}, 2, 51)])


def test_a_value_holds_anything_but_its_own_closing_tag() -> None:
    text = "</function>, <tool_call>, </tool_call> & <parameter=x> <b>"
    assert value("s", text) == text


def test_several_calls_and_several_functions_in_one_block() -> None:
    two = call_text("<parameter=i>\n1\n</parameter>\n") + "\n" + call_text("", "g")
    assert [(call.name, call.arguments) for call in parse(two).calls] == [("f", {"i": 1}), ("g", {})]
    one = "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>"
    assert [call.name for call in parse(one).calls] == ["f", "g"]
    assert parse(one).content == ""


def test_the_opening_tag_may_be_missing_where_the_function_begins_a_line() -> None:
    bare = "I look.\n<function=f>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call>"
    assert parse(bare).content == "I look.\n"
    assert only(bare).arguments == {"i": 1}
    prose = "The form is <function=f>\n</function>"
    assert parse(prose) == ParsedText(prose, [])


def test_a_closing_tag_may_be_missing_behind_a_whole_function() -> None:
    assert only("<tool_call>\n<function=f>\n</function>").status == "ok"
    read = parse("<tool_call>\n<function=f>\n</function>\nSo.")
    assert (read.content, read.calls[0].status) == ("\nSo.", "ok")


def test_no_cut_of_a_call_is_executable() -> None:
    text = call_text("<parameter=s>\na\n</parameter>\n<parameter=i>\n12\n</parameter>\n")
    whole = text.index("</function>") + len("</function>")
    for end in range(len("<tool_call>"), whole):
        call = only(text[:end])
        assert (call.status, call.end) == ("unclosed", end), text[:end]
        assert isinstance(call.arguments, str) and call.error
    for end in range(whole, len(text)):
        assert only(text[:end]).status == "ok"


@pytest.mark.parametrize(
    ("inside", "name", "sentence"),
    [
        ('{"name": "f", "arguments": {}}', "", "expected <function=name>"),
        ("[1]", "", "expected <function=name>"),
        ("", "", "expected <function=name>"),
        ("<function=></function>", "", "name of the function is missing"),
        ("<function=f>i=1</function>", "f", "expected <parameter=name>"),
        ("<function=f><parameter=i>1</parameter> and </function>", "f", "expected <parameter=name>"),
        ("<function=f><parameter=i>1</function>", "f", "the value of i is not closed"),
        ("<function=f><parameter=i>1</parameter><parameter=i>2</parameter></function>", "f", "i stands twice"),
        ("<function=f><parameter=>1</parameter></function>", "f", "name of a parameter is missing"),
        ("<function=f></function> so", "f", "extra text behind </function>: so"),
    ],
)
def test_what_is_no_call_says_why(inside: str, name: str, sentence: str) -> None:
    read = parse(f"before <tool_call>{inside}</tool_call> after")
    (call,) = read.calls
    assert (read.content, call.name, call.status) == ("before  after", name, "bad_json")
    assert call.error is not None and sentence in call.error


def test_a_forgotten_closing_tag_does_not_swallow_the_next_parameter_or_call() -> None:
    forgotten = call_text("<parameter=s>\na\n<parameter=i>\n1\n</parameter>\n")
    assert only(forgotten).status == "bad_json"
    two = call_text("<parameter=s>\na\n") + "\n" + call_text("<parameter=i>\n1\n</parameter>\n")
    assert [call.status for call in parse(two).calls] == ["bad_json"]


def test_a_call_quoted_in_a_broken_value_is_not_run() -> None:
    quoted = call_text("<parameter=i>\n1\n</parameter>\n", "rm")
    for before in ("", "use </parameter> so:\n"):
        text = call_text(f"<parameter=s>\n{before}{quoted}\n{quoted}\n</parameter>\n")
        for end in range(len(text)):
            assert all(call.name != "rm" or call.status != "ok" for call in parse(text[:end]).calls)


@pytest.mark.parametrize(
    "text", ["", "Hello.", "Action: search[x]", "<search_web>\n<query_text>x</query_text>\n</search_web>", "[f(a=1)]"]
)
def test_other_formats_are_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])


def test_a_function_behind_a_broken_value_is_part_of_it_even_without_its_own_tag() -> None:
    broken = "<tool_call>\n<function=note>\n<parameter=text>\nsay\n</function>\n</tool_call>"
    [call] = parse(f"{broken}\n<function=search>\n<parameter=query>\nx\n</parameter>\n</function>").calls
    assert (call.name, call.status) == ("note", "unclosed")
