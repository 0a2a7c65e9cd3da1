"""Batching: a blocking batch sampler as an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from unspool.engines import Batching, GenerateRequest, SampledSequence, SampleResponse
from unspool.engines.batching import sampled_logprobs
from unspool.types import EngineError, SamplingParams


class Echo:
    """Answers each item with its own prompt, and keeps the batches that it was called with."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.params: list[SamplingParams] = []
        self.at_once = 0
        self.most_at_once = 0

    def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> Sequence[SampleResponse]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.batches.append(batch)
        self.params.append(sampling_params)
        self.at_once -= 1
        return [SampleResponse([SampledSequence("stop", list(item["input_ids"]))]) for item in batch]


def ask(ids: list[int], max_tokens: int | None = None, temperature: float = 1.0, **more: Any) -> GenerateRequest:
    return GenerateRequest(ids, SamplingParams(max_tokens=max_tokens, temperature=temperature), **more)


async def test_what_waits_goes_in_one_call_with_everything_that_a_sampler_needs() -> None:
    sampler = Echo()
    engine = Batching(sampler)
    answers = await asyncio.gather(
        engine.generate(ask([1, 2], max_tokens=8, session="a", seed=11, stop_token_ids=(2,))),
        engine.generate(ask([3], max_tokens=5, session="b", seed=12, stop_token_ids=(2,))),
    )
    assert [answer.tokens for answer in answers] == [[1, 2], [3]]
    assert sampler.batches == [
        [
            {"input_ids": [1, 2], "session": "a", "seed": 11, "max_tokens": 8, "stop_token_ids": (2,)},
            {"input_ids": [3], "session": "b", "seed": 12, "max_tokens": 5, "stop_token_ids": (2,)},
        ]
    ]
    assert sampler.params[0].max_tokens == 8


async def test_requests_with_other_parameters_go_in_calls_of_their_own() -> None:
    sampler = Echo()
    engine = Batching(sampler)
    await asyncio.gather(*(engine.generate(ask([i], temperature=0.5 + i % 2)) for i in range(4)))
    assert sorted([item["input_ids"][0] for item in batch] for batch in sampler.batches) == [[0, 2], [1, 3]]


async def test_an_answer_over_its_own_max_tokens_is_cut_there() -> None:
    class WithLogprobs(Echo):
        def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> Sequence[SampleResponse]:
            return [SampleResponse([SampledSequence("stop", [5, 6, 7], [-0.1, -0.2, -0.3])]) for _ in batch]

    engine = Batching(WithLogprobs())
    cut, whole = await asyncio.gather(engine.generate(ask([1], max_tokens=2)), engine.generate(ask([2], max_tokens=3)))
    assert (cut.tokens, cut.logprobs, cut.stop_reason) == ([5, 6], [-0.1, -0.2], "length")
    assert (whole.tokens, whole.stop_reason) == ([5, 6, 7], "stop")
    assert engine.logprobs is True


async def test_while_a_call_runs_the_next_batch_gathers() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Echo):
        def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> Sequence[SampleResponse]:
            if not self.batches:
                entered.set()
                leave.wait(20)
            return super().sample(batch, sampling_params)

    sampler = Slow()
    engine = Batching(sampler)
    first = asyncio.create_task(engine.generate(ask([0])))
    await asyncio.to_thread(entered.wait, 20)
    rest = [asyncio.create_task(engine.generate(ask([i]))) for i in range(1, 6)]
    await asyncio.sleep(0)
    leave.set()
    await asyncio.gather(first, *rest)
    assert [len(batch) for batch in sampler.batches] == [1, 5]


async def test_a_cancelled_request_is_not_sampled() -> None:
    sampler = Echo()
    engine = Batching(sampler)
    gone = asyncio.create_task(engine.generate(ask([1])))
    kept = asyncio.create_task(engine.generate(ask([2])))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await kept).tokens == [2]
    assert [[item["input_ids"] for item in batch] for batch in sampler.batches] == [[[2]]]


async def test_a_failing_call_fails_its_own_rows_and_the_next_one_works() -> None:
    class Flaky(Echo):
        def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> Sequence[SampleResponse]:
            if sampling_params.temperature == 0.5:
                raise RuntimeError("no memory")
            return super().sample(batch, sampling_params)

    engine = Batching(Flaky())
    results = await asyncio.gather(
        engine.generate(ask([1], temperature=0.5)), engine.generate(ask([2])), return_exceptions=True
    )
    assert repr(results[0]) == "RuntimeError('no memory')"
    assert getattr(results[1], "tokens", None) == [2]
    assert (await engine.generate(ask([3]))).tokens == [3]


def test_several_event_loops_share_one_sampler_one_call_at_a_time() -> None:
    sampler = Echo()
    engine = Batching(sampler)

    def work(base: int) -> None:
        async def many() -> list[Any]:
            return list(await asyncio.gather(*(engine.generate(ask([base + i])) for i in range(20))))

        assert [answer.tokens[0] for answer in asyncio.run(many())] == list(range(base, base + 20))

    threads = [threading.Thread(target=work, args=(base,)) for base in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(len(batch) for batch in sampler.batches) == 60
    assert sampler.most_at_once == 1


async def test_two_engines_on_one_loop_do_not_wait_for_each_other() -> None:
    one, two = Batching(Echo()), Batching(Echo())
    answers = await asyncio.wait_for(asyncio.gather(one.generate(ask([1])), two.generate(ask([2]))), 20)
    assert [answer.tokens for answer in answers] == [[1], [2]]


def test_an_ended_session_is_told_to_a_sampler_that_wants_to_know(caplog: pytest.LogCaptureFixture) -> None:
    class Keeping(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.over: list[str] = []

        def end_session(self, session: str) -> None:
            self.over.append(session)
            if session == "b":
                raise RuntimeError("no such session")

    sampler = Keeping()
    engine = Batching(sampler)
    for session in ("a", "b", "c"):
        engine.end_session(session)
    assert sampler.over == ["a", "b", "c"]
    assert "Keeping.end_session failed" in caplog.text
    Batching(Echo()).end_session("a")


def test_a_samplers_context_length_is_the_engines() -> None:
    sampler = Echo()
    assert Batching(sampler).context_length is None
    sampler.context_length = 512  # type: ignore[attr-defined]
    assert Batching(sampler).context_length == 512


@pytest.mark.parametrize(
    "entries",
    [
        [-0.5, -1.5],
        [{7: -0.5, 9: -0.9}, {9: -0.1, 8: -1.5}],
        [[(9, -0.1), (7, -0.5)], [(8, -1.5)]],
        [{7: SimpleNamespace(logprob=-0.5)}, {8: SimpleNamespace(logprob=-1.5), 9: SimpleNamespace(logprob=-0.1)}],
    ],
)
def test_of_a_map_the_sampled_tokens_own_entry_is_taken(entries: Any) -> None:
    assert sampled_logprobs([7, 8], entries) == [-0.5, -1.5]


def test_log_probabilities_that_do_not_fit_the_tokens_are_refused() -> None:
    with pytest.raises(EngineError, match="1 log-probabilities for 2 tokens"):
        sampled_logprobs([7, 8], [-0.5])
    with pytest.raises(EngineError, match="of token 7 do not hold that token itself"):
        sampled_logprobs([7], [{9: -0.1}])
