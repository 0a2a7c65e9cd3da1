"""From logits to tokens: pure functions on tensors, a whole batch at a time.

What this module promises:

- The order is that of transformers' warpers: repetition penalty, temperature, top-k, top-p. A token is drawn from
  what is left, renormalised, and its log-probability is that of this very distribution.
- A row's tokens depend on its logits and on its own uniform numbers, never on its companions' numbers. The size of
  a batch changes logits in their last bits, which must not change tokens: a token is found by halving the vocabulary
  until one is left, with a number of its own for each choice. Each choice flips only where its number meets the
  rounding error of one ratio (about 1e-7 a token in float32). The inverse of one cumulative sum has as many edges as
  there are likely tokens, all moved by the error of the whole sum: it flips some hundred times as often.
- Greedy (temperature 0) takes the likeliest token after the penalty. The distribution drawn from is then a point,
  whose log-probability of 0 would tell a trainer nothing: `logprobs` is the model's own, at temperature 1, without
  penalty or truncation, which is what a forward pass over the answer gives.
- Ties at the edge of top-k or top-p stay together, so the outcome does not hang on how a sort breaks them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from unspool.types import SamplingParams

_INNER = 8
_BLOCK = 1 << _INNER
"""Width of the blocks whose sums are searched before the tokens in them."""

_CANDIDATES = 1024
"""How many of the likeliest tokens are looked at before a whole vocabulary is sorted for top-p."""


def stream(seed: int) -> random.Random:
    """The random numbers of one row. Every bit of the seed counts (torch's own generator uses the low 32 only)."""
    return random.Random(seed if seed >= 0 else f"negative {seed}")


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The parameters of a batch as tensors; None wherever no row asks for anything."""

    temperature: Tensor | None  # [B, 1] float32; 1 for greedy rows
    greedy: Tensor | None  # [B] bool
    penalised: Tensor | None  # [n] row indices with a repetition penalty
    penalty: Tensor | None  # [n, 1] float32
    top_k: tuple[Tensor, Tensor] | None  # row indices [n], k [n, 1]
    top_p: tuple[Tensor, Tensor] | None  # row indices [n], p [n, 1] float64 (float32 where there is none)
    raw: Tensor | None  # [n] rows whose temperature-1 log-probability is asked for
    alternatives: tuple[Tensor, int] | None  # row indices [n], and the most that any of them asks for

    @classmethod
    def of(cls, params: Sequence[SamplingParams], raw: Sequence[bool], device: torch.device) -> SamplingPlan:
        """The plan for a batch; `raw` says of each row whether it wants temperature-1 log-probabilities too."""
        greedy = [p.temperature == 0 for p in params]
        heat = [1.0 if p.temperature == 0 else p.temperature for p in params]
        penalised = [i for i, p in enumerate(params) if p.repetition_penalty != 1]
        k_rows = [i for i, p in enumerate(params) if p.top_k > 0 and p.temperature != 0]
        p_rows = [i for i, p in enumerate(params) if p.top_p < 1 and p.temperature != 0]
        beside = {i: p.logprobs for i, p in enumerate(params) if p.logprobs}
        raw_rows = [i for i, wanted in enumerate(raw) if wanted or greedy[i]]

        def index(rows: list[int]) -> Tensor:
            return torch.tensor(rows, device=device)

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            temperature=column(heat, torch.float32) if any(t != 1 for t in heat) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            penalised=index(penalised) if penalised else None,
            penalty=column([params[i].repetition_penalty for i in penalised], torch.float32) if penalised else None,
            top_k=(index(k_rows), column([params[i].top_k for i in k_rows], torch.int64)) if k_rows else None,
            top_p=(index(p_rows), column([params[i].top_p for i in p_rows], wide(device))) if p_rows else None,
            raw=index(raw_rows) if raw_rows else None,
            alternatives=(index(list(beside)), max(beside.values())) if beside else None,
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each row of a batch.

    Attributes:
        tokens: [B] int64.
        logprobs: [B], natural log, of the distribution drawn from (greedy: the model's own).
        raw_logprobs: [B], the model's own at temperature 1; NaN for rows that did not ask.
        alternatives: for the rows that ask, in their order: ids and the model's own log-probabilities, [n, most] each,
            likeliest first; None where no row asks.
        sound: [B] bool, false where the logits hold a NaN or +inf, or nothing but -inf: no token there.
    """

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor
    alternatives: tuple[Tensor, Tensor] | None
    sound: Tensor


def wide(device: torch.device) -> torch.dtype:
    """The widest float that the device has: float64, except on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def draw(logits: Tensor, plan: SamplingPlan, uniform: Tensor, seen: Tensor | None) -> Draw:
    """Draw a token for every row.

    Args:
        logits: [B, V], any float dtype, as the model gave them.
        plan: how, for each row.
        uniform: [B, choices(V)] in [0, 1), each row's own numbers, in the `wide` dtype.
        seen: [n, V] bool for the rows `plan.penalised`: what their prompts and answers hold.
    """
    raw = logits.float()
    scores = warp(raw, plan, seen)
    probs = scores.softmax(-1)
    tokens, total = descend(probs, uniform)
    sound = total.isfinite() & (total > 0)
    if plan.greedy is not None:
        tokens = torch.where(plan.greedy, scores.argmax(-1), tokens)
    chosen = probs.gather(-1, tokens[:, None])[:, 0].to(total.dtype)
    logprobs = chosen.log() - total.log()

    raw_logprobs = torch.full_like(logprobs, float("nan"))
    if plan.raw is not None:
        kept = raw[plan.raw]
        value = kept.gather(-1, tokens[plan.raw][:, None])[:, 0] - kept.logsumexp(-1)
        raw_logprobs[plan.raw] = value.to(logprobs.dtype)
    if plan.greedy is not None:
        logprobs = torch.where(plan.greedy, raw_logprobs, logprobs)
    alternatives = None
    if plan.alternatives is not None:
        index, most = plan.alternatives
        best = raw[index].log_softmax(-1).topk(min(most, raw.shape[-1]), dim=-1)
        alternatives = (best.indices, best.values)
    return Draw(tokens, logprobs, raw_logprobs, alternatives, sound)


def warp(logits: Tensor, plan: SamplingPlan, seen: Tensor | None) -> Tensor:
    """The scores [B, V] float32 whose softmax is the distribution to draw from."""
    scores = logits
    if plan.penalised is not None and plan.penalty is not None and seen is not None:
        rows = scores[plan.penalised]
        scores = scores.index_copy(0, plan.penalised, penalise(rows, seen, plan.penalty))
    if plan.temperature is not None:
        scores = scores / plan.temperature
    if plan.top_k is not None:
        index, k = plan.top_k
        scores = scores.index_copy(0, index, keep_top_k(scores[index], k))
    if plan.top_p is not None:
        index, p = plan.top_p
        scores = scores.index_copy(0, index, keep_top_p(scores[index], p))
    return scores


def penalise(scores: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Scores of seen tokens divided by the penalty where positive, multiplied by it where negative."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def keep_top_k(scores: Tensor, k: Tensor) -> Tensor:
    """Scores [n, V] with all but the k [n, 1] likeliest (and their ties) at -inf."""
    k = k.clamp(max=scores.shape[-1])
    best = scores.topk(int(k.max()), dim=-1).values
    return scores.masked_fill(scores < best.gather(-1, k - 1), -torch.inf)


def keep_top_p(scores: Tensor, p: Tensor) -> Tensor:
    """Scores [n, V] with all at -inf but the likeliest whose probabilities, summed, reach p [n, 1] (and their ties)."""
    size = scores.shape[-1]
    norm = scores.logsumexp(-1, keepdim=True)
    best = scores.topk(min(_CANDIDATES, size), dim=-1).values
    edge, reached = _edge(best, norm, p)
    if size > best.shape[-1] and not bool(reached.all()):
        # A flat distribution: the candidates do not reach p, so these rows are sorted whole.
        flat = (~reached[:, 0]).nonzero()[:, 0]
        full = scores[flat].sort(dim=-1, descending=True).values
        edge = edge.index_copy(0, flat, _edge(full, norm[flat], p[flat])[0])
    return scores.masked_fill(scores < edge, -torch.inf)


def _edge(ordered: Tensor, norm: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest score kept, and whether p is reached, from scores [n, m] in falling order."""
    probs = (ordered - norm).exp().to(p.dtype)
    total = probs.cumsum(-1)
    kept = (total - probs) < p
    count = kept.sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, count - 1), total[:, -1:] >= p


def descend(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token [B] for each row, found by halving the vocabulary until one is left; and each row's total [B].

    Sums of blocks are halved first, then the tokens of one block: one pass over the vocabulary, then little things.
    A token without probability is never returned, as long as the row has any.

    Args:
        probs: [B, V] float32, not negative; they need not add up to 1.
        uniform: [B, choices(V)] in [0, 1), a number for each halving.
    """
    rows, size = probs.shape
    whole = size - size % _BLOCK
    sums = probs[:, :whole].reshape(rows, -1, _BLOCK).sum(-1, dtype=uniform.dtype)
    if whole < size:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True, dtype=uniform.dtype)], dim=-1)
    upper = uniform.shape[-1] - _INNER
    block = _halve(F.pad(sums, (0, (1 << upper) - sums.shape[-1])), uniform[:, :upper])
    places = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    values = probs.gather(-1, places.clamp(max=size - 1)).masked_fill(places >= size, 0).to(uniform.dtype)
    token = block * _BLOCK + _halve(values, uniform[:, upper:])
    return token[:, 0].clamp(max=size - 1), sums.sum(-1)


def choices(size: int) -> int:
    """How many numbers a token of a vocabulary of this size takes."""
    blocks = -(-size // _BLOCK)
    return (blocks - 1).bit_length() + _INNER


def _halve(weights: Tensor, uniform: Tensor) -> Tensor:
    """An index [B, 1] into weights [B, 2**k], chosen half by half with uniform [B, k]."""
    halves = []
    while weights.shape[-1] > 1:
        halves.append(weights)
        weights = weights.reshape(len(weights), -1, 2).sum(-1)
    index = torch.zeros(len(weights), 1, dtype=torch.int64, device=weights.device)
    for step, level in enumerate(reversed(halves)):
        number = uniform[:, step : step + 1]
        left, right = level.gather(-1, 2 * index), level.gather(-1, 2 * index + 1)
        index = 2 * index + ((number * (left + right) >= left) & (right > 0)).to(torch.int64)
    return index
