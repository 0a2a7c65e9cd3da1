"""`[TOOL_CALLS]`: lists of JSON objects, and names with arguments."""

from __future__ import annotations

import json

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText


def parse(text: str) -> ParsedText:
    return PARSERS["mistral"].parse(text)


def brief(text: str) -> list[tuple[str, object, str, str]]:
    return [(call.name, call.arguments, call.id, call.status) for call in parse(text).calls]


def test_a_list_of_objects_with_ids() -> None:
    text = (
        'Hi[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]}"}, "id": "abcDEF012"}, '
        '{"name": "g", "arguments": {}, "id": "abcDEF013"}] so'
    )
    assert brief(text) == [("f", {"a": "]}"}, "abcDEF012", "ok"), ("g", {}, "abcDEF013", "ok")]
    assert parse(text).content == "Hi so"


def test_names_with_ids_and_arguments() -> None:
    text = 'Hi [TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]get-b.c[ARGS]{"n": [1]} so'
    assert brief(text) == [("f", {"a": "[TOOL_CALLS]"}, "abcDEF012", "ok"), ("get-b.c", {"n": [1]}, "", "ok")]
    assert parse(text).content == "Hi  so"
    first = parse(text).calls[0]
    assert text[first.start : first.end] == '[TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{"a": "[TOOL_CALLS]"}'


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]f{"a": 1}',
        '[TOOL_CALLS] f [ARGS] {"a": 1}',
        '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}},]',
        '[TOOL_CALLS]\n[\n  {"name": "f", "arguments": "{\\"a\\": 1}"}\n]',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}',
    ],
)
def test_what_models_leave_out_or_add_is_no_fault(text: str) -> None:
    assert parse(text) == ParsedText("", [ParsedCall("f", {"a": 1}, 0, len(text))])


def test_objects_without_a_comma_between_them_are_all_calls() -> None:
    assert brief('[TOOL_CALLS][{"name": "f"} {"name": "g"}]') == [("f", {}, "", "ok"), ("g", {}, "", "ok")]


def test_a_list_that_the_next_mark_breaks_off_loses_no_call() -> None:
    assert brief('[TOOL_CALLS][{"name": "f"}, [TOOL_CALLS]g{}') == [("f", {}, "", "ok"), ("g", {}, "", "ok")]
    assert brief('[TOOL_CALLS][{"name": "f"}[TOOL_CALLS]g{}') == [("f", {}, "", "ok"), ("g", {}, "", "ok")]


def test_no_cut_of_a_call_is_executable() -> None:
    named = '[TOOL_CALLS]f[CALL_ID]abcDEF012[ARGS]{"x": "a, \\"b\\"", "n": [1, {"t": true}], "z": -1.5e3}'
    listed = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "a, \\"b\\"", "n": [1, {"t": true}]}, "id": "abcDEF012"}'
    for text in (named, listed):
        for end in range(len("[TOOL_CALLS]"), len(text)):
            [call] = parse(text[:end]).calls
            assert call.status == "unclosed", (text[:end], call)
            assert isinstance(call.arguments, str) and call.error and call.end == end


def test_the_whole_calls_of_a_cut_list_stay() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "argu'
    assert brief(text)[0] == ("f", {}, "", "ok")
    assert [call.status for call in parse(text).calls] == ["ok", "unclosed"]


@pytest.mark.parametrize(
    ("behind", "sentence"),
    [
        ("[]", "holds no call"),
        ("[1]", "must be a JSON object with a name"),
        ('["f"]', "not a string"),
        ('[{"arguments": {}}]', "name of the call is missing"),
        ('[{"name": "f", "arguments": [1]}]', "must be a JSON"),
        ('[{"name": "f", "arguments": {"a": 1}} and]', "extra text behind the object: and"),
        ('[{"name": "f", "arguments": {"a": \'x\'}}]', "invalid JSON"),
        ('{"name": "f", "city": "Rome"}', 'no "arguments"'),
        ("f[ARGS][1]", "must be a JSON"),
        ('f[ARGS]"x"', "invalid JSON"),
        ("f[ARGS]{'a': 1}", "invalid JSON"),
        ('f[ARGS]{"a": 1, "a": 2}', "stands twice"),
        ('f[ARGS]{"a": "\\d"}', "backslash"),
    ],
)
def test_what_is_no_call_says_why_and_leaves_the_rest_alone(behind: str, sentence: str) -> None:
    read = parse(f"before [TOOL_CALLS]{behind} after[TOOL_CALLS]g[ARGS]{{}}")
    bad, good = read.calls
    assert (bad.status, good.name, good.status) == ("bad_json", "g", "ok")
    assert bad.error is not None and sentence in bad.error
    assert isinstance(bad.arguments, str)
    assert read.content == "before  after"


@pytest.mark.parametrize("behind", [" to call a tool", "f (x)", "[ARGS]{}", ""])
def test_a_mark_that_no_call_follows_is_a_failed_attempt(behind: str) -> None:
    text = f"I write [TOOL_CALLS]{behind}[TOOL_CALLS]g{{}}"
    bad, good = parse(text).calls
    assert (bad.status, good.status) == ("bad_json", "ok")
    assert bad.error is not None and bad.error


@pytest.mark.parametrize("form", ['[{{"name": "write", "arguments": {inner}]', "write[ARGS]{inner}"])
def test_a_call_quoted_in_the_string_of_a_broken_one_is_not_run(form: str) -> None:
    inner = json.dumps({"text": "[TOOL_CALLS]rm[ARGS]{}"})[:-1] + ", oops}"
    text = "[TOOL_CALLS]" + form.format(inner=inner)
    for end in range(len(text) + 1):
        assert all(call.name != "rm" for call in parse(text[:end]).calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello there.",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '[{"name": "f", "arguments": {}}]',
        "[f(a=1)]",
        "f[ARGS]{}",
        "[TOOL_RESULTS]{}[/TOOL_RESULTS]",
        "[TOOL_CALL]f{}",
    ],
)
def test_other_formats_are_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])
