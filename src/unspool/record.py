"""The record of an episode: append-only spans of tokens, and every view of them.

The invariant: a record is a path of immutable spans, and its `input_ids` are their tokens joined. A span has one
origin: `prompt` and `bridge` tokens were fed to the model, `sampled` tokens came from it, exactly these ids. Nothing
is ever removed or changed; where a conversation does not go on from what was recorded, `fork` starts a branch that
shares the spans of the common past. Every view has one entry a position of `input_ids` (input order; shifting for a
causal loss is `data.align`'s business).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from unspool.spans import IGNORE_INDEX, Cause, Origin, Span, token_ids
from unspool.types import MessageDict, RecordError, ToolInfo

__all__ = ["IGNORE_INDEX", "Cause", "Origin", "Record", "Span", "token_ids"]

T = TypeVar("T")


class Record:
    """One path through the tree of an episode's spans; `fork` makes another path of the same tree."""

    __slots__ = ("_ends", "_joined", "_spans", "_tree", "cause", "forked_at", "messages", "parent", "tools", "turns")

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._ends: list[int] = []
        self._joined: list[int] | None = None  # the ids of all spans, where such a list is at hand
        self.turns = 0  # sampled turns on this path
        self.messages: list[MessageDict] = []  # the conversation that the tokens stand for
        self.tools: list[ToolInfo] | None = None  # what was on offer; None: not known
        self._tree: list[Record] | None = None  # every path, once there is more than one: no cycle till then
        self.parent: Record | None = None
        self.forked_at: int | None = None
        self.cause: Cause | None = None

    # ------------------------------------------------------------------ writing

    def append_prompt(
        self, tokens: Iterable[int], *, message: int = 0, metadata: Mapping[str, Any] | None = None
    ) -> Span:
        """Tokens that were fed to the model and are context: the first prompt, or history that someone rewrote."""
        return self._append(Span("prompt", token_ids(tokens), self.turns, message, metadata=metadata or {}))

    def append_bridge(
        self, tokens: Iterable[int], *, message: int = 0, metadata: Mapping[str, Any] | None = None
    ) -> Span:
        """Tokens that lead from a sampled turn to the next: the close where it was missing, answers, headers."""
        if not self.turns:
            raise RecordError("a bridge follows a sampled turn; this record has none: append the prompt first")
        return self._append(Span("bridge", token_ids(tokens), self.turns, message, metadata=metadata or {}))

    def append_sampled(
        self,
        tokens: Iterable[int],
        *,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | int = 0,
        message: int = 0,
        trained: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> Span:
        """Tokens that the model sampled, as the engine returned them.

        Args:
            logprobs: one finite number <= 0 a token, or None.
            versions: one weight version a token, or one for all.

        Raises:
            RecordError: where counts differ or a log-probability is no log-probability.
        """
        ids = token_ids(tokens, "sampled tokens")
        count = len(ids)
        each = _alike(versions, count) if isinstance(versions, int) else tuple(versions)
        if len(each) != count:
            raise RecordError(f"{count} tokens were sampled but {len(each)} versions given")
        values: tuple[float, ...] | None = None
        if logprobs is not None:
            values = tuple(map(float, logprobs))
            if len(values) != count:
                raise RecordError(f"{count} tokens were sampled but {len(values)} log-probabilities given")
            if values and not (max(values) <= 1e-6 and math.isfinite(sum(values))):  # a sum keeps every inf and nan
                for value in values:
                    if not (math.isfinite(value) and value <= 1e-6):
                        raise RecordError(f"{value} is no log-probability: they are finite and at most 0")
        return self._append(Span("sampled", ids, self.turns, message, values, each, trained, metadata or {}))

    def _append(self, span: Span) -> Span:
        self._ends.append(len(self) + len(span.tokens))
        self._spans.append(span)
        if self._joined is not None:
            self._joined += span.tokens
        self.turns += span.origin == "sampled"
        return span

    def fork(self, at: int, cause: Cause | str) -> Record:
        """A branch that shares the first `at` spans and goes its own way from there.

        Args:
            at: number of spans kept, 0 to `len(record.spans)`: branches part at span boundaries only.
            cause: why, from `Cause`.
        """
        if not 0 <= at <= len(self._spans):
            raise RecordError(f"cannot fork at span {at}: this record has {len(self._spans)} spans")
        branch = Record()
        branch._spans = self._spans[:at]
        branch._ends = self._ends[:at]
        branch.turns = sum(span.origin == "sampled" for span in branch._spans)
        if self._tree is None:
            self._tree = [self]
        branch._tree = self._tree
        branch._tree.append(branch)
        branch.parent, branch.forked_at, branch.cause = self, at, Cause(cause)
        return branch

    # ------------------------------------------------------------------ views

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def last(self) -> Span | None:
        """The newest span."""
        return self._spans[-1] if self._spans else None

    @property
    def branches(self) -> tuple[Record, ...]:
        """Every path of the tree, in the order in which they were made; the first is the root's."""
        return tuple(self._paths)

    @property
    def _paths(self) -> list[Record]:
        return [self] if self._tree is None else self._tree

    @property
    def input_ids(self) -> list[int]:
        return self.prefix_ids(len(self._spans)) if self._joined is None else self._joined.copy()

    def lend_ids(self) -> list[int]:
        """`input_ids` for one request. Given back with `take_back`, the list need not be made again for the next."""
        ids, self._joined = self._joined, None
        return self.prefix_ids(len(self._spans)) if ids is None else ids

    def take_back(self, ids: list[int]) -> None:
        """What `lend_ids` lent, if nobody else holds it any more; nothing may have been appended in between."""
        self._joined = ids

    def prefix_ids(self, count: int) -> list[int]:
        """The ids of the first `count` spans."""
        ids: list[int] = []
        for span in self._spans[:count]:  # of the ways to join them the quickest for long records
            ids += span.tokens
        return ids

    def prefix_length(self, count: int) -> int:
        """How many ids the first `count` spans have."""
        return self._ends[count - 1] if count else 0

    @property
    def loss_mask(self) -> list[int]:
        """1 for a sampled token whose turn is trained, else 0."""
        return self._view(0, lambda span: (1,) * len(span.tokens) if span.masked else None)

    @property
    def labels(self) -> list[int]:
        """The id where the loss mask is 1, else -100. Not shifted."""
        return self._view(IGNORE_INDEX, lambda span: span.tokens if span.masked else None)

    @property
    def logprobs(self) -> list[float] | None:
        """0.0 for tokens that were fed; None as a whole where a sampled turn has none."""
        if any(span.origin == "sampled" and span.logprobs is None for span in self._spans):
            return None
        return self._view(0.0, lambda span: span.logprobs)

    @property
    def versions(self) -> list[int]:
        """The weight version of each sampled token; -1 for tokens that were fed."""
        return self._view(-1, lambda span: span.versions if span.origin == "sampled" else None)

    def _view(self, elsewhere: T, inside: Callable[[Span], Sequence[T] | None]) -> list[T]:
        """A list, of exactly its size, of `elsewhere`, and where a span has values of its own, of these."""
        view = [elsewhere] * len(self)
        start = 0
        for span, end in zip(self._spans, self._ends, strict=True):
            values = inside(span)
            if values is not None:
                view[start:end] = values
            start = end
        return view

    def unique_spans(self) -> Iterator[Span]:
        """Every span of the whole tree once, in the order of first appearance along the branches."""
        seen: set[int] = set()
        for branch in self._paths:
            for span in branch._spans:
                if id(span) not in seen:
                    seen.add(id(span))
                    yield span

    def to_arrays(self) -> dict[str, Any]:
        """The five views as plain lists of one length (`logprobs` may be None)."""
        return {
            "input_ids": self.input_ids[:],  # a copy is of exactly its size
            "labels": self.labels,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "versions": self.versions,
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """The arrays of every branch, for training: a sampled span that branches share has mask 1 in the first only.

        A path that another one continues whole is left out: nothing of it would be trained again.
        """
        rows: list[dict[str, Any]] = []
        trained: set[int] = set()
        for index, branch in enumerate(self._paths):
            if any(
                branch._is_covered_by(other, earlier=at < index) for at, other in enumerate(self._paths) if at != index
            ):
                continue
            arrays = branch.to_arrays()
            for span, end in zip(branch._spans, branch._ends, strict=True):
                if id(span) in trained:
                    count = len(span.tokens)
                    arrays["loss_mask"][end - count : end] = [0] * count
                    arrays["labels"][end - count : end] = [IGNORE_INDEX] * count
                trained.add(id(span))
            rows.append(arrays)
        return rows

    def _is_covered_by(self, other: Record, *, earlier: bool) -> bool:
        """Whether `other` has all of this path's spans, and more of them or came first."""
        count = len(self._spans)
        if len(other._spans) < count or (len(other._spans) == count and not earlier):
            return False
        return all(mine is theirs for mine, theirs in zip(self._spans, other._spans, strict=False))

    # ------------------------------------------------------------------ to and from a trajectory

    def to_trajectory(self) -> dict[str, Any]:
        """`messages`, `tools`, the arrays, `spans`; and of a tree that branched, `branches` and `branch` (this path).

        `spans` is a list of dicts: `origin`, `length`, `turn`, `message`, and, where they say something,
        `trained`, `metadata`, `logprobs` (where other sampled spans have none). `branches` holds for each path
        its `parent` (index), `forked_at`, `cause`, `messages`, `tools`, and the arrays and spans of its own part.
        `Record.from_trajectory` makes the same record of it again.
        """
        trajectory: dict[str, Any] = {"messages": list(self.messages), "tools": self.tools, **self.to_arrays()}
        trajectory["spans"] = _compact(self._spans, trajectory["logprobs"] is None)
        if len(self._paths) > 1:
            trajectory["branch"] = _position(self._paths, self)
            trajectory["branches"] = [branch._own_part() for branch in self._paths]
        return trajectory

    def _own_part(self) -> dict[str, Any]:
        own = Record()
        for span in self._spans[self.forked_at or 0 :]:
            own._append(span)
        arrays = own.to_arrays()
        return {
            "parent": None if self.parent is None else _position(self._paths, self.parent),
            "forked_at": self.forked_at,
            "cause": None if self.cause is None else str(self.cause),
            "messages": list(self.messages),
            "tools": self.tools,
            **arrays,
            "spans": _compact(own._spans, arrays["logprobs"] is None),
        }

    @classmethod
    def from_trajectory(cls, trajectory: Mapping[str, Any]) -> Record:
        """The record that `to_trajectory` described.

        Raises:
            RecordError: where arrays and spans do not agree; the message names the array.
        """
        if "branches" not in trajectory:
            return cls()._extend_from(trajectory)
        paths: list[Record] = []
        for part in trajectory["branches"]:
            path = cls() if part["parent"] is None else paths[part["parent"]].fork(part["forked_at"], part["cause"])
            paths.append(path._extend_from(part))
        chosen: int = trajectory["branch"]
        return paths[chosen]

    def _extend_from(self, part: Mapping[str, Any]) -> Record:
        missing = [name for name in (*_ARRAYS, "spans") if name not in part]
        if missing:
            raise RecordError(f"the trajectory has no {missing[0]!r}: it was not recorded token by token")
        self.messages = list(part.get("messages", ()))
        self.tools = part.get("tools")
        begin, start = len(self._spans), 0
        for span in part["spans"]:
            where = slice(start, start + span["length"])
            tokens, versions, logprobs = part["input_ids"][where], part["versions"][where], span.get("logprobs")
            if logprobs is None and part["logprobs"] is not None:
                logprobs = part["logprobs"][where]
            sampled = span["origin"] == "sampled"
            self._append(
                Span(
                    origin=span["origin"],
                    tokens=token_ids(tokens),
                    turn=span["turn"],
                    message=span["message"],
                    logprobs=tuple(logprobs) if sampled and logprobs is not None else None,
                    versions=tuple(versions) if sampled else (),
                    trained=span.get("trained", True),
                    metadata=span.get("metadata") or {},
                )
            )
            start += span["length"]
        again = Record()
        for span in self._spans[begin:]:
            again._append(span)
        for name, array in again.to_arrays().items():
            if array != (None if part[name] is None else list(part[name])):
                raise RecordError(f"the trajectory's {name!r} does not agree with its spans")
        return self


@lru_cache(maxsize=1024, typed=True)
def _alike(version: int, count: int) -> tuple[int, ...]:
    """One version for so many tokens: most spans have one, and many spans share it."""
    return (version,) * count


_ARRAYS = ("input_ids", "labels", "loss_mask", "logprobs", "versions")


def _compact(spans: Sequence[Span], logprobs_apart: bool) -> list[dict[str, Any]]:
    compact: list[dict[str, Any]] = []
    for span in spans:
        entry: dict[str, Any] = {
            "origin": span.origin,
            "length": len(span.tokens),
            "turn": span.turn,
            "message": span.message,
        }
        if not span.trained:
            entry["trained"] = False
        if span.metadata:
            entry["metadata"] = dict(span.metadata)
        if logprobs_apart and span.logprobs is not None:
            entry["logprobs"] = list(span.logprobs)
        compact.append(entry)
    return compact


def _position(tree: Sequence[Record], record: Record) -> int:
    return next(index for index, other in enumerate(tree) if other is record)
