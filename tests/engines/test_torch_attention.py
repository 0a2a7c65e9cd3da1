"""The engine's attention over shared heads equals transformers' own, and leaves the model's configuration as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.engines.tiny_models import request, tiny_llama
from unspool.engines.torch import TorchEngine
from unspool.engines.torch.attention import NAME, shared_heads, without_copies


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(0)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    share=st.integers(1, 4),
    length=st.integers(1, 5),
    past=st.integers(0, 9),
    added=st.booleans(),
    seed=st.integers(0, 999),
)
def test_it_equals_transformers_own_with_its_gradients(
    rows: int, groups: int, share: int, length: int, past: int, added: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    module = nn.Module()
    module.num_key_value_groups = share  # type: ignore[assignment]
    width = past + length
    query = torch.randn(rows, groups * share, length, 8, requires_grad=True)
    key, value = (torch.randn(rows, groups, width, 8, requires_grad=True) for _ in range(2))
    mask = torch.rand(rows, 1, length, width) < 0.7
    mask[..., -1] = True  # a row that sees nothing has no value to compare
    given_mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if added else mask
    ours, _ = shared_heads(module, query, key, value, given_mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, given_mask, scaling=0.3)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weights = torch.randn(ours.shape)
    mine = torch.autograd.grad((ours * weights).sum(), (query, key, value))
    others = torch.autograd.grad((theirs * weights).sum(), (query, key, value))
    torch.testing.assert_close(mine, others, atol=1e-4, rtol=1e-4)


def test_an_added_mask_of_another_dtype_is_taken(generator: torch.Generator) -> None:
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query = torch.randn(1, 4, 2, 8, generator=generator).bfloat16()
    key = torch.randn(1, 2, 5, 8, generator=generator).bfloat16()
    seen = torch.ones(1, 1, 2, 5, dtype=torch.bool)
    seen[..., 0] = False
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min / 2)
    ours, _ = shared_heads(module, query, key, key, added, scaling=1.0)
    theirs, _ = shared_heads(module, query, key, key, seen, scaling=1.0)
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_configuration_is_left_as_it_was_after_a_failure_too(name: str) -> None:
    config = LlamaConfig(attn_implementation=name)
    with pytest.raises(KeyError), without_copies(config):
        assert config._attn_implementation == (NAME if name == "sdpa" else "eager")
        raise KeyError
    assert config._attn_implementation == name


def test_what_somebody_else_chooses_meanwhile_stays() -> None:
    model = tiny_llama()
    with without_copies(model.config):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_forward_pass_beside_the_engines_has_the_same_values_at_padding_too() -> None:
    model = tiny_llama()
    ids = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 1, 2, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        with without_copies(model.config):
            ours = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


async def test_a_model_is_left_with_its_own_attention() -> None:
    model = tiny_llama()
    async with TorchEngine(model) as engine:
        await engine.generate(request(0))
    assert model.config._attn_implementation == "sdpa"
