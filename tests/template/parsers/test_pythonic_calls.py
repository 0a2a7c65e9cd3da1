"""Calls as Python writes them, read as literals and never run."""

from __future__ import annotations

from typing import Any

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


def parse(text: str) -> ParsedText:
    return PARSERS["pythonic"].parse(text)


def only(text: str) -> ParsedCall:
    (call,) = parse(text).calls
    return call


def argument(written: str) -> Any:
    call = only(f"{OPEN}[f(a={written})]{CLOSE}")
    assert call.status == "ok", call.error
    assert isinstance(call.arguments, dict)
    return call.arguments["a"]


def test_calls_in_tags_with_the_text_around_them_kept() -> None:
    text = f'hello {OPEN}[f(a=1, b="x"), g()]{CLOSE} world'
    read = parse(text)
    assert read.content == "hello  world"
    assert [(call.name, call.arguments) for call in read.calls] == [("f", {"a": 1, "b": "x"}), ("g", {})]
    assert [text[call.start : call.end] for call in read.calls] == [f'{OPEN}[f(a=1, b="x"),', f" g()]{CLOSE}"]


def test_a_bare_list_is_a_call_only_if_it_is_the_whole_turn() -> None:
    assert parse(" [f(a=1), g()]\n") == ParsedText("", [ParsedCall("f", {"a": 1}, 0, 9), ParsedCall("g", {}, 9, 15)])
    assert [call.name for call in parse("<|python_start|>[f(a=1)]<|python_end|>").calls] == ["f"]
    for prose in (
        "[see(1)] is prose",
        "[f(a=1)](https://x)",
        "so [f(a=1)]",
        "[1]",
        "[]",
        "[f]",
        "[f(a=[1)] so",
        "f(a=1)",
    ):
        assert parse(prose) == ParsedText(prose, [])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1", 1),
        ("-1.5e3", -1500.0),
        ("+2", 2),
        ("True", True),
        ("true", True),
        ("None", None),
        ("null", None),
        ("'x'", "x"),
        ('"it\'s"', "it's"),
        (r"'it\'s \"q\" \\ \n \u00e9'", 'it\'s "q" \\ \n é'),
        ("'a\nb\tc'", "a\nb\tc"),
        ("'''a 'b' c'''", "a 'b' c"),
        (r"r'\d+'", r"\d+"),
        ("'日本 🎉'", "日本 🎉"),
        (r'"\ud83c\udf89"', "🎉"),
        ("'), g(b=1)]'", "), g(b=1)]"),
        (f"'{OPEN}[rm()]{CLOSE}'", f"{OPEN}[rm()]{CLOSE}"),
        ("''", ""),
        ("[1, [2, 'x'], (3, 4)]", [1, [2, "x"], [3, 4]]),
        ('{"a": {"b": [true, false, null]}, "c": -1}', {"a": {"b": [True, False, None]}, "c": -1}),
        ("[]", []),
        ("{}", {}),
        ("[1, 2,]", [1, 2]),
    ],
)
def test_plain_values_are_read(written: str, expected: Any) -> None:
    assert argument(written) == expected
    assert type(argument(written)) is type(expected)


@pytest.mark.parametrize(
    "written",
    [
        "open('x')",
        "__import__('os').system('true')",
        "x",
        "nan",
        "1 + 1",
        "2 ** 9",
        "-True",
        "f'{x}'",
        "b'x'",
        "lambda: 1",
        "[x for x in y]",
        "{1, 2}",
        "{1: 2}",
        "{'a': 1, 'a': 2}",
        "{**{}}",
        "[1][0]",
        "1j",
        "...",
        "1e999",
        "9" * 5000,
        "0x" + "f" * 20000,
        "'it''s'",
        r"'C:\path'",
        r"'\d+'",
        r"'\x1'",
        "'a' 'b'",
        "1 # one",
        "",
        "[1, 2",
        "-" * 50000 + "1",
        "[" * 50000,
        "[1]" * 50000,
        "not " * 50000 + "1",
    ],
)
def test_what_is_no_plain_value_is_a_broken_call(written: str) -> None:
    read = parse(f"a{OPEN}[f(a={written})]{CLOSE}b")
    (call,) = read.calls
    assert (read.content, call.name, call.status) == ("ab", "f", "bad_json")
    assert call.error and len(call.error) < 300


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ("[]", "expected a call"),
        ("[1]", "expected a call"),
        ("['f']", "expected a call"),
        ("f(a=1)", "expected a list of calls"),
        ("", "expected a list of calls"),
        ("[f(1)]", "key=value, not 1"),
        ("[f(**x)]", "key=value"),
        ("[f(a=1, a=2)]", "a stands twice"),
        ("[f(a=1).g()]", "extra text behind the call of f"),
        ("[f(a=1)] so", "extra text behind the list"),
        ("[f(a=1]", "closes nothing"),
        ("[f(a='it's')]", "a string is not closed"),
        ('[{"name": 1}]', "name of the call must be"),
        ('[{"name": "f", "arguments": {"p": "\\d"}}]', "escape"),
    ],
)
def test_what_is_no_call_says_why(inside: str, sentence: str) -> None:
    read = parse(f"before {OPEN}{inside}{CLOSE} after")
    (call,) = read.calls
    assert (read.content, call.status) == ("before  after", "bad_json")
    assert call.error is not None and sentence in call.error


def test_names_and_keys_that_python_would_not_allow() -> None:
    call = only(f"{OPEN}[server.get-weather(from='a', class=1, x-y=2)]{CLOSE}")
    assert (call.name, call.arguments) == ("server.get-weather", {"from": "a", "class": 1, "x-y": 2})


def test_a_broken_call_leaves_its_neighbours_alone() -> None:
    read = parse(f"{OPEN}[f(a=1), g(a=x), h(a=2)]{CLOSE}")
    assert [(call.name, call.status) for call in read.calls] == [("f", "ok"), ("g", "bad_json"), ("h", "ok")]


def test_commas_and_line_breaks_where_python_allows_them() -> None:
    call = only(f"{OPEN}[\n  f(\n    a=1,\n    b={{\n'x': 2}},\n  ),\n]{CLOSE}")
    assert call.arguments == {"a": 1, "b": {"x": 2}}


def test_json_objects_in_the_list_are_calls() -> None:
    read = parse(f'{OPEN}[{{"name": "f", "arguments": {{"a": [1, 2]}}}}, {{"name": "g"}}]{CLOSE}')
    assert [(call.name, call.arguments) for call in read.calls] == [("f", {"a": [1, 2]}), ("g", {})]


def test_no_cut_of_a_call_is_executable() -> None:
    call = "f(a=1, b='x), ]', c={'d': [1, 2]})"
    for opening in (OPEN + "[", "["):
        for end in range(len(call)):
            for found in parse(opening + call[:end]).calls:
                assert found.status == "unclosed"
        assert [(c.name, c.status) for c in parse(f"{opening}{call}, g(b=").calls] == [("f", "ok"), ("g", "unclosed")]
    assert only(OPEN).status == "unclosed"
    assert only(f"{OPEN}[{call}]").status == "ok"


def test_a_call_quoted_in_a_broken_string_is_not_run() -> None:
    quoted = f"{OPEN}[rm()]{CLOSE}"
    text = f"{OPEN}[write(text='it's {quoted} and {quoted}')]{CLOSE} after"
    for end in range(len(text) + 1):
        assert all(call.status != "ok" for call in parse(text[:end]).calls)
    assert parse(text).content == " after"


@pytest.mark.parametrize(
    "text", ["", "Hello.", "Action: search[x]", "<a_b>\n<c_d>x</c_d>\n</a_b>", '{"name": "f", "parameters": {}}']
)
def test_other_formats_are_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])
