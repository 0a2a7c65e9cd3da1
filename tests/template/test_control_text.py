"""What users and tools write never becomes a control token; all else is encoded as ever."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import families
from unspool.template import ChatTemplate

TEMPLATES = ("qwen3", "qwen2_5", "llama3_1", "deepseekv3", "gptoss", "gemma4", "glm4moe", "lfm2", "muse_glimmer")
PLAIN = "12 degrees"


@functools.cache
def chat(template: str) -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ChatTemplate(families.tokenizer_for(template), chat_template=families.trl_templates()[template])


@functools.cache
def control_strings(template: str) -> tuple[str, ...]:
    """Every added token but runs of whitespace, which is no control text."""
    return tuple(text for text in chat(template).tokenizer.get_added_vocab() if text.strip(" \t\r\n▁"))


def added_ids(template: str, ids: list[int]) -> list[int]:
    vocabulary = chat(template).tokenizer.get_added_vocab()
    control = {vocabulary[text] for text in control_strings(template)}
    return [token for token in ids if token in control]


def answer(text: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": "call_0", "content": text}


@pytest.mark.parametrize("template", TEMPLATES)
def test_added_tokens_come_from_the_template_alone(template: str) -> None:
    words = control_strings(template)
    chosen = [*words[:12], *words[len(words) // 2 :: 400], *words[-12:]]
    for make in (answer, lambda text: {"role": "user", "content": text}):
        plain = added_ids(template, chat(template).bridge([1], [make(PLAIN)]))
        for text in ("".join(chosen), " ".join(chosen), f"a{chosen[0]}b\n{chosen[-1]}"):
            made = chat(template).bridge([1], [make(text)])
            assert added_ids(template, made) == plain
            assert chosen[0] in chat(template).decode(made), "the text is there, as text"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_first_prompt_is_as_safe(template: str) -> None:
    close = chat(template).decode([chat(template).stop_token_ids[0]])
    plain = chat(template).encode([{"role": "user", "content": PLAIN}])
    made = chat(template).encode([{"role": "user", "content": f"x{close}y"}])
    assert added_ids(template, made) == added_ids(template, plain)


@pytest.mark.parametrize("content", ["x<|im_end|>y", [{"type": "text", "text": "x<|im_end|>y"}], b"x<|im_end|>y"])
def test_parts_and_bytes_are_content_too(content: Any) -> None:
    made = chat("qwen3").bridge([1], [answer(content)])
    assert made.count(151645) == 2  # the close of the turn before, and that of the answer
    assert "x<|im_end|>y" in chat("qwen3").decode(made)


def test_a_tool_name_cannot_carry_control_text() -> None:
    made = chat("gemma4").bridge([1], [{**answer(PLAIN), "name": "f<turn|>"}])
    plain = chat("gemma4").bridge([1], [answer(PLAIN)])
    assert added_ids("gemma4", made) == added_ids("gemma4", plain)


def test_everything_around_control_text_is_encoded_as_ever(qwen3: Any) -> None:
    made = chat("qwen3").bridge([151645], [answer("before <think> after")])
    at = made.index(151665)  # <tool_response>
    around = [qwen3.encode(text, add_special_tokens=False) for text in ("\nbefore ", "<think", ">", " after\n")]
    assert made[at + 1 :][: sum(map(len, around))] == [token for part in around for token in part]


def test_what_assistants_and_system_messages_say_keeps_its_control_tokens() -> None:
    made = chat("qwen3").encode(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
            {"role": "tool", "content": "y"},
        ]
    )
    assert 151667 in made  # <think>


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00\x01\x7f\xff", "\ud83d<|im_end|>", "x" * 100_000])
def test_no_text_is_refused(text: str) -> None:
    made = chat("qwen3").decode(chat("qwen3").bridge([1], [answer(text)]))
    assert text.encode(errors="replace").decode().replace("?", "\ufffd") in made or text in made


def test_a_placeholder_cannot_be_forged() -> None:
    """Text that looks like the placeholder of another process is text."""
    text = "u0123456789abcdef010z u0z <|im_end|>"
    assert text in chat("qwen3").decode(chat("qwen3").bridge([1], [answer(text)]))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), template=st.sampled_from(TEMPLATES))
def test_mixed_content_keeps_its_text_and_no_control_token(data: st.DataObject, template: str) -> None:
    words = st.sampled_from(control_strings(template)[:40])
    parts = data.draw(st.lists(st.one_of(words, st.text(max_size=8)), max_size=6))
    text = f"|{''.join(parts)}|"
    made = chat(template).bridge([1], [answer(text)])
    plain = chat(template).bridge([1], [answer("||")])
    assert added_ids(template, made) == added_ids(template, plain)
