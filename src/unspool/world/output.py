"""What a tool returned, as text that a model can read.

`render` gives text for any value, at most `limit` characters of it, and the text is always valid Unicode: bytes
and lone surrogates become U+FFFD where they say nothing. It takes a bounded number of pieces from a stream (a
generator, any iterator), so that one that never ends still gives an answer. What it cannot promise is that a
value's own methods return: it runs where the tool ran, inside the tool's time-out.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Set
from enum import Enum
from typing import Any, NamedTuple

_SURROGATE = re.compile("[\ud800-\udfff]")
_SMALL_LIMIT = 100  # below this a marker inside the limit would leave no room for text
_MAX_PIECES = 100_000  # of one stream; a stream of empty pieces has to end somewhere
_PIECES_A_BREATH = 64  # an async stream that never waits must still let its time-out fire


class Rendered(NamedTuple):
    """Text for the model, and how it was shortened: None where it was not."""

    text: str
    cut: str | None = None


def render(value: object, limit: int, deadline: float | None = None) -> Rendered:
    """`value` as text of at most `limit` characters.

    `deadline`, on `time.monotonic`'s clock, is when a stream stops being read.

    Raises:
        Whatever the value's own methods raise; ValueError or RecursionError for structures without an end.
    """
    if not isinstance(value, str) and isinstance(value, Iterator):
        return _join(_pieces(value, limit, deadline), limit)
    return shorten(_text(value), limit)


async def render_stream(stream: AsyncIterator[object], limit: int) -> Rendered:
    """As `render`, for an async stream, which is closed where it is left before its end."""
    import asyncio

    pieces: list[str] = []
    kept, ended = 0, True
    async for value in stream:
        pieces.append(_text(value))
        kept += len(pieces[-1])
        if kept > limit or len(pieces) >= _MAX_PIECES:
            ended = False
            break
        if len(pieces) % _PIECES_A_BREATH == 0:
            await asyncio.sleep(0)
    close = getattr(stream, "aclose", None)
    if not ended and close is not None:
        await close()
    return _join((pieces, ended), limit)


def _pieces(stream: Iterator[object], limit: int, deadline: float | None) -> tuple[list[str], bool]:
    """The pieces of a stream until they pass the limit, and whether that was all of them."""
    pieces: list[str] = []
    kept = 0
    for value in stream:
        pieces.append(_text(value))
        kept += len(pieces[-1])
        late = deadline is not None and time.monotonic() > deadline
        if kept > limit or late or len(pieces) >= _MAX_PIECES:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
            return pieces, False
    return pieces, True


def _join(read: tuple[list[str], bool], limit: int) -> Rendered:
    pieces, ended = read
    text = "".join(pieces)
    if ended:
        return shorten(text, limit)
    # How much more there was is unknown, so the beginning is what can be kept.
    marker = "\n[... the rest was left out ...]"
    kept = limit - len(marker) if limit >= _SMALL_LIMIT else limit
    return Rendered(clean(text[:kept]) + marker, f"was a stream, of which the first {min(kept, len(text))} characters")


def shorten(text: str, limit: int) -> Rendered:
    """`text` in at most `limit` characters, cut in the middle, with a marker that says how many are missing.

    Only what is kept is copied. Limits under 100 are for the text alone; the marker then comes on top.
    """
    if len(text) <= limit:
        return Rendered(clean(text))
    room = limit
    if limit >= _SMALL_LIMIT:
        room -= len(_marker(len(text)))
    head, tail = room - room // 2, room // 2
    end = text[-tail:] if tail else ""
    cut = f"was {len(text)} characters long, of which {room}"
    return Rendered(clean(text[:head]) + _marker(len(text) - room) + clean(end), cut)


def _marker(left_out: int) -> str:
    return f"\n[... {left_out} characters left out ...]\n"


def clean(text: str) -> str:
    """`text` as valid Unicode: surrogate pairs are joined, lone ones become U+FFFD."""
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        # An enum or another subclass may write itself differently; its characters are what it is.
        return str.__str__(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if _is_structure(value):
        try:
            return json.dumps(value, ensure_ascii=False, default=_plain)
        except TypeError:  # keys that JSON has no form for
            return str(value)
    return str(value)


def _is_structure(value: object) -> bool:
    if isinstance(value, dict | list | tuple | Mapping | Set):
        return True
    return not isinstance(value, type) and (dataclasses.is_dataclass(value) or _has(value, "model_dump"))


def _has(value: object, method: str) -> bool:
    """Asked of the type: an instance may answer yes to any name."""
    return callable(getattr(type(value), method, None))


def _plain(value: Any) -> Any:
    """What stands for `value` inside JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    if isinstance(value, type):
        return str(value)
    if _has(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if _has(value, "tolist"):  # numpy and torch, scalars too
        return value.tolist()
    return str(value)
