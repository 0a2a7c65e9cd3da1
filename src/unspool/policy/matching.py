"""Whether a conversation goes on from the recorded one, and if not, why not.

What an agent sends back is compared by what it says, not by how it is written: arguments as text or as an object, an
absent or an empty content, keys that say nothing. A benign rewriting must not branch a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from unspool.record import Cause
from unspool.types import InvalidValueError, MessageDict, decode_arguments


def common_prefix(known: Sequence[MessageDict], messages: Sequence[MessageDict]) -> int:
    """How many messages at the start say the same."""
    if messages[: len(known)] == known:  # most often the very same dicts
        return len(known)
    for index, (old, new) in enumerate(zip(known, messages, strict=False)):
        if old is not new and old != new and _essence(old) != _essence(new):
            return index
    return min(len(known), len(messages))


def branch_cause(known: Sequence[MessageDict], messages: Sequence[MessageDict], same: int) -> Cause:
    """Why `messages` is not `known` gone on; `same` messages at the start are equal."""
    if same == len(messages):
        return Cause.TRUNCATED
    old, new = _essence(known[same]), _essence(messages[same])
    if {**old, "reasoning": ""} == new:
        return Cause.THINKING_DROPPED
    if {**old, "calls": _untyped(old["calls"])} == {**new, "calls": _untyped(new["calls"])}:
        return Cause.ARGUMENT_TYPES
    return Cause.COMPACTED if _moved_forward(known, messages, same) else Cause.EDITED


def _moved_forward(known: Sequence[MessageDict], messages: Sequence[MessageDict], same: int) -> bool:
    """Whether a message behind the difference stood further back before: what was between is gone."""
    before = [_essence(message) for message in known]
    return any(_essence(message) in before[index + 1 :] for index, message in enumerate(messages) if index >= same)


def _essence(message: MessageDict) -> dict[str, Any]:
    """What a message says: role, text, thinking, calls, and which call it answers."""
    return {
        "role": message.get("role"),
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [_call(call) for call in message.get("tool_calls") or ()],
        "answers": message.get("tool_call_id") or "",
    }


def _call(call: dict[str, Any]) -> tuple[Any, Any, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    with suppress(InvalidValueError):  # text that is no JSON object is compared as the text that it is
        arguments = decode_arguments(arguments)
    return call.get("id") or "", function.get("name"), arguments


def _untyped(calls: list[tuple[Any, Any, Any]]) -> list[tuple[Any, Any, str]]:
    """Calls with every argument as lower-case text, so that `true`, `True` and `"true"` are one."""
    return [(ident, name, _text(arguments)) for ident, name, arguments in calls]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return str({str(key): _text(item) for key, item in value.items()})
    if isinstance(value, list):
        return str([_text(item) for item in value])
    return str(value).lower()
