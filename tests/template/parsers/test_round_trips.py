"""What the real templates write for a call is read back as that call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from unspool.template.parsers import PARSERS, choose_parser
from unspool.template.thinking import split_thinking

HERMES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_training")
XML = (
    "qwen3_5_think",
    "qwen3_5_nothink",
    "qwen3_6",
    "qwen3_8",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
)
LLAMA = ("llama3_1", "llama3_2")
PYTHONIC = ("lfm2_v2", "lfm2_v2_training", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")
# These put strings between quotes as they are: nothing can tell a quote inside from the one that ends the string.
UNESCAPED = ("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")

PROPERTIES = {
    "city": {"type": "string"},
    "text": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "object"},
    "items": {"type": "array"},
    "yes": {"type": "boolean"},
    "none": {"type": ["string", "null"]},
    "empty": {"type": "string"},
    "digits": {"type": "string"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("look_up", "get-weather")
]
PLAIN: dict[str, Any] = {
    "city": "東京 🎉 é א",
    "days": 3,
    "ratio": -1.5,
    "deep": {"a": {"b": [1, True, None, "x"]}, "c": ""},
    "items": [1, [2], {"k": "v"}],
    "yes": False,
    "none": None,
    "empty": "",
    "digits": "42",
}
HARD: dict[str, Any] = {
    "text": 'it\'s "quoted", \\d+ C:\\path\n\n  <b>&amp;</b> </tool_call> }} {{ ]) , \t\r',
    "deep": {"q": "\"'\\", "n": "a\nb"},
}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": "", "function": {"name": name, "arguments": arguments}}


def read(templates: dict[str, str], template: str, turn: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = choose_parser(templates[template])
    assert parser is not None
    found = parser.parse(turn[split_thinking(turn, False).content_start :], TOOLS)
    assert [made.error for made in found.calls] == [None] * len(found.calls)
    return found.content, [(made.name, made.arguments) for made in found.calls]


ONE_CALL = [
    pytest.param(template, arguments, id=f"{template}-{kind}")
    for template in (*HERMES, *XML, *LLAMA, *PYTHONIC)
    for kind, arguments in (("none", {}), ("plain", PLAIN), ("hard", HARD))
    if not (kind == "hard" and template in UNESCAPED)
]


@pytest.mark.parametrize(("template", "arguments"), ONE_CALL)
def test_one_call_comes_back(
    templates: dict[str, str], turn_text: Callable[..., str], template: str, arguments: dict[str, Any]
) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call("look_up", arguments)]}
    content, calls = read(templates, template, turn_text(template, message, TOOLS))
    assert calls == [("look_up", arguments)]
    assert json.dumps(calls) == json.dumps([("look_up", arguments)])  # tells True from 1, and 3.0 from 3
    assert content.strip() == ""


@pytest.mark.parametrize("template", [*HERMES, *XML, *PYTHONIC])
def test_several_calls_and_the_text_before_them_come_back(
    templates: dict[str, str], turn_text: Callable[..., str], template: str
) -> None:
    made = [call("look_up", PLAIN), call("get-weather", {"city": "Rome"}), call("look_up", {})]
    message = {"role": "assistant", "content": "I look it up, `Action: x[1]`.", "tool_calls": made}
    content, calls = read(templates, template, turn_text(template, message, TOOLS))
    assert calls == [("look_up", PLAIN), ("get-weather", {"city": "Rome"}), ("look_up", {})]
    assert content.strip() == "I look it up, `Action: x[1]`."


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "qwen3_6", "lfm2_2_5_v2", "nemotron_3_nano"])
def test_thinking_before_the_calls_is_split_from_them(
    templates: dict[str, str], turn_text: Callable[..., str], template: str
) -> None:
    message = {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Could be <tool_call>.",
        "tool_calls": [call("look_up", {"days": 1})],
    }
    turn = turn_text(template, message, TOOLS)
    thinking = split_thinking(turn, False)
    if thinking.reasoning is None:
        turn = turn[turn.index("Could") :]  # the header ends with the opening tag
        thinking = split_thinking(turn, True)
    assert thinking.reasoning is not None and thinking.reasoning.strip() == "Could be <tool_call>."
    parser = choose_parser(templates[template])
    assert parser is not None
    found = parser.parse(turn[thinking.content_start :], TOOLS)
    assert (found.content.strip(), found.calls[0].arguments) == ("So.", {"days": 1})


class Characters:
    """A tokenizer of characters and two tags, as much of one as the oracle's parsers need."""

    unk_token_id = None
    tags = ("<tool_call>", "</tool_call>")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return -1 - self.tags.index(token) if token in self.tags else None

    def encode(self, text: str) -> list[int]:
        for number, tag in enumerate(self.tags):
            text = text.replace(tag, chr(0xE000 + number))
        return [-1 - (ord(char) - 0xE000) if char in "\ue000\ue001" else ord(char) for char in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.tags[-1 - token] if token < 0 else chr(token) for token in ids)


@pytest.mark.parametrize(("template", "oracle"), [("qwen3", "Qwen3ToolParser"), ("qwen3_6", "Qwen35ToolParser")])
def test_an_independent_parser_reads_the_same(
    templates: dict[str, str], turn_text: Callable[..., str], template: str, oracle: str
) -> None:
    parsers = pytest.importorskip("renderers.parsers")
    untyped = {"city": "東京", "deep": {"a": [1, None]}, "text": 'two\nlines and "quotes"'}
    made = [call("look_up", untyped), call("get-weather", {"city": "Rome"})]
    turn = turn_text(template, {"role": "assistant", "content": "Hi", "tool_calls": made}, TOOLS)
    turn = turn[split_thinking(turn, False).content_start :]
    _, theirs = getattr(parsers, oracle)(Characters()).extract(Characters().encode(turn))
    parser = choose_parser(templates[template])
    assert parser is not None
    ours = parser.parse(turn, TOOLS).calls
    assert [(made.name, made.arguments) for made in ours] == [(made.name, made.arguments) for made in theirs]


def test_every_parser_is_tried_here() -> None:
    elsewhere = {"mistral", "deepseek", "deepseek_dsml", "glm", "kimi_k2"}  # test_marked_round_trips, test_families
    elsewhere |= {"harmony", "gemma4", "react", "cline"}  # each in a file of its own
    assert set(PARSERS) == {"hermes", "qwen3_coder", "llama3_json", "pythonic"} | elsewhere
