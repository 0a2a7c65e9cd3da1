"""Beginnings that many texts share, encoded once: a system prompt with its tools, or the whole prompt of a group.

A text is cut only where an added token starts that splits it whatever stands around it, so the ids of the two parts,
joined, are those of the whole; that they are is checked besides when a beginning is learned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

SHORTEST = 256
"""Characters that a beginning has at least: what is shorter costs less than the bookkeeping."""
_MOST = 8


class _Head(NamedTuple):
    start: str  # the beginning, and the token that follows it
    cut: int  # where that token starts
    ids: tuple[int, ...]  # of the beginning alone


class Heads:
    """The shared beginnings of one tokenizer's texts.

    Args:
        encode: encodes a whole text.
        added: the text of every added token.
        splitting: those that can be cut at, see `splitting_tokens`.
    """

    def __init__(self, encode: Callable[[str], list[int]], added: Collection[str], splitting: Sequence[str]) -> None:
        self._encode = encode
        self._added = added
        self._token = re.compile("|".join(map(re.escape, sorted(splitting, key=len, reverse=True))))
        self._known: tuple[_Head, ...] = ()  # the latest first
        self._previous = ""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, the same as `encode` of the whole gives."""
        for head in self._known:
            if text.startswith(head.start):
                return [*head.ids, *self._encode(text[head.cut :])]
        ids = self._encode(text)
        if text[:SHORTEST] == self._previous[:SHORTEST]:
            self._learn(text, ids)
        self._previous = text
        return ids

    def _learn(self, text: str, ids: list[int]) -> None:
        """Keep what a text has in common with the one before, up to the last place to cut."""
        places = list(self._token.finditer(text, 0, _common(text, self._previous)))
        if not places or (last := places[-1]).start() < SHORTEST:
            return
        cut, token = last.start(), last[0]
        if any(token in other and not other.startswith(token) for other in self._added):
            return  # behind other text, the longer one could be there instead
        beginning = self._encode(text[:cut])
        if beginning + self._encode(text[cut:]) == ids:
            self._known = (_Head(text[: last.end()], cut, tuple(beginning)), *self._known[: _MOST - 1])


def _common(one: str, other: str) -> int:
    """How many characters at the start are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def splitting_tokens(backend: Any) -> list[str]:
    """Added tokens that are found in a text as it was given, and take nothing from what stands to their left."""
    return [
        token.content
        for token in backend.get_added_tokens_decoder().values()
        if token.special and not (token.normalized or token.lstrip or token.single_word)
    ]
