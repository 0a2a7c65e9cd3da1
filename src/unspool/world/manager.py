"""The tools of an episode, and how a turn's calls are answered.

Promises: every call of a turn gets exactly one answer, in call order, within its time-out; whatever goes wrong
in a call is told to the model as `Error: ...` and listed as a `ToolFailure`, and nothing that a tool does raises
out of here (a cancellation of the caller does). Calls run concurrently, sync tools on threads of their own, and
one that hangs is abandoned there. What a tool does to its arguments stays out of the messages.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from unspool.loop import run_sync
from unspool.threads import THREADS
from unspool.types import (
    InvalidTypeError,
    InvalidValueError,
    Message,
    MessageDict,
    ToolCall,
    ToolInfo,
    UnspoolError,
    decode_arguments,
)
from unspool.world.gate import Gate
from unspool.world.output import Rendered, clean, render, render_stream, shorten
from unspool.world.protocol import Step, StepResult, ToolFailure, tool_answer
from unspool.world.tool import Tool, check_limits, tool
from unspool.world.waiting import EAGER, lapse, leave, start_eagerly, wait_until

_MAX_ERROR_CHARS = 2_000
_OVER = "not run: an earlier call of this turn ended the episode"


class _Answer(NamedTuple):
    """What the model is told, and where the call failed: as what, and in what words."""

    content: str
    kind: str | None = None
    error: str = ""
    result: StepResult | None = None


class _Later(NamedTuple):
    """A sync function gave something to await: that belongs on the loop."""

    value: Any


class ToolManager:
    """Tools by name, and the answers to calls of them.

    Args:
        tools: Tools, or typed functions, which become Tools.
        timeout: seconds that a call may take, where its tool says nothing; None: no limit.
        max_tool_chars: most characters of an answer, where its tool says nothing; errors have at most 2,000.
        concurrency: most calls at once over all episodes that share this manager or its copies, for each event
            loop; None: any number. The time-out of a call begins when it runs.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] | None = None,
        *,
        timeout: float | None = 30.0,
        max_tool_chars: int = 16_000,
        concurrency: int | None = None,
    ) -> None:
        check_limits("", timeout, "max_tool_chars", max_tool_chars)
        if max_tool_chars is None:
            raise InvalidValueError("max_tool_chars must be at least 1, not None; output is always bounded")
        if concurrency is not None and not (isinstance(concurrency, int) and concurrency >= 1):
            raise InvalidValueError(f"concurrency must be at least 1, or None for no limit, not {concurrency!r}")
        self.timeout = timeout
        self.max_tool_chars = max_tool_chars
        self._gate = None if concurrency is None else Gate(concurrency)
        self._abandoned = 0
        self._tools: dict[str, Tool] = {}
        if isinstance(tools, Tool) or callable(tools) or isinstance(tools, str | Mapping):
            raise InvalidTypeError(f"tools must be a list of tools, not {tools!r}")
        for one in tools or ():
            self.register(one)

    # ------------------------------------------------------------------ the registry

    def register(self, function: Tool | Callable[..., Any]) -> Tool:
        """Add a tool; usable as a decorator.

        Raises:
            InvalidValueError: its name is taken, or its schema is not valid.
            InvalidTypeError: it is no tool and no typed function.
        """
        if not callable(function):
            raise InvalidTypeError(f"a tool must be a Tool or a typed function, not {function!r}")
        added = function if isinstance(function, Tool) else tool(function)
        if added.name in self._tools:
            raise InvalidValueError(f"a tool named {added.name!r} is registered already; unregister it first")
        _ = added.validator  # compiled now, so that a bad schema is an error here and not in every episode
        self._tools[added.name] = added
        return added

    def unregister(self, name: str) -> Tool:
        """Take a tool away, and return it."""
        if name not in self._tools:
            raise InvalidValueError(f"no tool is named {name!r}; there are: {', '.join(self._tools) or 'none'}")
        return self._tools.pop(name)

    @property
    def names(self) -> list[str]:
        """The names of the tools, in the order of registration."""
        return list(self._tools)

    @property
    def has_state(self) -> bool:
        """Whether a tool acts on an environment, so that the manager belongs to one episode."""
        return bool(self.in_order)

    @property
    def in_order(self) -> list[Tool]:
        """The tools that act on an environment, whose calls are run one after another."""
        return [one for one in self._tools.values() if one.in_order]

    @property
    def concurrency(self) -> int | None:
        """Most calls at once on one event loop; None: any number."""
        return None if self._gate is None else self._gate.limit

    @property
    def abandoned(self) -> int:
        """Calls that were given up, by time-out or cancellation, while they ran on a thread."""
        return self._abandoned

    def copy(self) -> ToolManager:
        """A manager with the same tools and limits; tools added to one are not in the other."""
        other = ToolManager(timeout=self.timeout, max_tool_chars=self.max_tool_chars)
        other._gate = self._gate
        other._tools = dict(self._tools)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tools": dict(self._tools), "_abandoned": 0}

    def __repr__(self) -> str:
        return f"ToolManager([{', '.join(self._tools)}])"

    # ------------------------------------------------------------------ a world

    def tool_infos(self) -> list[ToolInfo]:
        """The tools in OpenAI's form; fresh objects each time."""
        return [one.info() for one in self._tools.values()]

    def wants(self, message: Message) -> bool:
        """Whether the turn calls anything, well-formed or not."""
        return bool(message.tool_calls)

    async def step(self, message: Message) -> Step:
        """Answer every call of a turn, all at once, in call order; where one acts on an environment, one by one."""
        calls = message.tool_calls
        if len(calls) == 1:
            return _step(calls, [await self._answer(calls[0])])
        if not any(one.in_order for call in calls if (one := self._tools.get(call.name)) is not None):
            return _step(calls, await asyncio.gather(*(self._answer(call) for call in calls)))
        answers: list[_Answer] = []
        for call in calls:
            over = any(answer.result is not None and answer.result.done for answer in answers)
            answers.append(_failed("limit", _OVER) if over else await self._answer(call))
        return _step(calls, answers)

    async def call(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> str:
        """The answer to one call, as the model would read it; `arguments` is an object or JSON text."""
        return (await self._answer(ToolCall(name, cast(Any, arguments)))).content

    def __call__(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> str:
        """As `call`, blocking; the tool runs on unspool's own event loop or on a thread."""
        return run_sync(self.call(name, arguments))

    # ------------------------------------------------------------------ one call

    async def _answer(self, call: ToolCall) -> _Answer:
        """One call's answer; raises only the caller's own cancellation."""
        try:
            prepared = self._prepare(call)
            if isinstance(prepared, _Answer):
                return prepared
            if self._gate is None:
                return await self._execute(*prepared)
            async with self._gate():
                return await self._execute(*prepared)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise  # these are the caller's: a tool's own are caught where it runs
        except BaseException as error:
            return _raised(str(call.name), error)

    def _prepare(self, call: ToolCall) -> _Answer | tuple[Tool, Callable[[], Any]]:
        """The call as something to call, or why it cannot be."""
        if call.status != "ok":
            return _failed(call.status, call.error or f"the call of {call.name} could not be read ({call.status})")
        found = self._tools.get(call.name)
        if found is None:
            return _failed("unknown_tool", self._unknown(call.name))
        try:
            # A copy: what the tool does to its arguments must not reach the message that the model wrote.
            arguments = _own(decode_arguments(call.arguments))
        except (InvalidValueError, RecursionError) as error:
            return _failed("bad_json", str(error))
        try:
            problem = found.problem(arguments)
            if problem is not None:
                return _failed("bad_arguments", problem)
            positional, keyword = found.bind(arguments)
        except Exception as error:
            return _failed("bad_arguments", _words(error))
        function = found.function
        return found, lambda: function(*positional, **keyword)

    def _unknown(self, name: object) -> str:
        if not self._tools:
            return f"there is no tool named {name!r}; no tools are available"
        close = difflib.get_close_matches(str(name)[:128], self._tools, n=1, cutoff=0.5)
        hint = f" did you mean {close[0]!r}?" if close else ""
        return f"there is no tool named {name!r};{hint} available tools: {', '.join(self._tools)}"

    async def _execute(self, called: Tool, function: Callable[[], Any]) -> _Answer:
        """Run a call to its end, or to its time-out."""
        limit = self.max_tool_chars if called.max_chars is None else called.max_chars
        seconds = self.timeout if called.timeout is None else called.timeout
        if seconds is None or math.isinf(seconds):
            seconds = None
        deadline = None if seconds is None else time.monotonic() + seconds
        result: _Answer | _Later | None = _Later(function)
        if not called.is_async:
            result = await self._on_thread(lambda: _produce(called.name, function, limit, deadline), seconds)
            if isinstance(result, _Later):
                value = result.value
                result = _Later(lambda: value)
        if isinstance(result, _Later):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            result = await _on_loop(called.name, result.value, limit, left)
        if result is None:
            return _failed("timeout", f"{called.name} gave no answer within {seconds:g} s")
        return result

    async def _on_thread(self, produce: Callable[[], _Answer | _Later], seconds: float | None) -> Any:
        running = THREADS.start(produce)
        timer = lapse(running.future, seconds)
        result = None
        try:
            result = await running.future
        finally:
            if timer is not None:
                timer.cancel()
            # Late or cancelled: either way nobody will take the result.
            if result is None and running.abandon():
                self._abandoned += 1
        return result


_SCALARS = frozenset({str, int, float, bool, type(None)})


def _own(arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing that can change; most arguments are flat, and need no deep copy."""
    return arguments if all(type(value) in _SCALARS for value in arguments.values()) else copy.deepcopy(arguments)


def _produce(name: str, function: Callable[[], Any], limit: int, deadline: float | None) -> _Answer | _Later:
    """On a thread: the call and the writing of its result, so that a slow `__str__` blocks no loop either."""
    try:
        value = function()
        if inspect.isawaitable(value) or isinstance(value, AsyncIterator):
            return _Later(value)
        return _read(name, value, limit, deadline)
    except BaseException as error:
        return _raised(name, error)


async def _on_loop(name: str, function: Callable[[], Any], limit: int, seconds: float | None) -> _Answer | None:
    """As `_produce`, for what has to be awaited; None: its time is over.

    A task of its own keeps three things apart: the caller's cancellation, the time-out's, and one that the tool
    raises itself; and a tool that ignores its cancellation is left behind instead of being waited for.
    """

    async def produce() -> _Answer:
        # SystemExit and KeyboardInterrupt too: in a task they would stop the whole loop.
        try:
            value = function()
            if isinstance(value, AsyncIterator):
                return _shown(name, await render_stream(value, limit))
            return _read(name, await value, limit)
        except BaseException as error:
            return _raised(name, error)

    loop = asyncio.get_running_loop()
    task = start_eagerly(loop, produce())
    try:
        if not EAGER:
            await asyncio.sleep(0)  # its first step, in which quick tools end: for those no timer is set
        if not task.done():
            await wait_until(task, seconds)
    finally:
        if not task.done():
            leave(task)
    if not task.done():
        return None
    if task.cancelled():  # before its first step, by something that cancels all tasks
        return _raised(name, asyncio.CancelledError())
    return task.result()


def _step(calls: Sequence[ToolCall], answers: Sequence[_Answer]) -> Step:
    """The answers of a turn, with what environments said of it."""
    messages: list[MessageDict] = []
    failures = []
    done, reward, info = False, None, {}
    for call, answer in zip(calls, answers, strict=True):
        messages.append(tool_answer(call, answer.content))
        if answer.kind is not None:
            failures.append(ToolFailure(call.name, call.id, answer.kind, answer.error))
        if answer.result is not None:
            done = done or answer.result.done
            info.update(answer.result.info)
            if answer.result.reward is not None:
                reward = (reward or 0.0) + answer.result.reward
    return Step(messages, failures, done, reward, info)


def _read(name: str, value: object, limit: int, deadline: float | None = None) -> _Answer:
    """A result as an answer; of an environment's, the model reads the observation."""
    if isinstance(value, StepResult):
        return _shown(name, render(value.observation, limit, deadline))._replace(result=value)
    return _shown(name, render(value, limit, deadline))


def _shown(name: str, rendered: Rendered) -> _Answer:
    if rendered.cut is None:
        return _Answer(rendered.text)
    return _Answer(rendered.text, "truncated", f"the output of {name} {rendered.cut} were kept")


def _raised(name: str, error: BaseException) -> _Answer:
    return _failed("exception", _words(error) if isinstance(error, UnspoolError) else f"{name} raised {_words(error)}")


def _words(error: BaseException) -> str:
    """An exception in a sentence; unspool's own are sentences already."""
    kind = type(error).__name__
    try:
        said = str.__str__(str(error))
    except BaseException:  # even that can be the tool's code
        return f"{kind} (its message cannot be read)"
    if isinstance(error, UnspoolError):
        return said
    return f"{kind}: {said}" if said else kind


def _failed(kind: str, why: str) -> _Answer:
    content = shorten("Error: " + clean(why[: 8 * _MAX_ERROR_CHARS]), _MAX_ERROR_CHARS).text
    return _Answer(content, kind, content)
