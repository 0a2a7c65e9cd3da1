"""The sampler's functions, against transformers' warpers and against arithmetic."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from unspool.engines.torch.sampling import (
    Draw,
    SamplingPlan,
    choices,
    descend,
    draw,
    keep_top_k,
    keep_top_p,
    stream,
    warp,
)
from unspool.types import SamplingParams

CPU = torch.device("cpu")
NEG = -math.inf


def plan(*params: SamplingParams, raw: bool = False) -> SamplingPlan:
    return SamplingPlan.of(params, [raw] * len(params), CPU)


def numbers(count: int, size: int) -> torch.Tensor:
    source = random.Random(0)
    return torch.tensor([[source.random() for _ in range(choices(size))] for _ in range(count)], dtype=torch.float64)


def drawn(logits: list[float], count: int, params: SamplingParams, **options: bool) -> Draw:
    rows = torch.tensor(logits).expand(count, -1)
    return draw(rows, plan(*[params] * count, **options), numbers(count, len(logits)), None)


def chi_square(tokens: torch.Tensor, expected: list[float]) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * len(tokens)
    assert counts[wanted == 0].sum() == 0
    kept = wanted > 0
    return ((counts - wanted)[kept] ** 2 / wanted[kept]).sum().item()


def test_twenty_thousand_draws_have_the_frequencies_of_the_distribution() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.0625, 0.0625)]
    result = drawn(logits, 20_000, SamplingParams())
    assert chi_square(result.tokens, [0.5, 0.25, 0.125, 0.0625, 0.0625]) < 18.47  # 4 degrees of freedom, p = 0.001


def test_frequencies_under_temperature_top_k_and_top_p_are_those_of_the_renormalised_rest() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    squares = drawn(logits, 20_000, SamplingParams(temperature=0.5))
    assert chi_square(squares.tokens, [16 / 30, 9 / 30, 4 / 30, 1 / 30]) < 16.27
    two = drawn(logits, 20_000, SamplingParams(top_k=2))
    assert chi_square(two.tokens, [4 / 7, 3 / 7, 0, 0]) < 10.83
    three = drawn(logits, 20_000, SamplingParams(top_p=0.75))
    assert chi_square(three.tokens, [4 / 9, 3 / 9, 2 / 9, 0]) < 13.82


def test_a_distribution_over_many_blocks_is_drawn_from_rightly() -> None:
    size = 700  # two whole blocks and a part
    logits = torch.full((size,), NEG)
    places = [0, 255, 256, 511, 512, 699]
    logits[places] = torch.tensor([1.0, 2.0, 3.0, 3.0, 2.0, 1.0]).log()
    count = 20_000
    result = draw(logits.expand(count, -1), plan(*[SamplingParams()] * count), numbers(count, size), None)
    expected = [0.0] * size
    for place, weight in zip(places, (1, 2, 3, 3, 2, 1), strict=True):
        expected[place] = weight / 12
    assert chi_square(result.tokens, expected) < 20.52  # 5 degrees of freedom


def test_the_log_probability_is_that_of_the_distribution_drawn_from_and_the_raw_one_stands_beside_it() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    result = drawn(logits, 200, SamplingParams(temperature=0.5, top_k=2), raw=True)
    for token, logprob, raw in zip(result.tokens, result.logprobs, result.raw_logprobs, strict=True):
        assert logprob.exp().item() == pytest.approx([16 / 25, 9 / 25][int(token)], abs=1e-6)
        assert raw.exp().item() == pytest.approx([0.4, 0.3][int(token)], abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_the_models_own_log_probability() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]])
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, repetition_penalty=4.0)
    seen = torch.tensor([[True, False, False, False]])
    result = draw(logits, plan(params), numbers(1, 4), seen)
    # The penalty quadruples log 0.4, which leaves token 1 the likeliest; the model itself gives it 0.3.
    assert result.tokens.tolist() == [1]
    assert result.logprobs.exp().tolist() == pytest.approx([0.3], abs=1e-6)


@pytest.mark.parametrize("size", [50, 257, 1500, 5000])
@pytest.mark.parametrize("flat", [1.0, 0.01], ids=["peaked", "flat"])
def test_scores_agree_with_the_warpers_of_transformers_row_by_row(size: int, flat: float) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=generator) * 3 * flat
    prompts = torch.randint(0, size, (6, 20), generator=generator)
    params = [
        SamplingParams(temperature=0.7, top_k=7, top_p=0.8, repetition_penalty=1.3),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3, repetition_penalty=0.8),
        SamplingParams(),
        SamplingParams(temperature=1.8, top_p=0.99),
        SamplingParams(top_k=100_000, temperature=0.3),
    ]
    seen = torch.zeros(2, size, dtype=torch.bool)
    seen[0, prompts[0]] = True
    seen[1, prompts[2]] = True
    mine = warp(logits, plan(*params), seen).log_softmax(-1)
    for row, one in enumerate(params):
        scores = logits[row : row + 1].clone()
        if one.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(one.repetition_penalty)(prompts[row : row + 1], scores)
        scores = TemperatureLogitsWarper(float(one.temperature))(None, scores)
        if one.top_k > 0:
            scores = TopKLogitsWarper(one.top_k)(None, scores)
        if one.top_p < 1:
            scores = TopPLogitsWarper(one.top_p)(None, scores)
        theirs = scores.log_softmax(-1)[0]
        assert torch.equal(mine[row].isinf(), theirs.isinf())
        assert torch.allclose(mine[row], theirs, atol=1e-5)


def test_ties_at_the_edge_of_top_k_and_of_top_p_stay_together() -> None:
    scores = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    assert keep_top_k(scores, torch.tensor([[2]])).tolist() == [[3.0, 1.0, 1.0, NEG]]
    assert keep_top_p(scores, torch.tensor([[0.8]], dtype=torch.float64)).tolist() == [[3.0, 1.0, 1.0, NEG]]


def test_top_p_keeps_the_likeliest_token_however_small_it_is() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0]])
    assert keep_top_p(scores, torch.tensor([[1e-9]], dtype=torch.float64)).tolist() == [[NEG, 2.0, NEG]]


def test_each_number_halves_the_vocabulary() -> None:
    probs = torch.zeros(1, 512)
    probs[0, [0, 255, 256, 384]] = torch.tensor([0.25, 0.25, 0.125, 0.375])
    assert choices(512) == 9
    for first, second, token in (
        (0.49, 0.49, 0),  # 0 to 255 hold 0.5 of all, 0 to 127 hold 0.5 of that
        (0.49, 0.5, 255),
        (0.5, 0.24, 256),  # 256 to 383 hold a quarter of the second half
        (0.5, 0.25, 384),
    ):
        tokens, total = descend(probs, torch.tensor([[first, second] + [0.7] * 7], dtype=torch.float64))
        assert (tokens.tolist(), total.tolist()) == ([token], [1.0])


def test_a_token_without_probability_is_never_drawn() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(400, 1000, generator=generator)
    probs[probs < 0.97] = 0
    for number in (0.0, 0.3, 0.999999, 1 - 2**-53):
        for dtype in (torch.float64, torch.float32):  # in float32 the last number is 1
            tokens, _ = descend(probs, torch.full((400, choices(1000)), number, dtype=dtype))
            assert bool((probs.gather(-1, tokens[:, None]) > 0).all())


def test_small_errors_of_the_logits_hardly_ever_change_a_token() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5000, generator=generator).expand(4000, -1)
    noise = torch.randn(4000, 5000, generator=generator) * 1e-4
    params = plan(*[SamplingParams()] * 4000)
    clean, noisy = (draw(x, params, numbers(4000, 5000), None).tokens for x in (logits, logits + noise))
    # Halving flips 0.4 of 4000 on average here, the inverse of one cumulative sum 14.
    assert (clean != noisy).sum().item() <= 2


def test_unusable_logits_are_marked_in_their_row_alone() -> None:
    good = torch.tensor([0.0, 1.0, 2.0])
    rows = torch.stack([good, good * math.nan, good, torch.tensor([0.0, math.inf, 0.0]), torch.full((3,), NEG), good])
    result = draw(rows, plan(*[SamplingParams(top_p=0.9)] * 6), numbers(6, 3), None)
    assert result.sound.tolist() == [True, False, True, False, False, True]
    alone = draw(good[None], plan(SamplingParams(top_p=0.9)), numbers(6, 3)[2:3], None)
    assert result.tokens[2] == alone.tokens[0]


def test_masked_tokens_in_the_models_own_logits_are_no_fault() -> None:
    result = draw(torch.tensor([[NEG, 0.0, NEG]]), plan(SamplingParams()), numbers(1, 3), None)
    assert (result.tokens.tolist(), result.logprobs.tolist(), result.sound.tolist()) == ([1], [0.0], [True])


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    result = draw(logits, plan(SamplingParams()), numbers(1, 300), None)
    expected = logits.float().log_softmax(-1)[0, result.tokens[0]].item()
    assert result.logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_seeds_that_differ_in_their_high_bits_or_sign_alone_give_different_numbers() -> None:
    firsts = {stream(seed).random() for seed in (5, 5 + 2**32, 5 + 2**64, -5, 0)}
    assert len(firsts) == 5
    assert stream(5).random() == stream(5).random()
