"""Rollouts without a model: a tokenizer made on the spot, and an engine that says the lines that it is given.

For examples, and for tests of tools, environments, limits and rewards. The tokenizer is real (byte-level BPE with
ChatML's two control tokens), so prompts, bridges and masks are what a model would get; only the answers are written.

    template = small_template()
    engine = says(template, call("add", a=12, b=7), "It is 19.")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unspool import ChatTemplate, GenerateRequest, ScriptedEngine

CHATML = """
{%- if tools -%}
    {{- "<|im_start|>system\nTools:\n" -}}
    {%- for tool in tools -%}{{- tool | tojson ~ "\n" -}}{%- endfor -%}
    {{- 'Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" ~ message.role ~ "\n" ~ (message.content or "") -}}
    {%- for call in message.tool_calls or [] -%}
        {{- "<tool_call>" ~ (call.function | tojson) ~ "</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""


def small_template() -> ChatTemplate:
    """A ChatML template over a tokenizer of 258 tokens: one for each byte, and the two that open and close a turn."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    return ChatTemplate(tokenizer, chat_template=CHATML)


def call(name: str, **arguments: Any) -> str:
    """The text of one tool call, as a model would write it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def says(template: ChatTemplate, *lines: str, **options: Any) -> ScriptedEngine:
    """An engine that says these lines in every conversation, one a turn, and the last one from then on.

    `options` go to `ScriptedEngine`; log-probabilities (-1.0 for each token) are on unless they say otherwise.
    """
    turns: dict[str, int] = {}

    def reply(request: GenerateRequest) -> Sequence[int]:
        turn = turns.get(request.session, 0)
        turns[request.session] = turn + 1
        text = lines[min(turn, len(lines) - 1)]
        ids: list[int] = template.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        return ids

    return ScriptedEngine(reply, **{"logprobs": True, **options})
