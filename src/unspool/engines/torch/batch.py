"""The rows that are in the model together, and their key-value cache.

What this module promises:

- Rows are left-padded to one width. Where the padding is follows from the rows' lengths alone, never from token
  ids: a pad token that is also the end token is no matter.
- `prefill`, `decode`, `keep` and `join` change who computes beside whom, and nothing of what a row sees: its keys
  and values, and its positions, are moved whole.
- The cache holds all tokens of every layer, sliding-window layers too (their mask does the window), in buffers
  that grow by steps: a decoding step writes one column and copies nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from unspool.engines.torch.row import Row

_GROWTH = 128
"""Columns by which a full buffer grows at least."""


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, heads, width, size] of one layer: views of buffers with room at the right."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        width = self.keys.shape[-2]
        grown = width + key_states.shape[-2]
        if self._buffers[0].shape[-2] < grown:
            self._buffers = (_grow(self.keys, grown), _grow(self.values, grown))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, width:grown] = new
        self.keys, self.values = (buffer[:, :, :grown] for buffer in self._buffers)
        return self.keys, self.values

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Replace all that is held."""
        self._buffers = (keys, values)
        self.keys, self.values = keys, values


def _grow(held: Tensor, width: int) -> Tensor:
    room = held.new_empty(*held.shape[:-2], width + max(_GROWTH, width // 8), held.shape[-1])
    room[:, :, : held.shape[-2]] = held
    return room


def _aligned(parts: list[Tensor], width: int) -> Tensor:
    """The parts [n, heads, w, size] under each other, right-aligned at `width` (wider ones lose padding at the left).

    Padding is zeros: what a masked position holds must be finite, as 0 times infinity is not 0.
    """
    first = parts[0]
    joined = first.new_zeros(sum(len(part) for part in parts), first.shape[1], width, first.shape[-1])
    row = 0
    for part in parts:
        shared = min(width, part.shape[-2])
        joined[row : row + len(part), :, width - shared :] = part[:, :, part.shape[-2] - shared :]
        row += len(part)
    return joined


class Model:
    """A causal language model, and what its forward function takes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        parameters = inspect.signature(module.forward).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._positions = "position_ids" in parameters or anything
        self._last_only = "logits_to_keep" in parameters or anything

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def __call__(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [B, V] of the last position; the cache takes what was fed."""
        if self.module.training:
            self.module.eval()  # a trainer that shares the module left it in train mode: no dropout while sampling
        extra: dict[str, Any] = {"position_ids": positions} if self._positions else {}
        if self._last_only:
            extra["logits_to_keep"] = 1
        output = self.module(input_ids=input_ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        logits: Tensor = output.logits[:, -1]
        return logits


class Batch:
    """Rows and the cache of all their tokens but the last one sampled, which the next step feeds."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache: DynamicCache | None = None
        self.rows: list[Row] = []
        self.width = 0

    def __len__(self) -> int:
        return len(self.rows)

    def prefill(self, rows: list[Row]) -> Tensor:
        """Feed an empty batch the whole of `rows`, prompts and answers so far; logits [B, V] of what comes next."""
        device = self._model.device
        width = max(row.length for row in rows)
        ids = torch.tensor([[0] * (width - row.length) + row.ids for row in rows], device=device)
        mask, places = self._geometry([row.length for row in rows], width)
        cache = DynamicCache()
        cache.layer_class_to_replicate = _Layer
        logits = self._model(ids, mask, places, cache)
        self.rows, self.width, self._cache = list(rows), width, cache
        return logits

    def decode(self) -> Tensor:
        """Feed every row its last token; logits [B, V] of what comes next."""
        if self._cache is None:
            raise RuntimeError("decode() needs a batch that was prefilled")
        width = self.width + 1
        ids = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._model.device)
        mask, places = self._geometry([row.length for row in self.rows], width)
        logits = self._model(ids, mask, places[:, -1:], self._cache)
        self.width = width
        return logits

    def keep(self, indices: list[int]) -> None:
        """Keep these rows alone, and no more padding than the longest of them needs."""
        if len(indices) == len(self.rows):
            return
        if not indices or self._cache is None:
            self.clear()
            return
        # What a row holds in the cache: all but the token that was sampled last.
        width = max(self.rows[i].length for i in indices) - 1
        index = torch.tensor(indices, device=self._model.device)
        for layer in self._cache.layers:
            held = (layer.keys[:, :, self.width - width :], layer.values[:, :, self.width - width :])
            layer.set(*(part.index_select(0, index) for part in held))
        self.rows = [self.rows[i] for i in indices]
        self.width = width

    def join(self, other: Batch) -> None:
        """Take over the rows of another batch."""
        if not other.rows or other._cache is None:
            return
        if not self.rows or self._cache is None:
            self._cache = other._cache
        else:
            width = max(self.width, other.width)
            for mine, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
                mine.set(_aligned([mine.keys, theirs.keys], width), _aligned([mine.values, theirs.values], width))
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
