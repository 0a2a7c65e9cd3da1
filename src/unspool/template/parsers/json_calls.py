"""JSON as models write it: a value is read up to its own end, never up to a tag that follows it.

Raw control characters inside strings are accepted. What JSON leaves undefined is refused with a sentence rather than
decided for the model: invalid escapes, a key that stands twice in one object, NaN and Infinity, numbers too large to
handle, nesting beyond `MAX_DEPTH`. Nothing here raises, whatever the text.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from unspool.template.parsers.base import ParsedCall
from unspool.types import InvalidValueError, decode_arguments

MAX_DEPTH = 100
"""Deepest nesting of arguments: far above any real tool, and safe for recursive code (copies, templates) behind us."""

MAX_DIGITS = 4000
"""Longest integer: Python refuses to convert more than 4,300 digits to or from text."""

STRING = r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
"""Pattern of a string, with whatever escapes, or of one that the text does not close (with `re.DOTALL`)."""

_WINDOW = 4096

_BLANK = re.compile(r"[ \t\n\r]*+")
_REST_OF_STRING = re.compile(r'(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SALVAGED_NAME = re.compile(r'\{\s*+"name"\s*+:\s*+"([^"\\\n]{1,200})"')
_CUT_NUMBER = re.compile(r"\.|[eE][+-]?")
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_CALL_KEYS = frozenset({"name", "id", "type", "arguments", "parameters"})


@dataclass(frozen=True, slots=True)
class Decoded:
    """A JSON value read from a text.

    Attributes:
        value: the value; None where `error` is set.
        end: behind the value's last character. Where it could not be read that far: from where on the tag that closes
            it may be looked for (an earlier one stands inside a string).
        error: what is wrong with it, as a sentence for the model.
        cut: the text ended before the value did.
    """

    value: object
    end: int
    error: str | None = None
    cut: bool = False


def skip_blank(text: str, at: int) -> int:
    """The first position from `at` on that is not JSON whitespace."""
    match = _BLANK.match(text, at)
    return match.end() if match else at


def decode_at(text: str, start: int) -> Decoded:
    """Read the JSON value that begins at `start` (whitespace before it is skipped)."""
    start = skip_blank(text, start)
    # An error of the json module counts the lines of the whole document that it is given: a text with many broken
    # values would take quadratic time. So a value is tried on a window, which grows only if it ends too soon.
    size = _WINDOW
    while True:
        window = text[start : start + size]
        decoded = _decode(window)
        if start + size >= len(text) or not (decoded.cut or decoded.end == size):
            return replace(decoded, end=start + decoded.end)
        size *= 8


def _decode(text: str) -> Decoded:
    faults: list[str] = []
    try:
        value, end = _decoder(faults).raw_decode(text)
    except json.JSONDecodeError as error:
        return _explain(text, error)
    except RecursionError:
        return Decoded(None, 0, f"arguments are nested more than {MAX_DEPTH} deep")
    if not faults and _deeper_than(value, MAX_DEPTH):
        faults.append(f"arguments are nested more than {MAX_DEPTH} deep")
    return Decoded(None, end, faults[0]) if faults else Decoded(value, end)


def _decoder(faults: list[str]) -> json.JSONDecoder:
    # Hooks note a fault and go on, so that the value's own end is still found.
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items):
            faults.append(f"the key {json.dumps(_twice(items)[:80])} stands twice in one object")
        return value

    def constant(word: str) -> None:
        faults.append(f"invalid JSON: {word} is not a JSON number")

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            faults.append(f"a number of {len(digits)} digits is too large")
            return 0
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            faults.append(f"the number {digits[:40]} is too large")
        return value

    return json.JSONDecoder(
        strict=False, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer, parse_float=real
    )


def _twice(items: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in items:
        if key in seen:
            return key
        seen.add(key)
    return ""


def _explain(text: str, error: json.JSONDecodeError) -> Decoded:
    message = f"invalid JSON: {error.msg} (character {error.pos} of the object)"
    if error.msg.startswith("Unterminated string"):
        return Decoded(None, len(text), "the JSON was cut off inside a string", cut=True)
    if "escape" in error.msg:
        rest = _REST_OF_STRING.match(text, error.pos)
        cut = rest is None
        message += r"; a backslash inside a string is written \\"
        return Decoded(None, rest.end() if rest else len(text), message, cut=cut)
    tail = text[error.pos : error.pos + 12]
    begun = any(word.startswith(tail) for word in _LITERALS) or _CUT_NUMBER.fullmatch(tail)
    if (begun and error.pos + len(tail) == len(text)) or skip_blank(text, error.pos) == len(text):
        return Decoded(None, len(text), "the JSON was cut off before its end", cut=True)
    return Decoded(None, 0, message)


def _deeper_than(value: object, limit: int) -> bool:
    layer, depth = [value], 0
    while layer:
        if depth > limit:
            return True
        inner: list[object] = []
        for item in layer:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        layer, depth = inner, depth + 1
    return False


# ------------------------------------------------------------------------------------------------- calls


def call_from(value: object, raw: str, start: int, end: int) -> ParsedCall:
    """The call that a decoded JSON value means; `raw` is its text, `start` and `end` the span to report."""

    def bad(error: str, name: str = "") -> ParsedCall:
        return ParsedCall(name, raw, start, end, "bad_json", error)

    if not isinstance(value, dict):
        return bad(f"a call must be a JSON object with a name and arguments, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        said = "is missing" if name is None else f"must be a non-empty string, not {_kind(name)}"
        return bad(f"the name of the call {said}")
    if "arguments" in value and "parameters" in value:
        return bad('a call has either "arguments" or "parameters", not both', name)
    others = sorted(set(value) - _CALL_KEYS)
    if others and "arguments" not in value and "parameters" not in value:
        # Taking this for a call without arguments would run something that the model did not ask for.
        return bad(f'the call has no "arguments" object, but a key {json.dumps(others[0])} beside its name', name)
    try:
        arguments = read_arguments(value.get("arguments", value.get("parameters")))
    except InvalidValueError as error:
        return bad(str(error), name)
    written = value.get("id")
    return ParsedCall(name, arguments, start, end, id=written if isinstance(written, str) else "")


def broken_call(text: str, opened: int, start: int, end: int, decoded: Decoded) -> ParsedCall:
    """The call that could not be read at `opened`; its name is kept where that alone is readable."""
    match = _SALVAGED_NAME.match(text, skip_blank(text, opened))
    name = match.group(1) if match and match.group(1).strip() else ""
    return ParsedCall(name, text[opened:end], start, end, "unclosed" if decoded.cut else "bad_json", decoded.error)


def read_arguments(raw: object) -> dict[str, Any]:
    """Arguments as an object. JSON text is decoded by this module's rules, all else by `decode_arguments`.

    Raises:
        InvalidValueError: with a sentence for the model.
    """
    if not isinstance(raw, str) or not raw.strip():
        return decode_arguments(raw)
    decoded = decode_at(raw, 0)
    if decoded.error is None and skip_blank(raw, decoded.end) < len(raw):
        raise InvalidValueError(f"invalid JSON in arguments: text behind the object, at character {decoded.end}")
    if decoded.error is not None:
        raise InvalidValueError(f"invalid JSON in arguments: {decoded.error.removeprefix('invalid JSON: ')}")
    if not isinstance(decoded.value, dict):
        raise InvalidValueError(f"arguments must be a JSON object, not {_kind(decoded.value)}")
    return decoded.value


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "null")
