"""XML in Cline's manner: the tool's name is the tag, and each parameter is a tag in it.

    <read_file>
    <path>src/main.py</path>
    </read_file>

Only tags of tools that are on offer are calls; any other markup is text. A value runs to the closing tag of its
parameter that another parameter or the tool's closing tag follows, so a value may hold its own closing tag; the line
break on either side of it is layout. Types come from the tool's schema (`schema_values`). The tag of a tool with no tag
behind it, as prose may have one, is text, unless the tool is closed as well: that is a call which cannot be read.
What stands behind a parameter that is never closed belongs to its value and is not executed.

`<thinking>...</thinking>`, in which such models plan, is thinking wherever it stands outside a call, unless a tool is
called so: nothing in it is executed. Thinking that is never closed is all there is to the rest of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unspool.template.parsers import plain_text
from unspool.template.parsers.base import ParsedCall, ParsedText
from unspool.template.parsers.plain_text import as_text, described, properties, required
from unspool.template.parsers.schema_values import functions, typed
from unspool.types import InvalidValueError, MessageDict, ToolInfo

_TAG = re.compile(r"<([A-Za-z_][\w.:-]*+)>")
_TAG_BEGUN = re.compile(r"</?[\w.:-]*+$")
_BLANK = re.compile(r"\s*+")
_LINE_BREAKS = re.compile(r"\n*+")
_THINKING, _THOUGHT = "thinking", "</thinking>"

_INSTRUCTIONS = """\
You can use the tools below. To use one, write its name as a tag, with a tag for each parameter in it:

<tool_name>
<parameter_name>value</parameter_name>
</tool_name>

Write values as they are, without escapes; write lists and objects as JSON. After a tool call, stop and wait: its
result comes back in the next message. When you need no tool, answer in plain text.

# Tools

{tools}"""


class ClineParser:
    """Calls as tags of their own."""

    name = "cline"

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls of `tools` in `text`; without tools there are none. Thinking is split off in any case."""
        kept, thoughts, calls, at = [], [], [], 0
        for part in _parts(text, functions(tools)):
            kept.append(text[at : part.start])
            at = part.end
            if isinstance(part, ParsedCall):
                calls.append(part)
            else:
                thoughts.append(part.text)
        kept.append(text[at:])
        return ParsedText("".join(kept), calls, "\n".join(thoughts) if thoughts else None)

    def instructions(self, tools: Sequence[ToolInfo]) -> str:
        """The system prompt of the format, with the tools."""
        return _INSTRUCTIONS.format(tools="\n\n".join(_described(*tool) for tool in described(tools)))

    def written(self, messages: Sequence[Mapping[str, Any]]) -> list[MessageDict]:
        """Calls as tags, answers as user messages `[name] Result: ...`."""
        return plain_text.written(
            messages,
            lambda name, arguments: "\n".join(
                (f"<{name}>", *(f"<{key}>{as_text(value)}</{key}>" for key, value in arguments.items()), f"</{name}>")
            ),
            lambda name, answer: f"[{name or 'tool'}] Result:\n{answer}",
        )


def _described(name: str, description: str, schema: Mapping[str, Any]) -> str:
    needed = required(schema)
    lines = [f"## {name}", description] if description else [f"## {name}"]
    usage = [f"<{name}>"]
    for key, value in properties(schema).items():
        kind = value.get("type") if isinstance(value, Mapping) else None
        said = value.get("description") if isinstance(value, Mapping) else None
        notes = ", ".join((*([kind] if isinstance(kind, str) else []), "required" if key in needed else "optional"))
        lines.append(f"- {key} ({notes}): {said}" if said else f"- {key} ({notes})")
        usage.append(f"<{key}>...</{key}>")
    return "\n".join((*lines, "Usage:", *usage, f"</{name}>"))


class _Thought(NamedTuple):
    """Thinking, with its tags and the line breaks behind them at `start` to `end`."""

    start: int
    end: int
    text: str


def _thought(text: str, opened: re.Match[str]) -> _Thought:
    close = text.find(_THOUGHT, opened.end())
    if close < 0:
        return _Thought(opened.start(), len(text), text[opened.end() :])
    layout = _LINE_BREAKS.match(text, close + len(_THOUGHT))
    return _Thought(opened.start(), layout.end() if layout else close, text[opened.end() : close])


def _parts(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[ParsedCall | _Thought]:
    """The calls and the thinking, in order."""
    names = sorted({*schemas, _THINKING}, key=len, reverse=True)
    opening = re.compile("<(" + "|".join(map(re.escape, names)) + ")>")
    closes: dict[str, int] = {}
    at = 0
    while (match := opening.search(text, at)) is not None:
        name = match.group(1)
        if name not in schemas:
            thought = _thought(text, match)
            yield thought
            at = thought.end
            continue
        if name not in closes:
            closes[name] = text.rfind(f"</{name}>")
        call = _Call(text, match, schemas[name], closes[name]).read()
        at = match.end()
        if call is not None:
            yield call
            at = call.end


class _Call:
    """The call that the tag `opened` opens; `last` is where the tool's last closing tag stands, or -1."""

    def __init__(self, text: str, opened: re.Match[str], schema: Mapping[str, Any], last: int) -> None:
        self._text, self._schema, self._last = text, schema, last
        self._name, self._start, self._body = opened.group(1), opened.start(), opened.end()
        self._close = f"</{self._name}>"
        self._known = properties(schema)

    def read(self) -> ParsedCall | None:
        arguments: dict[str, Any] = {}
        fault: str | None = None
        at = self._skip(self._body)
        while not self._text.startswith(self._close, at):
            tag = self._parameter(at)
            if tag is None:
                return self._unreadable(at, begun=bool(arguments) or fault is not None)
            key = tag.group(1)
            end, after = self._value_end(tag)
            if end < 0:
                cut = self._last < tag.end()
                return self._broken(len(self._text), f"the value of {key} is not closed by </{key}>", cut)
            if key in arguments:
                fault = fault or f"the parameter {key} stands twice"
            try:
                value = self._text[tag.end() : end].removeprefix("\n").removesuffix("\n")
                arguments[key] = typed(value, key, self._schema)
            except InvalidValueError as error:
                fault = fault or str(error)
            at = after
        end = at + len(self._close)
        if fault is not None:
            return self._broken(end, fault)
        return ParsedCall(self._name, arguments, self._start, end)

    def _parameter(self, at: int) -> re.Match[str] | None:
        """The opening tag of a parameter at `at`; any tag will do where the schema names no parameters."""
        tag = _TAG.match(self._text, at)
        return tag if tag is not None and (not self._known or tag.group(1) in self._known) else None

    def _value_end(self, tag: re.Match[str]) -> tuple[int, int]:
        """Where the value ends, and where the text goes on behind its closing tag; (-1, -1) where it is not closed."""
        close = f"</{tag.group(1)}>"
        at = self._text.find(close, tag.end())
        while at >= 0:
            after = self._skip(at + len(close))
            if self._text.startswith(self._close, after) or self._parameter(after) is not None:
                return at, after
            if after == len(self._text) or _TAG_BEGUN.match(self._text, after):
                return at, after  # the text ends here, and so may the value: either way the call is cut off
            at = self._text.find(close, at + len(close))
        return -1, -1

    def _unreadable(self, at: int, begun: bool) -> ParsedCall | None:
        """No parameter and no end where one of them had to stand; None: the tag is prose."""
        if at == len(self._text) or _TAG_BEGUN.match(self._text, at):
            return self._broken(len(self._text), f"the call was cut off before {self._close}", cut=True)
        again = self._text.find(f"<{self._name}>", at)
        close = self._text.find(self._close, at, again if again >= 0 else len(self._text)) if self._last >= at else -1
        if close >= 0:
            return self._broken(close + len(self._close), self._expected(at))
        if not begun and _TAG.match(self._text, at) is None:
            return None
        return self._broken(len(self._text), self._expected(at))

    def _expected(self, at: int) -> str:
        known = ", ".join(f"<{name}>" for name in list(self._known)[:20]) or "a parameter"
        return f"expected {known} or {self._close}, not {self._text[at : at + 40].strip()!r}"

    def _broken(self, end: int, error: str, cut: bool = False) -> ParsedCall:
        raw = self._text[self._body : end].removesuffix(self._close)
        return ParsedCall(self._name, raw, self._start, end, "unclosed" if cut else "bad_json", error)

    def _skip(self, at: int) -> int:
        match = _BLANK.match(self._text, at)
        return match.end() if match else at
