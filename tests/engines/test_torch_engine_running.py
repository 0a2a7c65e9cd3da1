"""How a TorchEngine runs many requests: who is in the batch, what a failure costs, how it starts and ends."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import torch

from tests.engines.tiny_models import VOCABULARY, Watch, prompt, request, rescored, tiny_llama
from unspool.engines.protocol import GenerateRequest, Generation
from unspool.engines.torch import TorchEngine
from unspool.types import EngineError


@pytest.fixture(scope="module", autouse=True)
def no_thread_is_left() -> Any:
    yield
    assert not engine_threads()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "unspool-torch-engine"]


class Gate:
    """Stops the engine's thread before a given forward pass until it is opened."""

    def __init__(self, watch: Watch, at: int) -> None:
        self._at, self._loop = at, asyncio.get_running_loop()
        self.reached, self._open = asyncio.Event(), threading.Event()
        watch.before = self._before

    def _before(self, number: int) -> None:
        if number == self._at:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
async def watched() -> AsyncIterator[tuple[TorchEngine, Watch]]:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        yield engine, watch


def start(work: Coroutine[Any, Any, Generation]) -> asyncio.Task[Generation]:
    return asyncio.get_running_loop().create_task(work)


async def queued(engine: TorchEngine, asked: list[GenerateRequest]) -> list[asyncio.Task[Generation]]:
    """Requests that the engine sees all at once, whatever the threads' timing."""
    await engine.pause()
    tasks = [start(engine.generate(one)) for one in asked]
    await asyncio.sleep(0)
    await engine.resume()
    return tasks


# --------------------------------------------------------------------------- the batch


async def test_rows_join_a_running_batch_and_leave_it_when_they_are_done(watched: tuple[TorchEngine, Watch]) -> None:
    engine, watch = watched
    early, late = request(0, 5, max_tokens=20), request(1, 30, max_tokens=6)
    alone = [await engine.generate(one) for one in (early, late)]
    watch.passes.clear()
    gate = Gate(watch, at=4)
    first = start(engine.generate(early))
    await gate.reached.wait()
    second = start(engine.generate(late))
    await asyncio.sleep(0)  # the second request is queued now
    gate.open()
    assert [(await task).tokens for task in (first, second)] == [answer.tokens for answer in alone]
    # Three passes by itself; the other is prefilled; both go on as one batch, padded to the longer, until it is done.
    assert watch.passes[:6] == [(1, 5, 5), (1, 1, 6), (1, 1, 7), (1, 1, 8), (1, 30, 30), (2, 1, 31)]
    assert watch.passes[9:] == [(2, 1, 35)] + [(1, 1, width) for width in range(14, 25)]


async def test_a_forward_pass_never_exceeds_the_bounds(watched: tuple[TorchEngine, Watch]) -> None:
    asked = [request(i, (5, 60, 17, 130)[i % 4], max_tokens=30 + i) for i in range(20)]
    free = await asyncio.gather(*map(watched[0].generate, asked))
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model, max_batch_tokens=600, max_batch_size=5) as engine:
        bound = await asyncio.gather(*await queued(engine, asked))
    assert 500 < max(rows * width for rows, _, width in watch.passes) <= 600
    assert max(rows for rows, _, _ in watch.passes) == 5
    assert [answer.tokens for answer in bound] == [answer.tokens for answer in free]


async def test_a_row_that_outgrows_the_bound_waits_and_goes_on_where_it_was(watched: tuple[TorchEngine, Watch]) -> None:
    asked = [request(i, 100, max_tokens=200) for i in range(2)]
    free = await asyncio.gather(*map(watched[0].generate, asked))
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model, max_batch_tokens=400) as engine:
        bound = await asyncio.gather(*await queued(engine, asked))
    assert max(rows * width for rows, _, width in watch.passes) == 400
    assert [fed for rows, fed, _ in watch.passes if fed > 1] == [100, 201]  # prefilled anew with what it had
    assert [answer.tokens for answer in bound] == [answer.tokens for answer in free]


async def test_rows_of_very_different_lengths_are_not_prefilled_as_padding(watched: tuple[TorchEngine, Watch]) -> None:
    engine, watch = watched
    await asyncio.gather(*await queued(engine, [request(i, length) for i, length in enumerate((400, 4, 390, 6))]))
    assert watch.passes[:3] == [(2, 400, 400), (2, 6, 6), (4, 1, 401)]


async def test_only_the_last_position_goes_through_the_head(watched: tuple[TorchEngine, Watch]) -> None:
    engine, watch = watched
    shapes: list[tuple[int, ...]] = []
    watch.logits = lambda _, __, logits: shapes.append(tuple(logits.shape)) or logits  # type: ignore[func-returns-value]
    await engine.generate(request(0, 50, max_tokens=2))
    assert shapes == [(1, 1, VOCABULARY), (1, 1, VOCABULARY)]


# --------------------------------------------------------------------------- cancelling, pausing


async def test_a_cancelled_request_leaves_before_the_next_step(watched: tuple[TorchEngine, Watch]) -> None:
    engine, watch = watched
    keep = request(1, 9, max_tokens=20)
    alone = await engine.generate(keep)
    watch.passes.clear()
    gate = Gate(watch, at=5)
    tasks = await queued(engine, [request(0, 9, max_tokens=400), keep])
    await gate.reached.wait()
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    gate.open()
    assert (await tasks[1]).tokens == alone.tokens
    rows = [rows for rows, _, _ in watch.passes[4:]]
    assert rows[0] == 2
    assert set(rows[1:]) == {1}


async def test_a_request_cancelled_in_the_queue_is_never_computed(watched: tuple[TorchEngine, Watch]) -> None:
    engine, watch = watched
    await engine.pause()
    task = start(engine.generate(request(0, 77)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.resume()
    await engine.generate(request(1, 5, max_tokens=1))
    assert watch.passes == [(1, 5, 5)]


async def test_pause_holds_and_resume_goes_on_with_the_same_tokens(watched: tuple[TorchEngine, Watch]) -> None:
    engine, watch = watched
    asked = request(0, 5, max_tokens=30)
    alone = await engine.generate(asked)
    watch.passes.clear()
    gate = Gate(watch, at=6)
    task = start(engine.generate(asked))
    await gate.reached.wait()
    pausing = asyncio.ensure_future(engine.pause())
    await asyncio.sleep(0)
    assert not pausing.done()  # a forward pass is still running
    gate.open()
    await pausing
    assert len(watch.passes) == 6
    await engine.resume()
    assert await task == alone


# --------------------------------------------------------------------------- failures


async def test_a_row_whose_logits_are_nan_fails_alone(watched: tuple[TorchEngine, Watch]) -> None:
    engine, watch = watched
    asked = [request(i, 10 + i, max_tokens=12) for i in range(4)]
    poison = prompt(2, 12)[-1]
    alone = await asyncio.gather(*(engine.generate(one) for i, one in enumerate(asked) if i != 2))

    def spoil(_: int, fed: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(fed):
            if len(ids) > 1 and ids[-1] == poison:
                logits = logits.clone()
                logits[row] = float("nan")
        return logits

    watch.logits = spoil
    answers = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
    failed = answers.pop(2)
    assert isinstance(failed, EngineError)
    assert "logits hold NaN or infinity after 12 tokens" in str(failed)
    assert [a.tokens for a in answers if isinstance(a, Generation)] == [a.tokens for a in alone]


@pytest.mark.parametrize("at", [1, 4], ids=["prefill", "decode"])
async def test_a_forward_pass_that_fails_costs_only_the_row_that_makes_it_fail(
    watched: tuple[TorchEngine, Watch], at: int
) -> None:
    engine, watch = watched
    asked = [request(i, 10 + i, max_tokens=12) for i in range(4)]
    alone = await asyncio.gather(*map(engine.generate, asked))
    watch.passes.clear()
    poisoned = set(asked[2].input_ids[:3])

    def fail(number: int, fed: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
        # The batch fails at one step, and the guilty row again when it is tried by itself.
        if number == at or (len(fed[0]) > 1 and set(fed[0][:3]) == poisoned):
            raise RuntimeError("no kernel for this")
        return logits

    watch.logits = fail
    answers = await asyncio.gather(*await queued(engine, asked), return_exceptions=True)
    failed = answers.pop(2)
    assert isinstance(failed, EngineError)
    assert isinstance(failed.__cause__, RuntimeError)
    assert "no kernel for this" in str(failed)
    alone.pop(2)
    assert [a.tokens for a in answers if isinstance(a, Generation)] == [a.tokens for a in alone]
    watch.logits = None
    assert (await engine.generate(asked[2])).stop_reason == "length"  # the thread lives on


async def test_where_memory_runs_out_rows_run_in_smaller_batches_from_then_on(
    watched: tuple[TorchEngine, Watch],
) -> None:
    engine, watch = watched
    asked = [request(i, 10, max_tokens=12) for i in range(8)]
    alone = await asyncio.gather(*map(engine.generate, asked))
    watch.passes.clear()

    def short(number: int, fed: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
        rows, _, width = watch.passes[number - 1]
        if rows * width > 100:
            raise torch.OutOfMemoryError("too much")
        return logits

    watch.logits = short
    answers = await asyncio.gather(*await queued(engine, asked))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
    assert sum(rows * width > 100 for rows, _, width in watch.passes) <= 2
    assert watch.passes[-1][0] > 1  # smaller batches, not single rows
    too_long = await asyncio.gather(engine.generate(request(0, 101)), return_exceptions=True)
    assert isinstance(too_long[0], EngineError)
    assert isinstance(too_long[0].__cause__, torch.OutOfMemoryError)


async def test_a_tokenizer_that_fails_at_a_stop_string_costs_its_own_row_only() -> None:
    class Broken:
        def decode(self, token_ids: Any, **_: Any) -> str:
            raise KeyError("no such id")

    async with TorchEngine(tiny_llama(), tokenizer=Broken()) as engine:
        alone = await engine.generate(request(1))
        failed, other = await asyncio.gather(
            engine.generate(request(0, stop=("x",))), engine.generate(request(1)), return_exceptions=True
        )
    assert isinstance(failed, EngineError)
    assert isinstance(failed.__cause__, KeyError)
    assert isinstance(other, Generation)
    assert other.tokens == alone.tokens


# --------------------------------------------------------------------------- loops, threads, the end


def in_threads(works: list[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
    """Each on an event loop and a thread of its own, at once."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        results[index] = asyncio.run(works[index]())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_several_event_loops_in_threads_are_served_at_once_by_one_thread() -> None:
    engine = TorchEngine(tiny_llama())
    asked = [request(i, 5 + i, max_tokens=25) for i in range(12)]

    async def batch(part: int) -> list[list[int]]:
        answers = await asyncio.gather(*map(engine.generate, asked[part::3]))
        return [answer.tokens for answer in answers]

    results = in_threads([lambda part=part: batch(part) for part in range(3)])  # type: ignore[misc]
    assert len(engine_threads()) == 1

    async def again() -> list[list[int]]:
        async with engine:
            return [(await engine.generate(one)).tokens for one in asked]

    expected = asyncio.run(again())
    assert results == [expected[part::3] for part in range(3)]
    assert not engine_threads()


async def test_close_fails_what_is_running_and_queued_and_ends_the_thread() -> None:
    model = tiny_llama()
    watch = Watch(model)
    engine = TorchEngine(model, max_batch_size=1, version=4)
    gate = Gate(watch, at=3)
    tasks = [start(engine.generate(request(i, max_tokens=100))) for i in range(2)]
    await gate.reached.wait()
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    gate.open()
    await closing
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, EngineError)
        assert "the engine was closed" in str(outcome)
    assert not engine_threads()
    await engine.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        await engine.generate(request(0))
    await engine.start()
    assert (await engine.generate(request(0))).versions == [4] * 8
    await engine.close()


async def test_an_engine_that_was_never_used_has_no_thread() -> None:
    async with asyncio.timeout(10):
        engine = TorchEngine(tiny_llama())
        assert not engine_threads()
        await engine.close()
        assert not engine_threads()


async def test_an_engine_that_is_dropped_takes_its_thread_and_its_model_with_it() -> None:
    engine = TorchEngine(tiny_llama())
    await engine.generate(request(0))
    model = weakref.ref(engine.model)
    assert len(engine_threads()) == 1
    del engine
    gc.collect()
    assert not engine_threads()
    assert model() is None


async def test_a_model_in_train_mode_samples_without_dropout() -> None:
    model = tiny_llama(attention_dropout=0.5)
    async with TorchEngine(model) as engine:
        calm = await engine.generate(request(0))
        model.train()
        assert await engine.generate(request(0)) == calm


# --------------------------------------------------------------------------- all of it at once


async def test_rows_that_come_go_wait_and_meet_new_weights_keep_exact_log_probabilities() -> None:
    models = [tiny_llama(seed=seed) for seed in range(4)]
    chance = random.Random(7)
    asked = [
        request(i, chance.choice((1, 4, 30, 90)), max_tokens=chance.randint(1, 40), temperature=1.0) for i in range(60)
    ]
    dropped = set(chance.sample(range(60), 10))
    served = tiny_llama(seed=0)
    watch = Watch(served)
    async with TorchEngine(served, max_batch_tokens=700, max_batch_size=9) as engine:
        tasks: list[asyncio.Task[Generation]] = []
        for i, one in enumerate(asked):
            tasks.append(start(engine.generate(one)))
            if i % 3 == 0:  # let some steps pass: an answer of one token takes a turn of its own
                await engine.generate(request(100 + i, 2, max_tokens=1))
            if i in dropped:
                tasks[i // 2].cancel()
            if i % 20 == 19:
                await engine.update_weights(models[i // 20 + 1])
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert max(rows * width for rows, _, width in watch.passes) <= 700
    finished = 0
    for one, answer in zip(asked, answers, strict=True):
        if isinstance(answer, asyncio.CancelledError):
            continue
        assert isinstance(answer, Generation)
        assert answer.versions is not None
        assert len(answer.tokens) == one.params.max_tokens
        scores = [rescored(model, one, answer) for model in models]
        expected = [scores[version][place] for place, version in enumerate(answer.versions)]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        finished += 1
    assert finished >= 50


def test_torch_is_loaded_only_when_the_engine_is_asked_for_and_its_absence_names_the_remedy() -> None:
    script = """
import sys
import unspool.engines
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.modules["torch"] = None
try:
    unspool.engines.TorchEngine
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "MissingExtraError TorchEngine needs the package torch, which is not installed: "
        "run `pip install 'unspool[torch]'`."
    )
