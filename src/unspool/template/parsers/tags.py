"""Formats that write a call as tags: what one reading of a call gives, and how far a broken call reaches.

What this module promises: behind a fault in a value nothing is believed to be a call any more, as the value may quote
it; behind any other fault the text is trusted again from the next opening on.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from unspool.template.parsers.base import ParsedCall

_BLANK = re.compile(r"\s*+")


class TagsRead(NamedTuple):
    """A call's tags, read up to `end`. `inside` says that a fault lies behind or in a value."""

    name: str
    arguments: dict[str, Any]
    end: int
    error: str | None = None
    inside: bool = False
    complete: bool = True


def unfinished(
    text: str,
    start: int,
    opened: int,
    read: TagsRead,
    *,
    opening: re.Pattern[str],
    closing: str,
    behind: int,
    suspect: re.Pattern[str] | None = None,
) -> ParsedCall:
    """The call whose tags could not be read to their end, up to where the text can be trusted again.

    Args:
        start, opened: where the call begins in the text, and where its own tags do.
        opening, closing: what begins another call, and what ends this one.
        behind: where the next opening may stand at the earliest.
        suspect: what begins a call behind a broken value, where that is more than `opening`.
    """
    if read.inside:
        # A call that follows may be quoted by the broken value; it must not run.
        stop, close = len(text), text.rfind(closing, read.end)
        if close >= 0 and (suspect or opening).search(text, close):
            close = -1
    else:
        following = opening.search(text, behind)
        stop = following.start() if following else len(text)
        close = text.find(closing, read.end, stop)
    end = close + len(closing) if close >= 0 else stop
    cut = close < 0 and stop == len(text)
    raw = text[opened : close if close >= 0 else stop]
    return ParsedCall(read.name, raw, start, end, "unclosed" if cut else "bad_json", read.error)


def skip_layout(text: str, at: int) -> int:
    """The position behind the blanks and line breaks at `at`."""
    match = _BLANK.match(text, at)
    return match.end() if match else at
