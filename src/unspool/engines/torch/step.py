"""One token for every row of a batch, and what becomes of each row with it.

What this module promises: a row's token comes from its own logits and random numbers; a row whose logits are unusable,
or whose tokenizer fails at a stop string, fails alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unspool.engines.torch.row import Alternatives, Row, failure
from unspool.engines.torch.sampling import Draw, SamplingPlan, choices, draw, wide
from unspool.types import EngineError


def plan_for(rows: list[Row], device: torch.device) -> SamplingPlan:
    """How these rows are sampled."""
    return SamplingPlan.of([row.params for row in rows], [row.wants_raw for row in rows], device)


def sample(rows: list[Row], logits: Tensor, plan: SamplingPlan, version: int) -> tuple[list[int], list[int]]:
    """Give each row its next token from logits [B, V]; indices of rows that go on, and of those with a whole answer."""
    device, size = logits.device, logits.shape[-1]
    count = choices(size)
    uniform = torch.tensor([row.numbers(count) for row in rows], dtype=wide(device), device=device)
    drawn = draw(logits, plan, uniform, _seen(rows, size, device))
    tokens, sound = drawn.tokens.tolist(), drawn.sound.tolist()
    logprobs, raw = drawn.logprobs.tolist(), drawn.raw_logprobs.tolist()
    beside = _alternatives(plan, drawn)
    live: list[int] = []
    ended: list[int] = []
    for i, row in enumerate(rows):
        if not sound[i]:
            row.fail(
                EngineError(
                    f"the model's logits hold NaN or infinity after {row.length} tokens; check its weights and dtype"
                )
            )
            continue
        try:
            reason = row.take(tokens[i], logprobs[i], raw[i], version, beside.get(i))
        except Exception as error:  # the tokenizer, at a stop string
            row.fail(failure(row, error))
            continue
        if reason is None:
            live.append(i)
        else:
            ended.append(i)
            row.finish(reason)
    return live, ended


def _seen(rows: list[Row], size: int, device: torch.device) -> Tensor | None:
    """[n, size] bool: the tokens of those rows that have a repetition penalty."""
    masks: list[Tensor] = []
    for row in rows:
        if row.params.repetition_penalty == 1:
            continue
        if row.seen is None:
            row.seen = torch.zeros(size, dtype=torch.bool, device=device)
            row.seen[torch.tensor(row.ids, device=device)] = True
        masks.append(row.seen)
    return torch.stack(masks) if masks else None


def _alternatives(plan: SamplingPlan, drawn: Draw) -> dict[int, Alternatives]:
    """For each row that asks: the likeliest tokens and their log-probabilities."""
    if plan.alternatives is None or drawn.alternatives is None:
        return {}
    pairs = zip(*(part.tolist() for part in drawn.alternatives), strict=True)
    rows = plan.alternatives[0].tolist()
    return {row: list(zip(ids, values, strict=True)) for row, (ids, values) in zip(rows, pairs, strict=True)}
