"""Random conversations, contents and samples: the bridge stays exact, reading never fails."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests import families
from tests.template import scenarios as s
from unspool.template import ChatTemplate

TEMPLATES = (
    "qwen3",
    "qwen2_5_training",
    "qwen3_5_think",
    "llama3_1",
    "deepseekv3",
    "gptoss",
    "gemma4_v5",
    "glm4moe",
    "lfm2_v2",
    "muse_glimmer",
    "nemotron_3_nano",
)


@functools.cache
def chat(template: str) -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ChatTemplate(families.tokenizer_for(template), chat_template=families.trl_templates()[template])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
"""Any text that can be encoded; what are control strings in it is filtered out where it is used."""


def harmless(template: str, text: str) -> bool:
    """Without control text, marks of our own, or what a template reads as such in anyone's content."""
    return not chat(template)._encoder.has_control_text(text) and "Mark" not in text and "/nothink" not in text


@settings(max_examples=150, deadline=None)
@given(data=st.data(), template=st.sampled_from(TEMPLATES))
def test_any_content_is_bridged_as_the_full_render_has_it(data: st.DataObject, template: str) -> None:
    new = [
        s.tool(template, text, name, call) if role == "tool" else s.user(template, text)
        for call, (role, name, text) in enumerate(
            data.draw(
                st.one_of(
                    st.tuples(st.just(("tool", "get_weather")), texts).map(lambda x: [(*x[0], x[1])]),
                    st.tuples(texts, texts).map(lambda x: [("tool", "get_weather", x[0]), ("user", "", x[1])]),
                    texts.map(lambda x: [("user", "", x)]),
                )
            )
        )
    ]
    if not all(harmless(template, message["content"]) for message in new):
        return
    asks = new[0]["role"] == "tool"
    turn, mark = (s.asked(template), s.ASKED) if asks else (s.said(template), s.SAID)
    expected = s.behind_stop(template, [s.user(template, "Hi."), turn, *new], mark)
    assert chat(template).bridge(expected.before, new, s.TOOLS) == expected.tail


@settings(max_examples=30, deadline=None)
@given(data=st.data(), template=st.sampled_from([name for name in TEMPLATES if name != "deepseekv3"]))
def test_any_conversation_is_bridged_turn_by_turn(data: st.DataObject, template: str) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["tool", "user"]), min_size=1, max_size=5))
    conversation: list[dict[str, Any]] = [s.user(template, "Hi.")]
    for number, kind in enumerate(kinds):
        mark = f"{s.ASKED if kind == 'tool' else s.SAID}n{number}n"
        turn = s.asked(template, mark=mark) if kind == "tool" else s.said(template, mark)
        answer = data.draw(texts)
        if not harmless(template, answer):
            answer = "12"
        new = [s.tool(template, answer) if kind == "tool" else s.user(template, answer)]
        conversation += [turn, *new]
        expected = s.behind_stop(template, conversation, mark)
        assert chat(template).bridge(expected.before, new, s.TOOLS) == expected.tail


@settings(max_examples=150, deadline=None)
@given(data=st.data(), template=st.sampled_from(TEMPLATES))
def test_whatever_was_sampled_is_read_and_bridged(data: st.DataObject, template: str) -> None:
    """Random ids, control tokens among them often: no error, spans in order and inside, text kept."""
    tokenizer: Any = chat(template).tokenizer
    control = st.sampled_from(sorted(tokenizer.get_added_vocab().values())[:60])
    written = st.sampled_from(['{"name": "f", "arguments": {', '"a": 1}}', "<think>", "</think>", "\n", "[f(", "é"])
    tokens = st.one_of(control, st.integers(0, 100_000))
    pieces = st.one_of(tokens.map(lambda token: [token]), written.map(chat(template)._encoder.encode))
    sampled = [token for piece in data.draw(st.lists(pieces, max_size=25)) for token in piece]
    message = chat(template).parse(sampled, chat(template).encode([s.user(template, "Hi.")]), s.TOOLS)
    at = 0
    for call in message.tool_calls:
        assert at <= call.span[0] <= call.span[1] <= len(sampled)
        at = call.span[0]
    made = chat(template).bridge(sampled, [s.user(template, "Go on.")], s.TOOLS)
    assert "Go on." in chat(template).decode(made)
