"""Random models small enough for every test, and a way to see what is fed to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from unspool.engines.protocol import GenerateRequest, Generation
from unspool.types import SamplingParams

VOCABULARY = 500  # not a multiple of the block that the sampler searches
CONTEXT = 512


def tiny_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **_shape(config))).eval()


def tiny_qwen3(seed: int = 0, **config: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=2, head_dim=16, **_shape(config))).eval()


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    # A wide spread of the weights makes distributions of a few likely tokens, as those of language models are.
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **config,
    }


def prompt(index: int, length: int) -> list[int]:
    return [(31 * index + 17 * place + place * place) % VOCABULARY for place in range(length)]


def request(index: int = 0, length: int = 5, max_tokens: int | None = 8, **options: Any) -> GenerateRequest:
    """A request; `options` of GenerateRequest go there, all others are sampling parameters."""
    own = {name: options.pop(name) for name in ("stop_token_ids", "extra", "session") if name in options}
    seed = options.pop("seed", index)
    params = SamplingParams(max_tokens=max_tokens, **options)
    return GenerateRequest(prompt(index, length), params, seed=seed, **own)


def forward(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), V] float32 of one plain forward pass, without cache or padding."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def rescored(model: torch.nn.Module, asked: GenerateRequest, answer: Generation) -> list[float]:
    """The model's own log-probabilities of an answer, at temperature 1."""
    scores = forward(model, asked.input_ids + answer.tokens).log_softmax(-1)
    start = len(asked.input_ids) - 1
    return [scores[start + place, token].item() for place, token in enumerate(answer.tokens)]


@dataclass
class Watch:
    """Sees every forward pass of a model: (rows, tokens fed a row, width of the cache after it)."""

    model: torch.nn.Module
    passes: list[tuple[int, int, int]] = field(default_factory=list)
    before: Callable[[int], None] | None = None  # called with the number of the pass, on the engine's thread
    logits: Callable[[int, list[list[int]], torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.model.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.model.register_forward_hook(self._leave, with_kwargs=True)

    def _enter(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "past_key_values" not in kwargs:
            return
        rows, fed = kwargs["input_ids"].shape
        self.passes.append((rows, fed, kwargs["attention_mask"].shape[1]))
        if self.before is not None:
            self.before(len(self.passes))

    def _leave(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.logits is not None and "past_key_values" in kwargs:
            output.logits = self.logits(len(self.passes), kwargs["input_ids"].tolist(), output.logits)
