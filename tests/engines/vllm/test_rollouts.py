"""Rollouts over a real vLLM in process: the record holds the very ids that the engine was fed and that it sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.vllm.asking import ADAPTER, SUM
from unspool import ChatTemplate, MultiTurnRollout, ToolManager
from unspool.engines import VLLMEngine, VLLMSampler
from unspool.loop import run_sync
from unspool.world import calculator

pytestmark = pytest.mark.vllm

PROBLEMS = [SUM, *(f"State the final answer to the following arithmetic problem: {a} + {a + 9} - 3 =" for a in (5, 21))]


@contextlib.contextmanager
def outputs_of(llm: Any) -> Iterator[list[Any]]:
    """Every final output of an AsyncLLM while the block runs."""
    seen: list[Any] = []
    generate = llm.generate

    async def watched(*args: Any, **kwargs: Any) -> Any:
        async for output in generate(*args, **kwargs):
            seen.append(output)
            yield output

    llm.generate = watched
    try:
        yield seen
    finally:
        del llm.generate


def roll(sampler: Any, template: ChatTemplate) -> list[dict[str, Any]]:
    rollout = MultiTurnRollout(
        sampler,
        template,
        ToolManager([calculator]),
        sampling_params={"max_tokens": 64, "temperature": 0.3},
        max_turns=4,
        extra={"adapter": ADAPTER},
        progress=False,
        seed=3,
    )
    return rollout([{"messages": [{"role": "user", "content": text}]} for text in PROBLEMS])


def answered(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["error"] is None
        assert result["turns"] >= 2
        assert "tool" in [message["role"] for message in result["messages"]]
        assert result["stop_reason"] == "stop"
        assert len(result["logprobs"]) == len(result["input_ids"])


def test_turns_with_tools_keep_the_exact_ids(engine: VLLMEngine, template: ChatTemplate) -> None:
    cached = VLLMEngine(engine._made.llm, adapters=engine._adapters.folders, version=engine.version)  # type: ignore[union-attr]
    with outputs_of(engine._made.llm) as outputs:  # type: ignore[union-attr]
        results = roll(cached, template)
    answered(results)
    fed = {tuple(output.prompt_token_ids): list(output.outputs[0].token_ids) for output in outputs}
    assert len(outputs) == sum(result["turns"] for result in results)
    for result in results:
        ids, mask = result["input_ids"], result["loss_mask"]
        starts = [place for place, trained in enumerate(mask) if trained and not mask[place - 1]]
        assert len(starts) == result["turns"]
        for start in starts:
            sampled = fed[tuple(ids[:start])]
            assert ids[start : start + len(sampled)] == sampled
            assert all(mask[start : start + len(sampled)])
            assert result["versions"][start] == engine.version
        assert sum(mask) == sum(len(fed[tuple(ids[:start])]) for start in starts)
    assert template.tokenizer.decode(results[0]["input_ids"]).count("37 + 25") >= 2


def test_resumable_sessions_give_whole_episodes_too(engine: VLLMEngine, template: ChatTemplate) -> None:
    answered(roll(engine, template))

    async def ended() -> int:
        return len(engine._sessions or ())

    assert run_sync(ended()) == 0  # every episode told the engine that it is over


def test_a_sampler_rolls_out_in_batches(sampler: VLLMSampler, template: ChatTemplate) -> None:
    answered(roll(sampler, template))
