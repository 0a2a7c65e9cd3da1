"""Where memory runs out beside running rows, nobody's answer is lost and none is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engines.tiny_models import Watch, request, tiny_llama
from unspool.engines.protocol import GenerateRequest, Generation
from unspool.engines.torch import TorchEngine, batch
from unspool.types import EngineError

LONG, LATE = request(0, 5, max_tokens=60), request(1, 12, max_tokens=8)


def short_at(patch: pytest.MonkeyPatch, name: str, call: int) -> list[int]:
    """Let one call of a function that makes buffers run out of memory; the list counts the calls."""
    own: Callable[..., Any] = getattr(batch, name)
    calls: list[int] = []

    def made(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("too much")
        return own(*given)

    patch.setattr(batch, name, made)
    return calls


async def alone(*asked: GenerateRequest) -> list[list[int]]:
    async with TorchEngine(tiny_llama()) as engine:
        return [(await engine.generate(one)).tokens for one in asked]


async def late_beside_long(engine: TorchEngine, watch: Watch) -> list[Generation]:
    """The second request comes while the engine stands before the fourth pass, of the first one."""
    loop, tasks = asyncio.get_running_loop(), []
    sent = asyncio.Event()

    def send() -> None:
        tasks.append(loop.create_task(engine.generate(LATE)))
        loop.call_soon(sent.set)

    def before(number: int) -> None:
        if number == 4:
            asyncio.run_coroutine_threadsafe(_sent(send, sent), loop).result(30)

    watch.before = before
    first = await engine.generate(LONG)
    return [first, await tasks[0]]


async def _sent(send: Callable[[], None], sent: asyncio.Event) -> None:
    send()
    await sent.wait()


@pytest.mark.parametrize("kept", [0, 1000])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
async def test_a_join_that_fails_at_any_layer_leaves_no_half_of_it(
    monkeypatch: pytest.MonkeyPatch, call: int, kept: int
) -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model, max_kept_tokens=kept) as engine:
        await engine.generate(request(7, 4, max_tokens=1, session="other"))
        watch.passes.clear()
        calls = short_at(monkeypatch, "_aligned", call)
        answers = await late_beside_long(engine, watch)
    assert len(calls) >= call
    assert [answer.tokens for answer in answers] == await alone(LONG, LATE)


async def test_a_single_newcomer_that_finds_no_memory_beside_others_waits_for_some() -> None:
    model = tiny_llama()
    watch = Watch(model)
    failed: list[int] = []

    def short(number: int, fed: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
        if len(fed[0]) == len(LATE.input_ids) and not failed:
            failed.append(number)
            raise torch.OutOfMemoryError("too much")
        return logits

    watch.logits = short
    async with TorchEngine(model, max_kept_tokens=0) as engine:
        answers = await late_beside_long(engine, watch)
    assert failed == [5]
    assert [answer.tokens for answer in answers] == await alone(LONG, LATE)


async def test_rows_whose_batch_finds_no_memory_to_shrink_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(i, 5, max_tokens=length) for i, length in enumerate((20, 20, 6))]
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        calls = short_at(monkeypatch, "_grow", 6)  # four at the first decoding step; the third row leaves later
        await engine.resume()
        answers = await asyncio.gather(*tasks)
    assert len(calls) >= 6
    assert [(rows, fed) for rows, fed, _ in watch.passes if fed > 1] == [(3, 5), (2, 11)]
    assert [answer.tokens for answer in answers] == await alone(*asked)


async def test_a_row_by_itself_that_finds_no_memory_is_an_error() -> None:
    model = tiny_llama()
    watch = Watch(model)

    def short(number: int, fed: list[list[int]], logits: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("too much")

    watch.logits = short
    async with TorchEngine(model) as engine:
        with pytest.raises(EngineError, match="allow less in a batch"):
            await engine.generate(LONG)
