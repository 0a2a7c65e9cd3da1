"""Llama 3: `{"name": ..., "parameters": {...}}`, bare or behind `<|python_tag|>`; several stand one after another.

Behind the tag, whatever follows is a call. Without it, an object is a call only at the start of the turn and only if it
has the form of one: a turn that answers with some other JSON object has answered. Llama 3.1's built-in tools
(`<|python_tag|>search.call(query="...")`) are calls too; code for its interpreter is not something that can be called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.json_calls import Decoded, broken_call, call_from, decode_at, skip_blank
from unspool.template.parsers.literals import read_call, scan
from unspool.template.parsers.schema_values import functions
from unspool.types import InvalidValueError, ToolInfo

TAG = "<|python_tag|>"

_BUILTIN = re.compile(r"([^\W\d]\w*+)\.call(?=\()")
_OBJECT = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[{}]', re.DOTALL)
_HEAD = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"[^"\\]*+(?:"\s*+(?:,\s*+(?:"([^"\\]*+))?+)?+)?+'
)
_ARGUMENT_KEYS = ("parameters", "arguments")


class Llama3JsonParser:
    """JSON objects as the turn itself."""

    name = "llama3_json"

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls in `text`; `tools` tells a call without parameters from an object that just has a name."""
        return parsed(text, _calls(text, frozenset(functions(tools))))


def _calls(text: str, known: frozenset[str]) -> Iterator[ParsedCall]:
    at = 0
    if text.startswith("{", skip_blank(text, 0)):
        for call in _chain(text, 0, 0, known, tagged=False):
            at = call.end
            yield call
    while (start := text.find(TAG, at)) >= 0:
        at = start + len(TAG)
        for call in _behind_tag(text, start, at, known):
            at = call.end
            yield call


def _behind_tag(text: str, start: int, opened: int, known: frozenset[str]) -> Iterator[ParsedCall]:
    at = skip_blank(text, opened)
    if text.startswith("{", at):
        yield from _chain(text, start, opened, known, tagged=True)
        return
    stop = _next_tag(text, at)
    builtin = _BUILTIN.match(text, at)
    found = scan(text, builtin.end(), stop) if builtin else None
    if builtin and found and found.end is not None:
        plain = f"{builtin.group(1)}{text[builtin.end() : found.end]}"
        try:
            name, arguments = read_call(plain, 0, len(plain))
        except InvalidValueError as fault:
            yield ParsedCall(builtin.group(1), text[at : found.end], start, found.end, "bad_json", str(fault))
        else:
            yield ParsedCall(name, arguments, start, found.end)
        return
    cut = stop == len(text) and (at == stop or found is not None)
    error = f'expected an object like {{"name": ..., "parameters": {{...}}}} behind {TAG}'
    yield ParsedCall("", text[at:stop], start, stop, "unclosed" if cut else "bad_json", error)


def _chain(text: str, start: int, opened: int, known: frozenset[str], *, tagged: bool) -> Iterator[ParsedCall]:
    """The calls from `opened` on, with `;` or nothing between them; the first one's span begins at `start`."""
    while True:
        decoded = decode_at(text, opened)
        if decoded.error is not None:
            if tagged or _meant_as_call(text, skip_blank(text, opened), decoded):
                yield broken_call(text, opened, start, _object_end(text, opened, decoded), decoded)
            return
        if not tagged and not _has_form_of_call(decoded.value, known):
            return
        yield call_from(decoded.value, text[opened : decoded.end], start, decoded.end)
        start = opened = decoded.end
        at = skip_blank(text, opened)
        if text.startswith(";", at):
            opened = at + 1
        if not text.startswith("{", skip_blank(text, opened)):
            return


def _has_form_of_call(value: object, known: frozenset[str]) -> bool:
    if not isinstance(value, dict) or "name" not in value:
        return False
    name = value["name"]
    return any(key in value for key in _ARGUMENT_KEYS) or (len(value) == 1 and isinstance(name, str) and name in known)


def _meant_as_call(text: str, at: int, decoded: Decoded) -> bool:
    """Whether an object that cannot be read begins like a call, as far as it goes."""
    head = _HEAD.match(text, at)
    if head is None:
        return False
    second = head.group(1)
    if head.end() == len(text):
        return second is None or any(key.startswith(second) for key in _ARGUMENT_KEYS)
    return second in _ARGUMENT_KEYS


def _object_end(text: str, opened: int, decoded: Decoded) -> int:
    """Where an object that cannot be read ends: at its own last brace if there is one, else where the text does."""
    stop = _next_tag(text, decoded.end)
    if decoded.cut:
        return stop
    depth = 0
    for match in _OBJECT.finditer(text, opened, stop):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.end()
    return stop


def _next_tag(text: str, at: int) -> int:
    following = text.find(TAG, at)
    return following if following >= 0 else len(text)
