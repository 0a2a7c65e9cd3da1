"""New weights for a real vLLM: outputs and versions change, whatever runs goes on, and a bad update changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.vllm.asking import ADAPTER, QUESTIONS, SUM, asked, expected, model, request, until
from unspool import ChatTemplate, SamplingParams
from unspool.engines import VLLMEngine, VLLMSampler
from unspool.engines.embedded import embedded_adapter, ensure_embedded_model
from unspool.types import EngineError

pytestmark = pytest.mark.vllm

NORM = "model.norm.weight"


@pytest.fixture
async def restored(engine: VLLMEngine) -> AsyncIterator[VLLMEngine]:
    """The shared engine, with its own weights again afterwards."""
    yield engine
    await engine.update_weights(ensure_embedded_model())


def changed() -> dict[str, torch.Tensor]:
    """The model's state with a final norm that halves the logits."""
    state = load_file(ensure_embedded_model() / "model.safetensors")
    state[NORM] = state[NORM] / 2
    return state


def sampled(engine: VLLMEngine) -> int:
    """How many tokens vLLM has told of the requests that run."""
    states = engine._made.llm.output_processor.request_states  # type: ignore[union-attr]
    return sum(state.detokenizer.num_output_tokens() for state in list(states.values()))


async def test_an_update_changes_outputs_and_the_version(restored: VLLMEngine, template: ChatTemplate) -> None:
    one = request(asked(template, QUESTIONS[1]), max_tokens=6, temperature=0)
    before, version = await restored.generate(one), restored.version
    await restored.update_weights(changed())
    after = await restored.generate(one)
    assert restored.version == version + 1
    assert before.versions == [version] * 6
    assert after.versions == [version + 1] * 6
    assert before.logprobs != after.logprobs
    await restored.update_weights(ensure_embedded_model(), version + 10)
    again = await restored.generate(one)
    assert again.versions == [version + 10] * 6
    assert again.tokens == before.tokens
    assert again.logprobs == pytest.approx(before.logprobs, abs=0.1)


@pytest.mark.parametrize("session", ["", "updated"])
async def test_an_update_in_the_middle_of_a_generation_gives_both_versions_inside_one_span(
    session: str, restored: VLLMEngine, template: ChatTemplate
) -> None:
    prompt = asked(template, QUESTIONS[2])
    endless = request(prompt, session=session, max_tokens=160, extra={"ignore_eos": True})
    version = restored.version
    running = asyncio.create_task(restored.generate(endless))
    await until(lambda: sampled(restored) >= 5)
    await restored.update_weights(changed())
    answer = await running
    assert answer.versions is not None and answer.logprobs is not None
    early = answer.versions.count(version)
    assert answer.versions == [version] * early + [version + 1] * (160 - early)
    assert 0 < early < 160
    assert answer.stop_reason == "length"
    assert len(answer.logprobs) == 160
    # With the new weights logits are half as large, which is what a temperature of 2 makes of the old ones.
    new = expected(prompt, answer.tokens, SamplingParams(temperature=2.0))
    old = expected(prompt, answer.tokens, SamplingParams())
    far = [abs(own - (old if place < early else new)[place]) for place, own in enumerate(answer.logprobs)]
    assert sum(far[:early]) / early < 0.1
    assert sum(far[early:]) / (160 - early) < 0.1


async def test_a_module_and_an_adapter_by_name_work_with_new_weights(
    restored: VLLMEngine, template: ChatTemplate
) -> None:
    ids = asked(template, SUM, tools=True)
    taught = request(ids, max_tokens=40, temperature=0, extra={"adapter": ADAPTER})
    before = await restored.generate(taught)
    await restored.update_weights(model())
    after = await restored.generate(taught)
    assert after.tokens == before.tokens


async def test_updates_at_once_are_made_one_after_another(restored: VLLMEngine) -> None:
    version = restored.version
    await asyncio.gather(*(restored.update_weights(ensure_embedded_model()) for _ in range(3)))
    assert restored.version == version + 3


async def test_a_bad_update_changes_nothing_and_says_what_is_wrong(
    engine: VLLMEngine, template: ChatTemplate, tmp_path: Path
) -> None:
    version = engine.version
    state = changed()
    odd, short = tmp_path / "odd", tmp_path / "short"
    for folder in (odd, short, tmp_path / "empty"):
        folder.mkdir()
    save_file({**state, NORM: torch.ones(7)}, odd / "model.safetensors")
    save_file({name: value for name, value in state.items() if name != NORM}, short / "model.safetensors")
    for source, told in (
        (tmp_path / "none", "there is no folder"),
        (tmp_path / "empty", "holds no weights"),
        (odd, r"'model.norm.weight' has shape \(7,\), the model's has \(576,\)"),
        (short, "'model.norm.weight' is missing"),
        ({**state, "more": torch.ones(1)}, "the model has no weight 'more'"),
        (embedded_adapter(), r"is a LoRA adapter, which vLLM does not merge: make the engine with adapters"),
        (7, "not from int"),
    ):
        with pytest.raises(EngineError, match=told):
            await engine.update_weights(source)
    assert engine.version == version
    assert (await engine.generate(request(asked(template, QUESTIONS[0]), max_tokens=3))).versions == [version] * 3


async def test_a_pause_holds_generation_and_an_update_leaves_it_paused(
    restored: VLLMEngine, template: ChatTemplate
) -> None:
    await restored.pause()
    asking = asyncio.create_task(restored.generate(request(asked(template, QUESTIONS[0]), max_tokens=3)))
    await restored.update_weights(changed())
    done, _ = await asyncio.wait([asking], timeout=0.5)
    assert not done
    await restored.resume()
    assert (await asking).versions == [restored.version] * 3


def test_a_samplers_weights_can_be_updated(sampler: VLLMSampler, template: ChatTemplate) -> None:
    batch = [{"input_ids": asked(template, QUESTIONS[1]), "seed": 0}]
    params = SamplingParams(temperature=0, max_tokens=4)
    before = sampler.sample(batch, params)[0].sequences[0]
    sampler.update_weights(changed())
    after = sampler.sample(batch, params)[0].sequences[0]
    sampler.update_weights(ensure_embedded_model(), 7)
    again = sampler.sample(batch, params)[0].sequences[0]
    assert sampler.version == 7
    assert after.logprobs != before.logprobs
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-4)
