"""Environments: what a user writes, and their face as tools.

An `Env` is reset once, then acted on, one action at a time, until it says `done` or the episode ends, and closed
whatever ended it. Its methods may be sync (they run on threads) or async. `EnvWorld` runs one in an episode; as
`EnvTool`s it stands among the other tools of a `ToolManager`, where its user resets and closes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar, Self

from unspool.loop import run_sync
from unspool.types import InvalidTypeError, ToolInfo, Trajectory
from unspool.world.env_calls import EnvCalls
from unspool.world.protocol import StepResult
from unspool.world.tool import Tool

_ANYTHING = {"type": "object", "properties": {}}


class Env(ABC):
    """The base of environments; `step` is what there must be.

    Every method may be `async def` instead. `close` may be called more than once, and while another call hangs: where
    that call returns later, `close` is called again behind it.
    """

    acts_on_text: bool = False
    """Whether the model's text is the action (see `TextEnv`), beside calls of `tools()`."""

    def reset(self, trajectory: Trajectory | None = None) -> StepResult | Awaitable[StepResult]:
        """Begin an episode.

        Args:
            trajectory: the one that is run, its `seed` included; not to be changed.

        Returns:
            The first observation, which becomes a user message; an empty one is left out.
        """
        return StepResult()

    @abstractmethod
    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult | Awaitable[StepResult]:
        """Do one action: a call of one of `tools()`."""
        raise NotImplementedError

    def tools(self) -> list[ToolInfo] | Awaitable[list[ToolInfo]]:
        """The actions on offer, in OpenAI's form; asked for after `reset`."""
        return []

    def evaluate(self, trajectories: list[Trajectory], **kwargs: Any) -> list[float] | Awaitable[list[float]]:
        """A reward for each finished trajectory; where a class has its own, its value is the reward of the whole."""
        return [0.0] * len(trajectories)

    def close(self) -> Any:
        """Give everything back."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        run_sync(EnvCalls.of(self).close(None))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await EnvCalls.of(self).close(None)


class TextEnv(Env):
    """An environment whose action is what the model says: every turn is one, until it is `done`."""

    acts_on_text = True

    @abstractmethod
    def act(self, text: str) -> StepResult | Awaitable[StepResult]:
        """Do the action that a turn's text is; the observation becomes a user message."""
        raise NotImplementedError

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult | Awaitable[StepResult]:
        """The action as a call, for use through `EnvTool`: its text is the argument `text`."""
        return self.act(str(arguments.get("text", "")))


def has_evaluation(env: Env) -> bool:
    """Whether the environment has an `evaluate` of its own."""
    return type(env).evaluate is not Env.evaluate


class _EnvFunction:
    """The function of an `EnvTool`, with what the environment said last."""

    def __init__(self, env: Env, name: str) -> None:
        self.env, self.name = env, name
        self.last: StepResult | None = None
        self.reward = 0.0

    async def __call__(self, **arguments: Any) -> StepResult:
        calls = EnvCalls.of(self.env)
        self.last = await calls.result(self.env.step, self.name, arguments)
        self.reward += self.last.reward or 0.0
        return self.last


class EnvTool(Tool):
    """One action of an environment as a tool.

    In a `ToolManager` its observation is the answer, its reward counts, and `done` ends the episode with `env_done`.
    A step that raises is an `Error: ...` to the model, as with other tools. The environment is its owner's to reset and
    to close; where an episode should do that, give the environment itself (or what makes one) as the tool manager.

    Args:
        env: the environment.
        tool_name: the action's name, `step`'s first argument.
        description, parameters: what the model is told; without parameters any arguments are taken.
    """

    in_order: ClassVar[bool] = True

    def __init__(
        self,
        env: Env,
        tool_name: str = "env_action",
        description: str = "Execute an action in the environment.",
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        max_chars: int | None = None,
    ) -> None:
        if not isinstance(env, Env):
            raise InvalidTypeError(f"an EnvTool is made of an Env, not of {env!r:.80}; derive from unspool.Env")
        function = _EnvFunction(env, tool_name)
        super().__init__(tool_name, description, parameters or _ANYTHING, function, timeout, max_chars)

    @classmethod
    def from_env(
        cls, env: Env, infos: Sequence[ToolInfo] | None = None, *, timeout: float | None = None
    ) -> list[EnvTool]:
        """A tool for each of the environment's `tools()` (or of `infos`); one that takes anything where it has none.

        A text environment without tools gets one with the argument `text`.
        """
        found = run_sync(EnvCalls.of(env).tools()) if infos is None else infos
        tools = [cls._of(env, dict(info.get("function", info)), timeout) for info in found]
        if tools:
            return tools
        text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        return [cls(env, parameters=text if env.acts_on_text else None, timeout=timeout)]

    @classmethod
    def _of(cls, env: Env, function: dict[str, Any], timeout: float | None) -> EnvTool:
        name, description = function.get("name", ""), function.get("description") or ""
        return cls(env, name, description, function.get("parameters"), timeout=timeout)

    @property
    def _state(self) -> _EnvFunction:
        assert isinstance(self.function, _EnvFunction)
        return self.function

    @property
    def env(self) -> Env:
        """The environment that it acts on."""
        return self._state.env

    @property
    def last_result(self) -> StepResult | None:
        """What the last call gave."""
        return self._state.last

    @property
    def done(self) -> bool:
        """Whether the last call ended the episode."""
        return self._state.last is not None and self._state.last.done

    @property
    def episode_reward(self) -> float:
        """The sum of what this tool's calls earned."""
        return self._state.reward

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Do the action and wait; the observation."""
        return run_sync(self._state(**arguments)).observation

    def __reduce__(self) -> tuple[Any, ...]:
        limits = {"timeout": self.timeout, "max_chars": self.max_chars}
        return (_env_tool, (type(self), (self.env, self.name, self.description, dict(self.parameters)), limits))


def _env_tool(kind: type[EnvTool], about: tuple[Any, ...], limits: dict[str, Any]) -> EnvTool:
    return kind(*about, **limits)
