"""The rows that are in the model together, and their key-value cache.

What this module promises:

- Rows are left-padded to one width. Where the padding is follows from the rows' lengths alone, never from token
  ids: a pad token that is also the end token is no matter.
- `prefill`, `decode`, `release`, `keep` and `join` change who computes beside whom, and nothing of what a row sees:
  its keys and values, and its positions, are moved whole.
- The cache holds all tokens of every layer, sliding-window layers too (their mask does the window), in buffers
  that grow by steps: a decoding step writes one column and copies nothing.
- A model that does not fill the cache that it is given is fed whole rows at every step instead: slow, and exact.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from unspool.engines.torch.kept import Kept
from unspool.engines.torch.model import Model, UnfilledCacheError
from unspool.engines.torch.row import Row

_log = logging.getLogger(__name__)

_GROWTH = 128
"""Columns by which a full buffer grows at least."""


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, heads, width, size] of one layer: views of buffers with room at the right."""

    keys: Tensor
    values: Tensor
    buffers: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        if not self.is_initialized:
            self.hold((_room(key_states, 0), _room(value_states, 0)), 0)
        width = self.keys.shape[-2]
        grown = width + key_states.shape[-2]
        if self.buffers[0].shape[-2] < grown:
            self.buffers = (_grow(self.keys, grown), _grow(self.values, grown))
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, width:grown] = states
        self.keys, self.values = (buffer[:, :, :grown] for buffer in self.buffers)
        return self.keys, self.values

    def hold(self, buffers: tuple[Tensor, Tensor], width: int) -> None:
        """Replace all that is held by the first `width` columns of these buffers."""
        if not self.is_initialized:
            self.lazy_initialization(*buffers)
        self.buffers = buffers
        self.keys, self.values = (buffer[:, :, :width] for buffer in buffers)


def _room(like: Tensor, width: int, rows: int | None = None) -> Tensor:
    """An empty buffer of `width` columns and some more to grow (none: no columns at all)."""
    columns = width + max(_GROWTH, width // 8) if width else 0
    return like.new_empty(len(like) if rows is None else rows, like.shape[1], columns, like.shape[-1])


def _grow(held: Tensor, width: int) -> Tensor:
    buffer = _room(held, width)
    buffer[:, :, : held.shape[-2]] = held
    return buffer


def _aligned(parts: list[Tensor], width: int, room: int) -> Tensor:
    """The parts [n, heads, w, size] under each other, right-aligned at `width` of a buffer for `room` columns.

    Wider parts lose padding at the left, narrower ones get it: zeros, as what a masked position holds must be finite
    (0 times infinity is not 0).
    """
    joined = _room(parts[0], room, sum(len(part) for part in parts))
    row = 0
    for part in parts:
        shared = min(width, part.shape[-2])
        rows = joined[row : row + len(part)]
        rows[:, :, : width - shared].zero_()
        rows[:, :, width - shared : width] = part[:, :, part.shape[-2] - shared :]
        row += len(part)
    return joined


@dataclass(eq=False, slots=True)
class Newcomer:
    """A row to prefill, and what is already computed of it: the first `held` columns of `kept`."""

    row: Row
    kept: Kept | None = None
    held: int = 0

    @property
    def new(self) -> int:
        """Tokens that a forward pass must be fed, at least one."""
        return self.row.length - self.held


class Batch:
    """Rows and the cache of all their tokens but the last one sampled, which the next step feeds."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache: DynamicCache | None = None
        self.rows: list[Row] = []
        self.width = 0

    def __len__(self) -> int:
        return len(self.rows)

    def prefill(self, newcomers: list[Newcomer]) -> Tensor:
        """Feed an empty batch what is new of these rows; logits [B, V] of what comes next.

        Every row is fed its last n tokens, n being what the row with the most new ones has: so the cache has no
        holes. Of rows with fewer new ones some kept columns are computed again.
        """
        rows = [one.row for one in newcomers]
        width, fed = max(row.length for row in rows), max(one.new for one in newcomers)
        cache = DynamicCache()
        cache.layer_class_to_replicate = _Layer
        cache.layers = _past(newcomers, width - fed, width)
        logits = self._feed(rows, width, fed, cache)
        self.rows, self.width = rows, width
        return logits

    def decode(self) -> Tensor:
        """Feed every row its last token; logits [B, V] of what comes next."""
        if not self.rows:
            raise RuntimeError("decode() needs a batch that was prefilled")
        logits = self._feed(self.rows, self.width + 1, 1, self._cache)
        self.width += 1
        return logits

    def _feed(self, rows: list[Row], width: int, fed: int, cache: DynamicCache | None) -> Tensor:
        """Logits [B, V] of what comes after these rows: fed are their last `fed` tokens, or all if none are cached."""
        if self._model.caches:
            try:
                logits = self._model(*self._input(rows, width, fed), cache)
                self._cache = cache
                return logits
            except UnfilledCacheError as error:
                _log.warning("%s: from now on it is fed whole rows at every step", error)
                self._model.caches = False
        self._cache = None
        return self._model(*self._input(rows, width, width), None)

    def _input(self, rows: list[Row], width: int, fed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [B, fed], attention mask [B, width] and position ids [B, fed]."""
        ids = [[0] * (fed - row.length) + row.last(fed) for row in rows]
        mask, places = self._geometry([row.length for row in rows], width)
        return torch.tensor(ids, device=self._model.device), mask, places[:, -fed:]

    def release(self, index: int) -> Kept | None:
        """The cache of a row that is about to leave (`keep`), for its session's next turn.

        The only row of a batch hands its buffers over; of several a copy is made, so that the others' go free.
        """
        if self._cache is None:
            return None
        ids = self.rows[index].ids[:-1]  # all but the token that was sampled last
        layers = self._cache.layers
        if any(layer.keys.shape[-2] != self.width for layer in layers):
            return None  # a model that keeps something else than all tokens in a layer
        if len(self.rows) == 1 and len(ids) == self.width:
            return Kept(ids, [layer.buffers for layer in layers])
        held = [(layer.keys[index : index + 1], layer.values[index : index + 1]) for layer in layers]
        return Kept(ids, [(_last_columns(keys, len(ids)), _last_columns(values, len(ids))) for keys, values in held])

    def keep(self, indices: list[int]) -> None:
        """Keep these rows alone, and no more padding than the longest of them needs.

        One layer after the other, so that there are never two whole caches: where it raises, of memory, nothing can
        be done with the batch but `clear`. So it is with `join`.
        """
        if len(indices) == len(self.rows):
            return
        if not indices:
            self.clear()
            return
        # What a row holds in the cache: all but the token that was sampled last.
        width = max(self.rows[i].length for i in indices) - 1
        index = torch.tensor(indices, device=self._model.device)
        for layer in self._cache.layers if self._cache is not None else ():
            held = (part[:, :, self.width - width :].index_select(0, index) for part in (layer.keys, layer.values))
            keys, values = (_grow(part, width + 1) for part in held)
            layer.hold((keys, values), width)
        self.rows = [self.rows[i] for i in indices]
        self.width = width

    def join(self, other: Batch) -> None:
        """Take over the rows of another batch."""
        if not other.rows:
            return
        if not self._model.caches:
            self._cache = None
        elif not self.rows:
            self._cache = other._cache
        elif self._cache is not None and other._cache is not None:
            width = max(self.width, other.width)
            for mine, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
                keys = _aligned([mine.keys, theirs.keys], width, width + 1)
                mine.hold((keys, _aligned([mine.values, theirs.values], width, width + 1)), width)
        self.width = max(self.width, other.width)
        self.rows = self.rows + other.rows

    def clear(self) -> None:
        """Drop all rows and the cache."""
        self.rows, self.width, self._cache = [], 0, None

    def _geometry(self, lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
        """Attention mask and position ids, both [B, width] int64, of rows that end at the right edge."""
        device = self._model.device
        padding = width - torch.tensor(lengths, device=device)[:, None]
        places = torch.arange(width, device=device)[None] - padding
        return (places >= 0).to(torch.int64), places.clamp(min=0)


def _past(newcomers: list[Newcomer], past: int, width: int) -> list[_Layer]:
    """The layers of a cache that holds, right-aligned at `past`, what stands before the tokens that are fed.

    A single row goes on in its own buffers; several are copied into new ones with room for `width` columns.
    """
    if past == 0:
        return []
    fed = width - past
    with_cache = next(one.kept for one in newcomers if one.kept is not None)
    layers = []
    for number, buffers in enumerate(with_cache.buffers):
        layer = _Layer()
        if len(newcomers) == 1:
            layer.hold(buffers, past)
        else:
            parts: tuple[list[Tensor], list[Tensor]] = ([], [])
            for one in newcomers:
                count = max(0, one.row.length - fed)
                own = buffers if one.kept is None else one.kept.buffers[number]
                for side, part in zip(parts, own, strict=True):
                    side.append(part[:, :, :count])
            layer.hold((_aligned(parts[0], past, width), _aligned(parts[1], past, width)), past)
        layers.append(layer)
    return layers


def _last_columns(held: Tensor, count: int) -> Tensor:
    """The last `count` columns, in memory of their own."""
    return held[:, :, held.shape[-2] - count :].clone(memory_format=torch.contiguous_format)
