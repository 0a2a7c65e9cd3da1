"""What a real vLLM in process samples: seeds, stops, limits, forms, adapters, cancelling, and from which loop."""

from __future__ import annotations

import asyncio
import json
import random
import re

import pytest

from tests.engines.vllm.asking import ADAPTER, END, QUESTIONS, SUM, asked, request, until
from unspool import ChatTemplate
from unspool.engines import VLLMEngine, VLLMSampler
from unspool.loop import run_sync
from unspool.types import EngineError, SamplingParams

pytestmark = pytest.mark.vllm


async def test_the_same_seeds_give_the_same_ids_for_a_shuffled_batch(
    engine: VLLMEngine, template: ChatTemplate
) -> None:
    requests = [request(asked(template, f"{QUESTIONS[i % 4]} ({i})"), seed=i, max_tokens=24) for i in range(16)]
    first = await asyncio.gather(*map(engine.generate, requests))
    order = list(range(16))
    random.Random(5).shuffle(order)
    second = await asyncio.gather(*(engine.generate(requests[place]) for place in order))
    assert [answer.tokens for answer in second] == [first[place].tokens for place in order]
    assert len({tuple(answer.tokens) for answer in first}) == 16


async def test_another_seed_gives_other_ids(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[2])
    one, other = await asyncio.gather(*(engine.generate(request(ids, seed=s, max_tokens=24)) for s in (1, -1)))
    assert one.tokens != other.tokens


async def test_a_turn_ends_with_the_stop_token_that_was_sampled(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[1])
    answer = await engine.generate(request(ids, max_tokens=60, temperature=0))
    assert (answer.tokens[-1], answer.stop_reason) == (END, "stop")
    named = await engine.generate(request(ids, max_tokens=60, temperature=0, stop_token_ids=(answer.tokens[2],)))
    assert named.tokens == answer.tokens[:3]
    assert named.stop_reason == "stop"


async def test_named_stop_tokens_are_the_only_ones(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[1])
    answer = await engine.generate(request(ids, max_tokens=60, temperature=0, stop_token_ids=(49_000,)))
    assert END in answer.tokens[:-1]
    assert answer.stop_reason == "length"


async def test_the_limit_ends_a_turn(engine: VLLMEngine, template: ChatTemplate) -> None:
    answer = await engine.generate(request(asked(template, QUESTIONS[2]), max_tokens=5))
    assert (len(answer.tokens), answer.stop_reason) == (5, "length")


async def test_the_tokens_of_a_stop_string_are_all_kept(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[1])
    free = await engine.generate(request(ids, max_tokens=60, temperature=0))
    held = await engine.generate(request(ids, max_tokens=60, temperature=0, stop=" of France is"))
    assert template.tokenizer.decode(held.tokens).endswith(" of France is")
    assert held.tokens == free.tokens[: len(held.tokens)]
    assert held.stop_reason == "stop"
    assert held.logprobs is not None and len(held.logprobs) == len(held.tokens)


async def test_a_special_token_can_be_a_stop_string(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[1])
    answer = await engine.generate(
        request(ids, max_tokens=60, temperature=0, stop="<|im_end|>", stop_token_ids=(49_000,))
    )
    assert (answer.tokens[-1], answer.stop_reason) == (END, "stop")


async def test_an_adapter_changes_the_answer_and_an_unknown_one_is_an_error(
    engine: VLLMEngine, template: ChatTemplate
) -> None:
    ids = asked(template, SUM, tools=True)
    bare = await engine.generate(request(ids, max_tokens=40, temperature=0))
    taught = await engine.generate(request(ids, max_tokens=40, temperature=0, extra={"adapter": ADAPTER}))
    assert bare.tokens != taught.tokens
    call = template.parse(taught.tokens).tool_calls
    assert call and call[0].arguments == {"expression": "37 + 25"}
    with pytest.raises(EngineError, match="there is no adapter 'maths'; the engine was made with 'tools'"):
        await engine.generate(request(ids, extra={"adapter": "maths"}))


async def test_structured_outputs_hold(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[0])
    digits = await engine.generate(
        request(ids, max_tokens=20, temperature=1.5, extra={"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}})
    )
    assert re.fullmatch("[0-9]{3}-[a-f]{2}<.im_end.>", template.tokenizer.decode(digits.tokens))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    made = await engine.generate(
        request(ids, max_tokens=40, temperature=1.5, extra={"structured_outputs": {"json": schema}})
    )
    assert json.loads(template.tokenizer.decode(made.tokens, skip_special_tokens=True))["n"] in (1, 2)
    with pytest.raises(EngineError, match="structured_outputs must hold one of json, regex"):
        await engine.generate(request(ids, extra={"structured_outputs": {"xml": "a"}}))


async def test_what_vllm_refuses_is_an_error_that_says_why(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[0])
    with pytest.raises(EngineError, match=r"vLLM does not take the request: temperature must be in \[0, 2\]"):
        await engine.generate(request(ids, temperature=3.0))
    with pytest.raises(EngineError, match="the prompt has 2048 tokens and leaves no room"):
        await engine.generate(request([5] * 2048))
    assert engine.context_length == 2048


async def test_cancelling_aborts_the_request(engine: VLLMEngine, template: ChatTemplate) -> None:
    llm = engine._made.llm  # type: ignore[union-attr]
    ids = asked(template, QUESTIONS[2])
    for session in ("", "cancelled"):
        endless = request(ids, session=session, max_tokens=1500, extra={"ignore_eos": True})
        task = asyncio.create_task(engine.generate(endless))
        await until(llm.get_num_unfinished_requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not llm.get_num_unfinished_requests())
    assert (await engine.generate(request(ids, max_tokens=3))).tokens


def test_it_works_from_two_loops_and_after_one_is_closed(engine: VLLMEngine, template: ChatTemplate) -> None:
    one = request(asked(template, QUESTIONS[1]), max_tokens=8, temperature=0)

    async def in_both() -> list[list[int]]:
        here, there = await asyncio.gather(engine.generate(one), asyncio.to_thread(asyncio.run, engine.generate(one)))
        return [here.tokens, there.tokens]

    first, second = asyncio.run(in_both())
    assert first == second == run_sync(engine.generate(one)).tokens == asyncio.run(engine.generate(one)).tokens


def test_the_sampler_and_the_engine_sample_the_same_greedy_calls(
    engine: VLLMEngine, sampler: VLLMSampler, template: ChatTemplate
) -> None:
    sums = [f"State the final answer to the following arithmetic problem: {a} + {a + 7} =" for a in (12, 35, 48)]
    prompts = [asked(template, text, tools=True) for text in sums]
    batch = [{"input_ids": ids, "seed": 0, "adapter": ADAPTER, "max_tokens": 40} for ids in prompts]
    responses = sampler.sample(batch, SamplingParams(temperature=0))
    for ids, response in zip(prompts, responses, strict=True):
        wanted = run_sync(engine.generate(request(ids, max_tokens=40, temperature=0, extra={"adapter": ADAPTER})))
        assert response.sequences[0].tokens == wanted.tokens
        assert response.sequences[0].stop_reason == "stop"
