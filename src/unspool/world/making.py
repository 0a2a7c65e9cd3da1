"""From what a user gives as a world to the world of one episode.

Given may be a World, an Env, or what makes one: any callable. Promises: what a maker made is closed even where nobody
waits for it any more; a maker that blocks runs on a thread.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

from unspool.threads import run_in_thread
from unspool.types import InvalidTypeError, Trajectory
from unspool.world.env import Env, EnvTool
from unspool.world.env_world import EnvWorld
from unspool.world.manager import ToolManager
from unspool.world.protocol import LiveWorld, World
from unspool.world.taken import is_taken
from unspool.world.tool import Tool
from unspool.world.waiting import close_for_nobody

MakesWorld: TypeAlias = Callable[..., "World | Env | Awaitable[World | Env]"]
"""Called once for each episode: a function with its trajectory (or with nothing, where it takes nothing), a class with
nothing where it can be called so."""

Given: TypeAlias = World | Env | MakesWorld


def problem_with(given: object) -> str | None:
    """Why something is no world and makes none, as the middle of a sentence; None: it will do."""
    if isinstance(given, type):
        fine = not issubclass(given, ToolManager | Tool)
        return None if fine else f"the class {given.__name__} is"
    if isinstance(given, World | Env) or (callable(given) and not isinstance(given, Tool)):
        return None
    name = getattr(given, "name", getattr(given, "__name__", None))
    return f"a {type(given).__name__}" + (f" named {name!r}" if isinstance(name, str) else "") + " is"


def is_world(given: object) -> bool:
    return isinstance(given, World) and not isinstance(given, type)


def for_one_episode(given: object) -> bool:
    """Whether it is an object with state of its own, so that two episodes cannot share it."""
    if isinstance(given, type):
        return False
    if isinstance(given, ToolManager):
        return given.has_state
    return isinstance(given, Env | LiveWorld)


def stateful_parts(given: object) -> list[object]:
    """What in a world can serve one episode at a time only: itself, and the environments that it acts on."""
    if isinstance(given, ToolManager):
        return [one.env for one in given.in_order if isinstance(one, EnvTool)]
    if isinstance(given, EnvWorld):
        return [given, given.env]
    if isinstance(given, type) or not isinstance(given, Env | LiveWorld):
        return []
    inner = getattr(given, "tools", None)  # a simulated user's are a world
    return [given, *(stateful_parts(inner) if is_world(inner) else ())]


def comes_alive(given: object) -> bool:
    """Whether the world may have first messages of its own."""
    return given is not None and (for_one_episode(given) or not is_world(given))


async def make_world(given: Given | None, trajectory: Trajectory) -> World | None:
    """The world of an episode.

    Raises:
        InvalidTypeError: the maker gave something that is no world.
        Exception: what the maker raised.
    """
    if given is None or is_world(given):
        return cast("World | None", given)
    if isinstance(given, Env):
        return EnvWorld(given)
    made = await _Making(cast(MakesWorld, given), trajectory).run()
    if isinstance(made, Env):
        return EnvWorld(made)
    if not is_world(made):
        raise InvalidTypeError(
            f"a maker of worlds must return a World or an Env, not {made!r:.80}; as tool_manager it is called once for "
            "each episode, with the trajectory"
        )
    return cast(World, made)


class _Making:
    """One call of a maker, whose result is closed where it comes too late."""

    def __init__(self, maker: MakesWorld, trajectory: Trajectory) -> None:
        self._call = functools.partial(maker, *((trajectory,) if _takes_trajectory(maker) else ()))
        self._is_async = inspect.iscoroutinefunction(maker)
        self._lock = threading.Lock()
        self._unwanted = False
        self._made: object = None

    async def run(self) -> object:
        try:
            made: object = self._call() if self._is_async else await run_in_thread(self._on_thread)
            if inspect.isawaitable(made):
                made = self._made = await made
        except BaseException:
            with self._lock:
                self._unwanted = True
                late, self._made = self._made, None
            if late is not None:
                await run_in_thread(_close, late)
            raise
        return made

    def _on_thread(self) -> object:
        made = self._call()
        with self._lock:
            if not self._unwanted:
                self._made = made
                return made
        _close(made)
        return None


def _takes_trajectory(maker: MakesWorld) -> bool:
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        return False
    function: Any = maker
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        try:
            signature.bind()
        except TypeError:
            return True
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return bool(kinds & {*positional, inspect.Parameter.VAR_POSITIONAL})


def _close(made: object) -> None:
    """Close what a maker made for nobody, on a thread; not what another episode has."""
    if not any(is_taken(part) for part in stateful_parts(made)):
        close_for_nobody(made, "made when nobody wanted it any more")
