"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3: calls as tags, values as plain text.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A value runs to the next `</parameter>`, whatever else it holds, without the line break that the template writes on
either side of it. Types come from the tool's schema (`schema_values`). Several functions in one pair of tags are
several calls. The models often leave out `<tool_call>`: a `<function=...>` that begins a line opens a call as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.schema_values import functions, typed
from unspool.template.parsers.tags import TagsRead, skip_layout, unfinished
from unspool.types import InvalidValueError, ToolInfo

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"

_OPEN = re.compile(OPEN)
_START = re.compile(r"<tool_call>|^<function=", re.MULTILINE)
_FUNCTION = re.compile(r"<function=([^<>\n]*+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*+)>")
# What a value holds only if its own closing tag was forgotten, or if it quotes a call; the two cannot be told apart.
_SWALLOWED = re.compile(
    r"^<(?:parameter|function)=|<tool_call>\s*+<function=|</function>\s*+</tool_call>", re.MULTILINE
)


class Qwen3CoderParser:
    """Calls written as `<function=...>` and `<parameter=...>` tags."""

    name = "qwen3_coder"

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls in `text`; `tools` gives the values their types, without it they stay strings."""
        return parsed(text, _calls(text, functions(tools)))


def _calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[ParsedCall]:
    at = 0
    while (match := _START.search(text, at)) is not None:
        for call in _block(text, match.start(), match.group() == OPEN, schemas):
            at = call.end
            yield call


def _block(text: str, start: int, tagged: bool, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[ParsedCall]:
    at = start + len(OPEN) if tagged else start
    while True:
        opened = at
        read = _function(text, skip_layout(text, at), schemas)
        raw = text[opened : read.end]
        if read.error is not None:
            yield _broken(text, start, opened, read)
            return
        after = skip_layout(text, read.end)
        if text.startswith(CLOSE, after):
            yield ParsedCall(read.name, read.arguments, start, after + len(CLOSE))
            return
        if not text.startswith("<function=", after):
            break
        yield ParsedCall(read.name, read.arguments, start, read.end)
        start = at = read.end
    close = text.find(CLOSE, read.end, _next_open(text, read.end)) if tagged else -1
    if close < 0:
        # Nothing closes the block; what follows is not part of it.
        yield ParsedCall(read.name, read.arguments, start, read.end)
        return
    error = f"extra text behind {END_FUNCTION}: {text[read.end : close].strip()[:40]}"
    yield ParsedCall(read.name, raw, start, close + len(CLOSE), "bad_json", error)


def _function(text: str, at: int, schemas: Mapping[str, Mapping[str, Any]]) -> TagsRead:
    head = _FUNCTION.match(text, at)
    if head is None:
        return TagsRead("", {}, at, "expected <function=name> behind <tool_call>", complete=False)
    name = head.group(1).strip()
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    fault = None if name else "the name of the function is missing"
    at = skip_layout(text, head.end())
    while not text.startswith(END_FUNCTION, at):
        tag = _PARAMETER.match(text, at)
        if tag is None:
            error = f"expected <parameter=name> or {END_FUNCTION}, not {text[at : at + 40].strip()!r}"
            return TagsRead(name, {}, at, fault or error, inside=bool(arguments), complete=False)
        key = tag.group(1).strip()
        close = text.find(END_PARAMETER, tag.end())
        if close < 0 or _SWALLOWED.search(text, tag.end(), close):
            error = f"the value of {key} is not closed by {END_PARAMETER}"
            return TagsRead(name, {}, at, fault or error, inside=True, complete=False)
        if key in arguments or not key:
            fault = fault or (f"the parameter {key} stands twice" if key else "the name of a parameter is missing")
        try:
            arguments[key] = typed(_trimmed(text[tag.end() : close]), key, schema)
        except InvalidValueError as error:
            fault = fault or str(error)
        at = skip_layout(text, close + len(END_PARAMETER))
    return TagsRead(name, arguments, at + len(END_FUNCTION), fault)


def _broken(text: str, start: int, opened: int, read: TagsRead) -> ParsedCall:
    if read.complete:
        close = text.find(CLOSE, read.end, _next_open(text, read.end))
        if close < 0 or text[read.end : close].strip():
            return ParsedCall(read.name, text[opened : read.end], start, read.end, "bad_json", read.error)
        return ParsedCall(read.name, text[opened:close], start, close + len(CLOSE), "bad_json", read.error)
    return unfinished(text, start, opened, read, opening=_OPEN, closing=CLOSE, behind=read.end, suspect=_START)


def _trimmed(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _next_open(text: str, at: int) -> int:
    following = text.find(OPEN, at)
    return following if following >= 0 else len(text)
