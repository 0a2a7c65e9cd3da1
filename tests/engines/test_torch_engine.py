"""What one request to a TorchEngine gets: tokens, log-probabilities, an end, or a clear error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LogitsProcessorList,
    MambaConfig,
    MistralConfig,
    RepetitionPenaltyLogitsProcessor,
    T5Config,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engines.tiny_models import (
    CONTEXT,
    VOCABULARY,
    Watch,
    forward,
    prompt,
    request,
    rescored,
    tiny_llama,
    tiny_qwen3,
)
from unspool.engines.protocol import Engine, GenerateRequest, Generation
from unspool.engines.torch import TorchEngine
from unspool.types import EngineError, InvalidValueError, SamplingParams

LENGTHS = [3, 200, 40, 7, 90, 1, 33]


async def together(engine: TorchEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def distribution(model: torch.nn.Module, asked: GenerateRequest, answer: Generation) -> list[float]:
    """Log-probabilities of an answer under its sampling parameters, by transformers' own warpers."""
    params = asked.params
    warpers = LogitsProcessorList()
    if params.repetition_penalty != 1:
        warpers.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    ids = asked.input_ids + answer.tokens
    logits = forward(model, ids)
    scored = []
    for place in range(len(asked.input_ids), len(ids)):
        scores = warpers(torch.tensor([ids[:place]]), logits[place - 1 : place].clone())
        scored.append(scores.log_softmax(-1)[0, ids[place]].item())
    return scored


# --------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.4},
    ],
    ids=str,
)
async def test_log_probabilities_equal_a_fresh_forward_pass_for_ragged_prompts(build: Any, how: dict[str, Any]) -> None:
    model = build()
    asked = [request(i, length, max_tokens=5 + 4 * i, **how) for i, length in enumerate(LENGTHS)]
    async with TorchEngine(model) as engine:
        answers = await together(engine, asked)
    for one, answer in zip(asked, answers, strict=True):
        assert len(answer.tokens) == one.params.max_tokens
        assert answer.logprobs == pytest.approx(distribution(model, one, answer), abs=1e-4)


async def test_rows_of_different_parameters_run_together_and_each_has_its_own() -> None:
    model = tiny_llama()
    asked = [
        request(0, 30, temperature=0.7, top_p=0.8),
        request(1, 4, temperature=1.0),
        request(2, 9, repetition_penalty=1.5),
        request(3, 60, top_k=3, temperature=2.0),
    ]
    async with TorchEngine(model) as engine:
        answers = await together(engine, asked)
    for one, answer in zip(asked, answers, strict=True):
        assert answer.logprobs == pytest.approx(distribution(model, one, answer), abs=1e-4)


async def test_the_models_own_log_probability_comes_beside_the_other_where_asked_for() -> None:
    model = tiny_llama()
    by_param = request(0, temperature=0.5, top_k=4, logprobs=0)
    by_extra = request(1, temperature=0.5, top_k=4, extra={"raw_logprobs": True})
    unasked = request(2, temperature=0.5, top_k=4)
    async with TorchEngine(model) as engine:
        answers = await together(engine, [by_param, by_extra, unasked])
    for one, answer in zip((by_param, by_extra), answers, strict=False):
        assert answer.extra["raw_logprobs"] == pytest.approx(rescored(model, one, answer), abs=1e-4)
        assert answer.logprobs == pytest.approx(distribution(model, one, answer), abs=1e-4)
    assert dict(answers[2].extra) == {}


async def test_the_likeliest_tokens_come_beside_the_sampled_one_where_asked_for() -> None:
    model = tiny_llama()
    asked = [request(i, temperature=0.5, logprobs=count) for i, count in enumerate((None, 3, 0, 1))]
    async with TorchEngine(model) as engine:
        answers = await together(engine, asked)
    assert ["top_logprobs" in answer.extra for answer in answers] == [False, True, False, True]
    for row in (1, 3):
        one, answer = asked[row], answers[row]
        scores = forward(model, one.input_ids + answer.tokens).log_softmax(-1)[len(one.input_ids) - 1 :]
        assert len(answer.extra["top_logprobs"]) == len(answer.tokens)
        for place, pairs in enumerate(answer.extra["top_logprobs"]):
            best = scores[place].topk(one.params.logprobs)
            assert [token for token, _ in pairs] == best.indices.tolist()
            assert [value for _, value in pairs] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_greedy_equals_transformers_generate_and_reports_the_models_log_probability() -> None:
    model = tiny_llama()
    asked = [request(i, length, max_tokens=24, temperature=0) for i, length in enumerate(LENGTHS)]
    async with TorchEngine(model) as engine:
        answers = await together(engine, asked)
    for one, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([one.input_ids])
        theirs = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert answer.tokens == theirs[0, ids.shape[1] :].tolist()
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=1e-4)


async def test_a_sliding_window_model_is_exact_beyond_its_window() -> None:
    model = tiny_qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    asked = [request(i, length, max_tokens=30) for i, length in enumerate(LENGTHS)]
    async with TorchEngine(model) as engine:
        answers = await together(engine, asked)
    for one, answer in zip(asked, answers, strict=True):
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=1e-4)


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3),
        BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3),
        Gemma3TextConfig(**SMALL, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
        MistralConfig(**SMALL, sliding_window=16),
        GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
        LlamaConfig(**SMALL, attn_implementation="eager"),
    ],
    ids=lambda config: config.model_type,
)
async def test_other_families_are_exact_too(config: Any) -> None:
    """Learned positions, ALiBi without positions, sliding windows, experts, attention sinks, eager attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    asked = [request(i, length, max_tokens=20) for i, length in enumerate(LENGTHS)]
    async with TorchEngine(model, stop_token_ids=()) as engine:
        answers = await together(engine, asked)
    for one, answer in zip(asked, answers, strict=True):
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1), "MambaForCausalLM keeps a recurrent state"),
        (T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1), "T5ForConditionalGeneration is an encoder-decoder"),
    ],
    ids=["mamba", "t5"],
)
def test_models_that_cannot_be_padded_or_are_no_decoders_are_refused(config: Any, message: str) -> None:
    build = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with pytest.raises(EngineError, match=message):
        TorchEngine(build.from_config(config))


async def test_bfloat16_runs_and_scores_within_its_precision() -> None:
    model = tiny_llama(initializer_range=0.1).bfloat16()
    asked = [request(i, length) for i, length in enumerate(LENGTHS)]
    async with TorchEngine(model) as engine:
        answers = await together(engine, asked)
    for one, answer in zip(asked, answers, strict=True):
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=0.2)


# --------------------------------------------------------------------------- seeds


async def test_the_same_seed_gives_the_same_tokens_at_any_batch_size_and_in_any_order() -> None:
    model = tiny_llama()
    asked = [request(i, LENGTHS[i % 7], max_tokens=10 + i, seed=1000 + i) for i in range(16)]
    async with TorchEngine(model) as engine:
        all_at_once = await together(engine, asked)
        one_by_one = [await engine.generate(one) for one in asked]
        shuffled = list(range(16))
        random.Random(3).shuffle(shuffled)
        mixed = await together(engine, [asked[i] for i in shuffled])
    async with TorchEngine(model, max_batch_size=7) as engine:
        sevens = await together(engine, asked)
    expected = [answer.tokens for answer in all_at_once]
    assert [answer.tokens for answer in one_by_one] == expected
    assert [answer.tokens for answer in sevens] == expected
    assert [answer.tokens for answer in mixed] == [expected[i] for i in shuffled]


async def test_other_seeds_give_other_tokens() -> None:
    async with TorchEngine(tiny_llama()) as engine:
        answers = await together(engine, [request(0, 5, max_tokens=12, seed=seed) for seed in (1, 2, 2**40 + 1)])
    assert len({tuple(answer.tokens) for answer in answers}) == 3


# --------------------------------------------------------------------------- the end of a turn


async def test_a_sampled_stop_token_is_kept_with_its_log_probability_also_where_pad_is_eos() -> None:
    model = tiny_llama()
    async with TorchEngine(model) as engine:
        free = await engine.generate(request(0, 5, max_tokens=30))
        end = free.tokens[9]
        assert end not in free.tokens[:9]
        model.config.pad_token_id = end
        model.generation_config.pad_token_id = end
        asked = [request(0, 5, max_tokens=30, stop_token_ids=(end,)), request(1, 77, max_tokens=30)]
        stopped, companion = await together(engine, asked)
    assert stopped.tokens == free.tokens[:10]
    assert stopped.stop_reason == "stop"
    assert stopped.logprobs == pytest.approx(rescored(model, asked[0], stopped), abs=1e-4)
    assert companion.logprobs == pytest.approx(rescored(model, asked[1], companion), abs=1e-4)


async def test_prompts_that_hold_the_pad_token_attend_to_it() -> None:
    model = tiny_llama(pad_token_id=2)
    asked = [GenerateRequest([2, 2, 9, 2], SamplingParams(max_tokens=10)), request(1, 50)]
    async with TorchEngine(model) as engine:
        answers = await together(engine, asked)
    assert answers[0].logprobs == pytest.approx(rescored(model, asked[0], answers[0]), abs=1e-4)


async def test_the_models_own_end_tokens_stop_a_request_that_names_none() -> None:
    model = tiny_llama()
    async with TorchEngine(model) as engine:
        free = await engine.generate(request(0, max_tokens=12))
    model.generation_config.eos_token_id = [499, free.tokens[5]]
    async with TorchEngine(model) as engine:
        stopped = await engine.generate(request(0, max_tokens=12))
        named = await engine.generate(request(0, max_tokens=12, stop_token_ids=(free.tokens[7],)))
    assert stopped.tokens == free.tokens[:6]
    assert named.tokens == free.tokens[:8]


async def test_max_tokens_ends_an_answer_as_length_and_one_token_needs_no_decoding_step() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        answer = await engine.generate(request(0, 6, max_tokens=1))
    assert (len(answer.tokens), answer.stop_reason, watch.passes) == (1, "length", [(1, 6, 6)])


async def test_a_stop_token_as_the_last_allowed_token_is_a_stop() -> None:
    async with TorchEngine(tiny_llama()) as engine:
        free = await engine.generate(request(0, max_tokens=4))
        answer = await engine.generate(request(0, max_tokens=4, stop_token_ids=(free.tokens[3],)))
    assert (answer.tokens, answer.stop_reason) == (free.tokens, "stop")


async def test_without_max_tokens_the_context_is_filled_and_no_more() -> None:
    model = tiny_llama()
    async with TorchEngine(model) as engine:
        assert engine.context_length == CONTEXT
        answer = await engine.generate(request(0, CONTEXT - 9, max_tokens=None))
        bounded = await engine.generate(request(0, CONTEXT - 9, max_tokens=1000))
    assert (len(answer.tokens), answer.stop_reason) == (9, "length")
    assert bounded.tokens == answer.tokens


class Letters:
    """A tokenizer of one or two letters a token: 0 'a', 1 'b', ... 25 'z', 26 'aa', 27 'ba', ..."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz"[i % 26] + "a" * (i // 26 % 2) for i in token_ids)


async def test_a_stop_string_ends_the_turn_with_all_tokens_kept_whole() -> None:
    letters = Letters()
    async with TorchEngine(tiny_llama(), tokenizer=letters) as engine:
        free = await engine.generate(request(0, max_tokens=40))
        text = letters.decode(free.tokens)
        wanted = text[30:35]
        answer = await engine.generate(request(0, max_tokens=40, stop=("no such string", wanted)))
    end = text.index(wanted) + len(wanted)
    fewest = next(n for n in range(41) if len(letters.decode(free.tokens[:n])) >= end)
    assert (answer.tokens, answer.stop_reason) == (free.tokens[:fewest], "stop")
    assert answer.logprobs == free.logprobs[:fewest]


async def test_a_stop_string_already_in_the_prompt_does_not_count() -> None:
    letters = Letters()
    async with TorchEngine(tiny_llama(), tokenizer=letters) as engine:
        free = await engine.generate(request(0, max_tokens=5))
        straddling = letters.decode([*prompt(0, 5)[-1:], free.tokens[0]])
        assert straddling not in letters.decode(free.tokens)
        answer = await engine.generate(request(0, max_tokens=5, stop=(straddling,)))
    assert answer.tokens == free.tokens


# --------------------------------------------------------------------------- requests that cannot be served


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GenerateRequest([], SamplingParams()), "input_ids is empty"),
        (GenerateRequest([1, VOCABULARY], SamplingParams()), "token id 500 is not in the model's vocabulary of 500"),
        (GenerateRequest([1, -1], SamplingParams()), "token id -1 is not in"),
        (request(0, CONTEXT), "the prompt has 512 tokens and leaves no room in the model's context of 512"),
        (request(0, stop=("x",)), r"stop strings \('x',\) need a tokenizer"),
        (request(0, num_samples=2), "num_samples is 2"),
        (request(0, prompt_logprobs=1), "prompt_logprobs is 1, and TorchEngine gives none for prompts"),
        (request(0, 300, max_tokens=101), "300 tokens with max_tokens=101 exceeds max_batch_tokens=400"),
        (request(0, 400, max_tokens=None), "400 tokens with max_tokens=None exceeds max_batch_tokens=400"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_by_itself(bad: GenerateRequest, message: str) -> None:
    model = tiny_llama()
    good = request(3, 20)
    async with TorchEngine(model, max_batch_tokens=400) as engine:
        alone = await engine.generate(good)
        refusal, beside = await asyncio.gather(engine.generate(bad), engine.generate(good), return_exceptions=True)
    assert isinstance(refusal, EngineError)
    with pytest.raises(EngineError, match=message):
        raise refusal
    assert beside == alone


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="max_batch_tokens must be at least 1, not 0"):
        TorchEngine(tiny_llama(), max_batch_tokens=0)
    with pytest.raises(InvalidValueError, match="max_batch_size must be at least 1, not -3"):
        TorchEngine(tiny_llama(), max_batch_size=-3)


def test_it_is_an_engine() -> None:
    engine = TorchEngine(tiny_llama(), version=3)
    assert isinstance(engine, Engine)
    assert (engine.version, engine.logprobs) == (3, True)


async def test_inputs_are_left_as_they_are_and_gradients_can_still_be_taken() -> None:
    model = tiny_llama()
    asked = request(0, 6)
    before = list(asked.input_ids)
    async with TorchEngine(model) as engine:
        await engine.generate(asked)
    assert asked.input_ids == before
    model(torch.tensor([asked.input_ids]), labels=torch.tensor([asked.input_ids])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
