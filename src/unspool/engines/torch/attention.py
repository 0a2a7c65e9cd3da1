"""Attention with a mask in which query heads share keys and values, without a copy of those for every head.

What this module promises: `shared_heads` computes what transformers' own function for torch's attention computes, on
any input, and can be differentiated. That one repeats keys and values for each query head wherever there is a mask,
which a batch with padding always has: on a CPU up to half of a decoding step's time. Here the query heads of a group
stand under each other as rows of one head. And torch's CPU kernel turns a boolean mask into one to be added, anew in
each layer, which behind a long conversation takes as long as the attention: here that is done once a forward pass.

During a forward pass of the engine the configuration of a model whose attention is transformers' "sdpa" says `NAME`. A
forward pass of somebody else beside it gets the same values; a copy or a pickle of the module that is made meanwhile
keeps the name, which only a process with this module knows. What somebody else sets meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "unspool_shared_heads"
_PLAIN = "sdpa"


def shared_heads(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, N, d] to key and value [B, G, W, d], H a multiple of G: [B, N, H, d] and None.

    `attention_mask` [B, 1, N, W], boolean or to be added; `others` as transformers gives them.
    """
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, query.dtype):
        attention_mask = attention_mask.to(query.dtype)
    batch, heads, length, size = query.shape
    groups = key.shape[1]
    share = heads // groups
    if (
        attention_mask is None
        or attention_mask.dim() != 4
        or attention_mask.shape[1] != 1
        or share == 1
        or query.device.type != "cpu"
        or others.get("position_bias") is not None
        or others.get("cache") is not None
    ):
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return plain
    rows = query.reshape(batch, groups, share * length, size)
    mask = attention_mask[..., : key.shape[-2]]
    if length > 1:
        mask = mask[:, :, None].expand(-1, -1, share, -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def added_mask(*sizes: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor | None:
    """transformers' mask for torch's attention; on a CPU 0 and minus infinity, as torch's own kernel makes it.

    So a position that sees nothing, which is padding, gets the value that torch gives it.
    """
    mask: Tensor | None = sdpa_mask(*sizes, dtype=dtype, **options)
    if mask is None or mask.device.type != "cpu":
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


AttentionInterface.register(NAME, shared_heads)
AttentionMaskInterface.register(NAME, added_mask)


@contextmanager
def without_copies(config: Any) -> Iterator[None]:
    """Within, a model of this config uses `shared_heads`, if its attention is transformers' "sdpa"."""
    if getattr(config, "_attn_implementation", None) not in (_PLAIN, NAME):
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        if config._attn_implementation == NAME:  # else somebody has chosen another one meanwhile
            config._attn_implementation = _PLAIN
