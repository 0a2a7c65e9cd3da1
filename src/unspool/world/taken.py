"""What serves one episode at a time: who has it now.

Promises: a thing has one holder at most; a second is refused until the first gives it back, or is no more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

from unspool.types import InvalidValueError

_lock = threading.Lock()
_holders: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""From the `id` of a thing to its holder, which keeps the thing alive."""


def take(things: Iterable[object], holder: object) -> None:
    """Take things, all or none of them; the holder has to refer to them until it gives them back.

    Raises:
        InvalidValueError: another has one of them.
    """
    things = list(things)
    with _lock:
        for thing in things:
            if _holders.get(id(thing), holder) is not holder:
                raise InvalidValueError(
                    f"this {type(thing).__name__} serves another episode that has not ended; give a maker that makes a "
                    "new one for each episode"
                )
        for thing in things:
            _holders[id(thing)] = holder


def is_taken(thing: object) -> bool:
    """Whether somebody has it."""
    with _lock:
        return id(thing) in _holders


def give_back(things: Iterable[object], holder: object) -> None:
    """Give back what the holder has of these; what it does not have is left alone."""
    with _lock:
        for thing in things:
            if _holders.get(id(thing)) is holder:
                del _holders[id(thing)]
