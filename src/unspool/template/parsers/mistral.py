"""Mistral: `[TOOL_CALLS]`, and behind it a list of JSON objects, or a name and a JSON object.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": "123456789"}, ...]        Mistral 7B v0.3, Nemo, Mixtral
    [TOOL_CALLS]name[CALL_ID]123456789[ARGS]{...}[TOOL_CALLS]name...                Mistral Small 3.2, Magistral
    [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}                          Devstral 2, Ministral 3

What stands behind the mark tells the forms apart, so all are read whichever the template is. Nothing closes a call: it
ends where its JSON ends, and a mark inside a string is text, in broken objects as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.json_calls import STRING, broken_call, call_from, decode_at, read_arguments, skip_blank
from unspool.template.parsers.marks import next_opening
from unspool.types import CallStatus, InvalidValueError, ToolInfo

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_TAG = re.compile(re.escape(TAG))
_NAME = re.compile(
    rf"\s*+([^\s\[\]{{}}<>\"]++)\s*+(?:{re.escape(CALL_ID)}\s*+([^\s\[\]{{}}<>\"]*+)\s*+)?+({re.escape(ARGS)})?+"
)
_BRACKET = re.compile(rf"{STRING}|{re.escape(TAG)}|[\[\]{{}}]", re.DOTALL)


class MistralParser:
    """JSON behind `[TOOL_CALLS]`."""

    name = "mistral"

    openings = (TAG,)

    def parse(
        self, text: str, tools: Sequence[ToolInfo] | None = None, *, at: Collection[int] | None = None
    ) -> ParsedText:
        """Find the calls in `text`; the format carries its own types, so `tools` is not needed."""
        return parsed(text, _calls(text, at))


def _calls(text: str, counted: Collection[int] | None) -> Iterator[ParsedCall]:
    at = 0
    while (opening := next_opening(_TAG, text, at, counted)) is not None:
        for call in _behind_tag(text, opening.start()):
            at = call.end
            yield call


def _behind_tag(text: str, start: int) -> Iterator[ParsedCall]:
    at = skip_blank(text, start + len(TAG))
    listed = text.startswith("[", at) and not text.startswith(TAG, at)
    if listed:
        yield from _list(text, start, at + 1)
    elif text.startswith("{", at):
        decoded = decode_at(text, at)
        if decoded.error is None:
            yield call_from(decoded.value, text[at : decoded.end], start, decoded.end)
        else:
            yield broken_call(text, at, start, len(text) if decoded.cut else _close(text, at, 0), decoded)
    else:
        yield _named(text, start, at)


def _list(text: str, start: int, at: int) -> Iterator[ParsedCall]:
    """The calls of a list whose first item begins at `at`; their spans lie side by side up to the list's end."""
    first = at
    if text.startswith("]", skip_blank(text, at)):
        yield ParsedCall("", "[]", start, skip_blank(text, at) + 1, "bad_json", f"the list behind {TAG} holds no call")
        return
    while True:
        decoded = decode_at(text, at)
        if decoded.error is not None:
            if at > first and (at == len(text) or text.startswith(TAG, at)):
                return  # nothing was begun behind the comma
            yield broken_call(text, at, start, len(text) if decoded.cut else _close(text, at, 1), decoded)
            return
        call = call_from(decoded.value, text[at : decoded.end], start, decoded.end)
        after = skip_blank(text, decoded.end)
        if text.startswith(",", after):
            after = skip_blank(text, after + 1)
            closed = text.startswith("]", after)
        elif not (closed := text.startswith("]", after)) and not text.startswith("{", after):
            # Nothing closes the list, or something stands in it that is no call.
            end = _close(text, after, 1)
            if text.startswith("]", end - 1):
                error = f"invalid JSON: extra text behind the object: {text[after : end - 1].strip()[:40]}"
                call = replace(call, arguments=text[at : decoded.end], end=end, status="bad_json", error=error)
            yield call
            return
        yield replace(call, end=after + 1 if closed else after)
        if closed:
            return
        start = at = after


def _named(text: str, start: int, at: int) -> ParsedCall:
    head = _NAME.match(text, at)
    if head is None or (not text.startswith("{", skip_blank(text, head.end())) and head.group(3) is None):
        return _no_call(text, start, at, head)
    name, call_id, opened = head.group(1), head.group(2) or "", skip_blank(text, head.end())
    decoded = decode_at(text, opened)
    if decoded.error is not None:
        end = len(text) if decoded.cut else _close(text, opened, 0)
        status: CallStatus = "unclosed" if decoded.cut else "bad_json"
        return ParsedCall(name, text[opened:end], start, end, status, decoded.error, call_id)
    try:
        arguments = read_arguments(decoded.value)
    except InvalidValueError as fault:
        return ParsedCall(name, text[opened : decoded.end], start, decoded.end, "bad_json", str(fault), call_id)
    return ParsedCall(name, arguments, start, decoded.end, id=call_id)


def _no_call(text: str, start: int, at: int, head: re.Match[str] | None) -> ParsedCall:
    rest = text[head.end() if head else at :][: len(TAG)]
    cut = any(mark.startswith(rest) for mark in ((CALL_ID, ARGS) if head else ("",)))
    following = text.find(TAG, at)
    end = following if following >= 0 else len(text)
    error = f'expected a list of objects like {{"name": ..., "arguments": {{...}}}} or name{ARGS}{{...}} behind {TAG}'
    return ParsedCall("", text[at:end], start, end, "unclosed" if cut else "bad_json", error)


def _close(text: str, at: int, depth: int) -> int:
    """Where the brackets that are open at `at` (`depth` of them) and behind it are closed; at most the next mark."""
    for match in _BRACKET.finditer(text, at):
        found = match.group()
        if found == TAG:
            return match.start()
        if found in "[{":
            depth += 1
        elif found in "]}":
            depth -= 1
            if depth <= 0:
                return match.end()
    return len(text)
