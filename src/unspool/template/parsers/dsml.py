"""DeepSeek V3.2 and later: calls as tags that carry the mark `｜DSML｜`, each value with its type.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="name">
    <｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>
    <｜DSML｜parameter name="other" string="false">[1, 2]</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

`string="true"` means the text as it is, `"false"` means JSON. V4 calls the outer tag `tool_calls`. A value ends at its
own closing tag and holds no other mark: one that does has lost its closing tag, or quotes a call, and the two cannot be
told apart. More parameters could follow each one, so a call without `</｜DSML｜invoke>` is never run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.json_calls import decode_at, skip_blank
from unspool.template.parsers.marks import next_opening
from unspool.template.parsers.tags import TagsRead, skip_layout, unfinished
from unspool.types import ToolInfo

MARK = "｜DSML｜"
END_INVOKE, END_VALUE = f"</{MARK}invoke>", f"</{MARK}parameter>"

_OUTER = re.compile(rf"<{MARK}(?:function|tool)_calls>\s*+")
_END_OUTER = re.compile(rf"\s*+</{MARK}(?:function|tool)_calls>")
_START = re.compile(rf"<{MARK}(?:(?:function|tool)_calls>|invoke\b)")
_INVOKE = re.compile(rf'<{MARK}invoke\s++name="([^"<>\n]*+)"\s*+>\s*+')
_PARAMETER = re.compile(rf'<{MARK}parameter\s++name="([^"<>\n]*+)"\s++string="(true|false)"\s*+>')


class DsmlParser:
    """Calls written as `｜DSML｜` tags."""

    name = "deepseek_dsml"

    openings = (MARK,)

    def parse(
        self, text: str, tools: Sequence[ToolInfo] | None = None, *, at: Collection[int] | None = None
    ) -> ParsedText:
        """Find the calls in `text`; the format carries its own types, so `tools` is not needed."""
        return parsed(text, _calls(text, None if at is None else {position - len("<") for position in at}))


def _calls(text: str, counted: Collection[int] | None) -> Iterator[ParsedCall]:
    at, inside = 0, False
    while (opening := next_opening(_START, text, at, counted)) is not None:
        start = opening.start()
        outer = _OUTER.match(text, start)
        opened = outer.end() if outer else start
        if inside and outer is None and skip_layout(text, at) == start:
            start = at  # the layout between two calls of one block belongs to the second
        read = _read(text, opened)
        raw = text[opened : read.end]
        if read.error is None:
            call = ParsedCall(read.name, read.arguments, start, read.end)
        elif read.complete:
            call = ParsedCall(read.name, raw, start, read.end, "bad_json", read.error)
        else:
            # The call's own opening tag is not the one that follows.
            behind = max(read.end, opened + 1)
            call = unfinished(text, start, opened, read, opening=_START, closing=END_INVOKE, behind=behind)
        closing = _END_OUTER.match(text, call.end)
        inside = closing is None
        call = replace(call, end=closing.end()) if closing else call
        at = call.end
        yield call


def _read(text: str, at: int) -> TagsRead:
    head = _INVOKE.match(text, at)
    if head is None:
        return TagsRead("", {}, at, f'expected <{MARK}invoke name="...">, not {_shown(text, at)}', complete=False)
    name, at = head.group(1).strip(), head.end()
    arguments: dict[str, Any] = {}
    fault = None if name else "the name of the call is missing"
    while not text.startswith(END_INVOKE, at):
        tag = _PARAMETER.match(text, at)
        if tag is None:
            wanted = f'expected <{MARK}parameter name="..." string="true|false"> or {END_INVOKE}'
            return TagsRead(
                name, {}, at, fault or f"{wanted}, not {_shown(text, at)}", inside=bool(arguments), complete=False
            )
        key, close = tag.group(1).strip(), text.find(MARK, tag.end()) - len("</")
        if close < tag.end() or not text.startswith(END_VALUE, close):
            unclosed = f"the value of {key} is not closed by {END_VALUE}"
            return TagsRead(name, {}, at, fault or unclosed, inside=True, complete=False)
        if key in arguments or not key:
            fault = fault or (f"the parameter {key} stands twice" if key else "the name of a parameter is missing")
        value: object = text[tag.end() : close]
        if tag.group(2) == "false":
            value, error = _decoded(text[tag.end() : close])
            fault = fault or (f"parameter {key}: {error}" if error else None)
        arguments[key] = value
        at = skip_layout(text, close + len(END_VALUE))
    return TagsRead(name, arguments, at + len(END_INVOKE), fault)


def _decoded(written: str) -> tuple[object, str | None]:
    decoded = decode_at(written, 0)
    if decoded.error is None and skip_blank(written, decoded.end) < len(written):
        return None, f'invalid JSON: text behind the value; text as it is wants string="true": {written.strip()[:40]}'
    return decoded.value, decoded.error


def _shown(text: str, at: int) -> str:
    return repr(text[at : at + 40].strip())
