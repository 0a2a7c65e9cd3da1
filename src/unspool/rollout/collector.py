"""Garbage collection while very many episodes live.

What an episode makes is freed by its reference counts. A full collection walks every live object all the same: half a
second for ten thousand live episodes, several times a run, and it finds nothing. So while a rollout has many episodes,
full collections are made rarer, and those of young objects as rare as the number of episodes asks for; the process's
own setting comes back with the end of the last such rollout.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 1000
"""Episodes from which on it pays."""

_BETWEEN = 1000
"""Collections of the middle generation between two full ones (CPython's default is 10)."""

_YOUNG = 10
"""New objects for each episode between two collections of the youngest generation."""

_lock = threading.Lock()
_running = 0
_before: tuple[int, int, int] = (0, 0, 0)


@contextmanager
def seldom(episodes: int) -> Iterator[None]:
    """Make full collections rare while the block runs, if `episodes` are many."""
    if episodes < _MANY:
        yield
        return
    _enter(episodes)
    try:
        yield
    finally:
        _leave()


def _enter(episodes: int) -> None:
    global _running, _before
    with _lock:
        if not _running:
            _before = gc.get_threshold()
            young = max(_before[0], _YOUNG * episodes)
            gc.set_threshold(young, _before[1], max(_before[2], _BETWEEN))
        _running += 1


def _leave() -> None:
    global _running
    with _lock:
        _running -= 1
        if not _running:
            gc.set_threshold(*_before)
