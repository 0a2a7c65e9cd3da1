"""Rollouts of two turns with a tool, family by family: all ids equal those of the template's own full render.

Templates are the families' own where `trl` carries them; else short ones written here, which write calls and answers
as the family's documentation shows them. Turns are given as text, so that they are what the template would write.
"""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from tests import families
from unspool import ChatTemplate, MultiTurnRollout, ScriptedEngine, ToolManager, tool


@tool
async def get_weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
        city: where.
        days: how many days from now.
    """
    return f"12 degrees in {city!r}, {days!r}"


MISTRAL_LIST = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{{- '[/TOOL_RESULTS]' }}{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{{- '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}{% else %}{{ m.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""
MISTRAL_ARGS = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK_V31 = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜></think>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}{{ m.content }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}
{{- '<｜tool▁sep｜>' + c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}
{{- eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK_V32 = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜></think>
{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '\n\n<function_results>' }}{% endif %}
{{- '\n<result>' + m.content + '</result>' }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '\n</function_results>\n\n</think>' }}{% endif %}{% else %}{{ m.content }}{% if m.tool_calls %}
{{- '\n\n<｜DSML｜function_calls>' }}{% for c in m.tool_calls %}
{{- '\n<｜DSML｜invoke name="' + c.function.name + '">\n' }}
{%- for k, v in c.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="
{{- 'true' if v is string else 'false' }}">{{ v if v is string else v | tojson }}</｜DSML｜parameter>{{ '\n' }}
{%- endfor %}</｜DSML｜invoke>{% endfor %}{{ '\n</｜DSML｜function_calls>' }}{% endif %}{{ eos_token }}{% endif %}
{%- endfor %}"""
KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>
{%- elif m.role == 'tool' %}<|im_system|>{{ m.name }}<|im_middle|>## Return of {{ m.tool_call_id }}
{{ m.content }}<|im_end|>{% else %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}
{{- '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}
{{- '<|tool_calls_section_end|>' }}{% endif %}<|im_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

ROME = '{"city": "Rome", "days": 3}'
OSLO = '{"city": "Oslo"}'


def json_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@dataclass
class Family:
    """How a family writes the conversation.

    `turns` hold their stop tokens, `written` a piece of the whole render and what it is without the template's dropping
    of thinking; `stops_on_header`: the last turn's stop opens a turn that the render has not got;
    `blank_before_calls`: what the template writes between a text and its calls, which stays in the text.
    """

    tokenizer: str
    source: str
    turns: tuple[str, str]
    control: tuple[str, ...] = ()
    ids: tuple[str, ...] = ("call_0_0", "call_0_1")
    stops_on_header: bool = False
    arguments_as_text: bool = False
    written: tuple[str, str] = ("", "")
    blank_before_calls: str = ""


FAMILIES = {
    "deepseek v3": Family(
        "deepseek_v3",
        "trl:deepseekv3",
        (
            "hm\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            f"```json\n{ROME}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{OSLO}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "Cold.<｜end▁of▁sentence｜>",
        ),
        arguments_as_text=True,
        written=("<｜Assistant｜>I look.", "<｜Assistant｜><think>\nhm\n</think>\n\nI look."),
    ),
    "deepseek v3.1": Family(
        "deepseek_v3",
        DEEPSEEK_V31,
        (
            f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜>"
            f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "Cold.<｜end▁of▁sentence｜>",
        ),
    ),
    "deepseek v3.2": Family(
        "deepseek_v3",
        DEEPSEEK_V32,
        (
            'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>",
            "Cold.<｜end▁of▁sentence｜>",
        ),
        control=("｜DSML｜",),
        blank_before_calls="\n\n",
    ),
    "glm": Family(
        "qwen3",
        "trl:glm4moe",
        (
            "\n<think>hm</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_weather\n"
            "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call><|observation|>",
            "\n<think>so</think>\nCold.<|user|>",
        ),
        stops_on_header=True,
    ),
    "kimi k2": Family(
        "qwen3",
        KIMI,
        (
            "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            f"{ROME}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{OSLO}"
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
            "Cold.<|im_end|>",
        ),
        control=(
            "<|im_system|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>", "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ),
        ids=("functions.get_weather:0", "functions.get_weather:1"),
    ),
    "mistral, a list": Family(
        "gptoss",
        MISTRAL_LIST,
        (
            f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ROME}, "id": "abcDEF012"}}, '
            f'{{"name": "get_weather", "arguments": {OSLO}, "id": "abcDEF013"}}]</s>',
            "Cold.</s>",
        ),
        control=("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                 "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ids=("abcDEF012", "abcDEF013"),
    ),
    "mistral, names": Family(
        "gptoss",
        MISTRAL_ARGS,
        (f"I look.[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]get_weather[ARGS]{OSLO}</s>", "Cold.</s>"),
        control=("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                 "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
}  # fmt: skip


def tokenizer_of(family: Family) -> Any:
    if family.source.startswith("trl:"):
        return families.tokenizer_for(family.source[4:])
    from transformers import AddedToken

    tokenizer = families.fresh(family.tokenizer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in family.control])
    if "</s>" in family.control:
        tokenizer.eos_token = "</s>"
    return tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_rollout_is_what_the_template_renders(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    source = family.source
    if source.startswith("trl:"):
        source = families.trl_templates()[source[4:]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chat = ChatTemplate(tokenizer, chat_template=source)
    turns = [tokenizer.encode(turn, add_special_tokens=False) for turn in family.turns]
    assert all(turn[-1] in chat.stop_token_ids for turn in turns)
    left = list(turns)
    engine = ScriptedEngine(lambda request: left.pop(0))
    rollout = MultiTurnRollout(engine, chat, ToolManager([get_weather]), progress=False)
    [out] = rollout([{"messages": [{"role": "user", "content": "Go."}]}])

    assert (out["error"], out["stop_reason"], len(engine.requests)) == (None, "stop", 2)
    said, *answers, last = out["messages"][1:]
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [
        {"city": "Rome", "days": 3},
        {"city": "Oslo"},
    ]
    assert tuple(call["id"] for call in said["tool_calls"]) == family.ids
    assert [(answer["tool_call_id"], answer["content"]) for answer in answers] == [
        (family.ids[0], "12 degrees in 'Rome', 3"),
        (family.ids[1], "12 degrees in 'Oslo', 1"),
    ]
    assert last["content"].strip() == "Cold."
    assert "<" not in said["content"] and "[" not in said["content"], "no mark is content"
    assert [t for t in out["labels"] if t != -100] == [t for turn in turns for t in turn]
    assert out["input_ids"] == rendered(family, tokenizer, source, out["messages"], turns[-1][-1])


def rendered(family: Family, tokenizer: Any, source: str, messages: list[dict[str, Any]], stop: int) -> list[int]:
    """The ids of the whole conversation in transformers' own render."""
    messages = copy.deepcopy(messages)
    messages[1]["content"] = messages[1]["content"].removesuffix(family.blank_before_calls)
    for message in messages:
        for call in message.get("tool_calls") or () if family.arguments_as_text else ():
            call["function"]["arguments"] = json_text(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(
        messages, tools=[get_weather.info()], tokenize=False, chat_template=source, add_generation_prompt=False
    )
    ids: list[int] = tokenizer.encode(text.replace(*family.written), add_special_tokens=False)
    return [*ids, stop] if family.stops_on_header else ids
