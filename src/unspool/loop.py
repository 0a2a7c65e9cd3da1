"""The private event loop on which every sync entry runs: one a process, on a daemon thread, kept for its life.

So a blocking call works from a script, from a notebook whose own loop is running, and from any thread, and engines
see the same loop from one call to the next.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from unspool.types import BlockingCallError

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_owner: int | None = None  # the process that the loop's thread lives in: a fork has the loop but not the thread


def private_loop() -> asyncio.AbstractEventLoop:
    """The loop, started where it is not running in this process."""
    global _loop, _owner, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive() or _owner != os.getpid():
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            _thread = threading.Thread(target=_loop.run_forever, name="unspool-loop", daemon=True)
            _thread.start()
        return _loop


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the private loop, for a caller that will wait for it.

    Raises:
        BlockingCallError: on the private loop itself, where waiting would be for ever.
    """
    if _on_private_loop():
        work.close()
        raise BlockingCallError(
            "a blocking call of unspool was made on its own event loop (in an async tool, say), where it would wait "
            "for ever; await the async form instead, such as acall"
        )
    return asyncio.run_coroutine_threadsafe(work, private_loop())


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the private loop and wait for it; an interrupted wait cancels it."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _on_private_loop() -> bool:
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False
