"""A wall-clock limit that holds even over what ignores its cancellation.

`asyncio.timeout` waits until the cancelled work has ended, however long that takes. Here the work is a task of its own:
when time is up it is cancelled, given a moment to end, and left behind if it does not.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from unspool.types import UnspoolError

T = TypeVar("T")

_MOMENT = 0.1
"""Seconds that cancelled work may take to end."""

_left_behind: set[asyncio.Future[Any]] = set()
"""Cancelled work that has not ended: the loop alone would let it be collected half-way."""


class TimeUpError(UnspoolError, TimeoutError):
    """The limit was reached."""


class Deadline:
    """So many seconds from now on, for any number of awaits one after another."""

    def __init__(self, seconds: float, whose: str = "the episode") -> None:
        self._seconds = seconds
        self._whose = whose
        self._end = time.monotonic() + seconds

    async def hold(self, work: Awaitable[T]) -> T:
        """Await `work`, no longer than to the deadline.

        Raises:
            TimeUpError: it was not done by then.
            RuntimeError: the work raised SystemExit, which out of a task would stop the whole loop.
        """
        own: asyncio.Future[T] | None = work if isinstance(work, asyncio.Future) else None
        task = asyncio.ensure_future(_without_exit(work)) if own is None else own
        try:
            await asyncio.wait({task}, timeout=max(0.0, self._end - time.monotonic()))
        except asyncio.CancelledError:
            await _cancel(task)
            raise
        if task.done():
            return task.result()
        await _cancel(task)
        raise TimeUpError(f"{self._whose} took longer than its {self._seconds} s")


async def _without_exit(work: Awaitable[T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # a person's
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def hold_until_done(task: asyncio.Future[Any]) -> None:
    """Refer to cancelled work that nobody waits for until it has ended."""
    _left_behind.add(task)
    task.add_done_callback(_left_behind.discard)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_MOMENT)
    if not task.done():
        hold_until_done(task)
    elif not task.cancelled():
        task.exception()  # looked at, so that nothing is logged: nobody wants it any more
