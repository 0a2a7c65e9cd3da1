"""ReAct: thoughts, actions and observations as lines of plain text.

    Thought: I need the weather.
    Action: search[weather in Rome]

or, on two lines, `Action: search` and `Action Input: {"query": "weather in Rome"}`. A line that begins with `Action:`
(`Action 2:` and `**Action:**` too) is a call; thoughts stay in the content. An input that is a JSON object, fenced or
not, holds the arguments; any other text is the value of the tool's only parameter (or its only required one), typed by
the schema. Behind `Action Input:` that text may be a JSON string, in quotes.

The input in brackets runs to the bracket that balances the first, and ends its line; a plain input behind
`Action Input:` runs to the next line with a label, or to the end of the turn. `Action: None` and `Action: N/A` are no
calls, and neither is `Action: Finish[...]`, which is how the format ends, unless a tool is called so. `Finish[...]`,
`Final Answer:`, and an `Observation:` that the model writes itself behind a call end the reading: nothing behind them
is executed, as an answer may quote a call, and it all stays in the content. A call that cannot be read ends it as well,
for what stands behind may be part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unspool.template.parsers import plain_text
from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.json_calls import decode_at, read_arguments, skip_blank
from unspool.template.parsers.plain_text import as_text, described, properties, required
from unspool.template.parsers.schema_values import functions, typed
from unspool.types import InvalidValueError, MessageDict, ToolInfo


def _label(*names: str) -> str:
    """What matches a label: numbered or not, in Markdown's bold or not."""
    return rf"(?:\*\*)?(?:{'|'.join(names)})(?: [0-9]+)?(?::\*\*|(?:\*\*)?:)"


_ACTION = re.compile(rf"^[ \t]*+{_label('Action')}[ \t]*+", re.MULTILINE)
_INPUT = re.compile(rf"[ \t\r]*+\n\s*+{_label('Action Input')}[ \t]*+")
_LABEL = re.compile(
    rf"^[ \t]*+{_label('Thought', 'Action', 'Action Input', 'Observation', 'Final Answer')}", re.MULTILINE
)
_OBSERVATION = re.compile(rf"^[ \t]*+{_label('Observation')}", re.MULTILINE)
_ANSWER = re.compile(rf"^[ \t]*+{_label('Final Answer')}", re.MULTILINE)
_FENCE = re.compile(r"```(?:json)?\s*+(?=\{)")
_NAME = re.compile(r"[^\s\[\]{}()]++")
_REST_OF_LINE = re.compile(r"[^\n]*+")
_BRACKET = re.compile(r"[\[\]]")
_NO_ACTION = ("none", "n/a")

_INSTRUCTIONS = """\
Answer the question as well as you can. You can use these tools:

{tools}

Work in steps. In each step write one thought and one action, in this form, and then stop:

Thought: what you need to find out next
Action: the name of one tool
Action Input: a JSON object with the tool's arguments

The answer of the tool comes back as a message that begins with "Observation:". Never write an observation yourself.
When you know the answer, write no action but:

Thought: I know the answer.
Final Answer: the answer"""


class _Fault(NamedTuple):
    error: str
    cut: bool = False


class ReactParser:
    """Actions as lines of text."""

    name = "react"

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls in `text`; `tools` say which parameter a plain input is for, and of what type."""
        return parsed(text, _calls(text, functions(tools)))

    def instructions(self, tools: Sequence[ToolInfo]) -> str:
        """The system prompt of the format, with the tools."""
        lines = []
        for name, description, schema in described(tools):
            known = properties(schema)
            arguments = f"Arguments: {as_text(known)}" if known else "It takes no arguments."
            said = " ".join(description.split()).rstrip(".")
            lines.append(f"- {name}: {said}. {arguments}" if said else f"- {name}: {arguments}")
        return _INSTRUCTIONS.format(tools="\n".join(lines))

    def written(self, messages: Sequence[Mapping[str, Any]]) -> list[MessageDict]:
        """Calls as `Action:` lines, answers as user messages `Observation: ...`."""
        return plain_text.written(
            messages,
            lambda name, arguments: f"Action: {name}\nAction Input: {as_text(arguments)}",
            lambda _, answer: f"Observation: {answer}",
        )


def _calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[ParsedCall]:
    at, called = 0, False
    while (match := _ACTION.search(text, at)) is not None:
        if _ANSWER.search(text, at, match.start()) or (called and _OBSERVATION.search(text, at, match.start())):
            return
        name = _name(text, match.end())
        if name not in schemas:
            behind = skip_spaces(text, match.end() + len(name))
            if name.lower() == "finish" and text.startswith("[", behind):
                return
            if name.rstrip(".").lower() in _NO_ACTION and not _rest(text, behind):
                at = match.end()
                continue
        call = _action(text, match.start(), match.end(), name, schemas)
        yield call
        if call.status != "ok":
            return
        at, called = call.end, True


def _name(text: str, at: int) -> str:
    found = _NAME.match(text, at)
    return found.group() if found else ""


def _action(text: str, start: int, at: int, name: str, schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCall:
    """The call whose label stands at `start` and whose name at `at`."""
    behind = at + len(name)
    bracket = skip_spaces(text, behind)
    if text.startswith("[", bracket):
        return _in_brackets(text, start, name, bracket, schemas)
    label = _INPUT.match(text, behind)
    if label is not None:
        return _behind_label(text, start, name, label.end(), schemas)
    line = _REST_OF_LINE.match(text, behind)
    end = line.end() if line else behind
    if not text[behind:end].strip() and not text[end:].strip():
        fault = _Fault("the action was cut off before its input", cut=True)
    else:
        fault = _Fault("an action is written name[input], or a name with 'Action Input:' on the next line")
    return _broken(text, start, at, name, fault)


def _in_brackets(
    text: str, start: int, name: str, bracket: int, schemas: Mapping[str, Mapping[str, Any]]
) -> ParsedCall:
    opened = bracket + 1
    first = skip_blank(text, opened)
    if text.startswith("{", first):
        decoded = decode_at(text, first)
        if decoded.error is not None:
            return _broken(text, start, opened, name, _Fault(decoded.error, decoded.cut))
        close = skip_blank(text, decoded.end)
        if not text.startswith("]", close):
            cut = close == len(text)
            error = "the input was cut off before its closing bracket" if cut else "expected ']' behind the JSON object"
            return _broken(text, start, opened, name, _Fault(error, cut))
    else:
        close = _balanced(text, opened)
        if close < 0:
            fault = _Fault("the input was cut off before its closing bracket", cut=True)
            return _broken(text, start, opened, name, fault)
    junk = _rest(text, close + 1)
    if junk:
        return _broken(text, start, opened, name, _Fault(f"extra text behind the closing bracket: {junk[:40]}"))
    return _whole(text, start, name, (opened, close), close + 1, schemas)


def _behind_label(text: str, start: int, name: str, at: int, schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCall:
    first = skip_blank(text, at)
    if first == len(text):
        return _broken(text, start, at, name, _Fault("the action was cut off before its input", cut=True))
    fence = _FENCE.match(text, first)
    opened = fence.end() if fence else first
    if text.startswith("{", opened):
        decoded = decode_at(text, opened)
        if decoded.error is not None:
            return _broken(text, start, at, name, _Fault(decoded.error, decoded.cut))
        end = decoded.end
        if fence and text.startswith("```", skip_blank(text, end)):
            end = skip_blank(text, end) + len("```")
        if junk := _rest(text, end):
            return _broken(text, start, at, name, _Fault(f"invalid JSON: extra text behind the object: {junk[:40]}"))
        return _whole(text, start, name, (opened, decoded.end), end, schemas)
    following = _LABEL.search(text, at)
    end = following.start() if following else len(text)
    end = at + len(text[at:end].rstrip())
    return _whole(text, start, name, (at, end), end, schemas, quoted=True)


def _whole(
    text: str,
    start: int,
    name: str,
    inside: tuple[int, int],
    end: int,
    schemas: Mapping[str, Mapping[str, Any]],
    quoted: bool = False,
) -> ParsedCall:
    """The call with the input `inside`; `quoted`: which may be a JSON string."""
    raw = text[slice(*inside)]
    try:
        if not name:
            raise InvalidValueError("the name of the tool is missing behind 'Action:'")
        said = raw.strip()
        return ParsedCall(name, _arguments(said, schemas.get(name), _unquoted(said) if quoted else said), start, end)
    except InvalidValueError as error:
        return ParsedCall(name, raw, start, end, "bad_json", str(error))


def _unquoted(text: str) -> str:
    """The text that a JSON string means; any other text as it is."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    decoded = decode_at(f'{{"x":{text}}}', 0)
    value = decoded.value
    if decoded.error is None and decoded.end == len(text) + 6 and isinstance(value, dict) and len(value) == 1:
        return str(value["x"])
    return text


def _arguments(text: str, schema: Mapping[str, Any] | None, value: str) -> dict[str, Any]:
    """The arguments that an input means: those of a JSON object, or the one plain value."""
    if not text:
        return {}
    if text.startswith("{"):
        return read_arguments(decode_at(text, 0).value)
    if schema is None:
        return {"input": value}
    names, needed = list(properties(schema)), required(schema)
    only = names if len(names) == 1 else needed
    if len(only) != 1:
        takes = f"the arguments {', '.join(names)}" if names else "no arguments"
        raise InvalidValueError(f"the input must be a JSON object: this tool takes {takes}")
    return {only[0]: typed(value, only[0], schema)}


def _broken(text: str, start: int, at: int, name: str, fault: _Fault) -> ParsedCall:
    """A call that cannot be read, with all that stands behind it."""
    return ParsedCall(name, text[at:], start, len(text), "unclosed" if fault.cut else "bad_json", fault.error)


def _balanced(text: str, at: int) -> int:
    """Where the bracket opened before `at` is closed; -1 where it is not."""
    depth = 1
    for match in _BRACKET.finditer(text, at):
        depth += 1 if match.group() == "[" else -1
        if depth == 0:
            return match.start()
    return -1


def _rest(text: str, at: int) -> str:
    """What stands on the line from `at` on, but for blanks."""
    match = _REST_OF_LINE.match(text, at)
    return match.group().strip() if match else ""


def skip_spaces(text: str, at: int) -> int:
    """The first position from `at` on that is no space or tab."""
    while at < len(text) and text[at] in " \t":
        at += 1
    return at
