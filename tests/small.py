"""A small real tokenizer (byte-level BPE, ChatML) made on the spot, for tests that need no particular family."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import unspool
from unspool import (
    ChatTemplate,
    GenerateRequest,
    Generation,
    MultiTurnRollout,
    ScriptedEngine,
    ToolManager,
    calculator,
)

_TEXT = [
    "You are a helpful assistant that may call tools. What is the weather in Paris today?",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 7"}}\n</tool_call>',
    "The answer is 42. Hello there. Error: invalid JSON in arguments.",
]
TEMPLATE = Path(unspool.__file__).parent / "engines/assets/smollm2_tools/chat_template.jinja"


@cache
def small_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(_TEXT * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")


@cache
def small_template() -> ChatTemplate:
    return ChatTemplate(small_tokenizer(), chat_template=TEMPLATE.read_text(encoding="utf-8"))


def ids(text: str) -> list[int]:
    """The ids of a text in which `<|im_end|>` is the token."""
    encoded: list[int] = small_tokenizer().encode(text, add_special_tokens=False)
    return encoded


def say(text: str) -> list[int]:
    """A turn as a model would sample it, stop token included."""
    return ids(text + "<|im_end|>")


def call(name: str, **arguments: Any) -> str:
    """The text of one call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def user(text: str, **more: Any) -> dict[str, Any]:
    """A trajectory with one user message."""
    return {"messages": [{"role": "user", "content": text}], **more}


def script(*turns: str | Generation | Exception, **options: Any) -> ScriptedEngine:
    """An engine that says these turns in order, in every session."""
    return by_session(lambda request: turns, **options)


def by_session(
    lines: Callable[[GenerateRequest], Sequence[str | Generation | Exception]], **options: Any
) -> ScriptedEngine:
    """An engine that says the turns that `lines` gives for the first request of a session."""
    told: dict[str, list[str | Generation | Exception]] = {}

    def reply(request: GenerateRequest) -> Generation | list[int]:
        left = told.setdefault(request.session, list(lines(request)))
        turn = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(turn, Exception):
            raise turn
        return turn if isinstance(turn, Generation) else say(turn)

    return ScriptedEngine(reply, **options)


CALC = call("calculator", expression="12 + 7")


def rollout(engine: Any, tools: Any = "calculator", **options: Any) -> MultiTurnRollout:
    """A quiet rollout with the small template, and the calculator where no other tools (or None) are given."""
    manager = ToolManager([calculator]) if tools == "calculator" else tools
    return MultiTurnRollout(engine, small_template(), manager, progress=False, **options)
