"""What the benchmarks on a real model share: the embedded model, and a world that answers with as many tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.workload import UnavailableError
from unspool import ToolManager
from unspool.types import Message, MissingExtraError
from unspool.world import Step

ANSWER = 40
"""Tokens of a tool's answer."""


class Endless(ToolManager):
    """Answers every turn with the same text, whether it called a tool or not."""

    def __init__(self, text: str) -> None:
        super().__init__([])
        self._text = text

    def wants(self, message: Message) -> bool:
        return True

    async def step(self, message: Message) -> Step:
        return Step([{"role": "tool", "name": "lookup", "content": self._text}])


@cache
def folder() -> Path:
    """Where the embedded model is.

    Raises:
        UnavailableError: it cannot be made here.
    """
    from unspool.engines.embedded import ensure_embedded_model

    try:
        return ensure_embedded_model()
    except MissingExtraError as missing:
        raise UnavailableError(str(missing)) from None


def answer_text(tokenizer: Any, tokens: int) -> str:
    """A text of exactly so many tokens."""
    words = " ship harbour rope sail anchor deck lamp wind" * tokens
    ids = tokenizer.encode(words, add_special_tokens=False)[:tokens]
    text: str = tokenizer.decode(ids)
    if len(tokenizer.encode(text, add_special_tokens=False)) != tokens:
        raise RuntimeError(f"no text of {tokens} tokens with this tokenizer")
    return text
