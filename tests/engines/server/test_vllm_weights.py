"""New weights in a real vLLM server: the answers and the versions change, in the middle of a turn too."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines.server.vllm_parts import engine_of, running
from tests.vllm_server import VLLMServer
from unspool import ChatTemplate, GenerateRequest, SamplingParams, ServerEngine
from unspool.engines.embedded import ensure_embedded_model
from unspool.types import EngineError

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its last two layers changed: other answers, and still words."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(ensure_embedded_model(), folder)
    [path] = folder.glob("*.safetensors")
    weights: dict[str, Any] = load_file(path)
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    ends = (f"model.layers.{last}.mlp", f"model.layers.{last - 1}.mlp")
    changed = {name: tensor * 0.5 if name.startswith(ends) else tensor for name, tensor in weights.items()}
    save_file(changed, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(str(ensure_embedded_model()))


def request(template: ChatTemplate, max_tokens: int, **extra: Any) -> GenerateRequest:
    prompt = template.encode([{"role": "user", "content": "Tell me about the sea."}])
    return GenerateRequest(prompt, SamplingParams(max_tokens=max_tokens), session="a", seed=4, extra=extra)


async def put_back(engine: ServerEngine) -> None:
    await engine.update_weights(ensure_embedded_model())


async def test_new_weights_change_answers_and_versions_and_the_old_ones_bring_them_back(
    vllm_server: VLLMServer, template: ChatTemplate, other: Path
) -> None:
    async with engine_of(vllm_server) as engine:
        before = await engine.generate(request(template, 24))
        try:
            await engine.update_weights(other)
            changed = await engine.generate(request(template, 24))
        finally:
            await put_back(engine)
        after = await engine.generate(request(template, 24))
        with pytest.raises(EngineError, match="took no new weights"):
            await engine.update_weights("/nowhere")
        still = await engine.generate(request(template, 24))
    assert (set(before.versions or ()), set(changed.versions or ()), set(after.versions or ())) == ({0}, {1}, {2})
    assert before.tokens == after.tokens == still.tokens != changed.tokens
    assert still.versions == after.versions


async def test_an_update_in_the_middle_of_a_turn_gives_both_versions_and_log_probabilities_of_both_weights(
    vllm_server: VLLMServer, template: ChatTemplate, other: Path
) -> None:
    from transformers import AutoModelForCausalLM

    asked = request(template, 150, ignore_eos=True)
    async with engine_of(vllm_server) as engine:
        under_way = asyncio.create_task(engine.generate(asked))
        while not await running(vllm_server):
            pass
        try:
            await engine.update_weights(other, version=7)
            answer = await under_way
        finally:
            await put_back(engine)
    assert len(answer.tokens) == 150
    versions = answer.versions or []
    seam = versions.index(7)
    assert 0 < seam < 150
    assert versions == [0] * seam + [7] * (150 - seam)
    [retry] = answer.extra["retries"]
    assert retry["kept"] == seam
    for folder, places in ((ensure_embedded_model(), range(seam)), (other, range(seam, 150))):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            scores = model(torch.tensor([asked.input_ids + answer.tokens])).logits[0].log_softmax(-1)
        start = len(asked.input_ids) - 1
        errors = [
            abs(scores[start + place, answer.tokens[place]].item() - (answer.logprobs or [])[place]) for place in places
        ]
        assert max(errors) < 0.3
        assert sum(errors) / len(errors) < 0.03


async def test_a_pause_holds_a_turn_and_resume_lets_it_end(vllm_server: VLLMServer, template: ChatTemplate) -> None:
    async with engine_of(vllm_server) as engine:
        under_way = asyncio.create_task(engine.generate(request(template, 100, ignore_eos=True)))
        while not await running(vllm_server):
            pass
        await engine.pause()
        try:
            assert await running(vllm_server) == 0
            assert not under_way.done()
        finally:
            await engine.resume()
        answer = await under_way
    assert len(answer.tokens) == 100
    assert set(answer.versions or ()) == {0}
