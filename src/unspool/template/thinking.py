"""Thinking at the head of a turn: `<think>...</think>`, or thinking that the prompt has already opened.

Thinking that is never closed is all there is to the turn: its content is empty, so no call inside it is ever executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"

_OPENED_HERE = re.compile(rf"\s*+{re.escape(OPEN)}")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where the thinking of a turn ends. `reasoning` is as written, newlines included; None where there is none."""

    reasoning: str | None
    content_start: int


def split_thinking(text: str, opened: bool) -> Thinking:
    """Split a turn's text into thinking and what follows it.

    Args:
        text: the sampled turn.
        opened: the prompt ended inside thinking (it wrote the opening tag itself).

    Returns:
        The thinking between the tags, and the position at which content begins: behind the first closing tag and
        the newlines that follow it (chat templates take those for layout). Without thinking, content begins at 0.
    """
    start = 0
    if not opened:
        match = _OPENED_HERE.match(text)
        if match is None:
            return Thinking(None, 0)
        start = match.end()
    close = text.find(CLOSE, start)
    if close < 0:
        return Thinking(text[start:], len(text))
    at = close + len(CLOSE)
    while at < len(text) and text[at] == "\n":
        at += 1
    return Thinking(text[start:close], at)
