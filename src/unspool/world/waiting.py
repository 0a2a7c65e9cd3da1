"""Waiting for one thing with a time limit, without touching it: no cancellation is confused with another.

`asyncio.wait_for` cancels what it waits for; here a wait that ends, by time or from outside, leaves the work alone.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from unspool.deadline import hold_until_done

T = TypeVar("T")

logger = logging.getLogger("unspool")

EAGER = sys.version_info >= (3, 12)


def lapse(future: asyncio.Future[Any], seconds: float | None) -> asyncio.TimerHandle | None:
    """Settle `future` with None after `seconds`, unless it is settled by then."""
    if seconds is None:
        return None

    def settle() -> None:
        if not future.done():
            future.set_result(None)

    return future.get_loop().call_later(seconds, settle)


async def wait_until(task: asyncio.Task[Any], seconds: float | None) -> None:
    """Wait until the task is done or its time is over; it is not touched, whatever becomes of the wait."""
    settled: asyncio.Future[None] = task.get_loop().create_future()

    def settle(_: object) -> None:
        if not settled.done():
            settled.set_result(None)

    task.add_done_callback(settle)
    timer = lapse(settled, seconds)
    try:
        await settled
    finally:
        if timer is not None:
            timer.cancel()


def start_eagerly(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that runs up to its first wait at once, where Python can do that: most tools that are quick end there."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, eager_start=True)
    return loop.create_task(work)


def leave(task: asyncio.Task[Any]) -> None:
    """Cancel a task without waiting for it."""
    hold_until_done(task)
    task.cancel()


def close_for_nobody(thing: Any, why: str) -> None:
    """On a thread: close a thing that nobody waits for; a failure is logged, with `why` it had to be closed."""
    try:
        result = thing.close() if hasattr(thing, "close") else None
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))
    except BaseException:
        logger.warning("%s, %s, could not be closed", type(thing).__name__, why, exc_info=True)


async def _awaited(result: Awaitable[object]) -> None:
    await result


def running_task() -> asyncio.Task[Any] | None:
    """The task that runs here; None where there is none, or no loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def is_from_outside(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether an exception is meant for who runs the task, and was not raised by something that the task called."""
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()  # a person's
    # A coroutine that is thrown away gets its GeneratorExit outside of its task.
    return isinstance(error, GeneratorExit) and (task is None or running_task() is not task)
