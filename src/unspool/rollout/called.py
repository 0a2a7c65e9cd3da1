"""Tools as one function of a name and arguments, `execute_tool(name, arguments)`, and what goes with it.

`CalledByName` makes a world of such a function, with what a `ToolManager` promises: one answer a call, in call order,
within its time-out, whatever the function does. `as_worlds` tells such a function from worlds. `InStep` lets the
episodes of a batch go on together where their tools answer at once, and holds nobody up where they do not.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeGuard, cast

from unspool.template.parsers import PARSERS
from unspool.template.thinking import CLOSE, OPEN, split_thinking
from unspool.types import (
    InvalidTypeError,
    InvalidValueError,
    Message,
    ToolCall,
    ToolInfo,
    check_value,
    decode_arguments,
)
from unspool.world import Env, Step, Tool, ToolFailure, ToolManager, World
from unspool.world.making import Given, for_one_episode, is_world, problem_with

ExecuteTool = Callable[[str, dict[str, Any]], Any]
"""What a call of this name and these arguments returns, plain or async; None: there is no such tool."""

MAX_CHARS = 2048
"""Most characters of an answer: a tool may return a number without end."""

NOT_FOUND = '{"error": "tool not found"}'

GRACE = 0.05
"""Seconds for which an episode whose tools have answered waits for others whose tools began to run meanwhile."""


def parse_tool_calls(text: str, parser: str = "hermes") -> list[dict[str, Any]]:
    """The calls in a turn's text, in their order: dicts with `name` (str) and `arguments` (dict).

    Calls that cannot be read are left out, as are those inside thinking (up to a first `</think>`, or all of it where a
    `<think>` is never closed). Never raises, whatever the text.

    Args:
        text: one turn of a model.
        parser: the format, a name from `unspool.template.parsers.PARSERS`.

    Raises:
        InvalidValueError: there is no such format.
    """
    if parser not in PARSERS:
        raise InvalidValueError(f"no tool-call parser is called {parser!r}; there are: {', '.join(PARSERS)}")
    opened = CLOSE in text and OPEN not in text[: text.find(CLOSE)]
    content = text[split_thinking(text, opened).content_start :]
    found = PARSERS[parser].parse(content)
    return [{"name": call.name, "arguments": call.arguments} for call in found.calls if call.status == "ok"]


def execute_tool(
    name: str,
    arguments: Mapping[str, Any] | str | None,
    tools: Mapping[str, Callable[[dict[str, Any]], Any]],
    *,
    timeout: float | None = 1.0,
) -> Any:
    """Call `tools[name](arguments)`, blocking, for at most `timeout` seconds; on any thread, without signals.

    An async tool runs on an event loop of its own.

    Args:
        name: of the tool.
        arguments: an object, or JSON text of one, as models write them; the tool gets its own dict.
        tools: functions of such a dict, by name; plain or async.
        timeout: seconds; None: no limit.

    Returns:
        What the tool returned; None where no tool has that name; `{"error": ...}` where the arguments are none, where
        it raised, or where it took too long. It then stays behind on a thread of its own, which ends with the process.

    Raises:
        InvalidTypeError: `tools` is no mapping, or `timeout` no number.
        InvalidValueError: `timeout` is not above 0.
    """
    check_value("timeout", timeout, lambda value: value is None or value > 0, "above 0 seconds, or None")
    if not isinstance(tools, Mapping):
        raise InvalidTypeError(
            f"tools must map names to functions, and is a {type(tools).__name__}; a ToolManager is called itself, "
            "manager(name, arguments)"
        )
    function = tools.get(name) if isinstance(name, str) else None
    if function is None:
        return None
    try:
        own = decode_arguments(arguments)
    except InvalidValueError as error:
        return {"error": str(error)}
    results: SimpleQueue[Any] = SimpleQueue()
    limit = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)

    def call() -> None:
        try:
            result = function(own)
            results.put(asyncio.run(_awaited(result, limit)) if inspect.isawaitable(result) else result)
        except _LateError:
            pass  # whoever waits knows
        except BaseException as error:
            results.put({"error": f"{name} raised {type(error).__name__}: {error}"})

    threading.Thread(target=call, name=f"unspool-tool-{name[:32]}", daemon=True).start()
    try:
        return results.get(timeout=limit)
    except Empty:
        return {"error": f"{name} gave no answer within {limit:g} s"}


class _LateError(Exception):
    """An async tool was stopped by its time limit."""


async def _awaited(result: Awaitable[Any], seconds: float | None) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await result
    except TimeoutError:
        if limit.expired():
            raise _LateError from None
        raise


class CalledByName:
    """A world that answers every call with `execute_tool(name, arguments)`.

    What it returns is written as JSON, at most 2,048 characters of it, cut in the middle; None is answered with
    `{"error": "tool not found"}`. What it raises, and calls that cannot be read, are answered with `Error: ...`.

    Args:
        execute_tool: see `ExecuteTool`; None: no tool is found.
        timeout: seconds of a call; None: no limit.
    """

    def __init__(self, execute_tool: ExecuteTool | None, timeout: float | None = 30.0) -> None:
        self._execute = execute_tool
        properties = {"name": {"type": "string"}, "arguments": {"type": "object"}}
        schema = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        one = Tool("execute_tool", "", schema, self._run, timeout=timeout, max_chars=MAX_CHARS)
        self._manager = ToolManager([one], timeout=timeout)

    def tool_infos(self) -> list[ToolInfo]:
        """None: what is offered comes with the conversation."""
        return []

    def wants(self, message: Message) -> bool:
        """Whether the turn calls anything, well-formed or not."""
        return bool(message.tool_calls)

    async def step(self, message: Message) -> Step:
        """Answer every call, all at once, in call order."""
        calls = message.tool_calls
        through = tuple(_through(call) for call in calls)
        step = await self._manager.step(Message(message.content, None, through))
        failures = [
            replace(failure, name=next((c.name for c in calls if c.id == failure.call_id), failure.name))
            for failure in step.failures
        ]
        messages = []
        for call, answer in zip(calls, step.messages, strict=True):
            messages.append({**answer, "name": call.name})
            if answer["content"] == NOT_FOUND:
                failures.append(ToolFailure(call.name, call.id, "unknown_tool", f"no tool is named {call.name!r}"))
        return Step(messages, failures)

    def _run(self, name: str, arguments: dict[str, Any]) -> Any:
        result = None if self._execute is None else self._execute(name, arguments)
        return _later(result) if inspect.isawaitable(result) else _written(result)


def _through(call: ToolCall) -> ToolCall:
    if call.status != "ok":
        return call
    return ToolCall("execute_tool", {"name": call.name, "arguments": call.arguments}, call.id)


async def _later(result: Any) -> str:
    return _written(await result)


def _written(result: object) -> str:
    return NOT_FOUND if result is None else json.dumps(result, ensure_ascii=False, default=str)


def as_worlds(
    given: object, timeout: float | None, episodes: int, *, in_step: bool
) -> Given | Sequence[Given | None] | None:
    """What was given as `execute_tool`, as `MultiTurnRollout` takes it as tool manager.

    Worlds are told from functions by what they are; a plain function is always `execute_tool(name, arguments)`.

    Args:
        given: a function; a world; an Env, its class, or a partial of its class; a list of those; or None.
        timeout: seconds of a call of a function.
        episodes: how many there are; what has the state of one is refused for more.
        in_step: let the episodes go on together, where they share a world.

    Raises:
        InvalidTypeError: it is none of them.
        InvalidValueError: one with state for several episodes; a bad time-out.
    """
    check_value("tool_timeout", timeout, lambda value: value is None or value > 0, "above 0 seconds, or None")
    if isinstance(given, (list, tuple)) and all(one is None or _is_for_episodes(one) for one in given):
        return given
    if _is_for_episodes(given):
        if for_one_episode(given) and episodes > 1:
            raise InvalidValueError(
                f"execute_tool is one {type(given).__name__}, which has the state of one episode, and there are "
                f"{episodes}; give the class of the Env (or functools.partial of it), which is made for each, or a "
                "list of one for each"
            )
        # What has state is opened and closed by itself, which InStep knows nothing of.
        return InStep(cast(World, given)) if in_step and is_world(given) and not for_one_episode(given) else given
    if given is not None and (not callable(given) or isinstance(given, (type, Tool))):
        raise InvalidTypeError(
            "execute_tool must be a function of a name and arguments, a ToolManager, an Env or its class, a list of "
            f"one for each trajectory, or None, not {given!r:.80}"
        )
    world = CalledByName(cast("ExecuteTool | None", given), timeout)
    return InStep(world) if in_step else world


def _is_for_episodes(given: object) -> TypeGuard[Given]:
    """Whether it is a world or an Env, or the class of one, arguments bound or not."""
    while isinstance(given, functools.partial):
        given = given.func
        if not isinstance(given, (type, functools.partial)):
            return False
    if isinstance(given, type):
        return (issubclass(given, Env) or isinstance(given, World)) and problem_with(given) is None
    return isinstance(given, Env | World)


class InStep:
    """A world whose episodes go on together: one call of a batch engine a round, where tools answer at once.

    An episode whose tools have answered waits until those of the others have that began to run meanwhile, for at most
    `GRACE` seconds; a call that has run for longer is waited for by nobody. One instance serves all episodes of a
    rollout.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._fresh: set[object] = set()
        self._none_fresh = asyncio.Event()

    def tool_infos(self) -> list[ToolInfo]:
        """Those of the world inside."""
        return self._world.tool_infos()

    def wants(self, message: Message) -> bool:
        """As the world inside."""
        return self._world.wants(message)

    async def step(self, message: Message) -> Step:
        """The answer of the world inside."""
        mark = object()
        self._fresh.add(mark)
        self._none_fresh.clear()
        lapse = asyncio.get_running_loop().call_later(GRACE, self._ended, mark)
        try:
            step = await self._world.step(message)
        finally:
            lapse.cancel()
            self._ended(mark)
        if self._fresh:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    await self._none_fresh.wait()
        return step

    def _ended(self, mark: object) -> None:
        self._fresh.discard(mark)
        if not self._fresh:
            self._none_fresh.set()
