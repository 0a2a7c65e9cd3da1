"""The seam between an episode and whatever answers the model: tools, an environment, a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from unspool.types import Message, MessageDict, ToolCall, ToolInfo, Trajectory


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """A call that could not be answered as asked; the model got `error` as its answer.

    `kind` is `bad_json`, `unclosed`, `unknown_tool`, `bad_arguments`, `exception`, `timeout`,
    `truncated`, or `limit` (the episode's `max_tool_calls`).
    """

    name: str
    call_id: str
    kind: str
    error: str


@dataclass(frozen=True, slots=True)
class Step:
    """What the world answered to one turn.

    Attributes:
        messages: to append to the conversation, in order.
        failures: calls that failed; their answers stand in `messages` like any other.
        done: the episode ends here (`stop_reason` `env_done`).
        reward: what this turn earned, where the world says so.
        info: further facts, kept in the trajectory's `env_info`, the latest of each name.
    """

    messages: Sequence[MessageDict] = ()
    failures: Sequence[ToolFailure] = ()
    done: bool = False
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class StepResult:
    """What an environment answers to a reset or an action; also what a tool may return.

    Attributes:
        observation: what the model reads.
        reward: for this step; None: nothing is said of it.
        done: the episode is over.
        info: further facts, for logs.
    """

    observation: str = ""
    reward: float | None = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class World(Protocol):
    """What an episode talks to."""

    def tool_infos(self) -> list[ToolInfo]:
        """The tools on offer, as the template renders them; empty: none."""
        ...

    def wants(self, message: Message) -> bool:
        """Whether this turn asks for an answer; False ends the episode with `stop`."""
        ...

    async def step(self, message: Message) -> Step:
        """Answer a turn that `wants` one."""
        ...


@runtime_checkable
class LiveWorld(World, Protocol):
    """A world that belongs to one episode: it is opened before the first turn and closed at the end, whatever ends it.

    It may also have `async def evaluate(trajectory) -> float | None`: the reward of the whole, asked for before it is
    closed.
    """

    async def open(self, trajectory: Trajectory) -> Step | Sequence[MessageDict]:
        """Begin; what is to be appended to the first messages. A Step that is `done` ends the episode right here."""
        ...

    async def close(self) -> None:
        """Give everything back; called once, also after an `open` that failed or was cut short."""
        ...


def tool_answer(call: ToolCall, content: str) -> MessageDict:
    """The tool message that answers `call`."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
