"""A causal language model as the engine calls it.

What this module promises:

- A pass runs in eval mode, and leaves the module in the mode that it was in, each of its parts.
- The logits of a pass are given out only if the cache holds what was fed, in every layer, and the module was not put
  into train mode meanwhile. Otherwise the pass is tried once more from the same cache, and then it is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from unspool.engines.torch.attention import without_copies
from unspool.types import EngineError


class UnfilledCacheError(EngineError):
    """The model did not write into the cache what it was fed."""


class Model:
    """A causal language model, and what its forward function takes.

    Attributes:
        caches: whether it is called with a cache; turned off by who finds that it fills none.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.caches = True
        parameters = inspect.signature(module.forward).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._positions = "position_ids" in parameters or anything
        self._last_only = "logits_to_keep" in parameters or anything
        self._config = text_config(module)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def __call__(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None) -> Tensor:
        """Logits [B, V] of the last position; the cache, if any, takes what was fed.

        `input_ids` and `positions` [B, N], `mask` [B, W], all int64; `cache` holds W - N columns.

        Raises:
            UnfilledCacheError: the cache does not hold W columns after it.
            EngineError: the module was put into train mode while it ran.
        """
        width = mask.shape[1]
        for _ in range(2):
            logits, flipped = self._pass(input_ids, mask, positions, cache)
            if not flipped and (cache is None or _holds(cache, width)):
                return logits
            if cache is not None:
                _cut(cache, width - input_ids.shape[1])
        name = type(self.module).__name__
        if flipped:
            raise EngineError(
                f"{name} was put into train mode while the engine sampled with it; a trainer that shares the module "
                "must hold the engine (pause, resume) around each of its forward and backward passes"
            )
        raise UnfilledCacheError(
            f"{name} does not fill the cache it is given (a DynamicCache of transformers, as past_key_values); "
            "let its forward function call past_key_values.update in every layer"
        )

    def _pass(
        self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None
    ) -> tuple[Tensor, bool]:
        """The logits [B, V], and whether somebody put the module into train mode meanwhile."""
        extra: dict[str, Any] = {"position_ids": positions} if self._positions else {}
        if self._last_only:
            extra["logits_to_keep"] = 1
        with _without_dropout(self.module), without_copies(self._config):
            output = self.module(
                input_ids=input_ids,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
                **extra,
            )
            flipped = self.module.training
        logits: Tensor = output.logits[:, -1]
        return logits, flipped


def text_config(module: torch.nn.Module) -> Any:
    """The configuration of a model, of one with several parts that of its language model; None where it has none."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@contextmanager
def _without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """Within, a module that a trainer left in train mode is in eval mode; then each part is again as it was."""
    if not module.training:
        yield
        return
    were = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in were:
            part.training = True


def _holds(cache: DynamicCache, width: int) -> bool:
    """Whether every layer that holds anything holds that many columns, and any does."""
    held = [layer.keys.shape[-2] for layer in cache.layers if layer.is_initialized]
    return bool(held) and all(columns == width for columns in held)


def _cut(cache: DynamicCache, width: int) -> None:
    """Bring the cache back to its first `width` columns."""
    if width == 0:
        cache.layers.clear()
    for layer in cache.layers:
        if layer.is_initialized:
            layer.hold(layer.buffers, width)
