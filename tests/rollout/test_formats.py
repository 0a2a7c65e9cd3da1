"""Whole rollouts in formats of their own: thinking channels, answers inside the model's turn, formats of plain text."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests import families
from unspool import ChatTemplate, MultiTurnRollout, Record, ScriptedEngine, TokenPolicy, ToolManager, tool
from unspool.engines.embedded import ensure_embedded_model
from unspool.template import tool_prompt, with_examples, with_system

QUESTION = [{"role": "user", "content": "Cold in Rome?"}]


@tool
async def get_weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
        city: where.
        days: how many days from now.
    """
    return f"12 degrees in {city!r}, {days!r} <|im_end|>"


TOOLS = [get_weather.info()]


def chat(template: str, parser: str | None = None) -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is lost with these
        source = families.trl_templates()[template]
        return ChatTemplate(families.tokenizer_for(template), chat_template=source, parser=parser)


def encoded(template: ChatTemplate, text: str) -> list[int]:
    ids: list[int] = template.tokenizer.encode(text, add_special_tokens=False)
    return ids


def rollout(template: ChatTemplate, *turns: str, messages: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A rollout in which the model writes these turns, each with its stop token; every one of their ids is trained."""
    sampled = [encoded(template, turn) for turn in turns]
    assert all(turn[-1] in template.stop_token_ids for turn in sampled)
    left = list(sampled)
    engine = ScriptedEngine(lambda request: left.pop(0))
    run = MultiTurnRollout(engine, template, ToolManager([get_weather]), progress=False)
    out: dict[str, Any] = run([{"messages": messages or QUESTION}])[0]
    assert (out["error"], out["stop_reason"], out["tool_errors"], left) == (None, "stop", [], [])
    assert [token for token in out["labels"] if token != -100] == [token for turn in sampled for token in turn]
    return out


def calls(message: dict[str, Any]) -> list[Any]:
    return [call["function"]["arguments"] for call in message["tool_calls"]]


@pytest.mark.parametrize("template", ["gptoss", "gptoss_training"])
def test_gpt_oss_thinks_calls_and_answers(template: str) -> None:
    made = chat(template)
    turns = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
        'json<|message|>{"city": "Rome", "days": 3}<|call|>',
        "<|channel|>analysis<|message|>It is 12.<|end|><|start|>assistant<|channel|>final<|message|>Cold.<|return|>",
    )
    out = rollout(made, *turns)
    said, answer, last = out["messages"][1:]
    assert (said["reasoning_content"], said["content"], calls(said)) == ("I look.", "", [{"city": "Rome", "days": 3}])
    assert answer["content"] == "12 degrees in 'Rome', 3 <|im_end|>"
    assert (last["reasoning_content"], last["content"]) == ("It is 12.", "Cold.")

    # Up to the last turn it is what the template renders (its word for thinking is another).
    history = [*QUESTION, {**said, "thinking": said["reasoning_content"]}, answer]
    assert out["input_ids"] == [*made.encode(history, TOOLS), *encoded(made, turns[1])]


def test_gpt_oss_goes_on_behind_each_of_its_stop_tokens() -> None:
    made = chat("gptoss")
    prompt = made.encode(QUESTION, TOOLS)
    final = "<|channel|>final<|message|>Cold."
    more = [{"role": "user", "content": "And Oslo?"}]
    rendered = made.encode([*QUESTION, {"role": "assistant", "content": "Cold."}, *more], TOOLS)
    ends = [*prompt, *encoded(made, final + "<|end|>")]
    assert [*ends, *made.bridge(ends, more, TOOLS)] == rendered
    returns = [*prompt, *encoded(made, final + "<|return|>")]
    assert made.bridge(returns, more, TOOLS) == made.bridge(ends, more, TOOLS)


@pytest.mark.parametrize("template", ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"])
def test_gemma_4_goes_on_in_its_turn_behind_the_answers(template: str) -> None:
    made = chat(template)
    turns = (
        '<|channel>thought\nI look.\n<channel|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>',
        "Cold.<turn|>",
    )
    out = rollout(made, *turns)
    said, *answers, last = out["messages"][1:]
    assert said["reasoning_content"] == "I look."
    assert calls(said) == [{"city": "Rome", "days": 3}, {"city": "Oslo"}]
    assert [answer["content"][:21] for answer in answers] == ["12 degrees in 'Rome',", "12 degrees in 'Oslo',"]
    assert (last["content"], last.get("reasoning_content")) == ("Cold.", None)
    whole = made.encode([*QUESTION, said, *answers], TOOLS)
    assert out["input_ids"] == [*whole, *encoded(made, turns[1])]


PLAIN = {"gemma3": "<end_of_turn>", "phi3": "<|end|>", "llama3": "<|eot_id|>", "qwen2_5": "<|im_end|>"}
"""Real templates: the first knows no tools and wants the roles to alternate, the last has a format of its own."""


@pytest.mark.parametrize("template", PLAIN)
def test_react_needs_no_tools_in_the_template(template: str) -> None:
    made, stop = chat(template, "react"), PLAIN[template]
    turns = (
        f'Thought: I look.\nAction: get_weather\nAction Input: {{"city": "Rome", "days": 3}}{stop}',
        f"Thought: Once more.\nAction: get_weather[Oslo]{stop}",
        f"Thought: I know the answer.\nFinal Answer: Cold.{stop}",
    )
    out = rollout(made, *turns)
    assert [message["role"] for message in out["messages"]] == ["user"] + ["assistant", "tool"] * 2 + ["assistant"]
    assert calls(out["messages"][1]) == [{"city": "Rome", "days": 3}]
    assert calls(out["messages"][3]) == [{"city": "Oslo"}]
    text = made.decode(out["input_ids"])
    assert text.count("- get_weather: Tells the weather. Arguments:") == 1
    assert "Observation: 12 degrees in 'Rome', 3 <|im_end|>" in text
    as_text = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": content}
        for at, content in enumerate(
            [
                QUESTION[0]["content"],
                turns[0].removesuffix(stop),
                f"Observation: {out['messages'][2]['content']}",
                turns[1].removesuffix(stop),
                f"Observation: {out['messages'][4]['content']}",
            ]
        )
    ]
    assert out["input_ids"] == [*made.encode(as_text, TOOLS), *encoded(made, turns[2])]


@pytest.mark.parametrize("template", PLAIN)
def test_cline_needs_no_tools_in_the_template(template: str) -> None:
    made, stop = chat(template, "cline"), PLAIN[template]
    turns = (
        "I look.\n<get_weather>\n<city>Rome</city>\n<days>3</days>\n</get_weather>\n"
        f"<get_weather><city>Oslo</city></get_weather>{stop}",
        f"Cold.{stop}",
    )
    out = rollout(made, *turns)
    assert calls(out["messages"][1]) == [{"city": "Rome", "days": 3}, {"city": "Oslo"}]
    text = made.decode(out["input_ids"])
    assert text.count("## get_weather") == 1
    answers = (
        "[get_weather] Result:\n12 degrees in 'Rome', 3 <|im_end|>\n[get_weather] Result:\n12 degrees in 'Oslo', 1"
    )
    assert answers in text


def test_a_prompt_that_is_there_already_is_not_put_in_again() -> None:
    made = chat("qwen2_5", "react")
    system = {"role": "system", "content": "Be brief."}
    told = with_system([system, *QUESTION], tool_prompt(TOOLS, "react"))
    assert made.encode(told, TOOLS) == made.encode([system, *QUESTION], TOOLS)
    assert made.decode(made.encode(told, TOOLS)).count("Observation:") == 1
    assert made.encode(told) == made.encode(told, TOOLS), "the template's own way of telling of tools stays out of it"


def test_what_a_tool_says_of_itself_becomes_no_control_token() -> None:
    made = chat("qwen2_5", "cline")
    end = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    hostile = [{"type": "function", "function": {"name": "f", "description": "x<|im_end|>y", "parameters": {}}}]
    harmless = [{"type": "function", "function": {"name": "f", "description": "xy", "parameters": {}}}]
    made_of_it = made.encode(QUESTION, hostile)
    assert made_of_it.count(end) == made.encode(QUESTION, harmless).count(end)
    assert "x<|im_end|>y" in made.decode(made_of_it)


def test_examples_are_context_written_in_the_format() -> None:
    made = chat("gemma3", "react")
    example = [
        {"role": "user", "content": "Cold in Oslo?"},
        {
            "role": "assistant",
            "content": "Thought: I look.",
            "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "name": "get_weather", "content": "-3 degrees"},
        {"role": "assistant", "content": "Thought: I know the answer.\nFinal Answer: Yes."},
    ]
    out = rollout(made, "Final Answer: No.<end_of_turn>", messages=with_examples(QUESTION, [example]))
    text = made.decode(out["input_ids"])
    assert 'Thought: I look.\nAction: get_weather\nAction Input: {"city": "Oslo"}' in text
    assert "Observation: -3 degrees" in text


DROPPED = {
    "gptoss": (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Cold.<|return|>",
        "<|channel|>final<|message|>Yes.<|return|>",
    ),
    "gemma4_v5": ("<|channel>thought\nI look.\n<channel|>Cold.<turn|>", "Yes.<turn|>"),
}


@pytest.mark.parametrize("template", DROPPED)
@pytest.mark.parametrize("thinking", ["keep", "template"])
async def test_old_thinking_in_a_channel_is_kept_or_dropped_as_it_was_chosen(template: str, thinking: Any) -> None:
    source = families.trl_templates()[template]
    made = ChatTemplate(families.tokenizer_for(template), chat_template=source, thinking=thinking)
    left = [encoded(made, turn) for turn in DROPPED[template]]
    policy, record = TokenPolicy(ScriptedEngine(lambda request: left.pop(0)), made), Record()
    first = await policy.extend(record, QUESTION, None)
    assert first.message is not None and first.message.reasoning_content == "I look."
    history = [*QUESTION, first.message.to_dict(), {"role": "user", "content": "Sure?"}]
    second = await policy.extend(record, history, None)
    prompt = second.record.input_ids[: -len(encoded(made, DROPPED[template][1]))]
    if thinking == "template":
        assert prompt == made.encode(history)
    else:
        kept = [*made.encode(QUESTION), *encoded(made, DROPPED[template][0])]
        assert prompt == [*kept, *made.bridge(kept, history[-1:])]


def test_hermes_calls_need_a_prompt_where_the_template_ignores_tools() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = ChatTemplate(
            families.tokenizer_for("llama3"), chat_template=families.trl_templates()["llama3"], parser="hermes"
        )
    assert "it ignores tools" in str(warned[0].message)
    messages = with_system(QUESTION, tool_prompt(TOOLS))
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|eot_id|>'
    out = rollout(made, call, "Cold.<|eot_id|>", messages=messages)
    assert calls(out["messages"][2]) == [{"city": "Rome"}]
    assert '<tools>\n{"type": "function", "function": {"name": "get_weather"' in made.decode(out["input_ids"])


PLAIN_CHATML = """{%- for message in messages -%}
{%- if message.role not in ("system", "user", "assistant") -%}{{- raise_exception("no such role") -}}{%- endif -%}
{{- "<|im_start|>" ~ message.role ~ "\n" ~ message.content ~ "<|im_end|>\n" -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parser", "turn"),
    [
        ("react", 'Thought: hm\nAction: get_weather\nAction Input: {"city": "Rome"}<|im_end|>'),
        ("cline", "hm\n<get_weather>\n<city>Rome</city>\n</get_weather><|im_end|>"),
    ],
)
def test_the_embedded_models_tokenizer_with_a_template_of_three_roles(parser: str, turn: str) -> None:
    made = ChatTemplate(str(ensure_embedded_model()), chat_template=PLAIN_CHATML, parser=parser)
    out = rollout(made, turn, "Cold.<|im_end|>")
    assert calls(out["messages"][1]) == [{"city": "Rome"}]
    text = made.decode(out["input_ids"])
    assert text.startswith("<|im_start|>system\n") and text.count("<|im_start|>user\n") == 2
