"""TorchEngine with a real model: SmolLM2-135M-Instruct, its tokenizer, and what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import torch

from tests.engines.tiny_models import rescored
from unspool.engines.embedded import embedded_adapter, ensure_embedded_model
from unspool.engines.protocol import GenerateRequest, Generation
from unspool.engines.torch import TorchEngine
from unspool.types import SamplingParams

pytestmark = pytest.mark.slow

END = 2  # <|im_end|>, which is the pad token too
QUESTIONS = [
    "Name three colours.",
    "What is the capital of France?",
    "Write a long story about a dog, a lighthouse and a storm, with much detail about the sea and the people.",
    "Hi",
]


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    async with TorchEngine.from_pretrained(ensure_embedded_model(), dtype="float32", threads=1) as engine:
        yield engine


def ask(engine: TorchEngine, question: str, seed: int = 0, **params: object) -> GenerateRequest:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = engine.tokenizer.encode(text)  # type: ignore[union-attr]
    return GenerateRequest(ids, SamplingParams.of({"max_tokens": 40, **params}), seed=seed)


async def answers(engine: TorchEngine, asked: list[GenerateRequest]) -> list[Generation]:
    return list(await asyncio.gather(*map(engine.generate, asked)))


async def test_log_probabilities_and_seeds_hold_for_a_real_model(engine: TorchEngine) -> None:
    asked = [ask(engine, QUESTIONS[i % 4], seed=i) for i in range(8)]
    together = await answers(engine, asked)
    for one, answer in zip(asked, together, strict=True):
        assert answer.logprobs == pytest.approx(rescored(engine.model, one, answer), abs=1e-4)
    alone = [await engine.generate(one) for one in asked[:3]]
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in together[:3]]


async def test_the_end_token_is_kept_although_it_is_the_pad_token(engine: TorchEngine) -> None:
    answer = await engine.generate(ask(engine, QUESTIONS[1], temperature=0))
    assert answer.tokens[-1] == END
    assert answer.stop_reason == "stop"
    assert "Paris" in engine.tokenizer.decode(answer.tokens)  # type: ignore[union-attr]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.tokens)


async def test_a_stop_string_over_several_tokens_is_found(engine: TorchEngine) -> None:
    free = await engine.generate(ask(engine, QUESTIONS[1], temperature=0))
    answer = await engine.generate(ask(engine, QUESTIONS[1], temperature=0, stop=" of France is"))
    text = engine.tokenizer.decode(answer.tokens)  # type: ignore[union-attr]
    assert text.endswith(" of France is")
    assert answer.tokens == free.tokens[: len(answer.tokens)]
    assert answer.stop_reason == "stop"


async def test_it_is_loaded_with_the_shipped_adapter_in_bfloat16() -> None:
    if not (embedded_adapter() / "adapter_config.json").is_file():
        pytest.skip("the adapter is not shipped yet")
    path = ensure_embedded_model()
    async with TorchEngine.from_pretrained(path, adapter=embedded_adapter(), dtype="bfloat16", threads=1) as engine:
        assert next(engine.model.parameters()).dtype == torch.bfloat16
        one = ask(engine, QUESTIONS[0])
        answer = await engine.generate(one)
        assert answer.logprobs == pytest.approx(rescored(engine.model, one, answer), abs=0.3)


async def test_a_batch_costs_no_more_than_transformers_generate() -> None:
    """The aim is 1.15 of `generate`; the bound is wide, as other work may run beside the test."""
    path = ensure_embedded_model()
    async with TorchEngine.from_pretrained(path, dtype="bfloat16", threads=1, stop_token_ids=()) as engine:
        asked = [ask(engine, QUESTIONS[2], seed=i, max_tokens=24) for i in range(16)]
        ids = torch.tensor([one.input_ids for one in asked])
        ratios = []
        for _ in range(3):
            start = time.process_time()
            engine.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=24,
                max_new_tokens=24,
            )
            theirs = time.process_time() - start
            start = time.process_time()
            assert {len(answer.tokens) for answer in await answers(engine, asked)} == {24}
            ratios.append((time.process_time() - start) / theirs)
    assert min(ratios) < 1.5
