"""`｜DSML｜` tags: DeepSeek V3.2's calls, whose values say whether they are text or JSON."""

from __future__ import annotations

from typing import Any

import pytest

from tests.template.parsers.test_marked_round_trips import Characters
from unspool.template.parsers import PARSERS, ParsedCall, ParsedText


def value(key: str, written: str, string: bool = True) -> str:
    kind = "true" if string else "false"
    return f'<｜DSML｜parameter name="{key}" string="{kind}">{written}</｜DSML｜parameter>\n'


def invoke(inside: str = "", name: str = "f") -> str:
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n'


def block(*calls: str, tag: str = "function_calls") -> str:
    return f"<｜DSML｜{tag}>\n{''.join(calls)}</｜DSML｜{tag}>"


def parse(text: str) -> ParsedText:
    return PARSERS["deepseek_dsml"].parse(text)


def only(text: str) -> ParsedCall:
    [call] = parse(text).calls
    return call


@pytest.mark.parametrize("tag", ["function_calls", "tool_calls"])
def test_a_block_of_calls_is_taken_out_of_the_text_whole(tag: str) -> None:
    text = f"I look.\n\n{block(invoke(value('city', 'Rome')), invoke(name='get-b.c'), tag=tag)} so"
    read = parse(text)
    assert read.content == "I look.\n\n so"
    assert [(call.name, call.arguments, call.status) for call in read.calls] == [
        ("f", {"city": "Rome"}, "ok"),
        ("get-b.c", {}, "ok"),
    ]
    assert (read.calls[0].start, read.calls[-1].end) == (9, len(text) - 3)


@pytest.mark.parametrize(
    ("written", "string", "decoded"),
    [
        ("42", True, "42"),
        ("42", False, 42),
        ("true", False, True),
        ("null", False, None),
        ('{"a": [1, 2.5, "x\ny"]}', False, {"a": [1, 2.5, "x\ny"]}),
        ('"quoted"', False, "quoted"),
        ("", True, ""),
        ("\n two \n lines\n", True, "\n two \n lines\n"),
        ('it\'s "q" \\d </parameter> <b>&amp;</b>', True, 'it\'s "q" \\d </parameter> <b>&amp;</b>'),
    ],
)
def test_a_value_says_its_type(written: str, string: bool, decoded: object) -> None:
    call = only(block(invoke(value("x", written, string))))
    assert (call.status, call.arguments) == ("ok", {"x": decoded})
    assert isinstance(call.arguments, dict) and type(call.arguments["x"]) is type(decoded)


def test_no_cut_of_a_call_is_executable() -> None:
    text = block(invoke(value("x", "Rome") + value("n", "[1, 2]", string=False)))
    whole = text.index("</｜DSML｜invoke>") + len("</｜DSML｜invoke>")
    for end in range(len("<｜DSML｜function_calls>"), whole):
        call = only(text[:end])
        assert call.status == "unclosed", (text[:end], call)
        assert isinstance(call.arguments, str) and call.error and call.end == end
    for end in range(whole, len(text) + 1):
        assert only(text[:end]).status == "ok"


@pytest.mark.parametrize(
    ("inside", "name", "sentence"),
    [
        ("", "", "expected <｜DSML｜invoke"),
        ("so", "", "expected <｜DSML｜invoke"),
        ("<｜DSML｜invoke>\n</｜DSML｜invoke>", "", "expected <｜DSML｜invoke"),
        (invoke(name=""), "", "name of the call is missing"),
        (invoke("so"), "f", "expected <｜DSML｜parameter"),
        (invoke('<｜DSML｜parameter name="x">1</｜DSML｜parameter>'), "f", "expected <｜DSML｜parameter"),
        (invoke(value("x", "1") + value("x", "2")), "f", "x stands twice"),
        (invoke(value("", "1")), "f", "name of a parameter is missing"),
        (invoke(value("x", "Rome", string=False)), "f", "parameter x: invalid JSON"),
        (invoke(value("x", "1 2", string=False)), "f", "text behind the value"),
        (invoke(value("x", r'"\d"', string=False)), "f", "backslash"),
    ],
)
def test_what_is_no_call_says_why_and_leaves_the_next_one_alone(inside: str, name: str, sentence: str) -> None:
    bad, good = parse(f"before {block(inside)}{block(invoke(name='g'))} after").calls
    assert (bad.name, bad.status, good.name, good.status) == (name, "bad_json", "g", "ok")
    assert bad.error is not None and sentence in bad.error
    assert isinstance(bad.arguments, str)


def test_a_call_quoted_in_a_value_is_not_run() -> None:
    quoted = block(invoke(value("x", "1"), name="rm"))
    text = block(invoke(value("x", f"Write {quoted} and\n{quoted}")))
    for end in range(len(text) + 1):
        assert all(call.status != "ok" for call in parse(text[:end]).calls)


def test_a_forgotten_closing_tag_does_not_swallow_the_next_parameter() -> None:
    forgotten = '<｜DSML｜parameter name="x" string="true">a\n' + value("y", "b")
    assert only(block(invoke(forgotten))).status == "bad_json"


def test_the_outer_tag_may_be_missing() -> None:
    read = parse(f"Hi {invoke(value('x', '1'))}so")
    assert [(call.name, call.status) for call in read.calls] == [("f", "ok")]
    assert read.content == "Hi \nso"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello.",
        '<invoke name="f"></invoke>',
        "<function_calls>\n</function_calls>",
        "</｜DSML｜invoke>",
        "<｜tool▁calls▁begin｜>",
        '<tool_call>{"name": "f"}</tool_call>',
    ],
)
def test_other_formats_are_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])


def test_an_independent_parser_reads_the_same() -> None:
    parsing = pytest.importorskip("renderers.parsing", exc_type=ImportError)
    marks = Characters("<think>", "</think>")
    arguments: dict[str, Any] = {"city": "東京", "days": 3, "deep": {"a": [1, None]}}
    values = value("city", "東京") + value("days", "3", False) + value("deep", '{"a": [1, null]}', False)
    turn = "Hi\n\n" + block(invoke(values), invoke(value("x", "a\nb"), "g"), tag="tool_calls")
    theirs = parsing.parse_deepseek_v4(
        marks, marks.encode(turn), stop_ids=set(), thinking_enabled=False, think_start_id=-1, think_end_id=-2
    )
    ours = parse(turn)
    assert [(made.name, made.arguments) for made in theirs.tool_calls] == [("f", arguments), ("g", {"x": "a\nb"})]
    assert [(made.name, made.arguments) for made in ours.calls] == [("f", arguments), ("g", {"x": "a\nb"})]
    assert ours.content.strip() == theirs.content.strip() == "Hi"
