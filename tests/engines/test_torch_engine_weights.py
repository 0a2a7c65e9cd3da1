"""New weights for a TorchEngine: from where, what is checked, and what happens to what is running."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from tests.engines.tiny_models import Watch, request, rescored, tiny_llama
from unspool.engines.protocol import GenerateRequest, Generation
from unspool.engines.torch import TorchEngine
from unspool.types import EngineError

ASKED = request(0, 9, max_tokens=12)


async def answer_of(model: torch.nn.Module) -> list[int]:
    async with TorchEngine(model) as engine:
        return (await engine.generate(ASKED)).tokens


def lora(model: LlamaForCausalLM, seed: int, targets: list[str], dtype: torch.dtype = torch.float32) -> PeftModel:
    """A LoRA with weights that matter, around a copy of the model."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), config).eval()


def merged(adapted: PeftModel) -> LlamaForCausalLM:
    model: LlamaForCausalLM = copy.deepcopy(adapted).float().merge_and_unload()
    return model.eval()


# --------------------------------------------------------------------------- sources


@pytest.mark.parametrize("source", ["module", "state dict", "folder", "compiled names"])
async def test_weights_come_from_a_module_a_state_dict_or_a_folder(source: str, tmp_path: Path) -> None:
    other = tiny_llama(seed=1)
    given: Any = other
    if source == "state dict":
        given = other.state_dict()
    elif source == "folder":
        other.save_pretrained(tmp_path)
        given = tmp_path
    elif source == "compiled names":
        given = {f"module._orig_mod.{name}": tensor for name, tensor in other.state_dict().items()}
    async with TorchEngine(tiny_llama(seed=0), version=5) as engine:
        before = await engine.generate(ASKED)
        await engine.update_weights(given)
        after = await engine.generate(ASKED)
    assert (before.versions, after.versions) == ([5] * 12, [6] * 12)
    assert after.tokens == await answer_of(other) != before.tokens


async def test_a_version_can_be_given_and_the_next_one_counts_on() -> None:
    async with TorchEngine(tiny_llama()) as engine:
        await engine.update_weights(tiny_llama(), version=40)
        assert engine.version == 40
        await engine.update_weights(tiny_llama())
        assert engine.version == 41
        assert (await engine.generate(ASKED)).versions == [41] * 12
    assert engine.version == 41


async def test_the_engines_own_module_changed_in_place_is_taken_as_it_is() -> None:
    model = tiny_llama()
    other = tiny_llama(seed=1)
    async with TorchEngine(model) as engine:
        await engine.generate(ASKED)
        await engine.pause()
        model.load_state_dict(other.state_dict())
        await engine.update_weights(model)
        await engine.resume()
        after = await engine.generate(ASKED)
    assert after.tokens == await answer_of(other)
    assert after.versions == [1] * 12


async def test_tied_weights_may_be_given_once() -> None:
    other = tiny_llama(seed=1, tie_word_embeddings=True)
    state = {name: tensor for name, tensor in other.state_dict().items() if name != "lm_head.weight"}
    async with TorchEngine(tiny_llama(tie_word_embeddings=True)) as engine:
        await engine.update_weights(state)
        assert (await engine.generate(ASKED)).tokens == await answer_of(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), "weight 'model.norm.weight' is missing"),
        (lambda s: s.update(extra=torch.zeros(1)), "the model has no weight 'extra'"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(63)}),
            r"weight 'model.norm.weight' has shape \(63,\), the model's has \(64,\)",
        ),
    ],
)
async def test_weights_that_do_not_fit_are_refused_and_nothing_is_changed(change: Any, message: str) -> None:
    state = tiny_llama(seed=1).state_dict()
    change(state)
    async with TorchEngine(tiny_llama()) as engine:
        before = await engine.generate(ASKED)
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(state)
        assert engine.version == 0
        assert await engine.generate(ASKED) == before


@pytest.mark.parametrize(
    ("source", "message"), [(7, "not from int"), (Path("/no/such/folder"), "no model can be read from '/no/such")]
)
async def test_a_source_that_is_none_is_refused_with_a_remedy(source: Any, message: str) -> None:
    async with TorchEngine(tiny_llama()) as engine:
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(source)


# --------------------------------------------------------------------------- adapters


async def test_an_adapter_is_merged_with_the_base_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    base = tiny_llama()
    first, second = lora(base, 1, ["q_proj", "up_proj"]), lora(base, 2, ["q_proj", "v_proj"])
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    async with TorchEngine(copy.deepcopy(base)) as engine:
        plain = await engine.generate(ASKED)
        await engine.update_weights(tmp_path / "first")
        one = await engine.generate(ASKED)
        await engine.update_weights(str(tmp_path / "second"))
        two = await engine.generate(ASKED)
        state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    assert one.tokens == await answer_of(merged(first)) != plain.tokens
    assert two.tokens == await answer_of(merged(second)) != one.tokens
    for name, tensor in merged(second).state_dict().items():
        assert torch.allclose(state[name], tensor, atol=1e-6), name  # nothing of the first is left


async def test_new_base_weights_end_what_an_adapter_had_changed(tmp_path: Path) -> None:
    base, other = tiny_llama(), tiny_llama(seed=1)
    lora(base, 1, ["q_proj"]).save_pretrained(tmp_path)
    async with TorchEngine(copy.deepcopy(base)) as engine:
        await engine.update_weights(tmp_path)
        await engine.update_weights(other)
        await engine.update_weights(tmp_path)
        mixed = (await engine.generate(ASKED)).tokens
    expected = PeftModel.from_pretrained(copy.deepcopy(other), tmp_path).merge_and_unload()
    assert mixed == await answer_of(expected)


async def test_a_peft_module_gives_its_merged_weights_and_stays_as_it_is() -> None:
    adapted = lora(tiny_llama(), 1, ["q_proj", "v_proj"])
    names = list(adapted.state_dict())
    async with TorchEngine(tiny_llama()) as engine:
        await engine.update_weights(adapted)
        after = (await engine.generate(ASKED)).tokens
    assert after == await answer_of(merged(adapted))
    assert list(adapted.state_dict()) == names


async def test_a_peft_module_can_be_served_itself_but_takes_no_adapter_folder(tmp_path: Path) -> None:
    adapted = lora(tiny_llama(), 1, ["q_proj", "v_proj"])
    assert await answer_of(adapted) == await answer_of(merged(adapted))
    adapted.save_pretrained(tmp_path)
    async with TorchEngine(adapted) as engine:
        with pytest.raises(EngineError, match="serves a PEFT module as it is"):
            await engine.update_weights(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
async def test_a_folder_is_loaded_with_its_adapter_merged_in_float32_before_the_cast(
    dtype: str, tmp_path: Path
) -> None:
    base = tiny_llama().bfloat16()
    base.save_pretrained(tmp_path / "base")
    adapted = lora(base.float(), 1, ["q_proj", "down_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    engine = TorchEngine.from_pretrained(tmp_path / "base", adapter=tmp_path / "adapter", dtype=dtype)
    wanted = torch.float32 if dtype == "float32" else torch.bfloat16
    expected = merged(adapted).to(wanted).state_dict()
    for name, tensor in engine.model.state_dict().items():
        assert tensor.dtype == wanted
        assert torch.equal(tensor, expected[name]), name
    async with engine:
        assert len((await engine.generate(ASKED)).tokens) == 12
        await engine.update_weights(tmp_path / "adapter")  # from the base again, not on top
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


async def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    lora(tiny_llama(hidden_size=32), 1, ["q_proj"]).save_pretrained(tmp_path)
    async with TorchEngine(tiny_llama()) as engine:
        before = await engine.generate(ASKED)
        with pytest.raises(EngineError, match=r"the adapter .* does not fit the model"):
            await engine.update_weights(tmp_path)
        assert await engine.generate(ASKED) == before


def test_an_unknown_dtype_and_a_folder_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="dtype 'float8' is not known; use one of auto, float32"):
        TorchEngine.from_pretrained(tmp_path, dtype="float8")
    with pytest.raises(EngineError, match="no model can be read from"):
        TorchEngine.from_pretrained(tmp_path)


# --------------------------------------------------------------------------- while rows are running


def by_version(models: list[torch.nn.Module], asked: GenerateRequest, answer: Generation) -> list[float]:
    """Each token scored by a fresh forward pass of the weights of its own version."""
    assert answer.versions is not None
    scores = [rescored(model, asked, answer) for model in models]
    return [scores[version][place] for place, version in enumerate(answer.versions)]


async def test_tokens_after_an_update_come_from_the_new_weights_alone_whatever_was_cached() -> None:
    old, new = tiny_llama(), tiny_llama(seed=1)
    served = copy.deepcopy(old)
    watch = Watch(served)
    loop, reached, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 5:
            loop.call_soon_threadsafe(reached.set)
            assert go.wait(30)

    watch.before = before
    asked = [request(0, 9, max_tokens=20), request(1, 50, max_tokens=20), request(2, 9, max_tokens=1)]
    async with TorchEngine(served) as engine:
        await engine.pause()
        tasks = [loop.create_task(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        await engine.resume()
        await reached.wait()
        update = loop.create_task(engine.update_weights(new))
        await asyncio.sleep(0)
        go.set()
        await update
        answers = await asyncio.gather(*tasks)
    for one, answer in zip(asked, answers, strict=True):
        assert answer.logprobs == pytest.approx(by_version([old, new], one, answer), abs=1e-4)
    assert [answer.versions for answer in answers] == [[0] * 5 + [1] * 15, [0] * 5 + [1] * 15, [0]]


async def test_an_update_while_the_engine_is_held_reaches_rows_when_it_goes_on() -> None:
    new = tiny_llama(seed=1)
    async with TorchEngine(tiny_llama()) as engine:
        await engine.pause()
        task = asyncio.ensure_future(engine.generate(ASKED))
        await asyncio.sleep(0)
        await engine.update_weights(new, version=9)
        await engine.resume()
        answer = await task
    assert answer.versions == [9] * 12
    assert answer.tokens == await answer_of(new)
