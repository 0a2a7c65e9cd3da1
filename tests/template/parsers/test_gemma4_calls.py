"""Gemma 4: calls with quoting tokens, thinking in a channel, answers in the model's own turn."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import families
from unspool import ChatTemplate
from unspool.template.parsers import PARSERS, ParsedCall, ParsedText, TurnParser

TEMPLATES = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")
Q = '<|"|>'


def parse(text: str) -> ParsedText:
    return PARSERS["gemma4"].parse(text)


def only(text: str) -> ParsedCall:
    (call,) = parse(text).calls
    return call


def call_of(arguments: str) -> str:
    return f"<|tool_call>call:f{{{arguments}}}<tool_call|>"


@functools.cache
def chat(template: str) -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ChatTemplate(families.tokenizer_for(template), chat_template=families.trl_templates()[template])


def test_the_text_around_a_call_is_kept_exactly() -> None:
    text = f"hello <|tool_call>call:f{{city:{Q}Rome{Q}}}<tool_call|> world"
    assert parse(text) == ParsedText("hello  world", [ParsedCall("f", {"city": "Rome"}, 6, len(text) - 6)])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (f"{Q}{Q}", ""),
        (f'{Q}a "b" \\n {{}},[]: <tool_call|> \n\x00{Q}', 'a "b" \\n {},[]: <tool_call|> \n\x00'),
        ("3", 3),
        ("-2.5", -2.5),
        ("1e+16", 1e16),
        ("true", True),
        ("false", False),
        ("null", None),
        ("None", None),
        ("[]", []),
        ("{}", {}),
        (f"[1,{Q}a{Q},[true],{{k:1}}]", [1, "a", [True], {"k": 1}]),
        (f"{{a b:{{c:{Q}d{Q}}},{Q}e:f{Q}:2}}", {"a b": {"c": "d"}, "e:f": 2}),
        (" [ 1 , 2 ] ", [1, 2]),
    ],
)
def test_values(written: str, value: object) -> None:
    assert only(call_of(f"x:{written}")).arguments == {"x": value}


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ("call:f{x:Rome}", "a string is written"),
        ('call:f{x:"Rome"}', "a string is written"),
        ("call:f{x:1 2}", "expected ',' or '}'"),
        ("call:f{x:1,x:2}", "stands twice"),
        ("call:f{x}", "expected ':'"),
        ("call:f{x:}", "expected a value"),
        ("call:f{x:1,}", "expected a key"),
        ("call:f{x:inf}", "expected a value"),
        ("call:f{x:1e999}", "too large"),
        ("call:f{x:" + "9" * 5000 + "}", "5000 digits"),
        ("call:f{x:" + "[" * 101 + "]" * 101 + "}", "nested more than 100 deep"),
        ("call:f{x:" + "[" * 20_000 + "]" * 20_000 + "}", "nested more than 100 deep"),
        ("call:f{x:1}}", "extra text behind the arguments: }"),
        ("call:{x:1}", "expected call:name"),
        ('{"name": "f", "arguments": {}}', "expected call:name"),
        ("", "expected call:name"),
    ],
)
def test_what_cannot_be_run_says_why(inside: str, sentence: str) -> None:
    read = parse(f"before <|tool_call>{inside}<tool_call|> after")
    (call,) = read.calls
    assert (read.content, call.status, call.arguments) == ("before  after", "bad_json", inside)
    assert call.error is not None and sentence in call.error


def test_no_cut_of_a_call_is_executable() -> None:
    text = f"<|tool_call>call:f{{a:{Q}x,y{Q},n:[1,{{t:true}}],z:-1.5e+3}}"
    for end in range(len("<|tool_call>"), len(text)):
        call = only(text[:end])
        assert (call.status, call.end) == ("unclosed", end), text[:end]
        assert isinstance(call.arguments, str) and call.error
    assert only(text).status == "ok", "the closing mark may be missing"


def test_several_calls_keep_their_order_and_a_broken_one_does_not_take_the_next_with_it() -> None:
    read = parse(f"a{call_of('x:1')}b{call_of('x:Rome')}c{call_of('x:2')}d")
    assert [(call.arguments, call.status) for call in read.calls] == [
        ({"x": 1}, "ok"),
        ("call:f{x:Rome}", "bad_json"),
        ({"x": 2}, "ok"),
    ]
    assert read.content == "abcd"


def test_a_call_quoted_in_the_string_of_a_broken_one_is_not_run() -> None:
    read = parse(call_of(f"x:Rome,y:{Q}{call_of('')}{Q}") + " so")
    assert [call.status for call in read.calls] == ["bad_json"]
    assert read.content == " so"


def test_thinking_is_split_at_the_head_and_between_calls() -> None:
    first = f"<|channel>thought\nCould be {call_of('x:1')}.\n<channel|>"
    read = parse(f"{first}So.{call_of('x:2')}<|channel>thought\nagain\n<channel|>")
    assert read.reasoning == f"Could be {call_of('x:1')}.\nagain"
    assert (read.content, [call.arguments for call in read.calls]) == ("So.", [{"x": 2}])


def test_empty_thinking_and_thinking_that_is_never_closed() -> None:
    assert parse("<|channel>thought\n<channel|>Hi") == ParsedText("Hi", [], "")
    assert parse(f"<|channel>thought\nhm {call_of('x:1')}") == ParsedText("", [], f"hm {call_of('x:1')}")


def test_thinking_that_the_prompt_has_opened_goes_on() -> None:
    parser = PARSERS["gemma4"]
    assert isinstance(parser, TurnParser)
    assert parser.parse("hm\n<channel|>Hi", behind="<|turn>model\n<|channel>thought\n") == ParsedText("Hi", [], "hm")
    assert parser.parse("Hi", behind="<|turn>model\n<|channel>thought\n<channel|>") == ParsedText("Hi", [])


def test_an_invented_answer_ends_the_reading() -> None:
    answer = f"<|tool_response>response:f{{value:{Q}3{Q}}}<tool_response|>{call_of('x:2')}"
    read = parse(call_of("x:1") + answer)
    assert [call.arguments for call in read.calls] == [{"x": 1}]
    assert read.content == answer


@pytest.mark.parametrize(
    "text", ["", "Hello.", "call:f{x:1}", "Action: search[x]", '<tool_call>{"name": "f"}</tool_call>']
)
def test_other_formats_are_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])


# ---------------------------------------------------------------------------- what the templates render

VALUES: dict[str, Any] = {
    "city": 'Zürich, "ZH"\n{x:[1]}',
    "days": 3,
    "deep": {"a": [1, -2.5, True, {"b": "c"}], "z": {}},
    "empty": "",
    "list": [],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_template_writes_is_read_back(template: str) -> None:
    made = [{"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate([("look_up", VALUES), ("get-weather", {})])]  # fmt: skip
    message = {"role": "assistant", "content": "", "reasoning_content": "two\nlines", "tool_calls": made}
    text = families.tokenizer_for(template).apply_chat_template(
        [{"role": "user", "content": "Go."}, message],
        chat_template=families.trl_templates()[template],
        tokenize=False,
    )
    turn = text.split("<|turn>model\n")[-1]
    chosen = chat(template)
    ids = chosen.tokenizer.encode(re.sub(r"(<turn\|>)\n$", r"\1", turn), add_special_tokens=False)
    read = chosen.parse(ids)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [("look_up", VALUES), ("get-weather", {})]
    assert read.reasoning_content == (None if template == "gemma4_v2" else "two\nlines")
    assert read.content == ""


def test_control_words_that_are_spelled_out_are_text() -> None:
    template = chat("gemma4_v5")
    spelled = template._encoder.encode_control_text(Q)
    assert template.decode(spelled) == Q
    tokens = [
        template.tokenizer.encode(part, add_special_tokens=False)
        for part in (f"<|tool_call>call:f{{x:{Q}a", f"b{Q}}}<tool_call|>")
    ]
    [call] = template.parse([*tokens[0], *spelled, *tokens[1]]).tool_calls
    assert (call.arguments, call.status) == ({"x": f"a{Q}b"}, "ok")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_cut_anywhere_are_read(data: st.DataObject) -> None:
    template = chat("gemma4_v5")
    encode = template.tokenizer.encode
    ids = encode(
        f"<|channel>thought\nhm\n<channel|>Hi{call_of(f'x:{Q}a{Q},n:[1]')}<|tool_response>", add_special_tokens=False
    )
    marks = encode("".join(PARSERS["gemma4"].control_words), add_special_tokens=False)  # type: ignore[attr-defined]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(ids)))
        put = data.draw(st.lists(st.sampled_from(marks), max_size=2))
        ids = [*ids[:at], *put, *ids[at + data.draw(st.integers(0, 2)) :]]
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    for call in template.parse(cut).tool_calls:
        assert 0 <= call.span[0] < call.span[1] <= len(cut)
        assert call.status != "ok" or isinstance(call.arguments, dict)
