"""TorchRolloutEngine: MiniMind's tensors, over TorchEngine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.engines.tiny_models import tiny_llama, tiny_qwen3  # noqa: E402
from unspool.engines import (  # noqa: E402
    Engine,
    TorchRolloutEngine,
    as_engine,
    compute_per_token_logps,
    create_rollout_engine,
    torch_rollout,
)
from unspool.engines.protocol import GenerateRequest  # noqa: E402
from unspool.types import InvalidTypeError, InvalidValueError, SamplingParams  # noqa: E402

END = 3


class Words:
    """A tokenizer as far as a rollout engine needs one; its end token is its pad token."""

    pad_token_id = eos_token_id = END

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        return [
            " ".join(str(token) for token in row if not (skip_special_tokens and token == END)) for row in sequences
        ]


P = torch.tensor([[END, END, 11, 12, 13], [21, 22, 23, 24, 25]])  # the first row is padded with the end token
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def engine(model: Any = None) -> TorchRolloutEngine:
    return TorchRolloutEngine(tiny_llama() if model is None else model, Words())


def forward_logps(model: Any, ids: list[int], temperature: float = 1.0) -> Any:
    """[L - 1] float64: entry i scores ids[i + 1]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_shapes_are_those_of_b_times_g_rows() -> None:
    result = engine().rollout(P, MASK, num_generations=3, max_new_tokens=7)
    longest = int(result.completion_mask.sum(1).max())
    assert result.output_ids.shape == (2 * 3, 5 + longest)
    assert result.completion_ids.shape == result.per_token_logps.shape == (2 * 3, longest)
    assert result.completion_mask.shape == result.raw_logps.shape == (2 * 3, longest)
    assert result.attention_mask.shape == (2 * 3, 5 + longest)
    assert len(result.completions) == 2 * 3
    assert (result.output_ids.dtype, result.per_token_logps.dtype) == (torch.int64, torch.float32)
    assert 1 <= longest <= 7


def test_rows_of_one_prompt_are_next_to_each_other_and_differ() -> None:
    result = engine().rollout(P, MASK, num_generations=3, max_new_tokens=6)
    assert result.output_ids[:, :5].tolist() == [P[0].tolist()] * 3 + [P[1].tolist()] * 3
    assert result.prompt_ids.tolist() == result.output_ids[:, :5].tolist()
    assert result.output_ids[:, 5:].tolist() == result.completion_ids.tolist()
    assert len({tuple(row) for row in result.completion_ids[:3].tolist()}) > 1


def test_one_prompt_is_one_row_of_one_times_prompt_len() -> None:
    prompt = torch.tensor([[5, 6, 7, 8]])
    assert prompt.shape == (1, 4)
    result = engine().rollout(prompt, torch.ones_like(prompt), num_generations=1, max_new_tokens=3)
    assert (result.output_ids.shape[0], result.completion_ids.shape[0], len(result.completions)) == (1, 1, 1)


def test_padding_decides_nothing() -> None:
    """The same prompts, padded on the other side and wider, with other filling: the same answers."""
    both = engine()
    torch.manual_seed(5)
    left = both.rollout(P, MASK, num_generations=2, max_new_tokens=6)
    right_ids = torch.tensor([[11, 12, 13, 0, 0, 0], [21, 22, 23, 24, 25, 0]])
    right_mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    torch.manual_seed(5)
    right = both.rollout(right_ids, right_mask, num_generations=2, max_new_tokens=6)
    assert left.completion_ids.tolist() == right.completion_ids.tolist()


def test_log_probabilities_are_of_the_distribution_sampled_from_with_temperature_1_beside() -> None:
    model = tiny_llama()
    result = engine(model).rollout(P, MASK, num_generations=2, max_new_tokens=6, temperature=0.8)
    for row in range(4):
        count = int(result.completion_mask[row].sum())
        prompt = P[row // 2][MASK[row // 2].bool()].tolist()
        ids = prompt + result.completion_ids[row, :count].tolist()
        assert result.per_token_logps[row, :count].tolist() == pytest.approx(
            forward_logps(model, ids, 0.8)[-count:].tolist(), abs=1e-4
        )
        assert result.raw_logps[row, :count].tolist() == pytest.approx(
            forward_logps(model, ids)[-count:].tolist(), abs=1e-4
        )
        assert not result.per_token_logps[row, count:].any()


def test_rows_end_with_the_stop_token_which_is_kept_and_scored() -> None:
    """The same rollout twice: the second time one of its tokens is the end token, and the pad token too."""
    model = tiny_llama()
    torch.manual_seed(2)
    free = engine(model).rollout(P, MASK, num_generations=8, max_new_tokens=24, temperature=1.5)
    end = int(free.completion_ids.flatten().bincount().argmax())
    tokenizer = Words()
    tokenizer.pad_token_id = tokenizer.eos_token_id = end
    torch.manual_seed(2)
    result = TorchRolloutEngine(model, tokenizer).rollout(P, MASK, 8, max_new_tokens=24, temperature=1.5)
    counts = result.completion_mask.sum(1).tolist()
    assert len(set(counts)) > 2
    for row, (count, whole) in enumerate(zip(counts, free.completion_ids.tolist(), strict=True)):
        assert count == (whole.index(end) + 1 if end in whole else 24)
        assert result.completion_ids[row].tolist() == whole[:count] + [end] * (result.completion_ids.shape[1] - count)
        torch.testing.assert_close(result.per_token_logps[row, :count], free.per_token_logps[row, :count])
        assert not result.per_token_logps[row, count:].any()


def test_torchs_seed_repeats_a_rollout() -> None:
    one, torch_seed = engine(), 11
    torch.manual_seed(torch_seed)
    first = one.rollout(P, MASK, 2, 8).completion_ids.tolist()
    second = one.rollout(P, MASK, 2, 8).completion_ids.tolist()
    torch.manual_seed(torch_seed)
    assert one.rollout(P, MASK, 2, 8).completion_ids.tolist() == first != second


@pytest.mark.parametrize(
    ("ids", "mask", "members", "said"),
    [
        (P[0], MASK[0], 1, r"must be \[B, P\]"),
        (P, MASK[:1], 1, r"shape \[2, 5\] and attention_mask \[1, 5\]"),
        (P, MASK, 0, "num_generations must be a whole number, at least 1, not 0"),
    ],
)
def test_shapes_and_numbers_that_cannot_be_used_are_refused(ids: Any, mask: Any, members: int, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        engine().rollout(ids, mask, members, 4)


def test_no_mask_is_no_padding_and_lists_will_do() -> None:
    one, rows = engine(), P.tolist()
    torch.manual_seed(5)
    whole = one.rollout(P, torch.ones_like(P), 2, 6)
    torch.manual_seed(5)
    bare = one.rollout(rows, None, 2, 6)  # type: ignore[arg-type]
    assert bare.output_ids.tolist() == whole.output_ids.tolist()
    assert bare.attention_mask.tolist() == whole.attention_mask.tolist()
    torch.manual_seed(5)
    masked = one.rollout(rows, MASK.tolist(), 2, 6)  # type: ignore[arg-type]
    torch.manual_seed(5)
    assert masked.output_ids.tolist() == one.rollout(P, MASK, 2, 6).output_ids.tolist()


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        (P.float(), MASK, r"prompt_ids must be token ids, int64 \[B, P\], not torch.float32"),
        ([[1, 2], [3]], None, r"prompt_ids must be a tensor \[B, P\], or lists of that shape, not \[\[1, 2\], \[3\]\]"),
        ("text", None, r"prompt_ids must be a tensor \[B, P\], or lists of that shape, not 'text'"),
        (P, "all", "attention_mask must be a tensor"),
    ],
)
def test_what_is_no_tensor_of_token_ids_is_refused(ids: Any, mask: Any, said: str) -> None:
    with pytest.raises(InvalidTypeError, match=said):
        engine().rollout(ids, mask, 1, 4)


def test_update_policy_with_what_is_no_model_changes_nothing() -> None:
    model = tiny_llama()
    one = engine(model)
    for wrong in ("weights", None, torch.nn.Linear(2, 2)):
        with pytest.raises(InvalidTypeError, match="policy_model must be a"):
            one.update_policy(wrong)  # type: ignore[arg-type]
        assert one.policy_model is model and one.engine.model is model and one.version == 0


def test_update_policy_takes_a_model_trained_in_place_and_another_one() -> None:
    model, other = tiny_llama(), tiny_llama(seed=1)
    one = engine(model)
    assert one.version == 0
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    one.update_policy(model)
    assert one.version == 1 and one.engine.model is model
    one.update_policy(other)
    assert one.version == 2 and one.policy_model is other and one.engine.model is other
    result = one.rollout(P, MASK, 1, 4, temperature=1.0)
    ids = P[1].tolist() + result.completion_ids[1].tolist()
    count = int(result.completion_mask[1].sum())
    assert result.per_token_logps[1, :count].tolist() == pytest.approx(
        forward_logps(other, ids[: 5 + count])[-count:].tolist(), abs=1e-4
    )


async def test_it_is_an_engine_itself() -> None:
    one = engine()
    assert isinstance(one, Engine) and as_engine(one) is one
    assert (one.context_length, one.logprobs, str(one.device)) == (512, True, "cpu")
    async with one:
        answer = await one.generate(GenerateRequest([1, 2, 5], SamplingParams(max_tokens=3), seed=4))
        await one.pause()
        await one.resume()
        await one.update_weights(tiny_llama(seed=2).state_dict(), 9)
        assert one.version == 9
    assert len(answer.tokens) == len(answer.logprobs or []) <= 3


# ------------------------------------------------------------------ compute_per_token_logps


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_compute_per_token_logps_scores_each_token_by_the_logits_before_it(make: Any) -> None:
    model, ids = make(), [7, 8, 9, 10, 11, 12]
    expected = forward_logps(model, ids)
    for keep in (1, 3, 5):
        scored = compute_per_token_logps(model, torch.tensor([ids, ids]), keep)
        assert (scored.shape, scored.dtype) == ((2, keep), torch.float32)
        for row in scored.tolist():
            assert row == pytest.approx(expected[-keep:].tolist(), abs=1e-5)
    assert compute_per_token_logps(model, torch.tensor([ids]), 0).shape == (1, 0)
    with pytest.raises(InvalidValueError, match=r"n_keep is 6 for rows of 6 tokens.*5 is"):
        compute_per_token_logps(model, torch.tensor([ids]), 6)


def test_the_rows_of_a_rollout_are_scored_as_they_were_sampled_padding_or_not() -> None:
    model = tiny_llama()
    result = engine(model).rollout(P, MASK, num_generations=2, max_new_tokens=6, temperature=1.0)
    scored = compute_per_token_logps(model, result.output_ids, result.completion_ids.size(1), result.attention_mask)
    assert scored.shape == result.per_token_logps.shape
    difference = (scored - result.per_token_logps).abs() * result.completion_mask
    assert float(difference.detach().max()) < 1e-4


def test_gradients_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18]])

    def gradients(at_once: int) -> Any:
        monkeypatch.setattr(torch_rollout, "_VALUES_AT_ONCE", at_once)
        model = tiny_llama()
        compute_per_token_logps(model, ids, 3).sum().backward()
        return model.lm_head.weight.grad

    whole, chunked = gradients(1 << 24), gradients(1)
    assert float(whole.abs().max()) > 0
    torch.testing.assert_close(whole, chunked)


def test_bfloat16_logits_are_scored_in_float32() -> None:
    model = tiny_llama().to(torch.bfloat16)
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        scored = compute_per_token_logps(model, ids, 3)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored, expected)


# ------------------------------------------------------------------ create_rollout_engine


def test_create_rollout_engine_takes_minimind_arguments() -> None:
    model = tiny_llama()
    made = create_rollout_engine(
        engine_type="torch",
        policy_model=model,
        tokenizer=Words(),
        device="cpu",
        autocast_ctx=None,
        sglang_base_url="http://localhost:8998",
        sglang_model_path="../model",
        sglang_shared_path="./sglang_ckpt",
    )
    assert isinstance(made, TorchRolloutEngine) and made.engine.model is model
    for name in ("sglang", "vllm"):
        with pytest.raises(InvalidValueError, match=f"engine_type is '{name}', and there is only 'torch'"):
            create_rollout_engine(name, model, Words())
    with pytest.raises(InvalidValueError, match="give policy_model and tokenizer"):
        create_rollout_engine("torch", model)


def test_what_is_no_model_or_no_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="policy_model must be a torch module, not str"):
        TorchRolloutEngine("model", Words())  # type: ignore[arg-type]
    said = "policy_model must be a causal language model of Hugging Face's.*, and Linear is another module"
    with pytest.raises(InvalidTypeError, match=said):
        create_rollout_engine("torch", torch.nn.Linear(2, 2), Words())
    with pytest.raises(InvalidTypeError, match="tokenizer must be a Hugging Face tokenizer, not SimpleNamespace"):
        TorchRolloutEngine(tiny_llama(), SimpleNamespace())  # type: ignore[arg-type]
