"""The real vLLM with turns of an exact number of tokens, for the benchmarks that run on it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks.real_model import folder
from benchmarks.workload import UnavailableError
from unspool import ChatTemplate, GenerateRequest, Generation, SamplingParams
from unspool.engines import EngineBase, VLLMEngine

BLOCK = 32
"""Tokens of a block of the cache: the smallest that works on a CPU, where the default of 128 hardly ever serves."""

_ask = itertools.count(1)


class FixedTurns(EngineBase):
    """The engine, with turns that all have `max_tokens` tokens and end as if the model had wanted it.

    Args:
        engine: vLLM, with sessions that stay open between turns for requests that name one.
        sessions: whether requests name theirs; else each is a request of its own, and finds what it can in the cache.
    """

    logprobs = True

    def __init__(self, engine: VLLMEngine, *, sessions: bool) -> None:
        self._engine, self._sessions = engine, sessions

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = await self._engine.generate(_endless(request, request.session if self._sessions else ""))
        return replace(answer, stop_reason="stop")

    def end_session(self, session: str) -> None:
        self._engine.end_session(session)

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        await self._engine.update_weights(source, version)


def _endless(request: GenerateRequest, session: str) -> GenerateRequest:
    return replace(request, session=session, stop_token_ids=(), extra={"ignore_eos": True})


def make_engine() -> VLLMEngine:
    """The embedded model in bfloat16.

    Raises:
        UnavailableError: vLLM or the model is not here.
    """
    if find_spec("vllm") is None:
        raise UnavailableError("vLLM is not installed; `make bench` installs its build for CPUs")
    options = {"max_model_len": 2048, "block_size": BLOCK}
    return VLLMEngine.from_pretrained(folder(), dtype="bfloat16", sessions="resumable", **options)


def fresh_prompts(template: ChatTemplate, count: int) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Trajectories and the ids that they begin with; no run before had any of them, so no cache knows them."""
    trajectories = [
        {"messages": [{"role": "user", "content": f"{next(_ask)} ships are in the harbour; say what they carry."}]}
        for _ in range(count)
    ]
    return trajectories, [template.encode(trajectory["messages"]) for trajectory in trajectories]


async def sample_plainly(engine: VLLMEngine, contexts: Sequence[list[int]], tokens: int) -> list[Generation]:
    """All contexts given at once, `tokens` tokens each."""
    requests = [GenerateRequest(ids, SamplingParams(max_tokens=tokens), seed=i) for i, ids in enumerate(contexts)]
    return await asyncio.gather(*(engine.generate(_endless(request, "")) for request in requests))


async def seconds_of(work: Any) -> float:
    """Wall time of an awaitable."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started
