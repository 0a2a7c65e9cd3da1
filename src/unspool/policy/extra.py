"""What goes with the requests of a conversation beside its tokens: the same for every turn, or told by the turn.

A mapping goes with every turn. A function of the turn's number (from 0) returns the mapping of that turn: so a model
can be held to call a tool in its first turn and be free afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from unspool.types import InvalidTypeError

Extra: TypeAlias = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]


def check_extra(extra: object, name: str = "extra") -> None:
    """Refuse what is neither a mapping nor a function.

    Raises:
        InvalidTypeError: names the value.
    """
    if not (extra is None or isinstance(extra, Mapping) or callable(extra)):
        raise InvalidTypeError(
            f"{name} must be a mapping, or a function of the turn that returns one, not {extra!r:.80}"
        )


def extra_of(extra: Extra | None, turn: int) -> dict[str, Any]:
    """What goes with this turn (from 0).

    Raises:
        InvalidTypeError: a function returned something else than a mapping.
    """
    if extra is None:
        return {}
    given = extra(turn) if callable(extra) else extra
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"extra gave {given!r:.80} for turn {turn}; it must be a mapping")
    return dict(given)


def merged(below: Extra | None, above: Extra | None) -> Extra | None:
    """Both, name by name; where both have a name, the value of `above`."""
    if below is None or above is None:
        return above if below is None else below
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **above}
    return _Merged(below, above)


class _Merged:
    """Two of which at least one is told by the turn; a class, so that it pickles where they do."""

    def __init__(self, below: Extra, above: Extra) -> None:
        self._both = below, above

    def __call__(self, turn: int) -> dict[str, Any]:
        below, above = self._both
        return {**extra_of(below, turn), **extra_of(above, turn)}
