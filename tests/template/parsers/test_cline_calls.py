"""XML in Cline's manner: tags of tools on offer are calls, any other markup is text."""

from __future__ import annotations

from typing import Any

import pytest

from examples.scripted import CHATML
from tests.small import small_tokenizer
from unspool.template import ChatTemplate
from unspool.template.parsers import PARSERS, ParsedCall, ParsedText, PlainFormat

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Where."},
        "content": {"type": "string"},
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "tags": {"type": "array"},
    },
    "required": ["path"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "write_to_file", "description": "Writes.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "look", "parameters": {}}},
]


def parse(text: str, tools: list[dict[str, Any]] | None = TOOLS) -> ParsedText:
    return PARSERS["cline"].parse(text, tools)


def only(text: str) -> ParsedCall:
    (call,) = parse(text).calls
    return call


CALL = "<write_to_file>\n<path>a.txt</path>\n</write_to_file>"


def test_thinking_is_no_content_and_no_call_in_it_is_run() -> None:
    read = parse(f"<thinking>I could {CALL} but no</thinking>\n\nHello {CALL} <thinking>\nso</thinking>.")
    assert [(call.name, call.status) for call in read.calls] == [("write_to_file", "ok")]
    assert (read.content, read.reasoning) == ("Hello  .", f"I could {CALL} but no\n\nso")


def test_thinking_that_is_never_closed_is_the_rest_of_the_turn() -> None:
    assert parse(f"Hi <thinking>I {CALL}") == ParsedText("Hi ", [], f"I {CALL}")
    assert parse("Hi <thinking>so</thinking>", None) == ParsedText("Hi ", [], "so")


def test_thinking_that_a_value_holds_is_the_value() -> None:
    call = only("<write_to_file><path>a</path><content><thinking>x</thinking></content></write_to_file>")
    assert call.arguments == {"path": "a", "content": "<thinking>x</thinking>"}


def test_a_tool_that_is_called_thinking_is_a_tool() -> None:
    tool = {"type": "function", "function": {"name": "thinking", "parameters": SCHEMA}}
    read = parse("<thinking><path>a</path></thinking>", [tool])
    assert ([call.arguments for call in read.calls], read.reasoning) == ([{"path": "a"}], None)


def test_a_turn_has_the_thinking_of_the_head_and_of_the_format() -> None:
    template = ChatTemplate(small_tokenizer(), chat_template=CHATML, parser="cline")
    text = f"<think>a</think><thinking>{CALL}</thinking>\nHi {CALL}<|im_end|>"
    message = template.parse(template.tokenizer.encode(text, add_special_tokens=False), tools=TOOLS)
    assert (message.content, message.reasoning_content) == ("Hi ", f"a\n{CALL}")
    [call] = message.tool_calls
    assert call.arguments == {"path": "a.txt"}


def test_the_text_around_a_call_is_kept_exactly() -> None:
    text = "hello <write_to_file>\n<path>a.txt</path>\n</write_to_file> world"
    assert parse(text) == ParsedText("hello  world", [ParsedCall("write_to_file", {"path": "a.txt"}, 6, len(text) - 6)])


def test_values_have_the_types_of_the_schema() -> None:
    text = '<write_to_file>\n<a>1</a>\n<b>2</b>\n<tags>[1, "x"]</tags>\n<path>\n p \n</path></write_to_file>'
    assert only(text).arguments == {"a": 1, "b": "2", "tags": [1, "x"], "path": " p "}


def test_a_value_may_hold_markup_and_its_own_closing_tag() -> None:
    value = "<html><path>x</path>\n</content> and <content>\n<look></look></html>"
    text = f"<write_to_file>\n<path>a</path>\n<content>\n{value}\n</content>\n</write_to_file>"
    assert only(text).arguments == {"path": "a", "content": value}


def test_several_calls_keep_their_order() -> None:
    read = parse("a<look>\n</look>b<write_to_file><path>x</path></write_to_file><look><any>1</any></look>c")
    assert [(call.name, call.arguments) for call in read.calls] == [
        ("look", {}),
        ("write_to_file", {"path": "x"}),
        ("look", {"any": "1"}),
    ]
    assert read.content == "abc"


def test_only_tools_on_offer_are_called() -> None:
    text = "<read_file>\n<path>x</path>\n</read_file>"
    assert parse(text) == ParsedText(text, [])
    offered = "<look>\n</look>"
    assert parse(offered, None) == ParsedText(offered, [])
    assert parse(offered, []) == ParsedText(offered, [])


def test_the_tag_in_prose_is_text() -> None:
    for text in ("Use <look> for this.", "<look> is a tool, <write_to_file> another", "</look>"):
        assert parse(text) == ParsedText(text, [])
    read = parse("Use <look> now: <look>\n</look>")
    assert (read.content, [call.status for call in read.calls]) == ("Use <look> now: ", ["ok"])


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        ("<look>here</look> so", "bad_json", "expected a parameter or </look>, not 'here</look> so'"),
        ("<write_to_file><nope>1</nope></write_to_file> so", "bad_json", "expected <path>, <content>"),
        ("<write_to_file><path>a</path>x</write_to_file> so", "bad_json", "the value of path is not closed"),
        ("<write_to_file><a>1</a><a>2</a></write_to_file> so", "bad_json", "stands twice"),
        ("<write_to_file><tags>[1</tags></write_to_file> so", "bad_json", "tags"),
        ("<write_to_file><path>a", "unclosed", "the value of path is not closed"),
        ("<write_to_file><path>a</path>", "unclosed", "cut off before </write_to_file>"),
        ("<write_to_file><path>a</path>\n</write_to", "unclosed", "cut off"),
        ("<write_to_file>\n<pa", "unclosed", "cut off"),
        ("<write_to_file>", "unclosed", "cut off"),
    ],
)
def test_what_cannot_be_run_says_why(text: str, status: str, sentence: str) -> None:
    call = only(text)
    assert call.status == status
    assert call.error is not None and sentence in call.error
    assert isinstance(call.arguments, str)


def test_nothing_in_a_value_that_is_not_closed_is_run() -> None:
    read = parse("<write_to_file><content>\n<look>\n</look>\n<write_to_file><path>x</path></write_to_file>")
    assert all(call.status != "ok" for call in read.calls)


def test_no_cut_of_a_call_is_executable() -> None:
    text = "<write_to_file>\n<path>a</path>\n<content>x</content>\n</write_to_file>"
    for end in range(len(text)):
        assert all(call.status == "unclosed" for call in parse(text[:end]).calls)


def test_a_history_is_written_as_the_parser_reads_it() -> None:
    cline = PARSERS["cline"]
    assert isinstance(cline, PlainFormat)
    arguments = {"path": "a.txt", "content": "two\n</content> lines", "a": 3, "tags": ["x", {"y": None}]}
    message = {
        "role": "assistant",
        "content": "I write.",
        "tool_calls": [{"type": "function", "function": {"name": "write_to_file", "arguments": arguments}}],
    }
    said, answer = cline.written([message, {"role": "tool", "name": "write_to_file", "content": "done"}])
    assert answer == {"role": "user", "content": "[write_to_file] Result:\ndone"}
    read = parse(said["content"])
    assert (read.content, read.calls[0].arguments) == ("I write.\n", arguments)
