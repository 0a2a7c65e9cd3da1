"""The bridge equals the tail of the template's own full render, ids against ids, for every template at hand.

What a template cannot do stands in a table here, with the reason that is asserted; nothing is left out in silence.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from jinja2 import TemplateError as JinjaError

from tests import families
from tests.template import scenarios as s
from unspool.template import ChatTemplate
from unspool.types import TemplateError

TEMPLATES = tuple(families.trl_templates())

NO_TOOL_MESSAGES = {
    "cohere": "Conversation roles must alternate",
    "cohere2": "cannot render tool messages",
    "gemma": "Conversation roles must alternate",
    "gemma3": "Conversation roles must alternate",
    "llava_next": "Only user and assistant roles are supported!",
    "phi3": "cannot render tool messages",
    "phi3_5": "cannot render tool messages",
}
"""Templates without a tool role, and what is said where a tool message must be rendered."""

ONE_CALL_ONLY = ("llama3_1", "llama3_2")
"""Templates that refuse two calls in one message, so there is no render to compare with."""

TEXT_BEHIND_ANSWERS = ("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
"""Templates that write a calling turn's text behind the answers to its calls; a model writes it before them."""

ONE_ROUND_OF_ANSWERS = ("deepseekv3", "deepseek_r1_distill")
"""Templates that open the tool answers of a conversation once only: later rounds lack their opening marks."""

CONTENTS = {
    "plain": "12 degrees",
    "empty": "",
    "spaces": "  indented, and trailing  ",
    "newlines": "\n\nfirst\n\n\nsecond\n",
    "crlf and tabs": "a\r\n\tb\r\n",
    "json": '{"a": [1, 2.5, null], "b": "x\\n\\"y\\""}',
    "quotes": 'it\'s "quoted" and `ticked` \\ back',
    "html": "&lt;b&gt; & a < b > c",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈 ok 🤦🏽‍♂️",
    "right to left": "مرحبا بالعالم שלום",
    "combining": "e\u0301 n\u0303 Z\u0351\u036b\u0343 \u1100\u1161\u11a8",
    "looks like calls": 'Action: search[x] {"name": "f", "arguments": {}}',
    "long": ("The temperature in Zürich is 12.5 °C; wind NW 3 Bft. " * 60)[:3000],
}


@functools.cache
def chat(template: str) -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ChatTemplate(families.tokenizer_for(template), chat_template=families.trl_templates()[template])


def base(template: str) -> str:
    return template.removesuffix("_training")


def refuses_tools(template: str, new: list[dict[str, Any]]) -> bool:
    """Whether the table says that there is no bridge to a tool message; that it is refused is asserted."""
    if base(template) not in NO_TOOL_MESSAGES:
        return False
    with pytest.raises(TemplateError, match=NO_TOOL_MESSAGES[base(template)]) as raised:
        chat(template).bridge([1], new, s.TOOLS)
    assert "chat_template=" in str(raised.value), "the way out is named"
    return True


def assert_exact(template: str, expected: s.Expected, new: list[dict[str, Any]]) -> None:
    made = chat(template).bridge(expected.before, new, s.TOOLS)
    assert chat(template).decode(made) == chat(template).decode(expected.tail)
    assert made == expected.tail


def hello(template: str) -> dict[str, Any]:
    return s.user(template, "What is the weather?")


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_tool_answer(template: str) -> None:
    new = [s.tool(template, "12 degrees")]
    if not refuses_tools(template, new):
        assert_exact(template, s.behind_stop(template, [hello(template), s.asked(template), *new], s.ASKED), new)


@pytest.mark.parametrize("template", TEMPLATES)
def test_two_tool_answers(template: str) -> None:
    new = [s.tool(template, "12 degrees"), s.tool(template, "noon", "get_time", 1)]
    if refuses_tools(template, new):
        return
    old = [hello(template), s.asked(template, ("get_weather", "get_time"))]
    if base(template) in ONE_CALL_ONLY:
        with pytest.raises(JinjaError, match="only supports single tool-calls"):
            s.full_render(template, [*old, *new])
        made = chat(template).decode(chat(template).bridge([1], new, s.TOOLS))
        assert made.index("12 degrees") < made.index("noon")
        return
    assert_exact(template, s.behind_stop(template, [*old, *new], s.ASKED), new)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_tool_answer_behind_text_and_a_call(template: str) -> None:
    new = [s.tool(template, "12 degrees")]
    if refuses_tools(template, new):
        return
    expected = s.behind_stop(template, [hello(template), s.asked(template, text="Let me see."), *new], s.ASKED)
    if base(template) in TEXT_BEHIND_ANSWERS:
        made = chat(template).bridge(expected.before, new, s.TOOLS)
        rewritten = families.tokenizer_for(template).encode("Let me see.<turn|>\n", add_special_tokens=False)
        assert made + rewritten == expected.tail
        return
    assert_exact(template, expected, new)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_tool_answer_and_a_user_message_at_once(template: str) -> None:
    new = [s.tool(template, "12 degrees"), s.user(template, "And tomorrow?")]
    if not refuses_tools(template, new):
        assert_exact(template, s.behind_stop(template, [hello(template), s.asked(template), *new], s.ASKED), new)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_user_message(template: str) -> None:
    new = [s.user(template, "And tomorrow?")]
    assert_exact(template, s.behind_stop(template, [hello(template), s.said(template), *new], s.SAID), new)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turn_cut_by_length_is_closed_first(template: str) -> None:
    new = [s.user(template, "Go on.")]
    assert_exact(template, s.behind_text(template, [hello(template), s.said(template), *new]), new)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_stop_token_that_the_template_does_not_know_is_not_its_close(template: str) -> None:
    tokenizer = families.tokenizer_for(template)
    new = [s.user(template, "Go on.")]
    expected = s.behind_text(template, [hello(template), s.said(template), *new])
    foreign = next(
        token
        for text, token in tokenizer.get_added_vocab().items()
        if text in ("<|endoftext|>", "<|end_of_text|>", "<pad>", "<｜▁pad▁｜>") and text not in chat(template).source
    )
    assert chat(template).bridge([*expected.before, foreign], new, s.TOOLS) == expected.tail


@pytest.mark.parametrize("template", TEMPLATES)
def test_six_turns(template: str) -> None:
    """Each turn of a long conversation, among them tool answers, is bridged as the whole conversation renders it."""
    text = "" if base(template) in TEXT_BEHIND_ANSWERS else "Let me see."
    two = ("get_weather",) if base(template) in ONE_CALL_ONLY else ("get_weather", "get_time")
    answers = [s.tool(template, f"answer {name}", name, call) for call, name in enumerate(two)]
    turns = [
        (s.asked(template, mark=f"{s.ASKED}a"), [s.tool(template, "12 degrees")]),
        (s.said(template, f"{s.SAID}b"), [s.user(template, "And in Zürich?")]),
        (s.asked(template, two, mark=f"{s.ASKED}c"), answers),
        (s.asked(template, text=text, mark=f"{s.ASKED}d"), [s.tool(template, '{"t": 7}')]),
        (s.said(template, f"{s.SAID}e"), [s.user(template, "مرحبا 👋")]),
        (s.said(template, f"{s.SAID}f"), [s.user(template, "Thanks.")]),
    ]
    if base(template) in NO_TOOL_MESSAGES:
        turns = [turn for turn in turns if turn[1][0]["role"] == "user"]
    if base(template) in ONE_ROUND_OF_ANSWERS:
        text_of_two, _, _ = s.full_render(template, [hello(template), *flat(turns[0:1]), *flat(turns[2:3])])
        assert text_of_two.count("<｜tool▁outputs▁begin｜>") == 1, "the second round is not opened"
        turns = [turn for turn in turns if turn[1][0]["role"] == "user"] + turns[2:3]
    conversation = [hello(template)]
    for turn, new in turns:
        conversation += [turn, *new]
        assert_exact(template, s.behind_stop(template, conversation, mark_of(turn)), new)


def flat(turns: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    return [message for turn, new in turns for message in (turn, *new)]


def mark_of(turn: dict[str, Any]) -> str:
    """The last mark in a turn, which ends in one small letter of its own."""
    text = str(turn)
    at = max(text.rfind(s.SAID) + len(s.SAID), text.rfind(s.ASKED) + len(s.ASKED))
    start = text.rfind("Mark", 0, at)
    return text[start : at + 1]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_every_kind_of_content(template: str, role: str) -> None:
    make, turn, mark = (s.tool, s.asked(template), s.ASKED) if role == "tool" else (s.user, s.said(template), s.SAID)
    if role == "tool" and refuses_tools(template, [make(template, "12 degrees")]):
        return
    for text in CONTENTS.values():
        new = [make(template, text)]
        assert_exact(template, s.behind_stop(template, [hello(template), turn, *new], mark), new)


def test_the_tables_name_templates_that_exist() -> None:
    for table in (NO_TOOL_MESSAGES, ONE_CALL_ONLY, TEXT_BEHIND_ANSWERS, ONE_ROUND_OF_ANSWERS):
        assert set(table) <= {base(template) for template in TEMPLATES}
