"""A simulated user as the world of an episode.

Promises: what the assistant says in plain text goes to the user, whose answer comes back as a user message; its calls
go to the tools; the user never sees thinking, calls or tool answers, and the assistant's record never holds a token
that the user's model sampled, but the text of its message, encoded as any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from unspool.policy.protocol import Policy
from unspool.threads import run_in_thread
from unspool.types import (
    InvalidTypeError,
    InvalidValueError,
    Message,
    MessageDict,
    SamplingParams,
    ToolInfo,
    Trajectory,
    check_value,
    is_count,
)
from unspool.world.env_calls import is_async
from unspool.world.manager import ToolManager
from unspool.world.player import PolicyPlayer
from unspool.world.protocol import LiveWorld, Step, World

STOP = "###STOP###"

Says = Callable[[list[MessageDict]], str | Awaitable[str]]
"""From the conversation as the user sees it (the user is its assistant) to the user's next message."""


class UserSimulator:
    """A user, played by a policy or by a function. It has the state of one conversation: give what makes one.

    Args:
        user: a policy, with a conversation and a record of its own; or a function, sync or async, from the conversation
            as the user sees it to what it says.
        system: who the user is and what it wants; a policy's system message (and the first of a function's list).
        stop: a text in what the user says that ends the conversation (it is taken out), or a predicate of what it says.
        max_turns: most messages of the user in the episode; the one that reaches it ends the episode.
        tools: a ToolManager (or another World) for the assistant's calls; it is opened and closed along.
        greeting: what the user has heard first, where the trajectory has no assistant message in that place.
        params: how a policy samples.
    """

    def __init__(
        self,
        user: Policy | Says,
        system: str | None = None,
        *,
        stop: str | Callable[[str], bool] | None = STOP,
        max_turns: int | None = None,
        tools: World | None = None,
        greeting: str = "Hello! How can I help you?",
        params: SamplingParams | Mapping[str, Any] | None = None,
    ) -> None:
        check_value("max_turns", max_turns, lambda v: v is None or is_count(v), "at least 1, or None for no limit")
        if tools is not None and (isinstance(tools, type) or not isinstance(tools, World)):
            raise InvalidTypeError(f"tools must be a ToolManager or another World, not {tools!r:.80}")
        if not (stop is None or callable(stop) or (isinstance(stop, str) and stop)):
            kind = InvalidValueError if isinstance(stop, str) else InvalidTypeError
            raise kind(
                f"stop must be a text that is not empty, or a predicate of what the user says, not {stop!r:.80}; "
                "give None for no stop, or leave it out for the usual one"
            )
        if not hasattr(user, "extend") and not callable(user):
            raise InvalidTypeError(f"user must be a policy, or a function of the conversation, not {user!r:.80}")
        self.max_turns = max_turns
        self.tools = tools
        self.turns = 0
        self._user = user
        self._stop = stop
        self._greeting = greeting
        self._player = PolicyPlayer(user, system, params) if hasattr(user, "extend") else None
        self._seen: list[MessageDict] = [] if system is None else [{"role": "system", "content": system}]

    @property
    def messages(self) -> list[MessageDict]:
        """The conversation as the user sees it: it is the assistant there."""
        return self._seen if self._player is None else self._player.messages

    # ------------------------------------------------------------------ its life

    async def open(self, trajectory: Trajectory) -> Step:
        """Take the conversation so far from the user's side; where no user has spoken yet, the user begins."""
        if self._player is not None:
            self._player.seed = int(trajectory.get("seed", 0)) % 2**62
        opened: Step = Step()
        if isinstance(self.tools, LiveWorld):
            first = await self.tools.open(trajectory)
            opened = first if isinstance(first, Step) else Step(first)
        swap = {"user": "assistant", "assistant": "user"}
        spoken = [m for m in trajectory["messages"] if m["role"] in swap and m.get("content")]
        if not any(message["role"] == "user" for message in spoken):
            begins = await self._answer(spoken[-1]["content"] if spoken else self._greeting)
            return Step([*opened.messages, *begins.messages], opened.failures, begins.done, opened.reward, opened.info)
        if spoken[0]["role"] == "user":
            self.messages.append({"role": "user", "content": self._greeting})
        self.messages.extend({"role": swap[m["role"]], "content": m["content"]} for m in spoken)
        return opened

    async def close(self) -> None:
        """Close the tools, where they are to be closed."""
        if isinstance(self.tools, LiveWorld):
            await self.tools.close()

    @property
    def evaluate(self) -> Callable[[Trajectory], Awaitable[float | None]] | None:
        """What the tools' world says of the whole, where it says anything."""
        return getattr(self.tools, "evaluate", None)

    # ------------------------------------------------------------------ a world

    def tool_infos(self) -> list[ToolInfo]:
        """The tools on offer."""
        return [] if self.tools is None else self.tools.tool_infos()

    def wants(self, message: Message) -> bool:
        """Always: there is somebody who answers."""
        return True

    async def step(self, message: Message) -> Step:
        """The tools' answers to a turn with calls (without tools: that there are none), the user's to one without."""
        if message.tool_calls:
            return await (self.tools if self.tools is not None else ToolManager()).step(message)
        return await self._answer(message.content)

    async def _answer(self, text: str) -> Step:
        said = await (self._say(text) if self._player is None else self._player(text))
        self.turns += 1
        done = self.max_turns is not None and self.turns >= self.max_turns
        if callable(self._stop):
            done = done or self._stop(said)
        elif self._stop is not None and self._stop in said:
            done, said = True, said.replace(self._stop, "").strip()
        return Step([{"role": "user", "content": said}] if said or not done else [], done=done)

    async def _say(self, text: str) -> str:
        self._seen.append({"role": "user", "content": text})
        function, seen = self._user, [dict(message) for message in self._seen]
        assert callable(function)
        said = function(seen) if is_async(function) else await run_in_thread(function, seen)
        said = await said if inspect.isawaitable(said) else said
        if not isinstance(said, str):
            raise InvalidTypeError(f"a simulated user must say a str, not {said!r:.80}")
        self._seen.append({"role": "assistant", "content": said})
        return said
