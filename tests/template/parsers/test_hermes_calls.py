"""`<tool_call>{json}</tool_call>`: what is a call, what is a broken one, and what is text."""

from __future__ import annotations

import json

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText


def parse(text: str) -> ParsedText:
    return PARSERS["hermes"].parse(text)


def only(text: str) -> ParsedCall:
    (call,) = parse(text).calls
    return call


def test_the_text_around_a_call_is_kept_exactly() -> None:
    text = 'hello <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> world'
    read = parse(text)
    assert read.content == "hello  world"
    assert read.calls == [ParsedCall("f", {"a": 1}, 6, 67)]
    assert text[6:67].startswith("<tool_call>") and text[6:67].endswith("</tool_call>")


def test_several_calls_keep_their_order_and_the_text_between() -> None:
    read = parse('a<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>b')
    assert [call.name for call in read.calls] == ["f", "g"]
    assert read.content == "a\nb"


def test_several_objects_in_one_pair_of_tags_are_several_calls() -> None:
    read = parse('<tool_call>\n{"name": "f"}\n{"name": "g", "arguments": {"a": [1]}}\n</tool_call>')
    assert [(call.name, call.arguments, call.status) for call in read.calls] == [
        ("f", {}, "ok"),
        ("g", {"a": [1]}, "ok"),
    ]
    assert read.content == ""


def test_parameters_is_another_word_for_arguments() -> None:
    assert only('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>').arguments == {"a": 1}
    both = only('<tool_call>{"name": "f", "parameters": {"a": 1}, "arguments": {}}</tool_call>')
    assert (both.name, both.status) == ("f", "bad_json")


def test_a_closing_tag_inside_a_string_is_part_of_the_string() -> None:
    call = only('<tool_call>{"name": "f", "arguments": {"x": "</tool_call> {}}"}}</tool_call>')
    assert (call.arguments, call.status) == ({"x": "</tool_call> {}}"}, "ok")


def test_raw_control_characters_inside_strings_are_accepted() -> None:
    assert only('<tool_call>{"name": "f", "arguments": {"x": "a\nb\tc\x00"}}</tool_call>').arguments == {
        "x": "a\nb\tc\x00"
    }


@pytest.mark.parametrize(
    "value",
    [
        r"C:\path",
        r"\d+",
        r"\u12zz",
        r"a\
b",
    ],
)
def test_an_invalid_escape_is_an_error_with_a_way_out(value: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": "{value}"}}}}</tool_call> after'
    call = only(text)
    assert (call.name, call.status) == ("f", "bad_json")
    assert call.error is not None and "escape" in call.error and r"written \\" in call.error
    assert isinstance(call.arguments, str) and value in call.arguments
    assert parse(text).content == " after"


def test_an_invalid_escape_before_a_quoted_closing_tag_still_ends_at_the_real_one() -> None:
    read = parse(r'<tool_call>{"name": "f", "arguments": {"x": "C:\p </tool_call> y"}}</tool_call> after')
    assert (read.content, len(read.calls), read.calls[0].status) == (" after", 1, "bad_json")


def test_no_cut_of_a_call_is_executable() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "a, \\"b\\" \\u00e9", "n": [1, {"t": true}], "z": -1.5e3}}'
    for end in range(len("<tool_call>"), len(text)):
        call = only(text[:end])
        assert call.status == "unclosed", (text[:end], call)
        assert isinstance(call.arguments, str) and call.error
        assert call.end == end


def test_a_whole_object_without_its_closing_tag_is_a_call() -> None:
    assert only('<tool_call>\n{"name": "f", "arguments": {"a": 1}}').status == "ok"
    assert only('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_ca').status == "ok"
    read = parse('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}\n</tool_call>')
    assert [call.status for call in read.calls] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ("[1]", "must be a JSON object with a name and arguments, not a list"),
        ("[]", "must be a JSON object"),
        ("42", "not a number"),
        ('"f"', "not a string"),
        ("null", "not null"),
        ("true", "not a boolean"),
        ("{}", "name of the call is missing"),
        ('{"arguments": {}}', "name of the call is missing"),
        ('{"name": 7, "arguments": {}}', "must be a non-empty string, not a number"),
        ('{"name": {"a": 1}}', "must be a non-empty string, not an object"),
        ('{"name": " "}', "must be a non-empty string"),
        ('{"name": "f", "arguments": 42}', "must be a JSON string or object"),
        ('{"name": "f", "arguments": [1]}', "must be a JSON string or object"),
        ('{"name": "f", "arguments": "not json"}', "invalid JSON"),
        ('{"name": "f", "arguments": "[1]"}', "must be a JSON object"),
        ('{"name": "f", "arguments": "{} {}"}', "invalid JSON"),
        ('{"name": "f", "city": "Rome"}', 'no "arguments"'),
        ('{"name": "f", "arguments": {"a": 1}}}', "extra text behind the object: }"),
        ('{"name": "f", "arguments": {"a": 1}', "invalid JSON"),
        ("{'name': 'f'}", "invalid JSON"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', 'the key "a" stands twice'),
        ('{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}', 'the key "a" stands twice'),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not a JSON number"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "-Infinity is not a JSON number"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "too large"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "5000 digits"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 101 + "]" * 101 + "}}", "nested more than 100 deep"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 20000 + "]" * 20000 + "}}", "nested more than 100 deep"),
        ("f(a=1)", "invalid JSON"),
        ("<function=f></function>", "invalid JSON"),
        ("", "invalid JSON"),
    ],
)
def test_what_is_no_call_says_why(inside: str, sentence: str) -> None:
    read = parse(f"before <tool_call>{inside}</tool_call> after")
    (call,) = read.calls
    assert read.content == "before  after"
    assert call.status == "bad_json"
    assert call.error is not None and sentence in call.error
    assert isinstance(call.arguments, str)
    assert call.name in ("", "f")


def test_an_opening_tag_at_the_end_of_the_text_is_a_call_that_was_cut() -> None:
    assert parse("so <tool_call>") == ParsedText(
        "so ", [ParsedCall("", "", 3, 14, "unclosed", "the JSON was cut off before its end")]
    )


@pytest.mark.parametrize("arguments", ["null", '""', '"   "', "{}", '"{}"'])
def test_nothing_means_no_arguments(arguments: str) -> None:
    call = only(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert (call.arguments, call.status) == ({}, "ok")


def test_arguments_written_as_a_json_string_are_decoded() -> None:
    inner = json.dumps({"a": 'x "y" \\ é', "b": [1, None]})
    call = only(f"<tool_call>{json.dumps({'name': 'f', 'arguments': inner})}</tool_call>")
    assert (call.arguments, call.status) == ({"a": 'x "y" \\ é', "b": [1, None]}, "ok")


def test_braces_in_strings_do_not_end_a_call() -> None:
    assert only('<tool_call>{"name": "f", "arguments": {"x": "}}{{"}}</tool_call>').arguments == {"x": "}}{{"}


def test_an_id_that_the_model_wrote_is_kept() -> None:
    assert only('<tool_call>{"id": "c1", "name": "f", "type": "function"}</tool_call>').id == "c1"


def test_a_broken_call_does_not_take_the_next_one_with_it() -> None:
    read = parse('<tool_call>{"name": f}</tool_call>\n<tool_call>{"name": "g"}</tool_call>')
    assert [(call.name, call.status) for call in read.calls] == [("", "bad_json"), ("g", "ok")]
    read = parse('<tool_call>{"name": f}\n<tool_call>{"name": "g"}</tool_call>')
    assert [(call.name, call.status) for call in read.calls] == [("", "bad_json"), ("g", "ok")]


def test_a_call_quoted_in_the_string_of_a_broken_one_is_not_run() -> None:
    inner = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    outer = json.dumps({"name": "write", "arguments": {"text": inner}})
    for text in (
        f"<tool_call>{outer[:-1]}</tool_call>",
        f"<tool_call>{outer[:-3]}",
        f"<tool_call>{outer}x</tool_call>",
    ):
        assert all(call.status != "ok" for call in parse(text).calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello there.",
        "I would write\nAction: search[x]\nand wait.",
        "<search_web>\n<query_text>x</query_text>\n</search_web>",
        '{"name": "f", "parameters": {}}',
        "[f(a=1)]",
        "<function=f>\n</function>",
        "</tool_call>",
        "<tool_cal>{}",
    ],
)
def test_other_formats_are_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])
