"""Calls as Python writes them: LFM2's `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`, Llama 4's bare `[f(a=1)]`.

The list ends at its own closing bracket; tags inside its strings are text. Each call of it stands alone: one that
cannot be read does not spoil its neighbours. The bare form is a call only if it is all there is to the turn, for in
prose `[see(1)]` is prose. Items written as JSON objects, which LFM2 writes where it is asked to, are calls as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.json_calls import broken_call, call_from, decode_at, skip_blank
from unspool.template.parsers.literals import Scan, called_name, read_call, scan
from unspool.types import InvalidValueError, ToolInfo

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"

_BARE = re.compile(r"\s*+(?:<\|python_start\|>\s*+)?(?=\[\s*+[^\W\d][\w.\-]*+\s*+\()")
_TAIL = re.compile(r"(?:\s++|<\|\w++\|>)*+")


class PythonicParser:
    """Lists of Python calls, in tags or bare."""

    name = "pythonic"

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls in `text`; the format carries its own types, so `tools` is not needed."""
        if OPEN in text:
            return parsed(text, _tagged(text))
        return parsed(text, _bare(text))


def _tagged(text: str) -> Iterator[ParsedCall]:
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        opened = skip_blank(text, start + len(OPEN))
        calls = _block(text, start, opened) if text.startswith("[", opened) else [_no_list(text, start, opened)]
        at = calls[-1].end
        yield from calls


def _no_list(text: str, start: int, opened: int) -> ParsedCall:
    if opened == len(text):
        return ParsedCall("", "", start, len(text), "unclosed", "the call was cut off before its list of calls")
    following = text.find(OPEN, opened)
    stop = following if following >= 0 else len(text)
    close = text.find(CLOSE, opened, stop)
    end = close + len(CLOSE) if close >= 0 else stop
    raw = text[opened : close if close >= 0 else stop]
    return ParsedCall("", raw, start, end, "bad_json", f"expected a list of calls like [name(key=value)] behind {OPEN}")


def _block(text: str, start: int, opened: int) -> list[ParsedCall]:
    found = scan(text, opened)
    if found.end is None:
        # What follows may stand inside a string of the broken list: a call in it must not run.
        close = text.rfind(CLOSE, opened)
        if text.find(OPEN, max(close, opened)) >= 0:
            close = -1
        return _calls(text, start, found, close + len(CLOSE) if close >= 0 else len(text), closed=close >= 0)
    after = skip_blank(text, found.end)
    if text.startswith(CLOSE, after):
        return _calls(text, start, found, after + len(CLOSE))
    following = text.find(OPEN, found.end)
    close = text.find(CLOSE, found.end, following if following >= 0 else len(text))
    if close < 0:
        return _calls(text, start, found, found.end)
    error = f"extra text behind the list of calls: {text[found.end : close].strip()[:40]}"
    return [
        replace(call, arguments=text[call.start : call.end], status="bad_json", error=error)
        for call in _calls(text, start, found, close + len(CLOSE))
    ]


def _bare(text: str) -> list[ParsedCall]:
    head = _BARE.match(text)
    if head is None:
        return []
    found = scan(text, head.end())
    tail = _TAIL.match(text, found.end or len(text))
    whole = tail is not None and tail.end() == len(text)
    if not whole or (found.end is None and not found.cut and not text.rstrip().endswith("]")):
        return []
    return _calls(text, 0, found, len(text))


def _calls(text: str, start: int, found: Scan, end: int, closed: bool = False) -> list[ParsedCall]:
    """One call for each item of a list; their spans fill the room from `start` to `end` without gaps."""
    items = found.items
    broken = found.end is None
    if len(items) > 1 and not text[slice(*items[-1])].strip():
        items, broken = items[:-1], False  # a comma behind the last call, and then the list's end or the text's
    calls: list[ParsedCall] = []
    for number, (left, right) in enumerate(items):
        last = number == len(items) - 1
        upto = end if last else right + 1
        if last and broken:
            call = ParsedCall(called_name(text, left, right), text[left:end], start, end, "bad_json", found.error)
            calls.append(replace(call, status="unclosed") if found.cut and not closed else call)
        else:
            calls.append(_call(text, left, right, start, upto))
        start = upto
    return calls


def _call(text: str, left: int, right: int, start: int, end: int) -> ParsedCall:
    raw = text[left:right]
    if raw.lstrip().startswith("{"):
        decoded = decode_at(raw, 0)
        if decoded.error is None and not raw[decoded.end :].strip():
            return call_from(decoded.value, raw, start, end)
        return replace(broken_call(raw, 0, start, end, decoded), status="bad_json", error=decoded.error or "extra text")
    try:
        name, arguments = read_call(text, left, right)
    except InvalidValueError as error:
        return ParsedCall(called_name(text, left, right), raw, start, end, "bad_json", str(error))
    return ParsedCall(name, arguments, start, end)
