"""Spans: the pieces that a record is made of, and why records branch.

A span is immutable: its tokens have one origin and are exactly what was fed or sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import Any, Literal, cast

from unspool.types import RecordError

Origin = Literal["prompt", "sampled", "bridge"]
IGNORE_INDEX = -100
"""The label of positions that are not trained (the Hugging Face convention)."""


class Cause(StrEnum):
    """Why a record branched: the conversation that came is not the one that was recorded."""

    TEMPLATE = "template"  # the template renders the same messages to other tokens
    BPE = "bpe"  # the same text, other token boundaries
    ARGUMENT_TYPES = "argument_types"  # a call's arguments came back with other types
    EDITED = "edited"  # a message was changed
    TRUNCATED = "truncated"  # messages at the end are gone
    COMPACTED = "compacted"  # messages in the middle were dropped or summarised
    TOOLS_CHANGED = "tools_changed"  # other tools were offered
    THINKING_DROPPED = "thinking_dropped"  # earlier thinking was removed
    UNKNOWN = "unknown"  # none of these could be shown


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A run of tokens with one origin.

    Attributes:
        origin: who wrote the tokens.
        tokens: their ids.
        turn: the assistant turn (from 0) that this span is, or that it leads to.
        message: index of the first message it renders, in the conversation's `messages`.
        logprobs: of a sampled span, one a token, or None where the engine has none; None elsewhere.
        versions: of a sampled span, the weight version of each token; empty elsewhere.
        trained: whether a sampled span's loss mask is 1.
        metadata: anything else, carried along.
    """

    origin: Origin
    tokens: tuple[int, ...]
    turn: int
    message: int
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] = ()
    trained: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def masked(self) -> int:
        """The loss mask of its positions: 1 where trained, else 0."""
        return 1 if self.origin == "sampled" and self.trained else 0


_ONE_INT_PER_ID: dict[int, int] = {}


def token_ids(tokens: Iterable[int], what: str = "tokens") -> tuple[int, ...]:
    """The ids as a tuple of plain, shared ints: a vocabulary's ids exist once a process, whatever the episodes.

    Raises:
        RecordError: for anything but non-negative ints (a float, a bool, a string is no token id).
    """
    ids = tuple(tokens)
    kinds = set(map(type, ids))
    if kinds and kinds != {int}:
        ids = tuple(_as_int(token, what) for token in ids)
    if ids and min(ids) < 0:
        raise RecordError(f"{what} hold {min(ids)}, which is no token id")
    if len(ids) < 2:  # of one key itemgetter gives no tuple
        return tuple(map(_ONE_INT_PER_ID.setdefault, ids, ids))
    try:
        return cast(tuple[int, ...], itemgetter(*ids)(_ONE_INT_PER_ID))
    except KeyError:  # some of them are new
        return tuple(map(_ONE_INT_PER_ID.setdefault, ids, ids))


def _as_int(token: object, what: str) -> int:
    if not isinstance(token, (bool, float, str, bytes)) and hasattr(token, "__index__"):
        return int(cast(Any, token))
    raise RecordError(f"{what} hold {token!r} ({type(token).__name__}), which is no token id")
