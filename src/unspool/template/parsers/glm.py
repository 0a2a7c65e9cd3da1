"""GLM 4.5 and later: calls as tags, a key and a value for each argument.

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

The template writes strings as they are and everything else as JSON, so a value's type comes from the tool's schema
(`schema_values`); where that says nothing, a value that is JSON is read as JSON. A value runs to the next
`</arg_value>`, whatever else it holds, and keeps its blanks and line breaks. Line breaks between tags mean nothing
(GLM 4.7 writes none). More arguments could follow each one, so a call without `</tool_call>` is never run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.marks import next_opening
from unspool.template.parsers.schema_values import functions, typed
from unspool.template.parsers.tags import TagsRead, skip_layout, unfinished
from unspool.types import InvalidValueError, ToolInfo

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END_VALUE = "</arg_value>"

_OPEN = re.compile(OPEN)
_NAME = re.compile(r"\s*+([^\s<>{}\[\]\"]*+)\s*+")
_KEY = re.compile(r"<arg_key>([^<>]*+)</arg_key>\s*+<arg_value>")
# What a value holds only if its own closing tag was forgotten, or if it quotes a call; the two cannot be told apart.
_SWALLOWED = re.compile(r"<arg_key>|</arg_key>|<arg_value>|</tool_call>\s*+<tool_call>")


class GlmParser:
    """Calls written as `<arg_key>` and `<arg_value>` tags."""

    name = "glm"

    openings = (OPEN,)

    def parse(
        self, text: str, tools: Sequence[ToolInfo] | None = None, *, at: Collection[int] | None = None
    ) -> ParsedText:
        """Find the calls in `text`; `tools` gives the values their types."""
        return parsed(text, _calls(text, functions(tools), at))


def _calls(
    text: str, schemas: Mapping[str, Mapping[str, Any]], counted: Collection[int] | None
) -> Iterator[ParsedCall]:
    at = 0
    while (opening := next_opening(_OPEN, text, at, counted)) is not None:
        start, opened = opening.span()
        read = _read(text, opened, schemas)
        if read.error is None:
            call = ParsedCall(read.name, read.arguments, start, read.end)
        elif read.complete:
            call = ParsedCall(read.name, text[opened : read.end - len(CLOSE)], start, read.end, "bad_json", read.error)
        else:
            call = unfinished(text, start, opened, read, opening=_OPEN, closing=CLOSE, behind=read.end)
        at = call.end
        yield call


def _read(text: str, at: int, schemas: Mapping[str, Mapping[str, Any]]) -> TagsRead:
    head = _NAME.match(text, at)
    name, at = (head.group(1), head.end()) if head else ("", at)
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    fault = None if name else "the name of the function is missing"
    while not text.startswith(CLOSE, at):
        tag = _KEY.match(text, at)
        if tag is None:
            wanted = f"expected <arg_key>key</arg_key><arg_value>value</arg_value> or {CLOSE}"
            unknown = at == len(text) and not arguments  # cut off, perhaps in the name
            error = fault or f"{wanted}, not {text[at : at + 40].strip()!r}"
            return TagsRead("" if unknown else name, {}, at, error, inside=bool(arguments), complete=False)
        key = tag.group(1).strip()
        close = text.find(END_VALUE, tag.end())
        if close < 0 or _SWALLOWED.search(text, tag.end(), close):
            error = f"the value of {key} is not closed by {END_VALUE}"
            return TagsRead(name, {}, at, fault or error, inside=True, complete=False)
        if key in arguments or not key:
            fault = fault or (f"the argument {key} stands twice" if key else "the key of an argument is missing")
        try:
            arguments[key] = typed(text[tag.end() : close], key, schema, untyped_json=True)
        except InvalidValueError as error:
            fault = fault or str(error)
        at = skip_layout(text, close + len(END_VALUE))
    return TagsRead(name, arguments, at + len(CLOSE), fault)
