"""The seam between an episode and whatever answers in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from unspool.record import Record
from unspool.types import Message, MessageDict, SamplingParams, ToolInfo


@dataclass(frozen=True, slots=True)
class Turn:
    """What `Policy.extend` did.

    Attributes:
        record: the record that holds the turn: the one given, or a branch of it.
        message: the turn, read; None where there was no room to sample one.
        stop_reason: `stop`, or `length`: cut by `max_tokens`, or no room left.
        sampled: number of tokens sampled.
        needed: where there was no room, the length that the context would have had; else None.
        cap: where there was no room, the length that is not to be exceeded; else None.
    """

    record: Record
    message: Message | None
    stop_reason: Literal["stop", "length"]
    sampled: int = 0
    needed: int | None = None
    cap: int | None = None


class Policy(Protocol):
    """Answers a conversation, and keeps the record of it."""

    async def extend(
        self,
        record: Record,
        messages: Sequence[MessageDict],
        tools: Sequence[ToolInfo] | None = None,
        *,
        params: SamplingParams | None = None,
        session: str = "",
        seed: int = 0,
        max_total: int | None = None,
    ) -> Turn:
        """Sample the assistant's next turn.

        Args:
            record: what was said so far; empty at the first turn.
            messages: the whole conversation; those that the record does not cover yet are brought into it.
            tools: on offer.
            params: how to sample; None: the policy's own.
            session: unique to the episode.
            seed: of this turn.
            max_total: hard cap on the length of the record, None: none.
        """
        ...
