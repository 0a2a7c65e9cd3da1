"""(e) Time to the first token of a turn, against the length of the conversation.

One conversation on the embedded model (SmolLM2-135M, bfloat16), by itself, in a `TorchEngine` that keeps its keys and
values. Each turn asks for one token after so many tokens of context and 48 new ones: what is measured is all that
stands between a request and its first token. The conversations of all lengths take turns, and a cell is the median over
the repetitions.

Attention reads all keys, so even a forward pass that is fed 48 tokens grows with what stands before them. That is
measured by itself: the same forward pass of the bare model, with a cache made beforehand and transformers' own
attention. "anew" is an engine that keeps nothing and so computes the whole conversation each turn.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from benchmarks.report import Result, Target
from benchmarks.torch_turns import THREADS, folder
from unspool import GenerateRequest, SamplingParams, TorchEngine

LENGTHS = (200, 1000, 2000, 4000)
NEW = 48


class _Conversation:
    """Grows by one sampled token and `NEW` - 1 of others a turn, from what makes `length` at the middle turn."""

    def __init__(self, engine: TorchEngine, length: int, turns: int) -> None:
        self._engine = engine
        self._session = f"of {length}"
        self._turn = 0
        self._ids = _ids(max(NEW, length - NEW * (turns // 2)), length)

    async def turn(self) -> float:
        """One turn's seconds from request to token."""
        self._turn += 1
        request = GenerateRequest(list(self._ids), SamplingParams(max_tokens=1), self._session, seed=self._turn)
        start = time.perf_counter()
        answer = await self._engine.generate(request)
        elapsed = time.perf_counter() - start
        self._ids += answer.tokens + _ids(NEW - 1, self._turn)
        return elapsed


def _ids(count: int, start: int) -> list[int]:
    return [100 + (7919 * (start + place) + place * place) % 40_000 for place in range(count)]


def bare_pass(model: Any, length: int, times: int) -> float:
    """Median seconds of a forward pass of `NEW` tokens behind so many in transformers' own cache."""
    import torch
    from transformers import DynamicCache

    cache, seconds = DynamicCache(), []
    with torch.no_grad():
        model(input_ids=torch.tensor([_ids(length, length)]), past_key_values=cache, logits_to_keep=1)
        for turn in range(times):
            ids = torch.tensor([_ids(NEW, turn)])
            start = time.perf_counter()
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            seconds.append(time.perf_counter() - start)
            cache.crop(-NEW)
    return median(seconds)


async def _measure(engine: TorchEngine, lengths: tuple[int, ...], turns: int) -> dict[int, float]:
    conversations = {length: _Conversation(engine, length, turns) for length in lengths}
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for turn in range(turns + 1):
        for length, conversation in conversations.items():
            elapsed = await conversation.turn()
            if turn:  # the first turn computes all of it
                seconds[length].append(elapsed)
    return {length: median(values) for length, values in seconds.items()}


def run(quick: bool = False) -> Result:
    """Measure all lengths."""
    import torch

    lengths, turns = ((60, 120), 2) if quick else (LENGTHS, 15)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)

    async def both() -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        async with TorchEngine.from_pretrained(folder(), dtype="bfloat16", stop_token_ids=(-1,)) as engine:
            kept = await _measure(engine, lengths, turns)
            bare = {length: bare_pass(engine.model, length, max(2, turns)) for length in lengths}
            async with TorchEngine(engine.model, max_kept_tokens=0, stop_token_ids=(-1,)) as forgetful:
                return kept, bare, await _measure(forgetful, lengths, max(1, turns // 5))

    try:
        kept, bare, anew = asyncio.run(both())
    finally:
        torch.set_num_threads(threads)
    shortest, longest = lengths[0], lengths[-1]
    result = Result(
        "e",
        f"time to the first token of a later turn, {NEW} new tokens, one conversation, real model",
        (
            "kept, ms",
            f"/ at {shortest:,}",
            "bare pass, ms",
            f"/ at {shortest:,} ",
            "kept / bare pass",
            "computed anew, ms",
        ),
    )
    for length in lengths:
        mine, pure = kept[length], bare[length]
        result.add(
            f"unspool, {length:,} tokens",
            mine * 1e3,
            mine / kept[shortest],
            pure * 1e3,
            pure / bare[shortest],
            mine / pure,
            anew[length] * 1e3,
        )
    result.targets = [
        Target(f"kept, {longest:,} tokens / {shortest:,} tokens", kept[longest] / kept[shortest], 1.20),
        Target(f"kept / bare pass, {longest:,} tokens", kept[longest] / bare[longest], 1.20),
    ]
    result.facts = {"new tokens": NEW, "turns": turns, "threads": THREADS}
    return result
