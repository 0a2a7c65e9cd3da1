"""Rollouts by a real vLLM server: the ids, the log-probabilities and the seeds are what they claim to be."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest

from tests.engines.server.vllm_parts import Tap, ask, engine_of, running
from tests.vllm_server import ADAPTER, VLLMServer
from unspool import (
    ChatTemplate,
    GenerateRequest,
    MultiTurnRollout,
    SamplingParams,
    ToolManager,
    TorchEngine,
    calculator,
)
from unspool.engines.embedded import embedded_adapter, ensure_embedded_model
from unspool.types import EngineError

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")

SUMS = [(37, 25, 14), (8, 91, 3), (120, 45, 66), (5, 5, 9), (70, 12, 1), (33, 48, 20), (9, 64, 27), (81, 3, 40)]
BF16 = 0.3
"""Most that a log-probability of the server, which computes in bfloat16, may be from that of float32; the mean is held
to a tenth of it."""


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(str(ensure_embedded_model()))


@pytest.fixture(scope="module")
def taught() -> TorchEngine:
    """The same weights in float32, with the adapter merged."""
    return TorchEngine.from_pretrained(ensure_embedded_model(), adapter=embedded_adapter(), dtype="float32")


def conversations() -> list[dict[str, Any]]:
    text = "State the final answer to the following arithmetic problem: {} + {} - {} ="
    return [
        {"id": str(number), "messages": [{"role": "user", "content": text.format(*sum)}]}
        for number, sum in enumerate(SUMS)
    ]


def requests(template: ChatTemplate, count: int, max_tokens: int = 24) -> list[GenerateRequest]:
    prompts = [
        template.encode([{"role": "user", "content": f"Say something about the number {n}."}]) for n in range(count)
    ]
    params = SamplingParams(max_tokens=max_tokens)
    return [
        GenerateRequest(prompt, params, session=f"s{n}", seed=1000 + n, stop_token_ids=template.stop_token_ids)
        for n, prompt in enumerate(prompts)
    ]


async def test_multi_turn_records_hold_the_servers_own_ids_and_its_own_render(
    vllm_server: VLLMServer, template: ChatTemplate, taught: TorchEngine
) -> None:
    async with engine_of(vllm_server) as engine:
        assert engine.context_length == 2048
        tap = Tap(engine)
        rollout = MultiTurnRollout(
            engine,
            template,
            ToolManager([calculator]),
            {"max_tokens": 64, "temperature": 0.8},
            max_turns=5,
            seed=3,
            extra={"adapter": ADAPTER},
            progress=False,
        )
        results = await rollout.acall(conversations())
    assert [result["error"] for result in results] == [None] * len(SUMS)
    assert sum(result["turns"] for result in results) >= 2 * len(SUMS)
    by_prompt = {tuple(choice["prompt_token_ids"]): choice for _, choice in tap.exchanges}
    assert len(by_prompt) == len(tap.exchanges) == sum(result["turns"] for result in results)
    same_render = 0
    for result in results:
        for start, end in sampled_ranges(result):
            choice = by_prompt.pop(tuple(result["input_ids"][:start]))
            assert choice["token_ids"] == result["input_ids"][start:end]
            assert choice["logprobs"]["token_logprobs"] == result["logprobs"][start:end]
        same_render += await rendered_the_same(vllm_server, result)
        compare_with_float32(taught, result, temperature=0.8)
    assert not by_prompt
    assert same_render >= len(SUMS) - 2  # the others have a turn whose tokens are not those of its text


def sampled_ranges(result: dict[str, Any]) -> list[tuple[int, int]]:
    """Where each sampled turn stands in a trajectory."""
    mask = "".join(str(bit) for bit in result["loss_mask"])
    return [match.span() for match in re.finditer("1+", mask)]


async def rendered_the_same(server: VLLMServer, result: dict[str, Any]) -> bool:
    """Whether the server renders the conversation, up to its last turn, to the ids that were recorded for it."""
    assert result["messages"][-1]["role"] == "assistant"
    body = {
        "model": ADAPTER,
        "messages": [with_texts(message) for message in result["messages"][:-1]],
        "tools": ToolManager([calculator]).tool_infos(),
        "max_tokens": 1,
        "return_token_ids": True,
    }
    answer = await ask(server, "/v1/chat/completions", body)
    start, _ = sampled_ranges(result)[-1]
    return bool(answer["prompt_token_ids"] == result["input_ids"][:start])


def with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API wants it: the arguments of calls as JSON texts."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def compare_with_float32(taught: TorchEngine, result: dict[str, Any], temperature: float) -> None:
    with torch.no_grad():
        logits = taught.model(torch.tensor([result["input_ids"]])).logits[0].float() / temperature
    scores = logits.log_softmax(-1)
    places = [place for place, bit in enumerate(result["loss_mask"]) if bit]
    errors = [abs(scores[place - 1, result["input_ids"][place]].item() - result["logprobs"][place]) for place in places]
    assert max(errors) < BF16
    assert sum(errors) / len(errors) < BF16 / 10


async def test_the_same_seeds_give_the_same_ids_for_a_shuffled_batch_of_16(
    vllm_server: VLLMServer, template: ChatTemplate
) -> None:
    asked = requests(template, 16)
    async with engine_of(vllm_server) as engine:
        first = await asyncio.gather(*(engine.generate(request) for request in asked))
        order = random.Random(0).sample(range(16), 16)
        second = await asyncio.gather(*(engine.generate(asked[place]) for place in order))
    assert [second[order.index(place)].tokens for place in range(16)] == [answer.tokens for answer in first]
    assert len({tuple(answer.tokens) for answer in first}) == 16


async def test_a_stop_string_ends_the_turn_with_the_token_that_holds_it(
    vllm_server: VLLMServer, template: ChatTemplate
) -> None:
    prompt = template.encode([{"role": "user", "content": "Count from 1 to 20."}])
    params = SamplingParams(max_tokens=60, temperature=0.0, stop=("3",))
    async with engine_of(vllm_server) as engine:
        answer = await engine.generate(GenerateRequest(prompt, params, stop_token_ids=template.stop_token_ids))
    assert answer.stop_reason == "stop"
    assert "3" in template.decode(answer.tokens)
    assert "3" not in template.decode(answer.tokens[:-1])


async def test_a_cancelled_request_is_stopped_in_the_server(vllm_server: VLLMServer, template: ChatTemplate) -> None:
    params = SamplingParams(max_tokens=1500)
    async with engine_of(vllm_server) as engine:
        [request] = requests(template, 1)
        asked = GenerateRequest(request.input_ids, params, extra={"ignore_eos": True})
        under_way = asyncio.create_task(engine.generate(asked))
        while not await running(vllm_server):
            pass
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        async with asyncio.timeout(10):
            while await running(vllm_server):
                pass


async def test_an_adapter_is_chosen_by_name(
    vllm_server: VLLMServer, template: ChatTemplate, taught: TorchEngine
) -> None:
    tools = ToolManager([calculator]).tool_infos()
    prompt = template.encode(conversations()[0]["messages"], tools)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    async with engine_of(vllm_server) as engine:
        plain, adapted = [
            await engine.generate(GenerateRequest(prompt, params, stop_token_ids=template.stop_token_ids, extra=extra))
            for extra in ({}, {"adapter": ADAPTER})
        ]
        with pytest.raises(EngineError, match="nobody"):
            await engine.generate(GenerateRequest(prompt, params, extra={"adapter": "nobody"}))
    assert "<tool_call>" in template.decode(adapted.tokens)
    assert "<tool_call>" not in template.decode(plain.tokens)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}, r"\{\s*\"a\".*"),
        ({"grammar": 'root ::= "no" | "yes"'}, "no|yes"),
    ],
    ids=["regex", "choice", "json", "grammar"],
)
async def test_structured_outputs_hold_the_answer_to_their_form(
    vllm_server: VLLMServer, template: ChatTemplate, form: dict[str, Any], wanted: str
) -> None:
    [request] = requests(template, 1)
    params = SamplingParams(max_tokens=60)
    asked = GenerateRequest(
        request.input_ids, params, stop_token_ids=request.stop_token_ids, extra={"structured_outputs": form}
    )
    async with engine_of(vllm_server) as engine:
        answer = await engine.generate(asked)
    text = template.decode(answer.tokens).removesuffix("<|im_end|>")
    assert re.match(wanted, text)


async def test_a_server_with_processed_log_probabilities_serves_every_parameter(
    vllm_server: VLLMServer, template: ChatTemplate
) -> None:
    [request] = requests(template, 1)
    params = SamplingParams(max_tokens=8, temperature=0.7, top_k=1, repetition_penalty=1.3)
    async with engine_of(vllm_server) as engine:
        answer = await engine.generate(GenerateRequest(request.input_ids, params, seed=1))
    assert answer.logprobs == [0.0] * 8
