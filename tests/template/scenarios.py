"""Conversations that go on behind a model's turn, and where in a template's own full render they go on.

Everything here is independent of unspool: renders and ids are those of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests import families

SAID = "MarkSaid7"
ASKED = "MarkAsked7"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {what}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
    for name, what in (("get_weather", "weather"), ("get_time", "time"))
]

# ---------------------------------------------------------------------------- what templates are like, by hand

STOPS: tuple[tuple[str, str, str], ...] = (
    # template, stop behind text, stop behind calls; the first row that begins the template's name
    ("cohere", "<|END_OF_TURN_TOKEN|>", ""),
    ("deepseek", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ("diffusion_gemma", "<turn|>", "<|tool_response>"),
    ("gemma4_v2", "<turn|>", "<turn|>"),
    ("gemma4", "<turn|>", "<|tool_response>"),
    ("gemma", "<end_of_turn>", ""),
    ("gptoss", "<|end|>", "<|call|>"),
    ("idefics3", "<end_of_utterance>", ""),
    ("smolvlm", "<end_of_utterance>", ""),
    ("lfm2", "<|im_end|>", "<|im_end|>"),
    ("llama3", "<|eot_id|>", "<|eot_id|>"),
    ("llava_next", "</s>", ""),
    ("muse_glimmer", "<|eot|>", "<|eot|>"),
    ("nemotron", "<|im_end|>", "<|im_end|>"),
    ("phi3", "<|end|>", ""),
    ("qwen", "<|im_end|>", "<|im_end|>"),
)
HEADERS = {"tool": "<|observation|>", "user": "<|user|>"}
"""What GLM stops on instead: the header of the next turn."""

PARTS = ("idefics3", "smolvlm", "llava_next")
"""Templates that read contents as lists of parts."""

ARGUMENTS_AS_TEXT = ("deepseekv3",)
"""Templates that take arguments as JSON text."""

CALLS_NOT_RENDERED = ("llama3", "qwen2_5_vl", "idefics3", "smolvlm", "deepseek_r1_distill", "lfm2", "lfm2_training")
"""Templates that have (or let pass) a tool role, but write no calls."""


def _listed(template: str, names: Sequence[str]) -> bool:
    return template.removesuffix("_training") in names or template in names


def renders_calls(template: str) -> bool:
    return not _listed(template, CALLS_NOT_RENDERED)


def content(template: str, text: str) -> Any:
    return [{"type": "text", "text": text}] if _listed(template, PARTS) else text


def user(template: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": content(template, text)}


def tool(template: str, text: str, name: str = "get_weather", call: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": f"call_{call}", "content": content(template, text)}


def said(template: str, text: str = SAID) -> dict[str, Any]:
    """A turn of text."""
    return {"role": "assistant", "content": content(template, text)}


def asked(template: str, names: Sequence[str] = ("get_weather",), text: str = "", mark: str = ASKED) -> dict[str, Any]:
    """A turn of calls, or of text where the template writes no calls."""
    if not renders_calls(template):
        return said(template, mark)
    arguments: Any = {"city": mark}
    if _listed(template, ARGUMENTS_AS_TEXT):
        arguments = json.dumps(arguments)
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content(template, text), "tool_calls": calls}


@dataclass(frozen=True)
class Expected:
    """A full render, cut behind a model's turn: `before` ends in what was sampled, `tail` is the rest."""

    before: list[int]
    tail: list[int]


def full_render(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> tuple[str, list[int], list[int]]:
    """Text, ids, and where in the text each id begins."""
    tokenizer = families.tokenizer_for(template)
    source = families.trl_templates()[template]
    common: dict[str, Any] = {"tools": TOOLS, "chat_template": source, "add_generation_prompt": True, **kwargs}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **common)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # as tokenize=True does
    return text, encoding["input_ids"], [begin for begin, _ in encoding["offset_mapping"]]


def behind_stop(template: str, messages: list[dict[str, Any]], mark: str, **kwargs: Any) -> Expected:
    """The render cut behind the first stop token that follows the last `mark`."""
    text, ids, begins = full_render(template, messages, **kwargs)
    at = text.rindex(mark) + len(mark)
    by_call = mark.startswith(ASKED) and renders_calls(template)
    if template.startswith("glm"):
        following = next(m["role"] for i, m in enumerate(messages) if i and mark in json.dumps(messages[i - 1]))
        stop = HEADERS[following]
    else:
        row = next(row for row in STOPS if template.startswith(row[0]))
        stop = row[2] if by_call else row[1]
    where = text.index(stop, at)
    index = begins.index(where)
    assert ids[index] == families.tokenizer_for(template).convert_tokens_to_ids(stop), "the stop is one token"
    return Expected(ids[: index + 1], ids[index + 1 :])


def behind_text(template: str, messages: list[dict[str, Any]], mark: str = SAID) -> Expected:
    """The render cut directly behind the mark: what was sampled has no stop token."""
    text, ids, begins = full_render(template, messages)
    at = text.rindex(mark) + len(mark)
    index = next(index for index, begin in enumerate(begins) if begin >= at)
    assert begins[index] == at or text[at : begins[index]].isspace(), "the mark ends where a token does"
    return Expected(ids[:index], ids[index:])
