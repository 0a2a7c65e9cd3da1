"""Key-value caches of conversations between their turns.

What this module promises:

- What is kept is bounded: the columns of all caches together, room at their right included, are at most `max_tokens`;
  the least recently used go first. A cache that is gone is only computed again.
- A cache belongs to whoever took it out: two requests of one session never write into the same one.
- A cache is used for the tokens that it holds and no others: it is cut to what it has in common with the request.
- A session that is said to be over keeps nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False, slots=True)
class Kept:
    """The cache of one row.

    Attributes:
        ids: the tokens whose keys and values it holds, in columns 0 to len(ids) - 1.
        buffers: of every layer, keys and values [1, heads, columns, size]; columns beyond the ids are room.
    """

    ids: list[int]
    buffers: list[tuple[Tensor, Tensor]]

    @property
    def columns(self) -> int:
        """What it counts for in the bound."""
        return max((keys.shape[-2] for keys, _ in self.buffers), default=0)

    def in_common(self, ids: list[int]) -> int:
        """How many of its first tokens are also the first of `ids`, which keep one to be fed at least."""
        return min(common_prefix(self.ids, ids), len(ids) - 1)


class KeptCaches:
    """Caches by session; for one thread, but for `over`: to it any thread may append a session that has ended."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._caches: OrderedDict[str, Kept] = OrderedDict()
        self.over: deque[str] = deque()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self._max_tokens > 0

    def peek(self, session: str) -> Kept | None:
        """The cache of a session, left where it is."""
        return self._caches.get(session)

    def take(self, session: str) -> Kept | None:
        """The cache of a session, taken out."""
        kept = self._caches.pop(session, None)
        if kept is not None:
            self.tokens -= kept.columns
        return kept

    def put(self, session: str, kept: Kept) -> None:
        """Keep a cache in place of any other of the session, dropping the least recently used for it."""
        self.take(session)
        if kept.columns > self._max_tokens:
            return
        while self.tokens + kept.columns > self._max_tokens:
            self.take(next(iter(self._caches)))
        self._caches[session] = kept
        self.tokens += kept.columns

    def drop_over(self) -> None:
        """Drop the caches of the sessions that are over."""
        while self.over:
            self.take(self.over.popleft())

    def clear(self) -> None:
        """Drop all of them."""
        self._caches.clear()
        self.tokens = 0


def common_prefix(one: list[int], other: list[int]) -> int:
    """The length of the longest common prefix, by comparing slices: no step of Python's a token."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] equals other[:low], one[:high] does not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
