"""How an environment's methods are called: one at a time, sync ones on threads, none waited for longer than allowed.

Promises: no two calls of one environment run at once, but for `close`, which has to be able to end one that hangs. A
call given up (by time-out or cancellation) while it runs on its thread makes the environment unusable: later calls are
refused with a sentence. What `close` cannot reach, because a call that was given up makes it only later, is closed when
that call returns.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from unspool.deadline import Deadline, TimeUpError
from unspool.threads import THREADS
from unspool.types import InvalidTypeError, ToolInfo, UnspoolError
from unspool.world.protocol import StepResult
from unspool.world.returned import checked
from unspool.world.waiting import close_for_nobody

if TYPE_CHECKING:
    from unspool.world.env import Env

P = ParamSpec("P")
T = TypeVar("T")

_GRACE = 0.5
"""Seconds that a call which was given up has to return before `close` is called beside it."""


class EnvError(UnspoolError, RuntimeError):
    """An environment failed, or cannot be used any more."""


class EnvCalls:
    """The calls of one environment; `EnvCalls.of(env)` is the same object each time."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._hung: str | None = None  # the method that was given up and has not returned
        self._returned: asyncio.Event | None = None  # set when it has
        self._closed = False

    @classmethod
    def of(cls, env: Env) -> EnvCalls:
        calls = env.__dict__.get("_unspool_calls")
        if calls is None or calls._env is not env:  # a shallow copy has those of what it was copied from
            calls = env.__dict__["_unspool_calls"] = cls(env)
        return cast(EnvCalls, calls)

    def __reduce__(self) -> tuple[type[EnvCalls], tuple[Env]]:
        return EnvCalls, (self._env,)

    # ------------------------------------------------------------------ calls

    async def call(
        self,
        function: Callable[P, T | Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the environment, behind all calls before it.

        Raises:
            EnvError: an earlier call hangs.
            Exception: what the method raised.
        """
        async with self._turn:
            if self._hung is not None:
                raise EnvError(
                    f"{self._name(self._hung)} has not returned since it was given up, so the environment cannot be "
                    "used any more; make a new one"
                )
            self._closed = False  # whoever uses it again wants it closed again
            if is_async(function):
                return await cast(Awaitable[T], function(*args, **kwargs))
            result = await self._on_thread(getattr(function, "__name__", "a call"), lambda: function(*args, **kwargs))
            return await result if inspect.isawaitable(result) else result

    async def within(self, seconds: float | None, work: Awaitable[T], name: str) -> T:
        """Await one of the calls, no longer than so many seconds.

        Raises:
            EnvError: it was not done by then.
        """
        try:
            return await (work if seconds is None else Deadline(seconds, self._name(name)).hold(work))
        except TimeUpError as error:  # of this call, not of the episode
            raise EnvError(str(error)) from None

    async def result(self, function: Callable[..., Any], *args: Any) -> StepResult:
        """As `call`, for what has to give a StepResult; its parts are looked at here.

        Raises:
            InvalidTypeError: it is none, or a part of it has a type that it cannot have.
            InvalidValueError: its reward is not finite.
        """
        given = await self.call(function, *args)
        return checked(given, self._name(getattr(function, "__name__", "step")))

    async def tools(self) -> list[ToolInfo]:
        """The environment's `tools()`.

        Raises:
            InvalidTypeError: they are no list of dicts.
        """
        given: object = await self.call(self._env.tools)
        name = self._name("tools")
        if not isinstance(given, list | tuple):
            raise InvalidTypeError(f"{name} must return a list of tools ([] for none), not {given!r:.80}")
        for one in given:
            if not isinstance(one, dict) or not isinstance(one.get("function", one), dict):
                raise InvalidTypeError(f"{name} must return dicts in OpenAI's form, not {one!r:.80} among them")
        return list(given)

    async def _on_thread(self, name: str, function: Callable[[], T]) -> T:
        loop, returned = asyncio.get_running_loop(), asyncio.Event()
        running = THREADS.start(lambda: self._watched(function, loop, returned))
        try:
            return await running.future
        finally:
            if running.abandon():
                with self._lock:
                    self._hung, self._returned = name, returned
                if returned.is_set():
                    self._hung = None

    def _watched(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop, returned: asyncio.Event) -> T:
        """On a thread: the call; where it was given up and the environment was closed by then, close it again."""
        try:
            return function()
        finally:
            with self._lock:
                late = self._closed
            try:
                if late:
                    close_for_nobody(self._env, "given up in a call")
            finally:
                try:
                    loop.call_soon_threadsafe(self._came_back, returned)
                except RuntimeError:  # the loop is closed: nobody waits
                    self._hung = None

    def _came_back(self, returned: asyncio.Event) -> None:
        returned.set()
        if self._returned is returned:
            self._hung = None

    def _name(self, method: str) -> str:
        return f"{type(self._env).__name__}.{method}"

    # ------------------------------------------------------------------ closing

    async def close(self, seconds: float | None) -> None:
        """Close the environment once, no longer than so many seconds.

        Raises:
            EnvError: it was not done by then.
            Exception: what `close` raised.
        """
        if self._hung is not None and self._returned is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._returned.wait(), _GRACE)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        await self.within(seconds, self._close(), "close")

    async def _close(self) -> None:
        function = self._env.close
        if is_async(function):
            await function()
            return
        running = THREADS.start(function)
        try:
            result = await running.future
        finally:
            running.abandon()
        if inspect.isawaitable(result):
            await result


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await and blocks nothing."""
    return any(inspect.iscoroutinefunction(one) for one in (function, getattr(type(function), "__call__", None)))  # noqa: B004
