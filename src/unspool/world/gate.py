"""At most so many calls at once on each event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref


class Gate:
    """A semaphore for each event loop that asks; pickles as its limit. Calling it gives the running loop's.

    Args:
        limit: most calls at once on one loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        with self._lock:
            semaphore = self._loops.get(loop)
            if semaphore is None:
                semaphore = self._loops[loop] = asyncio.Semaphore(self.limit)
            return semaphore

    def __reduce__(self) -> tuple[type[Gate], tuple[int]]:
        return Gate, (self.limit,)
