"""ChatTemplate from a user's side: prompts, bridges, reading turns, errors, copies."""

from __future__ import annotations

import functools
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, overload

import pytest

from tests import families
from tests.template import scenarios as s
from unspool.template import ChatTemplate
from unspool.types import InvalidValueError, MissingExtraError, TemplateError

IM_END, IM_START, THINK, NEWLINE = 151645, 151644, 151667, 198
HELLO = [{"role": "user", "content": "What is the weather?"}]
ANSWER = [{"role": "tool", "name": "get_weather", "tool_call_id": "call_0", "content": "12 degrees"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@functools.cache
def chat(template: str, **kwargs: Any) -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = families.trl_templates()[template]
        return ChatTemplate(families.tokenizer_for(template), chat_template=source, **kwargs)


def ids(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenizer.encode(text, add_special_tokens=False)


# ---------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("template", tuple(families.trl_templates()))
def test_a_prompt_is_the_templates_own(template: str) -> None:
    messages = [s.user(template, "  Wie ist das Wetter in Zürich? 🌦 \n")]
    _, theirs, _ = s.full_render(template, messages)
    assert chat(template).encode(messages, s.TOOLS) == theirs


def test_the_tokenizers_own_template_is_the_default(qwen3: Any) -> None:
    theirs = qwen3.apply_chat_template(HELLO, tools=s.TOOLS, add_generation_prompt=True, return_dict=False)
    assert ChatTemplate(qwen3).encode(HELLO, s.TOOLS) == theirs


def test_bos_is_written_once(llama3_1: Any) -> None:
    assert chat("llama3_1").encode(HELLO).count(llama3_1.bos_token_id) == 1


def test_arguments_as_json_text_become_an_object_and_the_callers_messages_stay() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": true, "t": "x\ny"}'}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, *ANSWER]
    before = deepcopy(messages)
    text = chat("qwen3").decode(chat("qwen3").encode(messages))
    assert '{"name": "f", "arguments": {"b": true, "t": "x\\ny"}}' in text
    assert messages == before


def test_a_template_that_wants_arguments_as_text_gets_text() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"b": True}}}
    template = chat("deepseekv3")
    assert '{"b": true}' in template.decode(
        template.encode([*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, *ANSWER])
    )


def test_content_comes_in_the_form_that_the_template_reads() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "the weather?"}]
    assert chat("qwen3").encode([{"role": "user", "content": parts}]) == chat("qwen3").encode(HELLO)
    assert "What is the weather?" in chat("smolvlm").decode(chat("smolvlm").encode(HELLO))


# ---------------------------------------------------------------------------- bridges


def test_the_bridge_begins_with_the_newline_that_qwen_puts_behind_its_stop_token() -> None:
    made = chat("qwen3").bridge([IM_END], ANSWER)
    assert made[:2] == [NEWLINE, IM_START]
    assert chat("qwen3").decode(made) == (
        "\n<|im_start|>user\n<tool_response>\n12 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


class OnlyTheLast(Sequence[int]):
    """A long conversation that tells nothing but its last token."""

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> Any:
        assert index == -1, "only the last token is looked at"
        return IM_END

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the conversation is not walked")


def test_the_bridge_looks_at_the_last_token_alone() -> None:
    assert chat("qwen3").bridge(OnlyTheLast(), ANSWER) == chat("qwen3").bridge([5, IM_END], ANSWER)


def test_a_turn_without_a_stop_token_is_closed_by_the_bridge() -> None:
    behind_stop = chat("qwen3").bridge([IM_END], ANSWER)
    assert chat("qwen3").bridge(ids(chat("qwen3"), "and then"), ANSWER) == [IM_END, *behind_stop]


def test_behind_an_end_of_text_that_the_template_does_not_know_the_turn_is_closed() -> None:
    assert chat("qwen3").bridge(ids(chat("qwen3"), "x<|endoftext|>"), ANSWER)[0] == IM_END


def test_gpt_oss_may_stop_with_either_of_its_closes() -> None:
    template = chat("gptoss")
    user = [{"role": "user", "content": "And tomorrow?"}]
    after_end = template.bridge(ids(template, "<|end|>"), user)
    assert template.bridge(ids(template, "<|return|>"), user) == after_end
    assert template.decode(after_end) == "<|start|>user<|message|>And tomorrow?<|end|><|start|>assistant"


def test_gpt_oss_answers_a_tool_in_its_name_and_closes_a_call_that_was_cut() -> None:
    template = chat("gptoss")
    made = template.decode(template.bridge(ids(template, "<|call|>"), ANSWER))
    assert made.startswith("<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>")
    assert template.decode(template.bridge([5], ANSWER)) == "<|call|>" + made


def test_gemma_4_goes_on_inside_the_models_turn() -> None:
    template = chat("gemma4")
    opened = template.bridge(ids(template, "<|tool_response>"), ANSWER)
    assert template.decode(opened) == 'response:get_weather{value:<|"|>12 degrees<|"|>}<tool_response|>'
    assert template.bridge(ids(template, "<tool_call|>"), ANSWER) == ids(template, "<|tool_response>") + opened


def test_glm_keeps_the_header_that_it_stopped_on() -> None:
    template = chat("glm4moe")
    observation, user = ids(template, "<|observation|>"), ids(template, "<|user|>")
    behind = template.bridge(observation, ANSWER)
    assert template.decode(behind).startswith("\n<tool_response>")
    assert template.bridge([5], ANSWER) == observation + behind
    assert template.bridge(user, ANSWER) == observation + behind, "another header does not do"
    assert {*observation, *user} <= set(template.stop_token_ids)


def test_a_name_that_the_template_would_look_up_has_to_be_given() -> None:
    nameless = [{"role": "tool", "tool_call_id": "call_0", "content": "x"}]
    for template in ("gptoss", "gemma4", "muse_glimmer"):
        with pytest.raises(TemplateError, match="give the tool message a 'name'"):
            chat(template).bridge([1], nameless)
    assert chat("qwen3").bridge([IM_END], nameless)


def test_rewritten_history_may_hold_any_roles() -> None:
    new = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    text = chat("qwen2_5").decode(chat("qwen2_5").bridge([IM_END], new))
    assert text == (
        "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_bridge_is_the_same_the_first_time_and_the_hundredth() -> None:
    template = ChatTemplate(families.load("qwen3"))
    for new in (ANSWER, [*ANSWER, *HELLO], [{**ANSWER[0], "tool_call_id": "call_77"}, ANSWER[0]]):
        for tools in (None, s.TOOLS, s.TOOLS[:1]):
            assert len({tuple(template.bridge([IM_END], new, tools)) for _ in range(8)}) == 1


# ---------------------------------------------------------------------------- switches


def test_switches_can_be_changed_for_one_trajectory() -> None:
    template = chat("qwen3")
    quiet = template.with_kwargs(enable_thinking=False)
    assert quiet is template.with_kwargs(enable_thinking=False)
    assert quiet.with_kwargs(enable_thinking=False) is quiet
    assert quiet.encode(HELLO) == template.encode(HELLO) + ids(template, "<think>\n\n</think>\n\n")
    assert quiet.bridge([IM_END], ANSWER) == template.bridge([IM_END], ANSWER) + ids(
        template, "<think>\n\n</think>\n\n"
    )
    assert template.template_kwargs == {}
    assert quiet.template_kwargs == {"enable_thinking": False}


def test_many_switches_are_not_kept_for_ever() -> None:
    template = ChatTemplate(families.load("qwen3"))
    for number in range(200):
        template.with_kwargs(enable_thinking=number)
    assert len(template._variants) < 100


# ---------------------------------------------------------------------------- reading turns


def test_a_turn_is_read_into_thinking_text_and_calls_with_their_tokens() -> None:
    template = chat("qwen3")
    sampled = ids(template, f"<think>\nhm\n</think>\n\nLet me see. {CALL}<|im_end|>")
    message = template.parse(sampled, template.encode(HELLO), s.TOOLS)
    assert (message.reasoning_content, message.content) == ("\nhm\n", "Let me see. ")
    (call,) = message.tool_calls
    assert (call.name, call.arguments, call.status, call.id) == ("get_weather", {"city": "Zürich"}, "ok", "")
    assert template.decode(sampled[slice(*call.span)]) == CALL


def test_thinking_that_the_prompt_opened_belongs_to_the_turn() -> None:
    template = chat("qwen3_5_think")
    sampled = ids(template, "hm\n</think>\n\nYes.<|im_end|>")
    prompt = template.encode(HELLO)
    assert template.decode(prompt).endswith("<think>\n")
    for message in (template.parse(sampled, prompt), template.parse(sampled)):
        assert (message.reasoning_content, message.content) == ("hm\n", "Yes.")


def test_calls_inside_thinking_are_not_calls() -> None:
    message = chat("qwen3").parse(ids(chat("qwen3"), f"<think>{CALL}</think>No.<|im_end|>"))
    assert (message.content, message.tool_calls) == ("No.", ())
    assert chat("qwen3").parse(ids(chat("qwen3"), f"<think>{CALL}")).tool_calls == ()


def test_empty_reasoning_of_stock_qwen3_breaks_nothing() -> None:
    template = chat("qwen3")
    message = template.parse(ids(template, "<think>\n\n</think>\n\nHello there.<|im_end|>"))
    assert (message.reasoning_content or "").strip() == ""
    assert message.content == "Hello there."
    assert template.bridge([IM_END], HELLO)[:2] == [NEWLINE, IM_START]


def test_one_stop_token_is_taken_off_and_no_more() -> None:
    template = chat("qwen3")
    assert template.parse([*ids(template, "a"), IM_END]).content == "a"
    assert template.parse([*ids(template, "a"), IM_END, IM_END]).content == "a<|im_end|>"
    assert template.parse(ids(template, "a<|endoftext|>")).content == "a"
    assert template.parse([]).content == ""


@pytest.mark.parametrize("bad", [-1, 151_936, 200_000, 2**31, 2**40, 1.5, float("nan"), "x", None, [7], (1, 2)])
def test_ids_that_the_tokenizer_does_not_have_are_skipped(bad: Any) -> None:
    template = chat("qwen3")
    assert template.vocab_size == len(template.tokenizer.get_vocab()) < 151_936  # type: ignore[attr-defined]
    call = ids(template, CALL)
    read = template.parse([bad, *ids(template, "Hi "), bad, *call, bad, IM_END])
    assert read.content == "Hi "
    assert [(c.name, c.arguments) for c in read.tool_calls] == [("get_weather", {"city": "Zürich"})]
    assert read.tool_calls[0].span == (4, 4 + len(call))
    assert template.parse([*ids(template, "Hi"), bad]).content == "Hi"
    assert template.parse(ids(template, "Hi"), prompt_ids=[THINK, bad]).reasoning_content == "Hi"


def test_two_calls_have_spans_of_their_own_also_behind_split_emoji() -> None:
    template = chat("qwen3")
    sampled = ids(template, f"👩‍👩‍👧‍👦 é مرحبا {CALL}\n{CALL}<|im_end|>")
    first, second = template.parse(sampled).tool_calls
    assert first.span[1] <= second.span[0]
    assert [template.decode(sampled[slice(*call.span)]) for call in (first, second)] == [CALL, CALL]


def test_half_a_character_is_read_all_the_same() -> None:
    sampled = ids(chat("qwen3"), "ok 🤦🏽‍♂️")
    for end in range(len(sampled)):
        assert chat("qwen3").parse(sampled[:end]).content.startswith("ok"[:end])


def test_a_parser_that_fails_leaves_the_text(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "broken"

        def parse(self, text: str, tools: Any = None) -> Any:
            raise RuntimeError(text)

    template = ChatTemplate(families.load("qwen3"))
    template.parser = Broken()
    assert template.parse(ids(template, "hello<|im_end|>")).content == "hello"
    assert "broken" in caplog.text


def test_decoding_keeps_special_tokens_and_spaces() -> None:
    text = "<|im_start|> a , b . c n't <|im_end|>\n"
    assert chat("qwen3").decode(ids(chat("qwen3"), text)) == text


# ---------------------------------------------------------------------------- stop tokens

STOPS = {
    "qwen3": {"<|im_end|>"},
    "qwen2_5": {"<|im_end|>"},
    "llama3_1": {"<|eot_id|>", "<|eom_id|>"},
    "deepseekv3": {"<｜end▁of▁sentence｜>"},
    "gptoss": {"<|return|>", "<|call|>"},
    "gemma3": {"<end_of_turn>"},
    "gemma4": {"<end_of_turn>", "<turn|>", "<|tool_response>"},
    "glm4moe": {"<|im_end|>", "<|user|>", "<|observation|>"},
    "phi3": {"<|im_end|>", "<|end|>"},
    "muse_glimmer": {"<|im_end|>", "<|eot|>"},
    "cohere2": {"<|im_end|>", "<|END_OF_TURN_TOKEN|>"},
}
"""With eos of the tokenizer that stands in: Qwen3's, where we have no other."""


@pytest.mark.parametrize("template", STOPS)
def test_stop_tokens_are_those_that_models_stop_with(template: str) -> None:
    tokenizer = chat(template).tokenizer
    assert {tokenizer.convert_ids_to_tokens(token) for token in chat(template).stop_token_ids} == STOPS[template]  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------- errors and warnings


def test_a_prompt_needs_messages() -> None:
    with pytest.raises(TemplateError, match="messages is empty"):
        chat("qwen3").encode([])


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": None, "content": "x"}, {"role": 7}, "x"])
def test_a_message_needs_a_role(message: Any) -> None:
    with pytest.raises(TemplateError, match="must"):
        chat("qwen3").encode([message])


def test_what_a_template_raises_is_passed_on_in_one_sentence() -> None:
    with pytest.raises(TemplateError, match="Conversation roles must alternate") as raised:
        chat("gemma3").encode([*HELLO, *HELLO])
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_a_template_asks_for_one(gptoss: Any) -> None:
    with pytest.raises(TemplateError, match="pass chat_template="):
        ChatTemplate(gptoss)


def test_a_template_that_knows_no_tools_warns_once_and_refuses_at_the_tool_turn(gemma3: Any) -> None:
    with pytest.warns(UserWarning, match="ignores tools.*no tool messages") as caught:
        template = ChatTemplate(gemma3)
    assert len(caught) == 1
    assert template.encode(HELLO, s.TOOLS)
    with pytest.raises(TemplateError, match=r"cannot render tool messages .*chat_template="):
        template.bridge([1], ANSWER)
    with pytest.raises(TemplateError, match="cannot render tool messages"):
        template.encode([*HELLO, {"role": "assistant", "content": "x"}, *ANSWER])


def test_a_good_template_warns_of_nothing(qwen3: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatTemplate(qwen3)


def test_calls_that_no_parser_reads_are_warned_of(qwen3: Any) -> None:
    source = families.trl_templates()["qwen3"].replace("tool_call", "x_call").replace("arguments", "x_args")
    with pytest.warns(UserWarning, match="pass parser="):
        template = ChatTemplate(_renamed(qwen3, "someone/thing"), chat_template=source)
    assert template.parser is None
    assert template.parse(ids(template, f"{CALL}<|im_end|>")).content == CALL


def _renamed(tokenizer: Any, name: str) -> Any:
    copy = pickle.loads(pickle.dumps(tokenizer))
    copy.name_or_path = name
    return copy


def test_unknown_names_are_refused(qwen3: Any) -> None:
    with pytest.raises(InvalidValueError, match="no tool-call parser"):
        ChatTemplate(qwen3, parser="nonsense")
    with pytest.raises(InvalidValueError, match="'keep' or 'template'"):
        ChatTemplate(qwen3, thinking="drop")  # type: ignore[arg-type]


def test_a_name_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'unspool\[torch\]'"):
        ChatTemplate("some/model")


# ---------------------------------------------------------------------------- as an object


def test_a_template_pickles_with_all_that_it_does() -> None:
    template = chat("qwen3", enable_thinking=False, thinking="template")
    template.bridge([IM_END], ANSWER)
    copy = pickle.loads(pickle.dumps(template))
    assert copy.bridge([IM_END], ANSWER) == template.bridge([IM_END], ANSWER)
    assert copy.encode(HELLO, s.TOOLS) == template.encode(HELLO, s.TOOLS)
    assert copy.parse(ids(copy, CALL)) == template.parse(ids(template, CALL))
    assert (copy.thinking, copy.stop_token_ids, copy.template_kwargs) == (
        "template",
        template.stop_token_ids,
        template.template_kwargs,
    )


def test_a_template_says_what_it_is() -> None:
    assert repr(chat("qwen3", enable_thinking=False)).endswith("parser='hermes', enable_thinking=False)")
