"""Threads for calls that block, where one that never returns costs nobody else anything.

Promises: a call starts at once, on an idle thread or on a new one, however many others hang; a call that is
given up (`abandon`) before it began never runs, and one that began keeps its thread until it returns by itself;
the interpreter's exit waits for none of them; a result for a loop that is closed is dropped.

Why not what exists: the threads of `concurrent.futures.ThreadPoolExecutor` are a fixed number and are joined at
exit, so hung calls use them up and keep the process alive. `anyio.to_thread` has ordinary (joined) threads too,
forty to a loop by default, tied to one loop's life, and a thread given up still holds one of the forty.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Call(Generic[T]):
    """One call on a thread, and the future on the caller's loop that gets its result."""

    __slots__ = ("_context", "_function", "_given_up", "_returned", "future", "loop", "started")

    def __init__(self, function: Callable[[], T]) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self.started = False
        self._given_up = False
        self._returned = False
        self._function: Callable[[], T] | None = function
        self._context = contextvars.copy_context()

    def abandon(self) -> bool:
        """Want no result any more; True where the call is now running for nobody."""
        self._given_up = True
        return self.started and not self._returned

    def run(self) -> None:
        """On a thread: make the call and hand the result over."""
        function, self._function = self._function, None
        if self._given_up or function is None:
            return
        self.started = True
        try:
            result = self._context.run(function)
        except BaseException as error:
            self._deliver(self._fail, error)
        else:
            self._deliver(self._succeed, result)

    def _deliver(self, settle: Callable[[Any], None], value: object) -> None:
        self._returned = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(settle, value)

    def _succeed(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            # A future refuses StopIteration, and the loop would be torn down by the two that end processes.
            if isinstance(error, StopIteration | SystemExit | KeyboardInterrupt):
                error = RuntimeError(f"{type(error).__name__}: {error}")
            self.future.set_exception(error)


class DaemonThreads:
    """A pool of daemon threads that grows whenever all are busy, and shrinks when they are idle.

    Args:
        max_idle: threads kept for later; one that becomes free beyond them ends.
        idle_seconds: how long an idle thread waits for work.
    """

    def __init__(self, max_idle: int = 64, idle_seconds: float = 10.0) -> None:
        self._max_idle = max_idle
        self._idle_seconds = idle_seconds
        self._names = itertools.count(1)
        self._forget()
        if hasattr(os, "register_at_fork"):  # threads do not survive a fork; their bookkeeping would
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Call[Any]]] = []
        self._backlog: deque[Call[Any]] = deque()
        self._alive = 0

    def start(self, function: Callable[[], T]) -> Call[T]:
        """Call `function` on a thread, in a copy of the caller's context; from inside an event loop.

        Raises:
            RuntimeError: not one thread runs, and the system gives none.
        """
        call = Call(function)
        with self._lock:
            # The latest to fall idle is taken first, so that the others can reach the end of their wait.
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(call)
        else:
            self._grow(call)
        return call

    def _grow(self, call: Call[Any]) -> None:
        thread = threading.Thread(
            target=self._work, args=(call,), name=f"unspool-thread-{next(self._names)}", daemon=True
        )
        with self._lock:
            self._alive += 1
        try:
            thread.start()
        except RuntimeError:  # the system's limit; a thread that becomes free takes the call
            with self._lock:
                self._alive -= 1
                if self._alive == 0:
                    raise
                self._backlog.append(call)

    def _work(self, call: Call[Any] | None) -> None:
        inbox: SimpleQueue[Call[Any]] = SimpleQueue()
        while call is not None:
            call.run()
            call = None  # hold no result while waiting
            call = self._next(inbox)

    def _next(self, inbox: SimpleQueue[Call[Any]]) -> Call[Any] | None:
        """What this thread does next; None: nothing, ever."""
        with self._lock:
            if self._backlog:
                return self._backlog.popleft()
            if len(self._idle) >= self._max_idle:
                self._alive -= 1
                return None
            self._idle.append(inbox)
        try:
            return inbox.get(timeout=self._idle_seconds)
        except Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    self._alive -= 1
                    return None
            return inbox.get()  # taken in the last moment: work is on its way

    @property
    def alive(self) -> int:
        """Threads that run now, idle ones included."""
        with self._lock:
            return self._alive


THREADS = DaemonThreads()
"""The threads of this process, for tools and for engines that block."""


async def run_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function on a daemon thread; a cancelled wait leaves the call behind on its thread."""
    call = THREADS.start(functools.partial(function, *args, **kwargs))
    try:
        return await call.future
    finally:
        call.abandon()
