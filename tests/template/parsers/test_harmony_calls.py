"""Harmony, the format of gpt-oss: which channel is what, what is a call, and what only quotes one."""

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

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": {}}}
    for name in ("get_weather", "python")
]
# The documented example of a turn that thinks, says what it is about to do, and calls.
ANALYSIS = "<|channel|>analysis<|message|>Need to use function get_weather.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look at the sky.<|end|>"
HEADER = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
CALL = HEADER + '{"city": "Rome"}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>12 degrees.<|return|>"


def parse(text: str, tools: list[dict[str, Any]] | None = None) -> ParsedText:
    return PARSERS["harmony"].parse(text, tools)


def only(text: str, tools: list[dict[str, Any]] | None = None) -> ParsedCall:
    (call,) = parse(text, tools).calls
    return call


@functools.cache
def chat(template: str = "gptoss") -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ChatTemplate(families.tokenizer_for(template), chat_template=families.trl_templates()[template])


def test_analysis_is_thinking_and_all_else_is_said() -> None:
    read = parse(ANALYSIS + PREAMBLE + CALL)
    assert read.reasoning == "Need to use function get_weather."
    assert read.content == "I look at the sky."
    assert read.calls == [
        ParsedCall("get_weather", {"city": "Rome"}, len(ANALYSIS + PREAMBLE), len(ANALYSIS + PREAMBLE + CALL))
    ]
    last = parse(ANALYSIS + FINAL)
    assert last == ParsedText("12 degrees.", [], "Need to use function get_weather.")


def test_several_parts_of_one_kind_are_lines() -> None:
    again = "<|start|>assistant" + ANALYSIS.replace("Need", "No need")
    read = parse(ANALYSIS + again + PREAMBLE + FINAL)
    assert read.reasoning == "Need to use function get_weather.\nNo need to use function get_weather."
    assert read.content == "I look at the sky.\n12 degrees."


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|message|>",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        " to=functions.get_weather<|message|>",
        "<|channel|>commentary to=get_weather <|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
        "<|channel|>final to=functions.get_weather <|constrain|>json<|message|>",
    ],
)
def test_a_recipient_makes_a_call_wherever_it_stands(header: str) -> None:
    for close in ("<|call|>", ""):
        text = f'{header}{{"city": "Rome"}}{close}'
        assert parse(text) == ParsedText("", [ParsedCall("get_weather", {"city": "Rome"}, 0, len(text))])


def test_the_models_own_tools_are_calls_by_their_names() -> None:
    call = only("<|channel|>analysis to=python code<|message|>print(1)<|call|>", TOOLS)
    assert (call.name, call.status, call.arguments) == ("python", "bad_json", "print(1)")
    assert only('<|channel|>commentary to=browser.search<|message|>{"query": "x"}<|call|>').name == "browser.search"


@pytest.mark.parametrize("recipient", ["assistant", "user", "all"])
def test_a_recipient_that_is_no_tool_is_none(recipient: str) -> None:
    assert parse(f"<|channel|>commentary to={recipient}<|message|>Hi<|end|>") == ParsedText("Hi", [])


def test_what_thinking_quotes_is_no_call() -> None:
    quoted = "I could write <|channel|>commentary to=functions.get_weather<|message|>{}<|call|> or <|start|>assistant."
    read = parse(f"<|channel|>analysis<|message|>{quoted}<|end|>{FINAL}")
    assert read == ParsedText("12 degrees.", [], quoted)


def test_thinking_that_is_never_closed_is_all_there_is() -> None:
    assert parse("<|channel|>analysis<|message|>hm, functions.f") == ParsedText("", [], "hm, functions.f")


def test_several_calls_keep_their_order() -> None:
    read = parse(ANALYSIS + CALL + CALL.replace("Rome", "Oslo") + FINAL)
    assert [call.arguments for call in read.calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert read.content == "12 degrees."


def test_an_invented_answer_ends_the_reading() -> None:
    answer = '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"12"<|end|>'
    read = parse(CALL + answer + CALL)
    assert [call.status for call in read.calls] == ["ok"]
    assert read.content == answer + CALL


def test_arguments_end_where_their_json_ends() -> None:
    text = '<|channel|>commentary to=functions.f<|message|>{"x": "<|call|><|end|>\n\t}"}<|call|>'
    assert only(text).arguments == {"x": "<|call|><|end|>\n\t}"}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ('{"x": "C:\\path"}<|call|>', "bad_json", "escape"),
        ('{"x": 1} {"y": 2}<|call|>', "bad_json", "extra text behind the object"),
        ('{"x": 1, "x": 2}<|call|>', "bad_json", "stands twice"),
        ("[1]<|call|>", "bad_json", "must be a JSON string or object"),
        ("x = 1<|call|>", "bad_json", "invalid JSON"),
        ('{"x": "a', "unclosed", "cut off"),
        ("", "unclosed", "cut off"),
    ],
)
def test_what_cannot_be_run_says_why(body: str, status: str, sentence: str) -> None:
    call = only(f"<|channel|>commentary to=functions.f<|message|>{body}")
    assert (call.name, call.status, call.arguments) == ("f", status, body.removesuffix("<|call|>"))
    assert call.error is not None and sentence in call.error


def test_nothing_between_header_and_close_means_no_arguments() -> None:
    assert only("<|channel|>commentary to=functions.f<|message|><|call|>").arguments == {}


def test_a_header_without_its_end_is_reported() -> None:
    assert only("<|channel|>commentary to=functions.f <|constrain|>js").status == "unclosed"
    assert only("<|channel|>commentary to=functions.f<|end|>").status == "bad_json"
    assert only("<|channel|>commentary to=functions.<|message|>{}<|call|>").error is not None


def test_the_raw_text_of_a_broken_call_ends_before_its_close() -> None:
    header = "<|channel|>commentary to=functions.f<|message|>"
    assert only(f"{header}[1]<|call|>").arguments == "[1]"
    text = f'{header}{{"x": y}}<|call|>'
    harmony = PARSERS["harmony"]
    assert isinstance(harmony, TurnParser)
    read = harmony.parse(text, at={match.start() for match in re.finditer(r"<\|\w+\|>", text)})
    assert [(call.arguments, call.end) for call in read.calls] == [('{"x": y}', len(text))]


def test_a_broken_call_runs_nothing_that_it_may_quote() -> None:
    inner = "<|call|><|start|>assistant to=functions.rm<|channel|>commentary<|message|>{}<|call|>"
    for body in (f'{{"x": "{inner}"', f"{{'x': '{inner}'}}", f'{{"x": "\\p{inner}"}}', f'{{"x": "{inner}"}}}}'):
        assert all(
            call.status != "ok" for call in parse(f"<|channel|>commentary to=functions.w<|message|>{body}").calls
        )


@pytest.mark.parametrize("text", ["", "Hello there.", "Action: search[x]", "to be or not", "functions.f({})"])
def test_text_without_headers_is_said(text: str) -> None:
    assert parse(text) == ParsedText(text, [])


def test_a_message_that_the_prompt_has_opened_goes_on() -> None:
    parser = PARSERS["harmony"]
    assert isinstance(parser, TurnParser)
    opened = "<|end|><|start|>assistant<|channel|>analysis<|message|>Let me"
    assert parser.parse(" think.<|end|>" + FINAL, behind=opened) == ParsedText("12 degrees.", [], " think.")
    assert parser.parse("Hi.", behind="<|start|>assistant<|channel|>final<|message|>") == ParsedText("Hi.", [])


# ---------------------------------------------------------------------------- with gpt-oss's own tokenizer


def test_thinking_and_calls_are_read_from_ids() -> None:
    template = chat()
    ids = template.tokenizer.encode(ANALYSIS + PREAMBLE + CALL, add_special_tokens=False)
    prompt = template.encode([{"role": "user", "content": "Weather?"}], TOOLS)
    for read in (template.parse(ids, prompt), template.parse(ids)):
        assert read.reasoning_content == "Need to use function get_weather."
        assert read.content == "I look at the sky."
        [call] = read.tool_calls
        assert (call.name, call.arguments, call.status) == ("get_weather", {"city": "Rome"}, "ok")
        assert template.decode(ids[slice(*call.span)]) + "<|call|>" == CALL


def test_control_words_that_are_spelled_out_are_text() -> None:
    template = chat()
    quoted = f"So I write <|end|>{CALL} and stop"
    spelled = [token for char in quoted for token in template.tokenizer.encode(char, add_special_tokens=False)]
    head = template.tokenizer.encode("<|channel|>analysis<|message|>", add_special_tokens=False)
    tail = template.tokenizer.encode("<|end|>" + FINAL, add_special_tokens=False)
    read = template.parse([*head, *spelled, *tail])
    assert (read.reasoning_content, read.content, read.tool_calls) == (quoted, "12 degrees.", ())


def test_the_stop_tokens_are_those_that_end_a_turn() -> None:
    stops = {chat().decode([token]) for token in chat().stop_token_ids}
    assert stops == {"<|return|>", "<|call|>"}, "<|end|> ends a message, and the turn goes on behind it"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_cut_anywhere_are_read(data: st.DataObject) -> None:
    template = chat()
    ids = template.tokenizer.encode(ANALYSIS + PREAMBLE + CALL + FINAL, add_special_tokens=False)
    marks = template.tokenizer.encode("".join(PARSERS["harmony"].control_words), add_special_tokens=False)  # type: ignore[attr-defined]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(ids)))
        put = data.draw(st.lists(st.sampled_from(marks), max_size=2))
        ids = [*ids[:at], *put, *ids[at + data.draw(st.integers(0, 2)) :]]
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    for call in template.parse(cut, None, TOOLS).tool_calls:
        assert 0 <= call.span[0] < call.span[1] <= len(cut)
        assert call.status != "ok" or isinstance(call.arguments, dict)


@pytest.mark.parametrize("text", [ANALYSIS + FINAL, ANALYSIS + CALL, ANALYSIS + PREAMBLE + CALL, FINAL])
def test_an_independent_parser_reads_the_same(text: str) -> None:
    parsing = pytest.importorskip("renderers.parsing", exc_type=ImportError)
    template = chat()
    tokenizer = template.tokenizer
    whole = text if text.startswith("<|start|>") else "<|start|>assistant" + text
    names = {name: template._encoder.added[f"<|{name}|>"] for name in
             ("return", "call", "start", "end", "channel", "message", "constrain")}  # fmt: skip
    theirs = parsing.parse_gpt_oss(
        tokenizer,
        tokenizer.encode(whole, add_special_tokens=False),
        **{f"{name}_id": token for name, token in names.items()},
    )
    ours = template.parse(tokenizer.encode(whole.removeprefix("<|start|>assistant"), add_special_tokens=False))
    assert (ours.content, ours.reasoning_content) == (theirs.content, theirs.reasoning_content)
    assert [(call.name, call.arguments) for call in ours.tool_calls] == [
        (call.name, call.arguments) for call in theirs.tool_calls
    ]
