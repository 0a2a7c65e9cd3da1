"""Python's call syntax, read without ever running it: brackets and strings are scanned, values are `ast` literals.

Two liberties beside Python's grammar, for what models and templates write: a raw line break inside a quoted string, and
JSON's `true`, `false`, `null`. Everything that is not a plain value (names, calls, f-strings, bytes, arithmetic) is
refused with a sentence, and before `ast` sees it: its parser recurses, and must not be fed what can recurse deeply.
"""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any, NamedTuple

from unspool.template.parsers.json_calls import MAX_DEPTH, MAX_DIGITS
from unspool.types import InvalidValueError

_CLOSERS = {"[": "]", "(": ")", "{": "}"}
# A string that the text does not close matches up to the text's end, so that it is scanned once only.
_STRING = (
    r"""(?:'''(?:[^'\\]++|\\.|'(?!''))*+(?:'''|\Z)|\"\"\"(?:[^"\\]++|\\.|"(?!""))*+(?:\"\"\"|\Z)"""
    r"""|'(?:[^'\\]++|\\.)*+(?:'|\Z)|"(?:[^"\\]++|\\.)*+(?:"|\Z))"""
)
_TOKEN = re.compile(rf"(?P<raw>(?<!\w)[rR])?{_STRING}|[\[\](){{}},#]", re.DOTALL)
_NUMBER = r"(?:0[xXoObB][0-9a-fA-F_]++|(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?+|\.[0-9][0-9_]*+)(?:[eE][+-]?[0-9_]++)?+)(?!\w)"
_PLAIN = re.compile(
    # No string right behind a string: who writes 'it''s' does not mean Python's joining of the two.
    rf"(?:\s++|(?<!\w)[rR]?{_STRING}(?!\s*+[rR]?['\"])|[\[({{,:]|[\])}}](?!\s*+[\[(])|[+-]?\s*+{_NUMBER}"
    r"|\b(?:True|False|None|true|false|null)\b)*+",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)|[\x00-\x1f\ud800-\udfff]", re.DOTALL)
_KNOWN_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567")
_CALL = re.compile(r"\s*+([^\W\d][\w.\-]*+)\s*+(?=\()")
_KEYWORD = re.compile(r"\s*+([^\W\d][\w\-]*+)\s*+=(?!=)")
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Scan(NamedTuple):
    """A bracketed list: the spans between its commas, and where it ends.

    `end` is behind the closing bracket, None where the scan failed; `error` then says why, and `cut` whether the text
    simply ended. The last of `items` is then the one that failed.
    """

    items: list[tuple[int, int]]
    end: int | None
    error: str | None = None
    cut: bool = False


def scan(text: str, start: int, stop: int | None = None) -> Scan:
    """Split the list whose opening bracket stands at `start` at its own commas, looking no further than `stop`."""
    stop = len(text) if stop is None else stop
    closers: list[str] = []
    items: list[tuple[int, int]] = []
    begun = start + 1
    for match in _TOKEN.finditer(text, start, stop):
        token, at = match.group(), match.start()
        if token in _CLOSERS:
            closers.append(_CLOSERS[token])
            if len(closers) > MAX_DEPTH:
                return Scan([*items, (begun, stop)], None, f"brackets are nested more than {MAX_DEPTH} deep")
        elif token == "," and len(closers) == 1:
            items.append((begun, at))
            begun = at + 1
        elif token in ("]", ")", "}"):
            if token != closers.pop():
                return Scan([*items, (begun, stop)], None, f"the bracket {token} closes nothing that is open")
            if not closers:
                items.append((begun, at))
                return Scan(items, at + 1)
        elif token == "#":
            return Scan([*items, (begun, stop)], None, "a comment is not allowed here")
    return Scan([*items, (begun, stop)], None, "the call was cut off before its end, or a string is not closed", True)


def read_call(text: str, start: int, end: int) -> tuple[str, dict[str, Any]]:
    """The name and arguments of the call `name(key=value, ...)` between `start` and `end`.

    Raises:
        InvalidValueError: it is none, or an argument is not a plain value.
    """
    head = _CALL.match(text, start, end)
    if head is None:
        raise InvalidValueError(f"expected a call like name(key=value), not {_short(text[start:end])}")
    inside = scan(text, head.end(), end)
    if inside.end is None:
        raise InvalidValueError(inside.error or "the call is not closed")
    if text[inside.end : end].strip():
        raise InvalidValueError(f"extra text behind the call of {head.group(1)}: {_short(text[inside.end : end])}")
    arguments: dict[str, Any] = {}
    for number, (left, right) in enumerate(inside.items):
        if number == len(inside.items) - 1 and not text[left:right].strip():
            break  # no arguments, or a comma behind the last
        key = _KEYWORD.match(text, left, right)
        if key is None:
            raise InvalidValueError(f"arguments are written key=value, not {_short(text[left:right])}")
        if key.group(1) in arguments:
            raise InvalidValueError(f"the argument {key.group(1)} stands twice")
        try:
            arguments[key.group(1)] = literal(text[key.end() : right])
        except InvalidValueError as error:
            raise InvalidValueError(f"argument {key.group(1)}: {error}") from error
    return head.group(1), arguments


def called_name(text: str, start: int, end: int) -> str:
    """The name before the first bracket, or `""`."""
    head = _CALL.match(text, start, end)
    return head.group(1) if head else ""


def literal(source: str) -> Any:
    """The plain value that `source` writes.

    Raises:
        InvalidValueError: it writes none.
    """
    if not _PLAIN.fullmatch(source):
        raise InvalidValueError(f"{_short(source)} is not a plain value")
    plain = _TOKEN.sub(_normal, source.strip())
    try:
        tree = ast.parse(plain, mode="eval")
        return _value(tree.body)
    except InvalidValueError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg[:80] if isinstance(error, SyntaxError) else "too large or too deep"
        raise InvalidValueError(f"{_short(source)} is not a plain value ({reason})") from error


def _normal(match: re.Match[str]) -> str:
    token = match.group()
    if len(token) < 2 or match.group("raw"):
        return token

    def fix(escape: re.Match[str]) -> str:
        letter = escape.group(1)
        if letter is None:
            return f"\\u{ord(escape.group()):04x}"
        if letter not in _KNOWN_ESCAPES:
            raise InvalidValueError(rf"invalid escape \{letter} in a string; a backslash is written \\")
        return escape.group()

    return _ESCAPE.sub(fix, token)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() as written):
            return _joined(written)
        case ast.Constant(value=None | bool() as plain):
            return plain
        case ast.Constant(value=int() | float() as number):
            return _number(number)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return _number(-number if isinstance(sign, ast.USub) else number)
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _object(keys, values)
    raise InvalidValueError(f"{_short(ast.unparse(node))} is not a plain value")


def _object(keys: list[ast.expr | None], values: list[ast.expr]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in zip(keys, values, strict=True):
        name = _value(key) if key is not None else None
        if not isinstance(name, str):
            raise InvalidValueError("the keys of an object must be strings")
        if name in made:
            raise InvalidValueError(f"the key {json.dumps(name)} stands twice in one object")
        made[name] = _value(value)
    return made


def _number(number: int | float) -> int | float:
    # Bits, for turning a number that is too long into digits is what must not happen.
    if isinstance(number, int) and number.bit_length() > MAX_DIGITS * 3:
        raise InvalidValueError("a number is too large")
    if isinstance(number, float) and not math.isfinite(number):
        raise InvalidValueError("a number is too large")
    return number


def _joined(written: str) -> str:
    # JSON inside a Python literal writes one character beyond the BMP as two surrogates.
    if not re.search(r"[\ud800-\udbff][\udc00-\udfff]", written):
        return written
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _short(source: str) -> str:
    source = source.strip() or "nothing"
    return source if len(source) <= 60 else source[:57] + "..."
