"""Hermes, Qwen2.5, Qwen3, MiniMind: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The object ends where its JSON ends; a `</tool_call>` inside one of its strings is text. A missing closing tag behind a
whole object is no fault. Several objects in one pair of tags are several calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.json_calls import Decoded, broken_call, call_from, decode_at, skip_blank
from unspool.types import ToolInfo

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """JSON calls between `<tool_call>` tags."""

    name = "hermes"

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls in `text`; the format carries its own types, so `tools` is not needed."""
        return parsed(text, _calls(text))


def _calls(text: str) -> Iterator[ParsedCall]:
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        at = start + len(OPEN)
        for call in _block(text, start):
            at = call.end
            yield call


def _block(text: str, start: int) -> Iterator[ParsedCall]:
    """The calls of the block whose opening tag stands at `start`; they lie side by side up to the block's end."""
    opened = start + len(OPEN)
    while True:
        decoded = decode_at(text, opened)
        if decoded.error is not None:
            yield broken_call(text, opened, start, _resume(text, decoded.end, opened), decoded)
            return
        after = skip_blank(text, decoded.end)
        raw = text[opened : decoded.end]
        if text.startswith(CLOSE, after):
            yield call_from(decoded.value, raw, start, after + len(CLOSE))
            return
        if not text.startswith("{", after):
            yield _left_open(text, decoded, opened, start)
            return
        yield call_from(decoded.value, raw, start, decoded.end)
        start = opened = decoded.end


def _left_open(text: str, decoded: Decoded, opened: int, start: int) -> ParsedCall:
    """A whole value with neither a closing tag nor another object right behind it."""
    following = text.find(OPEN, decoded.end)
    stop = following if following >= 0 else len(text)
    close = text.find(CLOSE, decoded.end, stop)
    if close < 0:
        # Nothing closes the block; what follows is not part of it.
        return call_from(decoded.value, text[opened : decoded.end], start, decoded.end)
    junk = text[decoded.end : close].strip()[:40]
    fault = Decoded(None, decoded.end, f"invalid JSON: extra text behind the object: {junk}")
    return broken_call(text, opened, start, close + len(CLOSE), fault)


def _resume(text: str, at: int, opened: int) -> int:
    """Where the text goes on behind a call that could not be read: behind its closing tag, or at the next opening."""
    at = max(at, opened)
    following = text.find(OPEN, at)
    stop = following if following >= 0 else len(text)
    close = text.find(CLOSE, at, stop)
    return close + len(CLOSE) if close >= 0 else stop
