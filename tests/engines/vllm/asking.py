"""What the tests of vLLM ask, and the float32 forward pass that they compare with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from unspool import ChatTemplate, GenerateRequest, SamplingParams
from unspool.engines.embedded import ensure_embedded_model
from unspool.world import calculator

ADAPTER = "tools"
END = 2
"""The id of <|im_end|>."""

SUM = "State the final answer to the following arithmetic problem: 37 + 25 - 14 ="
QUESTIONS = ["Name three colours.", "What is the capital of France?", "Tell me of the sea.", "Who are you?"]


def asked(template: ChatTemplate, question: str, *, tools: bool = False) -> list[int]:
    return template.encode([{"role": "user", "content": question}], [calculator.info()] if tools else None)


def request(ids: Sequence[int], seed: int = 0, session: str = "", **extra_and_params: Any) -> GenerateRequest:
    extra = extra_and_params.pop("extra", {})
    stops = extra_and_params.pop("stop_token_ids", ())
    return GenerateRequest(list(ids), SamplingParams(**extra_and_params), session, seed, stops, extra)


async def until(true: Callable[[], object]) -> None:
    """Return when vLLM, in its other process, has got so far; at most 10 s."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@cache
def model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(ensure_embedded_model(), dtype=torch.float32)
    return loaded.eval()


@torch.no_grad()
def logits(prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Of a float32 forward pass at each place of an answer: [tokens, vocabulary]."""
    whole = torch.tensor([[*prompt, *tokens]])
    scores: torch.Tensor = model()(whole).logits[0, len(prompt) - 1 : -1]
    return scores


def expected(prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> list[float]:
    """Log-probabilities of an answer under the distribution that these parameters make (greedy: the model's own)."""
    scores = logits(prompt, tokens)
    if params.temperature:
        scores = scores / params.temperature
        if params.top_k > 0:
            edge = scores.topk(params.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < edge, -torch.inf)
        if params.top_p < 1:
            ordered, places = scores.softmax(-1).sort(dim=-1, descending=True)
            cut = ordered.cumsum(-1) - ordered >= params.top_p
            scores = scores.masked_fill(cut.gather(-1, places.argsort(-1)), -torch.inf)
    own = scores.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
    return [float(value) for value in own[:, 0]]
