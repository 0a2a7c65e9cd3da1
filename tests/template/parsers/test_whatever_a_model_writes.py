"""Whatever a model writes: no exception, spans in order and disjoint, the rest of the text kept, in linear time."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.template.parsers import PARSERS, MarkedParser, ParsedText, ToolParser, TurnParser

HERMES = (
    'Hi <tool_call>\n{"name": "f", "arguments": {"x": "a\\"b", "n": [1, {}]}}\n</tool_call>\n<tool_call>{"name": "g"}'
)
XML = (
    "Hi\n<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n</function>\n"
    "</tool_call>\n<function=g>\n</function>"
)
LLAMA = '{"name": "f", "parameters": {"x": "a\\"b"}}; {"name": "g", "parameters": {}}<|python_tag|>h.call(a="b")'
PYTHONIC = "Hi <|tool_call_start|>[f(x='a\\'b', n=[1, {'k': True}]), g()]<|tool_call_end|> so"
MISTRAL = (
    'Hi [TOOL_CALLS] [{"name": "f", "arguments": {"x": "a\\"b"}, "id": "012345678"}, {"name": "g", "arguments": {}}] so'
    '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": "a\\"b", "n": [1, {}]}[TOOL_CALLS]g[ARGS]{}'
)
DEEPSEEK = (
    "Hi <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"x": "a\\"b", "n": [1, {}]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}'
    '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> so <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "y"}<｜tool▁call▁end｜>'
)
DSML = (
    'Hi\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="true">a\n'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1, {}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls> so'
)
GLM = (
    "Hi\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>n</arg_key>\n<arg_value>[1]</arg_value>\n"
    "</tool_call>\n<tool_call>g\n</tool_call> so <tool_call>g<arg_key>k</arg_key><arg_value>1</arg_value></tool_call>"
)
KIMI = (
    "Hi <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": "a\\"b", "n": [1, {}]}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|> so"
)
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Hi<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "a\\"b", "n": [1, {}]}'
    "<|call|>"
    "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
    "<|start|>assistant<|channel|>final<|message|>so<|return|>"
)
GEMMA4 = (
    '<|channel>thought\nhm\n<channel|>Hi <|tool_call>call:f{n:[1,-2.5,{k:true}],x:<|"|>a,"b}<|"|>}<tool_call|>'
    "<|tool_call>call:g{}<tool_call|> so"
)
REACT = (
    'Thought: hm\nAction: f\nAction Input: {"x": "a\\"b", "n": [1, {}]}\nAction: g[{"k": "]"}]\nAction 3: g[a [1] b]\n'
    "Observation: 3\nAction: f[x]"
)
CLINE = (
    "<thinking>hm <f>\n</f> <f><x>b</x></f></thinking>\nHi <f>\n<x>\na</x> <b>\n</x>\n<n>[1]</n>\n</f> so\n<f>\n</f>"
)
VALID = {
    "hermes": HERMES,
    "qwen3_coder": XML,
    "llama3_json": LLAMA,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "deepseek_dsml": DSML,
    "glm": GLM,
    "kimi_k2": KIMI,
    "harmony": HARMONY,
    "gemma4": GEMMA4,
    "react": REACT,
    "cline": CLINE,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"x": {"type": "string"}, "n": {"type": "array"}}},
        },
    }
]
PIECES = (
    "<tool_call>", "</tool_call>", "<function=", "f", ">", "</function>", "<parameter=", "x", "</parameter>", "\n", " ",
    "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "(", ")", "{", "}", '"name"', '"arguments"',
    '"parameters"', '"f"', ":", ",", "=", "'", '"', "\\", "1", "-", ".", "e", "null", "true", "NaN", "\\u12", "\ud800",
    "é", "#", ";", "r'", '"""', "<think>", "\x00",
    "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json", "```", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "functions.f:0", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="x" string="true">',
    '<｜DSML｜parameter name="n" string="false">', "</｜DSML｜parameter>",
    "<|start|>", "assistant", " to=functions.f", "<|channel|>", "analysis", "<|constrain|>", "<|message|>", "<|end|>",
    "<|call|>", "<|return|>", "<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "<|channel>", "<channel|>",
    "<|tool_response>", "Action:", "Action Input:", "Observation:", "Thought:", "Finish", "<f>", "</f>", "<x>", "</x>",
    "<thinking>", "</thinking>",
)  # fmt: skip

parsers = pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def in_order(part: str, text: str) -> bool:
    """Whether the characters of `part`, line breaks aside, stand in `text` in this order."""
    left = iter(text)
    return part in text or all(char in left for char in part if char != "\n")


def check(parser: ToolParser, text: str) -> ParsedText:
    read = parser.parse(text, TOOLS)
    at, rest = 0, ""
    for call in read.calls:
        assert at <= call.start < call.end <= len(text)
        rest += text[at : call.start]
        at = call.end
        if call.status == "ok":
            assert call.error is None and isinstance(call.arguments, dict) and call.name
        else:
            assert call.status in ("bad_json", "unclosed")
            assert call.error and isinstance(call.arguments, str)
    rest += text[at:]
    if isinstance(parser, TurnParser):  # headers are left out, and parts are joined by line breaks
        assert in_order(read.content, rest) and in_order(read.reasoning or "", rest)
    elif read.reasoning is not None:
        assert parser.name == "cline" and "<thinking>" in rest
        assert in_order(read.content, rest) and in_order(read.reasoning, rest)
    else:
        assert read.content == rest
    return read


@parsers
@many
@given(text=st.text(alphabet=st.characters()))
def test_any_text_is_read(parser: ToolParser, text: str) -> None:
    check(parser, text)


@parsers
@many
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_heap_of_the_formats_own_pieces_is_read(parser: ToolParser, pieces: list[str]) -> None:
    check(parser, "".join(pieces))


@parsers
@pytest.mark.parametrize("text", VALID.values(), ids=VALID)
def test_a_valid_turn_cut_anywhere_is_read(parser: ToolParser, text: str) -> None:
    for end in range(len(text) + 1):
        check(parser, text[:end])
        check(parser, text[end:])


@parsers
@many
@given(data=st.data())
def test_a_valid_turn_with_parts_moved_doubled_or_lost_is_read(parser: ToolParser, data: st.DataObject) -> None:
    text = VALID[parser.name]
    for _ in range(data.draw(st.integers(1, 4))):
        left, right = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        at = data.draw(st.integers(0, len(text)))
        part, lost = text[left:right], data.draw(st.booleans())
        text = text[:left] + text[right:] if lost else text[:at] + part + text[at:]
    check(parser, text)


@pytest.mark.parametrize("name", [name for name, parser in PARSERS.items() if isinstance(parser, MarkedParser)])
@many
@given(data=st.data())
def test_only_openings_that_count_open_calls(name: str, data: st.DataObject) -> None:
    parser, text = PARSERS[name], VALID[name]
    assert isinstance(parser, MarkedParser)
    assert parser.parse(text, TOOLS, at=set()) == ParsedText(text, [])
    places = [match.start() for word in parser.openings for match in re.finditer(re.escape(word), text)]
    assert parser.parse(text, TOOLS, at=places) == parser.parse(text, TOOLS)
    counted = data.draw(st.sets(st.sampled_from(places)))
    read = parser.parse(text, TOOLS, at=counted)
    end = 0
    for call in read.calls:
        assert end <= call.start < call.end <= len(text)
        assert call.start == end or any(call.start <= place < call.end for place in counted)
        end = call.end


@parsers
def test_a_cut_turn_has_no_call_that_the_whole_turn_has_not(parser: ToolParser) -> None:
    text = VALID[parser.name]
    whole = [(call.name, call.arguments) for call in check(parser, text).calls if call.status == "ok"]
    assert len(whole) >= 2
    for end in range(len(text)):
        cut = [(call.name, call.arguments) for call in check(parser, text[:end]).calls if call.status == "ok"]
        assert cut == whole[: len(cut)]


def hostile(size: int) -> dict[str, str]:
    """Texts of `size` characters in which a parser that looks back or ahead too often loses itself."""
    units = [
        *PIECES,
        '<tool_call>{"',
        "<tool_call>{",
        '<tool_call>{"a": ["',
        '<tool_call>{"a": "\\x',
        '<tool_call>{"name": "f"} ',
        '<tool_call>{"name": "f"} x',
        '<tool_call>{"k":["</tool_call><tool_call>{","</tool_call>',
        "<tool_call><function=f><parameter=x>",
        "<tool_call><function=f><parameter=x></function></tool_call>",
        "<tool_call><function=f><parameter=x>1</parameter> ",
        "<function=f>\n",
        "</function>   ",
        "<|tool_call_start|>[",
        "<|tool_call_start|>['",
        "<|tool_call_start|>[f(a='",
        '<|tool_call_start|>[f(a="it\'s", ',
        "<|tool_call_start|>[f()]x",
        "<|python_tag|>",
        "<|python_tag|>{",
        '<|python_tag|>{"a": "',
        '<|python_tag|>{"name": "\\d',
        "<|python_tag|>f.call(",
        '{"a": ',
        "{'a': ",
        '\\"',
        "f(",
        "a=1, ",
        "[1]",
        "1_",
        "1e",
        '"" ',
        "'''",
        '"a": 1, ',
        "[TOOL_CALLS]f[ARGS]{",
        '[TOOL_CALLS]f[ARGS]{"a": "',
        '[TOOL_CALLS]f[ARGS]{"a": "\\x',
        "[TOOL_CALLS]f[ARGS]{} ",
        "[TOOL_CALLS][{",
        '{"name": "f"}, ',
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜invoke name="f"></｜DSML｜invoke> ',
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">',
        '<｜DSML｜parameter name="x" string="false">{}</｜DSML｜parameter>',
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} ",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "',
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}x<｜tool▁call▁end｜>",
        "<tool_call>f<arg_key>x</arg_key><arg_value>",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value>",
        "<arg_key>x</arg_key><arg_value>1</arg_value>",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "\\',
    ]
    openings = ("", "<tool_call>", '<tool_call>{"name": "', "[f(a=", "<|tool_call_start|>[f(a=", '{"name": "f", ')
    openings += ("[TOOL_CALLS][", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<tool_call>f<arg_key>x</arg_key><arg_value>")
    openings += ('<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">',)
    chosen = random.Random(0).choices(openings, k=len(units))
    texts = {f"{unit!a} on end": unit * (size // len(unit)) for unit in units}
    for unit, opening in zip(units, chosen, strict=True):
        texts[f"{opening!a} then {unit!a} on end"] = opening + unit * (size // len(unit))
    keys = ", ".join(f'"{number}": 1' for number in range(size // 13))
    texts["many keys, the last one twice"] = (
        f'<tool_call>{{"name": "f", "arguments": {{{keys}, "{size // 13 - 1}": 2}}}}'
    )
    texts["deep json"] = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (size // 5)
    texts["blanks"] = "<tool_call>" + " " * size + "</tool_call>"
    return texts


@parsers
@pytest.mark.parametrize("size", [50_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_hostile_texts_take_linear_time(parser: ToolParser, size: int) -> None:
    slow = {}
    for name, text in hostile(size).items():
        begun = time.process_time()
        check(parser, text)
        spent = time.process_time() - begun
        if spent > size / 20_000:  # far above what any takes, on a busy machine too; a quadratic reading takes minutes
            slow[name] = spent
    assert not slow
