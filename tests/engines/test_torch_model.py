"""Models that do not fill the cache they are given, those with longrope, and modules put into train mode meanwhile."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.engines.tiny_models import VOCABULARY, Watch, request, rescored, tiny_llama
from unspool.engines.protocol import GenerateRequest
from unspool.engines.torch import TorchEngine
from unspool.types import EngineError, SamplingParams

SIZE = 32


class OwnCacheConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "own_cache"
    num_hidden_layers = 2


class OwnCacheModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Drops a cache that is an object, and returns one of its own: a list of pairs."""

    config_class = OwnCacheConfig

    def __init__(self, config: OwnCacheConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, SIZE)
        self.layers = nn.ModuleList(nn.Linear(SIZE, 3 * SIZE) for _ in range(2))
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        if hasattr(past_key_values, "layers"):
            past_key_values = None
        hidden, present = self.embed(input_ids), []
        for layer, past in zip(self.layers, past_key_values or [None, None], strict=True):
            query, key, value = layer(hidden).chunk(3, -1)
            if past is not None:
                key, value = torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
            present.append((key, value) if use_cache else None)
            length, width = query.shape[1], key.shape[1]
            distance = torch.arange(width)[None] - torch.arange(width - length, width)[:, None]
            scores = query @ key.transpose(1, 2) + 0.1 * distance  # the positions are relative ones
            scores = scores.masked_fill(distance > 0, -1e9)
            if attention_mask is not None:
                scores = scores + (1.0 - attention_mask[:, None].float()) * -1e9
            hidden = hidden + scores.softmax(-1) @ value
        return CausalLMOutputWithPast(logits=self.head(hidden[:, -logits_to_keep:]), past_key_values=present)


def own_cache_model() -> OwnCacheModel:
    torch.manual_seed(0)
    model = OwnCacheModel(OwnCacheConfig(vocab_size=VOCABULARY, eos_token_id=None))
    model.eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


async def test_a_model_that_fills_no_cache_is_fed_whole_rows_and_gives_the_same_tokens_beside_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = own_cache_model()
    asked = [request(i, 3 + 4 * i, max_tokens=4 + 3 * i, session=f"s{i}") for i in range(4)]
    with caplog.at_level(logging.WARNING, logger="unspool"):
        async with TorchEngine(model, max_batch_size=3) as engine:
            together = await asyncio.gather(*map(engine.generate, asked))
            alone = [await engine.generate(one) for one in asked]
            after = GenerateRequest(
                asked[0].input_ids + together[0].tokens + [1, 2], SamplingParams(max_tokens=5), "s0", 9
            )
            second = await engine.generate(after)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for one, answer in [*zip(asked, together, strict=True), (after, second)]:
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=1e-4)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "OwnCacheModel does not fill the cache" in warning


# --------------------------------------------------------------------------- positions


async def test_longrope_is_served_up_to_where_the_longest_row_would_change_the_others() -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [12.0] * 4}
    config = Phi3Config(
        **shape,
        **heads,
        pad_token_id=0,
        eos_token_id=None,
        max_position_embeddings=1024,
        original_max_position_embeddings=48,
        rope_parameters={**rope, "original_max_position_embeddings": 48, "partial_rotary_factor": 1.0},
    )
    model = Phi3ForCausalLM(config).eval()
    short = GenerateRequest([1, 2, 3], SamplingParams(max_tokens=60), seed=1)
    long = GenerateRequest([4] * 40, SamplingParams(max_tokens=60), seed=2)
    async with TorchEngine(model) as engine:
        assert engine.context_length == 48
        alone = await engine.generate(short)
        beside, full = await asyncio.gather(engine.generate(short), engine.generate(long))
        with pytest.raises(EngineError, match="no room in the model's context of 48"):
            await engine.generate(GenerateRequest([4] * 48, SamplingParams(max_tokens=1)))
    assert (len(beside.tokens), len(full.tokens), full.stop_reason) == (45, 8, "length")
    assert beside.tokens == alone.tokens
    assert beside.logprobs == pytest.approx(rescored(model, short, beside), abs=1e-4)


# --------------------------------------------------------------------------- train mode


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, initializer_range=0.3, **shape, **ends)).eval()


async def test_each_part_of_a_module_has_its_mode_again_after_sampling() -> None:
    model = tiny_gpt2()
    model.train()
    model.transformer.h[0].eval()  # a trainer that has frozen a layer
    before = {name: part.training for name, part in model.named_modules()}
    async with TorchEngine(model) as engine:
        answer = await engine.generate(request(0))
    assert {name: part.training for name, part in model.named_modules()} == before
    assert answer.logprobs == pytest.approx(rescored(copy.deepcopy(model).eval(), request(0), answer), abs=1e-4)


class Trainer:
    """Puts the module into train mode in the middle of given passes of the engine."""

    def __init__(self, model: LlamaForCausalLM, watch: Watch, passes: set[int]) -> None:
        self._model, self._watch, self._passes = model, watch, passes
        model.model.layers[0].register_forward_hook(self._train)

    def _train(self, *_: Any) -> None:
        if len(self._watch.passes) in self._passes:
            self._model.train()


async def test_a_pass_in_which_a_trainer_turns_dropout_on_is_done_again() -> None:
    model = tiny_llama(attention_dropout=0.5)
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        calm = await engine.generate(request(0))
        watch.passes.clear()
        Trainer(model, watch, {1, 4})
        assert await engine.generate(request(0)) == calm
    assert [fed for _, fed, _ in watch.passes] == [5, 5, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [width for _, _, width in watch.passes] == [5, 5, 6, 7, 7, 8, 9, 10, 11, 12]


async def test_a_trainer_that_is_always_in_between_is_told_to_hold_the_engine() -> None:
    model = tiny_llama(attention_dropout=0.5)
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        Trainer(model, watch, {3, 4})
        with pytest.raises(EngineError, match=r"train mode while the engine sampled.*\(pause, resume\)"):
            await engine.generate(request(0))
        model.eval()
        answer = await engine.generate(request(1))
    assert answer.logprobs == pytest.approx(rescored(model, request(1), answer), abs=1e-4)
