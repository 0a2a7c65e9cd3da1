"""A name and JSON between marks: DeepSeek's calls and Kimi K2's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{END_CALL}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{END_CALL}"


def kimi(name: str, arguments: str, number: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


WRITERS = {"deepseek v3": ("deepseek", v3), "deepseek v3.1": ("deepseek", v31), "kimi k2": ("kimi_k2", kimi)}
each = pytest.mark.parametrize(("parser", "write"), WRITERS.values(), ids=WRITERS)


def section(parser: str, inside: str) -> str:
    return f"{BEGIN}{inside}{END}" if parser == "deepseek" else f"{SECTION}{inside}{END_SECTION}"


def parse(parser: str, text: str) -> ParsedText:
    return PARSERS[parser].parse(text)


@each
def test_the_text_around_a_section_is_kept_exactly(parser: str, write: Any) -> None:
    text = f"hello {section(parser, write('f', json.dumps({'a': 1})))} world"
    read = parse(parser, text)
    assert read.content == "hello  world"
    [call] = read.calls
    assert (call.name, call.arguments, call.status) == ("f", {"a": 1}, "ok")
    assert (call.start, call.end) == (6, len(text) - 6)


@each
def test_several_calls_keep_their_order_and_leave_no_layout_behind(parser: str, write: Any) -> None:
    made = [write("f", "{}"), write("get-weather.v2", '{"city": "東京"}'), write("f", '{"n": [1, null]}')]
    for between in ("", "\n"):
        read = parse(parser, f"I look.{section(parser, between.join(made))}")
        assert read.content == "I look."
        assert [(call.name, call.arguments, call.status) for call in read.calls] == [
            ("f", {}, "ok"),
            ("get-weather.v2", {"city": "東京"}, "ok"),
            ("f", {"n": [1, None]}, "ok"),
        ]


@each
def test_marks_inside_strings_are_part_of_the_string(parser: str, write: Any) -> None:
    value = f'{END_CALL}{END} ``` <|tool_call_end|>{END_SECTION} {write("rm", "{}")} C:\\path "q"'
    read = parse(parser, section(parser, write("f", json.dumps({"x": value}, ensure_ascii=False))))
    assert [(call.name, call.arguments) for call in read.calls] == [("f", {"x": value})]


@each
def test_raw_control_characters_are_accepted_and_invalid_escapes_are_errors(parser: str, write: Any) -> None:
    [call] = parse(parser, section(parser, write("f", '{"x": "a\nb\tc"}'))).calls
    assert call.arguments == {"x": "a\nb\tc"}
    read = parse(parser, section(parser, write("f", r'{"x": "C:\path"}') + write("g", "{}")) + " after")
    assert [(call.name, call.status) for call in read.calls] == [("f", "bad_json"), ("g", "ok")]
    assert read.calls[0].error is not None and r"written \\" in read.calls[0].error
    assert read.calls[0].arguments is not None and r"C:\path" in read.calls[0].arguments
    assert read.content == " after"


@each
def test_no_cut_of_a_call_is_executable(parser: str, write: Any) -> None:
    whole = write("f", '{"x": "a \\"b\\" \\u00e9", "n": [1, {"t": true}], "z": -1.5e3}')
    text = section(parser, whole)
    json_end = text.index("e3}") + 3
    opened = len(BEGIN if parser == "deepseek" else SECTION)
    for end in range(opened, json_end):
        [call] = parse(parser, text[:end]).calls
        assert call.status == "unclosed", (text[:end], call)
        assert isinstance(call.arguments, str) and call.error and call.end == end
    for end in range(json_end, len(text)):
        assert [call.status for call in parse(parser, text[:end]).calls] == ["ok"]


@each
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("[1]", "must be a JSON"),
        ("{'a': 1}", "invalid JSON"),
        ('{"a": 1}}', "extra text behind the object: }"),
        ('{"a": 1} and', "extra text behind the object: and"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": f}', "invalid JSON"),
    ],
)
def test_what_is_no_call_says_why_and_leaves_the_next_one_alone(
    parser: str, write: Any, arguments: str, sentence: str
) -> None:
    read = parse(parser, f"before {section(parser, write('f', arguments) + write('g', '{}'))} after")
    assert read.content == "before  after"
    bad, good = read.calls
    assert (bad.name, bad.status, good.name, good.status) == ("f", "bad_json", "g", "ok")
    assert bad.error is not None and sentence in bad.error
    assert isinstance(bad.arguments, str)


@each
def test_a_call_quoted_in_the_string_of_a_broken_one_is_not_run(parser: str, write: Any) -> None:
    quoted = write("rm", "{}")
    broken = section(parser, write("write", json.dumps({"text": quoted}, ensure_ascii=False)[:-1] + ", oops}"))
    for end in range(len(broken) + 1):
        assert all(call.name != "rm" for call in parse(parser, broken[:end]).calls)


@each
def test_missing_marks_of_the_section_are_no_fault(parser: str, write: Any) -> None:
    call = write("f", "{}")
    assert [(made.name, made.status) for made in parse(parser, f"a{call} b").calls] == [("f", "ok")]
    assert parse(parser, f"a{call} b").content == "a b"
    opened = section(parser, call)[: -len(END if parser == "deepseek" else END_SECTION)]
    assert parse(parser, f"{opened} b").content == " b"


@each
@pytest.mark.parametrize("inside", ["", " so "])
def test_a_section_without_a_call_is_a_failed_attempt(parser: str, write: Any, inside: str) -> None:
    text = section(parser, inside)
    [call] = parse(parser, f"a {text} b").calls
    assert (call.status, call.start, call.end) == ("bad_json", 2, 2 + len(text))
    [cut] = parse(parser, text[: len(BEGIN if parser == "deepseek" else SECTION)]).calls
    assert cut.status == "unclosed"


def test_kimis_id_is_the_word_that_the_model_wrote() -> None:
    read = parse("kimi_k2", section("kimi_k2", kimi("get_weather", "{}", 3) + kimi("a.b:c", "{}", 12)))
    assert [(call.name, call.id) for call in read.calls] == [
        ("get_weather", "functions.get_weather:3"),
        ("a.b:c", "functions.a.b:c:12"),
    ]
    bare = "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert [(call.name, call.id) for call in parse("kimi_k2", bare).calls] == [("f", "f")]


def test_kimis_documented_layout_with_line_breaks_is_read() -> None:
    text = (
        f"{SECTION}\n<|tool_call_begin|>\nfunctions.get_weather:0<|tool_call_argument_begin|>\n"
        f'{{"location": "Tokyo"}}\n<|tool_call_end|>\n{END_SECTION}'
    )
    read = parse("kimi_k2", text)
    assert [(call.name, call.arguments) for call in read.calls] == [("get_weather", {"location": "Tokyo"})]
    assert read.content == ""


@pytest.mark.parametrize(
    "head", ["", "functions.:0<|tool_call_argument_begin|>", "{}", "two words<|tool_call_argument_begin|>"]
)
def test_kimis_head_without_a_name_is_an_error(head: str) -> None:
    text = f"{SECTION}<|tool_call_begin|>{head}{{}}<|tool_call_end|>{kimi('g', '{}')}{END_SECTION}"
    assert [(call.name, call.status) for call in parse("kimi_k2", text).calls] == [("", "bad_json"), ("g", "ok")]


def test_a_deepseek_call_without_a_separator_or_a_name_is_an_error() -> None:
    for head in ("f", f"{SEP}", f"{SEP}\n```json\n"):
        text = f"{BEGIN}{CALL}{head}{{}}{END_CALL}{v31('g', '{}')}{END}"
        assert [(call.name, call.status) for call in parse("deepseek", text).calls] == [("", "bad_json"), ("g", "ok")]


def test_r1_leaves_out_the_fence() -> None:
    read = parse("deepseek", f'{BEGIN}{CALL}function{SEP}f\n{{"a": 1}}{END_CALL}{END}')
    assert read.calls == [ParsedCall("f", {"a": 1}, 0, len(BEGIN + CALL + SEP + END_CALL + END) + 18)]


@pytest.mark.parametrize("parser", ["deepseek", "kimi_k2"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello there.",
        "Action: search[x]",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "[TOOL_CALLS]f[ARGS]{}",
        '```json\n{"name": "f"}\n```',
        "<|tool_calls_begin|><|tool_call|>f",
        END_CALL,
        END_SECTION,
    ],
)
def test_other_formats_are_text(parser: str, text: str) -> None:
    assert parse(parser, text) == ParsedText(text, [])
