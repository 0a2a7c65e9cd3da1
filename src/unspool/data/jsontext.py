"""JSON text that gives back what went in, or one sentence that says what does not fit.

Dicts with string keys, lists, strings (lone surrogates too), ints of any size below Python's digit limit, floats to
the last bit, booleans and None come back equal. Tuples come back as lists. NaN and the infinities are written as
Python writes them (`NaN`, `Infinity`), which strict readers of other languages refuse. Anything else is an error
here, never a changed value. (One pair of lone surrogates that together form a character comes back as it.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unspool.types import InvalidValueError

_REMEDY = "make it of dicts with string keys, lists, strings, numbers, booleans and None"
_SCALARS = {str, int, float, bool, type(None)}


def encode(value: object, where: str, key: str) -> str:
    """One line of ASCII.

    Args:
        where: what the value belongs to, for the error ("row 3").
        key: the name of the value there.

    Raises:
        InvalidValueError: naming `where`, the path from `key` to what JSON cannot hold, and its type.
    """
    try:
        fault = _fault(value, key)
        if fault is None:
            return json.dumps(value, ensure_ascii=True)
    except RecursionError:
        fault = f"{key} is nested too deeply, or contains itself"
    except ValueError as error:  # a number with more digits than Python writes, a cycle
        fault = f"{key} cannot be written as JSON ({error})"
    raise InvalidValueError(f"{where}: {fault}; {_REMEDY}")


def encode_object(row: Mapping[str, Any], where: str) -> str:
    """A dict as one line of ASCII; errors as `encode`, each naming the key of `row` that it is about."""
    parts = []
    for key, value in row.items():
        if not isinstance(key, str):
            raise InvalidValueError(f"{where}: has the key {key!r}, which is no string; {_REMEDY}")
        parts.append(f"{json.dumps(key)}: {encode(value, where, key)}")
    return "{" + ", ".join(parts) + "}"


def decode(text: str | bytes, where: str) -> Any:
    """The value of one text.

    Raises:
        InvalidValueError: naming `where`.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidValueError(f"{where}: the JSON is nested too deeply to be read") from error
    except ValueError as error:
        raise InvalidValueError(f"{where}: not JSON ({error})") from error


def _fault(value: object, path: str) -> str | None:
    """The first thing in a value that JSON would refuse, or change without a word."""
    if type(value) in _SCALARS:
        return None
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= _SCALARS:
            return None
        faults = (_fault(item, f"{path}[{index}]") for index, item in enumerate(value))
        return next((fault for fault in faults if fault), None)
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                return f"{path} has the key {name!r}, which is no string"
            fault = _fault(item, f"{path}.{name}")
            if fault:
                return fault
        return None
    if isinstance(value, (str, int, float)):  # subclasses: enums, numpy.float64
        return None
    return f"{path} is of type {type(value).__name__}, which JSON cannot hold"
