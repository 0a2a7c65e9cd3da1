"""Log-probabilities of a real vLLM are those of the distribution that its tokens were drawn from.

In float32 they are a float32 forward pass's own to 2e-3; in bfloat16, whose eight bits of mantissa move logits by a
few hundredths, to 0.1 in the mean over an answer and 0.6 at the worst token.
"""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.engines.vllm.asking import QUESTIONS, asked, expected, request
from unspool import ChatTemplate, SamplingParams
from unspool.engines import VLLMEngine, VLLMSampler

pytestmark = pytest.mark.vllm

WAYS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_in_float32_they_are_those_of_a_forward_pass(
    way: dict[str, float], sampler: VLLMSampler, template: ChatTemplate
) -> None:
    params = SamplingParams(max_tokens=24, **way)  # type: ignore[arg-type]
    batch = [{"input_ids": asked(template, text), "seed": place} for place, text in enumerate(QUESTIONS)]
    for item, response in zip(batch, sampler.sample(batch, params), strict=True):
        (sequence,) = response.sequences
        wanted = expected(item["input_ids"], sequence.tokens, params)  # type: ignore[arg-type]
        assert sequence.logprobs == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_in_bfloat16_they_are_those_of_a_forward_pass_to_its_accuracy(
    way: dict[str, float], engine: VLLMEngine, template: ChatTemplate
) -> None:
    params = SamplingParams(max_tokens=24, **way)  # type: ignore[arg-type]
    prompts = [asked(template, text) for text in QUESTIONS]
    made = await asyncio.gather(*(engine.generate(request(ids, max_tokens=24, **way)) for ids in prompts))
    for prompt, answer in zip(prompts, made, strict=True):
        assert answer.logprobs is not None
        wanted = expected(prompt, answer.tokens, params)
        far = [abs(own - other) for own, other in zip(answer.logprobs, wanted, strict=True) if math.isfinite(other)]
        assert len(far) >= len(wanted) - 1  # a token at the very edge of top-k or top-p may fall out of the other set
        assert max(far) < 0.6
        assert sum(far) / len(far) < 0.1


async def test_they_move_with_the_temperature(engine: VLLMEngine, template: ChatTemplate) -> None:
    """At a temperature T two tokens are apart by what their logits are apart, over T."""
    ids = asked(template, QUESTIONS[1])
    apart = []
    for heat in (0.5, 2.0):
        answer = await engine.generate(request(ids, max_tokens=1, temperature=heat, logprobs=2))
        (first, second) = answer.extra["top_logprobs"][0]
        apart.append(first[1] - second[1])
    assert apart[1] > 0
    assert apart[0] == pytest.approx(4 * apart[1], rel=1e-3)


async def test_alternatives_are_of_the_same_distribution(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[0])
    answer = await engine.generate(request(ids, max_tokens=4, temperature=0.5, top_k=3, logprobs=5))
    assert answer.logprobs is not None
    for token, own, places in zip(answer.tokens, answer.logprobs, answer.extra["top_logprobs"], strict=True):
        assert dict(places)[token] == own
        assert len(places) == 3
        assert sum(math.exp(value) for _, value in places) == pytest.approx(1, abs=1e-3)


async def test_a_penalty_is_in_them(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[1])
    plain = await engine.generate(request(ids, max_tokens=1, temperature=0))
    fined = await engine.generate(request(ids, max_tokens=1, temperature=0, repetition_penalty=1.5))
    assert fined.logprobs != plain.logprobs
