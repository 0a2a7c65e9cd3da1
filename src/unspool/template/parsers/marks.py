"""Where a format's control words stand in a turn, in order.

Where the words are tokens of the tokenizer, a model can also spell one out, letter by letter: that is text which quotes
the format, and no control word. Only ids can tell the two apart, so a reader of ids says where the tokens stand.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple


class Mark(NamedTuple):
    """A control word and the characters [start, end) where it stands."""

    word: str
    start: int
    end: int


def find_marks(text: str, words: Sequence[str], at: Collection[int] | None = None) -> list[Mark]:
    """Every control word in `text`; `at`: the positions where they count, None for all."""
    found = (Mark(match[0], match.start(), match.end()) for match in _pattern(tuple(words)).finditer(text))
    return [mark for mark in found if at is None or mark.start in at]


def next_opening(
    pattern: re.Pattern[str], text: str, position: int, at: Collection[int] | None = None
) -> re.Match[str] | None:
    """The next match from `position` on that begins where opening words count (`at`; None: anywhere)."""
    match = pattern.search(text, position)
    while match is not None and at is not None and match.start() not in at:
        match = pattern.search(text, match.end())
    return match


def first_from(marks: Sequence[Mark], position: int) -> int:
    """The index of the first mark that starts at `position` or behind it."""
    return bisect_left(marks, position, key=lambda mark: mark.start)


@lru_cache(maxsize=16)
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
