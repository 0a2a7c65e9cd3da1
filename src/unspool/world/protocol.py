"""The seam between an episode and whatever answers the model: tools, an environment, a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from unspool.types import Message, MessageDict, ToolCall, ToolInfo


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
    """

    messages: Sequence[MessageDict] = ()
    failures: Sequence[ToolFailure] = ()
    done: bool = False
    reward: float | None = None


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


def tool_answer(call: ToolCall, content: str) -> MessageDict:
    """The tool message that answers `call`."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
