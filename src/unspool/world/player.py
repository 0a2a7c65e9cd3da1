"""A model on the other side: whoever plays against the model of an episode, or is its user.

Its conversation and its record are its own; nothing of its tokens gets into the record of the episode but as the text
of a message.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping
from typing import Any

from unspool.policy.protocol import Policy
from unspool.record import Record
from unspool.types import EngineError, MessageDict, SamplingParams


class PolicyPlayer:
    """Answers texts with a policy, in a conversation of its own.

    Args:
        policy: any policy, such as a `TokenPolicy`; also the one that is trained.
        system: its system message; None: none.
        params: how it samples; None: the policy's own.
        seed: of its first turn, from which the others count.

    `messages` and `record` are its side of the conversation.
    """

    def __init__(
        self,
        policy: Policy,
        system: str | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.params = None if params is None else SamplingParams.of(params)
        self.seed = seed
        self.record = Record()
        self.messages: list[MessageDict] = [] if system is None else [{"role": "system", "content": system}]
        self._session = f"player-{secrets.token_hex(6)}"
        self._turns = 0

    async def start(self) -> None:
        """Make its engine ready, where it has one."""
        started = getattr(self.policy, "start", None)
        if started is not None and inspect.isawaitable(waiting := started()):
            await waiting

    async def __call__(self, text: str) -> str:
        """Hear a text, and answer it.

        Raises:
            EngineError: its context is full.
        """
        if not self._turns:
            await self.start()
        self.messages.append({"role": "user", "content": text})
        said = await self.policy.extend(
            self.record, self.messages, params=self.params, session=self._session, seed=self.seed + self._turns
        )
        self._turns += 1
        self.record = said.record
        if said.message is None:
            raise EngineError(f"the player has no room to answer: {said.needed} tokens, and at most {said.cap}")
        self.messages.append(said.record.messages[-1])
        return said.message.content
