"""The one event loop that a vLLM lives on, and calls to it from any other.

What this module promises: a call from another loop, whichever and however many there are, costs one wake-up each way;
cancelling it cancels the work; a loop that is closed meanwhile harms nobody. Work that must not be left half done
(`finish`) goes on where its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Home:
    """An event loop that runs in some thread, for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._kept: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine there."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine there that runs to its end even where the caller is cancelled."""
        return await self.run(self._shielded(work))

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self.keep(work))

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """From the loop itself: start work that nobody needs to wait for."""
        task = self.loop.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """From any thread: call a function there soon; never raises."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *args)
