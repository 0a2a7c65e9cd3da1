"""What a TorchEngine keeps of a conversation between its turns: used, bounded, dropped, and never seen in answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BloomConfig, Gemma3TextConfig, GPT2Config

from tests.engines.tiny_models import VOCABULARY, Watch, forward, prompt, request, rescored, tiny_llama, tiny_qwen3
from unspool.engines.embedded import ensure_embedded_model
from unspool.engines.protocol import GenerateRequest, Generation
from unspool.engines.torch import TorchEngine
from unspool.engines.torch.kept import Kept, KeptCaches, common_prefix
from unspool.types import EngineError, InvalidValueError, SamplingParams


@dataclass
class Turn:
    asked: GenerateRequest
    answer: Generation


async def converse(
    engine: TorchEngine,
    index: int,
    turns: int,
    *,
    first: int = 20,
    news: Sequence[int] = (6,),
    max_tokens: Sequence[int] = (5,),
    session: str | None = None,
    **params: Any,
) -> list[Turn]:
    """A conversation: each turn sees all before it and `news` tokens more (lengths in turn, as `max_tokens`)."""
    told: list[Turn] = []
    ids = prompt(index, first)
    for turn in range(turns):
        limit = max_tokens[(index + turn) % len(max_tokens)]
        asked = GenerateRequest(
            list(ids),
            SamplingParams(max_tokens=limit, **params),
            session=f"s{index}" if session is None else session,
            seed=1000 * index + turn,
        )
        told.append(Turn(asked, await engine.generate(asked)))
        ids += told[-1].answer.tokens + prompt(index + turn + 50, news[(index + turn) % len(news)])
    return told


def answers(conversations: Sequence[Sequence[Turn]]) -> list[list[list[int]]]:
    return [[turn.answer.tokens for turn in one] for one in conversations]


def assert_equal(ours: Sequence[Sequence[Turn]], theirs: Sequence[Sequence[Turn]]) -> None:
    """The same tokens, and log-probabilities to 1e-4."""
    assert answers(ours) == answers(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for mine, yours in zip(one, other, strict=True):
            assert mine.answer.logprobs == pytest.approx(yours.answer.logprobs, abs=1e-4)


# --------------------------------------------------------------------------- what is fed


async def test_a_later_turn_is_fed_its_new_tokens_alone() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        await converse(engine, 0, 3, first=100, news=(7,), max_tokens=(4,))
    # The last sampled token is new as well: nothing was computed of it.
    assert [fed for _, fed, _ in watch.passes] == [100, 1, 1, 1, 8, 1, 1, 1, 8, 1, 1, 1]
    assert [width for _, _, width in watch.passes][3:5] == [103, 111]


async def test_what_is_fed_does_not_grow_with_the_conversation() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        await converse(engine, 0, 40, first=30, news=(5,), max_tokens=(1,))
    assert [fed for _, fed, _ in watch.passes] == [30] + [6] * 39


async def test_next_turns_of_rows_that_ended_together_are_one_forward_pass() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        await engine.pause()
        tasks = [asyncio.ensure_future(converse(engine, i, 1, session=f"s{i}")) for i in range(6)]
        await asyncio.sleep(0)
        await engine.resume()
        first = [task[0] for task in await asyncio.gather(*tasks)]
        await engine.pause()
        watch.passes.clear()
        following = [
            GenerateRequest(
                turn.asked.input_ids + turn.answer.tokens + prompt(i, i + 1), SamplingParams(max_tokens=1), f"s{i}"
            )
            for i, turn in enumerate(first)
        ]
        later = [asyncio.ensure_future(engine.generate(one)) for one in following]
        await asyncio.sleep(0)
        await engine.resume()
        done = await asyncio.gather(*later)
    # 1 to 6 new tokens and the one sampled last: all are fed seven.
    assert watch.passes == [(6, 7, 31)]
    for one, answer in zip(following, done, strict=True):
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=1e-4)


async def test_a_newcomer_with_a_long_prompt_does_not_make_others_compute_theirs_again() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        [turn] = await converse(engine, 0, 1, first=300)
        following = GenerateRequest([*turn.asked.input_ids, *turn.answer.tokens, 3], SamplingParams(max_tokens=1), "s0")
        watch.passes.clear()
        await engine.pause()
        both = [asyncio.ensure_future(engine.generate(one)) for one in (request(9, 290, max_tokens=1), following)]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*both)
    assert watch.passes == [(1, 290, 290), (1, 2, 306)]


async def test_a_conversation_that_was_changed_keeps_what_it_has_in_common() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        [turn] = await converse(engine, 0, 1, first=60)
        changed = list(turn.asked.input_ids)
        changed[40] = (changed[40] + 1) % VOCABULARY
        asked = GenerateRequest(changed, SamplingParams(max_tokens=6), "s0", seed=3)
        watch.passes.clear()
        branch = await engine.generate(asked)
        shorter = GenerateRequest(turn.asked.input_ids[:30], SamplingParams(max_tokens=1), "s0")
        same_again = await engine.generate(shorter)
    assert [fed for _, fed, _ in watch.passes] == [20, 1, 1, 1, 1, 1, 1]
    assert branch.logprobs == pytest.approx(rescored(model, asked, branch), abs=1e-4)
    assert same_again.logprobs == pytest.approx(rescored(model, shorter, same_again), abs=1e-4)


async def test_requests_without_a_session_share_nothing() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        await converse(engine, 0, 2, first=40, session="", max_tokens=(1,))
    assert [fed for _, fed, _ in watch.passes] == [40, 47]


async def test_a_row_that_has_to_wait_goes_on_from_what_it_had_computed() -> None:
    model = tiny_llama()
    watch = Watch(model)
    asked = [request(i, 100, max_tokens=100, session=f"s{i}") for i in range(2)]
    async with TorchEngine(model, max_batch_tokens=320, max_kept_tokens=1000) as engine:
        await engine.pause()
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        await engine.resume()
        done = await asyncio.gather(*tasks)
    assert max(fed for _, fed, _ in watch.passes) == 100  # and not 161, as without a session
    for one, answer in zip(asked, done, strict=True):
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=1e-4)


# --------------------------------------------------------------------------- exactness


def tied() -> Any:
    return tiny_llama(tie_word_embeddings=True, num_attention_heads=8)


def sliding() -> Any:
    return tiny_qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=1)


def other(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def gemma() -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    kinds = ["sliding_attention", "full_attention"]
    heads = {"num_key_value_heads": 1, "head_dim": 16}
    return other(
        Gemma3TextConfig(vocab_size=VOCABULARY, sliding_window=16, layer_types=kinds, **shape, **heads, **ends)
    )


def gpt2() -> Any:
    return other(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3))


def bloom() -> Any:
    return other(BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3))


@pytest.mark.parametrize("build", [tied, sliding, gemma, gpt2, bloom])
@pytest.mark.parametrize("bound", [None, 150, 30], ids=["all kept", "some kept", "hardly any kept"])
async def test_eight_turns_with_the_kept_cache_equal_those_without_it(build: Any, bound: int | None) -> None:
    model = build()
    how: dict[str, Any] = {
        "news": (1, 9, 4, 60),
        "max_tokens": (3, 8, 1),
        "temperature": 0.8,
        "repetition_penalty": 1.2,
    }

    async def run(**options: Any) -> list[list[Turn]]:
        async with TorchEngine(model, stop_token_ids=(), **options) as engine:
            work = [converse(engine, i, 8, first=(5, 40, 11)[i % 3], **how) for i in range(5)]
            return list(await asyncio.gather(*work))

    assert_equal(await run(max_kept_tokens=bound), await run(max_kept_tokens=0))


@pytest.mark.parametrize("seed", range(3))
async def test_conversations_that_come_and_go_at_random_are_those_of_an_engine_that_keeps_nothing(seed: int) -> None:
    model = tiny_llama()
    chance = random.Random(seed)
    plans = [(chance.randint(1, 8), chance.choice((3, 50, 90)), chance.randint(0, 3)) for _ in range(16)]

    async def run(chance: random.Random, **options: Any) -> list[list[Turn]]:
        async with TorchEngine(model, **options) as engine:

            async def one(index: int, turns: int, first: int, others: int) -> list[Turn]:
                for number in range(others):  # so it begins after so many turns of somebody else
                    await engine.generate(request(200 + index, 3 + number, max_tokens=chance.randint(1, 6)))
                return await converse(engine, index, turns, first=first, news=(2, 13, 30), max_tokens=(1, 9, 4))

            return list(await asyncio.gather(*(one(i, *plan) for i, plan in enumerate(plans))))

    kept = await run(chance, max_kept_tokens=600, max_batch_size=6, max_batch_tokens=1500)
    assert_equal(kept, await run(chance, max_kept_tokens=0))
    for turn in kept[0]:
        assert turn.answer.logprobs == pytest.approx(rescored(model, turn.asked, turn.answer), abs=1e-4)


async def test_requests_of_one_session_at_once_do_not_meet() -> None:
    model = tiny_llama()
    async with TorchEngine(model) as engine:
        [turn] = await converse(engine, 0, 1, first=40)
        base = turn.asked.input_ids + turn.answer.tokens
        asked = [GenerateRequest([*base, *prompt(i, 4)], SamplingParams(max_tokens=9), "s0", seed=i) for i in range(4)]
        done = await asyncio.gather(*map(engine.generate, asked))
    for one, answer in zip(asked, done, strict=True):
        assert answer.logprobs == pytest.approx(rescored(model, one, answer), abs=1e-4)


async def test_the_same_seeds_give_the_same_turns_at_any_size_of_the_batch() -> None:
    model = tiny_qwen3()
    runs = []
    for size in (16, 7, 1):
        async with TorchEngine(model, max_batch_size=size) as engine:
            work = (converse(engine, i, 3, first=5 + 3 * i, news=(4, 11), max_tokens=(6, 3)) for i in range(16))
            runs.append(await asyncio.gather(*work))
    assert answers(runs[0]) == answers(runs[1]) == answers(runs[2])


@pytest.fixture(scope="module")
def real_model() -> Any:
    path = ensure_embedded_model()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.slow
async def test_eight_turns_of_a_real_model_equal_those_without_a_kept_cache(real_model: Any) -> None:
    how: dict[str, Any] = {"news": (12, 3, 30), "max_tokens": (4, 7), "temperature": 0.9}
    runs = []
    for bound in (400, 0):
        async with TorchEngine(real_model, max_kept_tokens=bound, stop_token_ids=(), threads=1) as engine:
            runs.append(await asyncio.gather(*(converse(engine, i, 8, first=15 + 20 * i, **how) for i in range(3))))
    assert_equal(*runs)
    for turn in runs[0][2][-2:]:
        assert turn.answer.logprobs == pytest.approx(distribution(real_model, turn, 0.9), abs=1e-4)


@pytest.mark.slow
async def test_seeds_of_a_real_model_give_the_same_turns_at_batch_sizes_1_7_and_16(real_model: Any) -> None:
    runs = []
    for size in (16, 7, 1):
        async with TorchEngine(real_model, max_batch_size=size, stop_token_ids=(), threads=1) as engine:
            work = (converse(engine, i, 2, first=8 + 3 * i, news=(4, 11), max_tokens=(7, 5)) for i in range(16))
            runs.append(await asyncio.gather(*work))
    assert answers(runs[0]) == answers(runs[1]) == answers(runs[2])


def distribution(model: Any, turn: Turn, temperature: float) -> list[float]:
    """Log-probabilities of an answer by one plain forward pass."""
    scores = (forward(model, turn.asked.input_ids + turn.answer.tokens) / temperature).log_softmax(-1)
    start = len(turn.asked.input_ids) - 1
    return [scores[start + place, token].item() for place, token in enumerate(turn.answer.tokens)]


# --------------------------------------------------------------------------- new weights, failures, the end


async def test_what_was_kept_under_old_weights_is_not_used_under_new_ones() -> None:
    model, fresh = tiny_llama(seed=0), tiny_llama(seed=1)
    async with TorchEngine(model) as engine:
        [turn] = await converse(engine, 0, 1, first=50)
        await engine.update_weights(fresh)
        following = GenerateRequest(turn.asked.input_ids + turn.answer.tokens, SamplingParams(max_tokens=8), "s0", 5)
        ours = await engine.generate(following)
    async with TorchEngine(fresh, version=1) as engine:
        theirs = await engine.generate(following)
    assert (ours.tokens, ours.versions) == (theirs.tokens, theirs.versions)
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


async def test_weights_changed_in_place_drop_what_was_kept() -> None:
    model = tiny_llama(seed=0)
    async with TorchEngine(model) as engine:
        [turn] = await converse(engine, 0, 1, first=50)
        await engine.pause()
        model.load_state_dict(tiny_llama(seed=1).state_dict())
        await engine.update_weights(model)
        await engine.resume()
        following = GenerateRequest(turn.asked.input_ids + turn.answer.tokens, SamplingParams(max_tokens=8), "s0", 5)
        answer = await engine.generate(following)
    assert answer.logprobs == pytest.approx(rescored(tiny_llama(seed=1), following, answer), abs=1e-4)


async def test_an_update_within_a_turn_leaves_both_versions_each_scored_by_its_own_weights() -> None:
    models = [tiny_llama(seed=seed) for seed in (0, 1)]
    served = tiny_llama(seed=0)
    watch = Watch(served)
    loop, reached = asyncio.get_running_loop(), asyncio.Event()
    async with TorchEngine(served) as engine:
        [turn] = await converse(engine, 0, 1, first=50, max_tokens=(4,))
        [idle] = await converse(engine, 1, 1, first=30)
        watch.passes.clear()

        def at_the_fifth_pass(number: int) -> None:
            if number == 5:
                loop.call_soon_threadsafe(reached.set)

        watch.before = at_the_fifth_pass
        following = GenerateRequest(turn.asked.input_ids + turn.answer.tokens, SamplingParams(max_tokens=200), "s0", 5)
        task = asyncio.ensure_future(engine.generate(following))
        await reached.wait()
        await engine.update_weights(models[1])
        answer = await task
        other_session = GenerateRequest(idle.asked.input_ids + idle.answer.tokens, SamplingParams(max_tokens=5), "s1")
        after = await engine.generate(other_session)
        last = GenerateRequest([*following.input_ids, *answer.tokens, 7], SamplingParams(max_tokens=5), "s0")
        next_turn = await engine.generate(last)
    assert answer.versions is not None
    assert answer.versions == sorted(answer.versions)
    assert set(answer.versions) == {0, 1}
    scores = [rescored(model, following, answer) for model in models]
    expected = [scores[version][place] for place, version in enumerate(answer.versions)]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    for one, made in ((other_session, after), (last, next_turn)):
        assert made.logprobs == pytest.approx(rescored(models[1], one, made), abs=1e-4)


async def test_where_memory_runs_out_what_is_kept_goes_first() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        [turn] = await converse(engine, 0, 1, first=50)
        watch.passes.clear()

        def short(number: int, fed: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
            if number == 1:
                raise torch.OutOfMemoryError("too much")
            return logits

        watch.logits = short
        await converse(engine, 1, 1, first=30)
        following = GenerateRequest(turn.asked.input_ids + turn.answer.tokens, SamplingParams(max_tokens=1), "s0", 5)
        answer = await engine.generate(following)
    # A row by itself fails where memory runs out with nothing kept: here it is tried again.
    assert [fed for _, fed, _ in watch.passes if fed > 1] == [30, 30, 55]
    assert answer.logprobs == pytest.approx(rescored(model, following, answer), abs=1e-4)


async def test_a_turn_that_fails_costs_its_own_cache_and_the_conversation_goes_on() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        [turn] = await converse(engine, 0, 1, first=50)
        following = GenerateRequest(turn.asked.input_ids + turn.answer.tokens, SamplingParams(max_tokens=4), "s0", 5)
        watch.logits = lambda _, __, logits: torch.full_like(logits, float("nan"))
        with pytest.raises(EngineError, match="NaN or infinity"):
            await engine.generate(following)
        watch.logits = None
        answer = await engine.generate(following)
    assert answer.logprobs == pytest.approx(rescored(model, following, answer), abs=1e-4)


async def test_a_closed_engine_has_kept_nothing() -> None:
    model = tiny_llama()
    watch = Watch(model)
    engine = TorchEngine(model)
    await converse(engine, 0, 1, first=50)
    await engine.close()
    watch.passes.clear()
    await engine.start()
    await engine.generate(GenerateRequest(prompt(0, 50), SamplingParams(max_tokens=1), "s0"))
    await engine.close()
    assert [fed for _, fed, _ in watch.passes] == [50]


# --------------------------------------------------------------------------- the bound


async def test_the_bound_of_what_is_kept_holds_after_every_turn() -> None:
    model = tiny_llama()
    watch = Watch(model)
    most: list[int] = []
    async with TorchEngine(model, max_kept_tokens=500) as engine:
        await engine.start()
        assert engine._scheduler is not None
        kept = engine._scheduler.kept
        watch.before = lambda _: most.append(sum(one.columns for one in kept._caches.values()))
        await asyncio.gather(*(converse(engine, i, 6, first=30 + i, news=(20,), max_tokens=(2, 3)) for i in range(9)))
        assert kept.tokens == sum(one.columns for one in kept._caches.values())
    assert 300 < max(most) <= 500


def test_a_bound_below_none_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"max_kept_tokens must be at least 0 \(keep nothing\), not -1"):
        TorchEngine(tiny_llama(), max_kept_tokens=-1)


def cache_of(columns: int) -> Kept:
    return Kept(list(range(columns)), [(torch.zeros(1, 1, columns, 2), torch.zeros(1, 1, columns, 2))])


def test_the_least_recently_used_goes_first_and_what_is_too_large_is_not_kept() -> None:
    caches = KeptCaches(100)
    for name in ("a", "b", "c"):
        caches.put(name, cache_of(30))
    used = caches.take("a")
    assert used is not None
    caches.put("a", used)
    caches.put("d", cache_of(40))
    assert [caches.peek(name) is not None for name in "abcd"] == [True, False, True, True]
    assert caches.tokens == 100
    caches.put("c", cache_of(101))
    assert caches.peek("c") is None
    assert caches.tokens == 70
    caches.clear()
    assert (len(caches), caches.tokens) == (0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.booleans()),
        max_size=40,
    ),
    st.integers(0, 100),
)
def test_whatever_is_put_and_taken_the_bound_holds(steps: list[tuple[str, int, bool]], bound: int) -> None:
    caches = KeptCaches(bound)
    for session, columns, put in steps:
        if put:
            caches.put(session, cache_of(columns))
        else:
            caches.take(session)
            assert caches.peek(session) is None
        assert caches.tokens <= bound
        assert caches.tokens == sum(cache.columns for s in "abcdef" if (cache := caches.peek(s)) is not None)


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_the_common_prefix_is_as_long_as_it_can_be(one: list[int], other: list[int]) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
