"""The seam between an episode and whatever answers in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from unspool.record import Record
from unspool.types import Message, MessageDict, SamplingParams, ToolInfo

logger = logging.getLogger("unspool")


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
        usage: what an API counted for this turn (`prompt_tokens`, `completion_tokens`, ...), as it said it.
    """

    record: Record
    message: Message | None
    stop_reason: Literal["stop", "length"]
    sampled: int = 0
    needed: int | None = None
    cap: int | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


class Policy(Protocol):
    """Answers a conversation, and keeps the record of it.

    It may also have `end(session)`, which is called once the episode is over, whatever ended it; it returns at once.
    """

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


def end_session(policy: Policy, session: str) -> None:
    """Tell a policy that wants to know that an episode is over; what it raises is logged and harms nobody."""
    end = getattr(policy, "end", None)
    if end is None or not session:
        return
    try:
        end(session)
    except Exception:
        logger.exception("the session %s could not be ended", session)
