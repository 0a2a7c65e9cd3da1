"""An environment as the world of one episode.

Promises: `open` resets it and `close` closes it, whatever came between; its steps are made one at a time, in the order
of the calls; a step that raises, or takes longer than its time-out, raises out of here (and so ends its own episode),
while a call that the model got wrong is told to the model.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from unspool.types import InvalidTypeError, Message, MessageDict, ToolInfo, Trajectory, check_value
from unspool.world.env import Env, EnvTool, has_evaluation
from unspool.world.env_calls import EnvCalls
from unspool.world.manager import ToolManager
from unspool.world.output import shorten
from unspool.world.protocol import Step, StepResult
from unspool.world.returned import number
from unspool.world.tool import Tool

T = TypeVar("T")


class EnvWorld:
    """A `World` over an `Env`; an Env given as a tool manager becomes one by itself.

    Args:
        env: the environment.
        timeout: seconds that a reset, a step, `tools` or `evaluate` may take; None: no limit.
        close_timeout: seconds that closing may take.
        max_chars: most characters of an observation.
    """

    def __init__(
        self,
        env: Env,
        *,
        timeout: float | None = 60.0,
        close_timeout: float = 10.0,
        max_chars: int = 16_000,
    ) -> None:
        if not isinstance(env, Env):
            raise InvalidTypeError(f"env must be an Env, not {env!r:.80}; derive from unspool.Env")
        for name, value in (("timeout", timeout), ("close_timeout", close_timeout)):
            check_value(name, value, lambda v: v is None or v > 0, "above 0 seconds, or None for no limit")
        check_value("max_chars", max_chars, lambda v: v >= 1, "at least 1")
        self.env = env
        self.timeout = timeout
        self.close_timeout = close_timeout
        self.max_chars = max_chars
        self._calls = EnvCalls.of(env)
        self._tools = ToolManager()
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------ its life

    async def open(self, trajectory: Trajectory) -> Step:
        """Reset the environment; its first observation as a user message."""
        result = await self._within(self._calls.result(self.env.reset, trajectory), "reset")
        infos = await self._within(self._calls.tools(), "tools")
        if infos or not self.env.acts_on_text:
            tools = [_Action(self, tool) for tool in EnvTool.from_env(self.env, infos)]
            self._tools = ToolManager(tools, timeout=None, max_tool_chars=self.max_chars)
        return self._said(result)

    async def close(self) -> None:
        """Close the environment."""
        await self._calls.close(self.close_timeout)

    @property
    def evaluate(self) -> Callable[[Trajectory], Awaitable[float]] | None:
        """`async evaluate(trajectory) -> float`, where the environment has one of its own; else None."""
        return self._evaluate if has_evaluation(self.env) else None

    async def _evaluate(self, trajectory: Trajectory) -> float:
        given = await self._within(self._calls.call(self.env.evaluate, [trajectory]), "evaluate")
        if not isinstance(given, list | tuple) or len(given) != 1:
            raise InvalidTypeError(
                f"{type(self.env).__name__}.evaluate must return a reward for each trajectory, not {given!r:.80} for 1"
            )
        return number(given[0], f"the reward of {type(self.env).__name__}.evaluate")

    # ------------------------------------------------------------------ a world

    def tool_infos(self) -> list[ToolInfo]:
        """The environment's tools, as they were when it was opened."""
        return self._tools.tool_infos()

    def wants(self, message: Message) -> bool:
        """Whether the turn is an action: any turn where text is one, else one with calls."""
        return self.env.acts_on_text or bool(message.tool_calls)

    async def step(self, message: Message) -> Step:
        """Do what the turn asks for."""
        if not message.tool_calls:
            act = getattr(self.env, "act", None)
            if act is None:
                raise InvalidTypeError(f"{type(self.env).__name__} acts on text and has no act(text); give it one")
            result = await self._within(self._calls.result(act, message.content), "act")
            return self._said(result, answers=not result.done)
        step = await self._tools.step(message)
        if self._failure is not None:
            raise self._failure
        return step

    async def act(self, name: str, arguments: dict[str, Any]) -> StepResult:
        """One call of a tool; a failure of the environment is kept, and nothing is asked of it any more."""
        if self._failure is not None:
            raise self._failure
        try:
            return await self._within(self._calls.result(self.env.step, name, arguments), "step")
        except BaseException as error:
            self._failure = error
            raise

    async def _within(self, work: Awaitable[T], name: str) -> T:
        return await self._calls.within(self.timeout, work, name)

    def _said(self, result: StepResult, answers: bool = False) -> Step:
        """An observation as a user message; an empty one is kept where the model is to go on behind it."""
        messages: list[MessageDict] = []
        if result.observation or answers:
            text = shorten(result.observation, self.max_chars).text
            messages.append({"role": "user", "content": text})
        return Step(messages, (), result.done, result.reward, result.info)


class _Action(Tool):
    """A tool of an environment that is a world: its time-out and its failures are the world's."""

    in_order: ClassVar[bool] = True

    def __init__(self, world: EnvWorld, tool: EnvTool) -> None:
        name = tool.name

        async def act(**arguments: Any) -> StepResult:
            return await world.act(name, arguments)

        super().__init__(name, tool.description, tool.parameters, act, math.inf)
