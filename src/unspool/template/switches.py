"""Switches of a template: names that its source reads, and none that belong to the conversation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from unspool.types import InvalidTypeError, InvalidValueError

OPTIONS = ("chat_template", "parser", "thinking")
"""What `ChatTemplate` itself takes."""
_OF_THE_CONVERSATION = ("messages", "tools", "add_generation_prompt")


def check_switches(switches: Mapping[Any, Any]) -> None:
    """Refuse what can be no switch.

    Raises:
        InvalidTypeError: a name is no string.
        InvalidValueError: a name stands for a part of the conversation.
    """
    for name in switches:
        if not isinstance(name, str):
            raise InvalidTypeError(f"names of template switches must be strings, not {name!r}")
        if name in _OF_THE_CONVERSATION:
            raise InvalidValueError(
                f"{name!r} cannot be a template switch: it would replace that of the conversation; leave it out"
            )


def unread(switches: Iterable[str], read: Collection[str], besides: Collection[str] = ()) -> list[str]:
    """A sentence's part for each switch that the template never reads; `besides`: variables that are no switches."""
    known = sorted({*OPTIONS, *read}.difference(_OF_THE_CONVERSATION, besides))
    said = []
    for name in switches:
        if name not in read:
            near = get_close_matches(name, known, 1)
            said.append(f"it never reads the switch {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return said
