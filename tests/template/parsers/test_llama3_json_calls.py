"""JSON objects as the turn itself: which are calls, and which are answers."""

from __future__ import annotations

from typing import Any

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


def parse(text: str, tools: Any = None) -> ParsedText:
    return PARSERS["llama3_json"].parse(text, tools)


def only(text: str, tools: Any = None) -> ParsedCall:
    (call,) = parse(text, tools).calls
    return call


def test_an_object_with_name_and_parameters_is_a_call() -> None:
    assert parse(' {"name": "f", "parameters": {"a": 1}}') == ParsedText("", [ParsedCall("f", {"a": 1}, 0, 38)])
    assert only('{"type": "function", "name": "f", "parameters": {"a": 1}}').arguments == {"a": 1}
    assert only('{"name": "f", "arguments": {"a": 1}}').arguments == {"a": 1}
    assert only('{"name": "f", "parameters": null}').arguments == {}


def test_behind_the_tag_text_may_come_before() -> None:
    read = parse('I look. <|python_tag|>{"name": "f", "parameters": {"a": "x\ny"}} done')
    assert read.content == "I look.  done"
    assert read.calls[0].arguments == {"a": "x\ny"}


@pytest.mark.parametrize("between", ["; ", ";", "\n", " ", "", ";\n"])
@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_several_calls_stand_side_by_side(between: str, tag: str) -> None:
    read = parse(tag + between.join(f'{{"name": "{name}", "parameters": {{}}}}' for name in "fgh"))
    assert [(call.name, call.status) for call in read.calls] == [("f", "ok"), ("g", "ok"), ("h", "ok")]
    assert read.content == ""


def test_every_call_may_have_a_tag_of_its_own() -> None:
    read = parse('<|python_tag|>{"name": "f", "parameters": {}}<|python_tag|>{"name": "g", "parameters": {}}')
    assert [call.name for call in read.calls] == ["f", "g"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello.",
        '{"answer": 42}',
        '{"name": "Alice", "age": 3}',
        '{"name": "Alice", "age": 3',
        '{"name": "Alice"}',
        "{not json}",
        '[{"name": "f", "parameters": {}}]',
        'You can write {"name": "f", "parameters": {}} for that.',
        "<tool_call>{}</tool_call>",
        "Action: search[x]",
    ],
)
def test_an_answer_is_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])


def test_a_name_alone_is_a_call_where_a_tool_has_that_name() -> None:
    assert only('{"name": "now"}', TOOLS).arguments == {}
    assert parse('{"name": "now", "age": 3}', TOOLS).calls == []
    assert only('<|python_tag|>{"name": "anything"}').arguments == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"name": "f", "parameters": {"p": "C:\\path"}}', r"written \\"),
        ('{"name": "f", "parameters": {"p": "C:\\} x"}}', r"written \\"),
        ('{"name": "f", "parameters": 42}', "must be a JSON string or object"),
        ('{"name": 42, "parameters": {}}', "name of the call must be a non-empty string"),
        ('<|python_tag|>{"parameters": {}}', "name of the call is missing"),
        ('<|python_tag|>{"name": "f", "parameters": {"a": NaN}}', "NaN"),
        ("<|python_tag|>print(1)", "expected an object"),
        ("<|python_tag|>[1]", "expected an object"),
        ("<|python_tag|>find.call(1)", "key=value"),
    ],
)
def test_a_broken_call_says_why(text: str, sentence: str) -> None:
    call = only(text)
    assert call.status == "bad_json" and call.error is not None and sentence in call.error
    assert isinstance(call.arguments, str)


def test_text_behind_a_broken_call_is_kept_and_so_is_the_next_call() -> None:
    assert parse('{"name": "f", "parameters": {"p": "\\d"}} tail').content == " tail"
    read = parse('<|python_tag|>{"name": "f", "parameters": {"p": "\\d"}}<|python_tag|>{"name": "g"}')
    assert [(call.name, call.status) for call in read.calls] == [("f", "bad_json"), ("g", "ok")]


def test_no_cut_of_a_call_is_executable() -> None:
    text = '{"name": "f", "parameters": {"x": "a } \\"b\\"", "n": [1, {"t": true}], "z": -1.5e3}}'
    for end in range(len(text)):
        assert all(call.status == "unclosed" for call in parse(text[:end]).calls)
        assert only("<|python_tag|>" + text[:end]).status == "unclosed"
    assert only(text[:30]).name == "f"


def test_built_in_tools_are_calls() -> None:
    call = only('<|python_tag|>brave_search.call(query="x (y)", n=2)')
    assert (call.name, call.arguments, call.status) == ("brave_search", {"query": "x (y)", "n": 2}, "ok")
    assert only('<|python_tag|>brave_search.call(query="x').status == "unclosed"
