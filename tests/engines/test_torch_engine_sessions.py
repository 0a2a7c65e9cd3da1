"""What a TorchEngine keeps of a conversation goes when the episode is over."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.engines.tiny_models import Watch, prompt, request, tiny_llama
from tests.small import rollout, user
from unspool.engines.protocol import GenerateRequest
from unspool.engines.torch import TorchEngine
from unspool.engines.torch.kept import KeptCaches
from unspool.types import EngineError, SamplingParams


def caches(engine: TorchEngine) -> KeptCaches:
    assert engine._scheduler is not None
    return engine._scheduler.kept


async def settled(engine: TorchEngine) -> None:
    """Return when the engine's thread has dropped all that it was told."""
    assert engine._scheduler is not None
    over = caches(engine).over
    while await asyncio.wrap_future(engine._scheduler.command(lambda: bool(over))):
        pass


async def test_an_ended_session_is_dropped_and_others_stay() -> None:
    async with TorchEngine(tiny_llama()) as engine:
        for index, name in enumerate("abc"):
            await engine.generate(request(index, 20, max_tokens=2, session=name))
        engine.end_session("b")
        await settled(engine)
        kept = caches(engine)
        assert [kept.peek(name) is not None for name in "abc"] == [True, False, True]
        assert kept.tokens == sum(one.columns for name in "ac" if (one := kept.peek(name)) is not None)
        for name in ("a", "c", "b", "never heard of"):
            engine.end_session(name)
        await settled(engine)
        assert (len(kept), kept.tokens) == (0, 0)


async def test_an_engine_that_is_held_or_idle_drops_it_as_well() -> None:
    async with TorchEngine(tiny_llama()) as engine:
        await engine.generate(request(0, 20, max_tokens=2, session="a"))
        await engine.pause()
        engine.end_session("a")
        await settled(engine)
        assert len(caches(engine)) == 0
        await engine.resume()


async def test_an_answer_that_is_cancelled_in_its_last_step_leaves_nothing_behind() -> None:
    model = tiny_llama()
    reached, go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 3:
            reached.set()
            assert go_on.wait(20)

    watch = Watch(model)
    watch.before = hold
    async with TorchEngine(model) as engine:
        asked = asyncio.ensure_future(engine.generate(request(0, 20, max_tokens=3, session="a")))
        await asyncio.to_thread(reached.wait, 20)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        engine.end_session("a")
        go_on.set()
        await settled(engine)
        assert len(caches(engine)) == 0


async def test_a_session_that_begins_again_is_computed_whole_and_kept_again() -> None:
    model = tiny_llama()
    watch = Watch(model)
    async with TorchEngine(model) as engine:
        first = await engine.generate(request(0, 30, max_tokens=1, session="a"))
        engine.end_session("a")
        await settled(engine)
        ids = prompt(0, 30) + first.tokens + [3, 4]
        await engine.generate(GenerateRequest(ids, SamplingParams(max_tokens=1), "a"))
        assert [fed for _, fed, _ in watch.passes] == [30, 33]
        await settled(engine)  # what is kept is put away behind the answer
        assert caches(engine).peek("a") is not None


async def test_an_engine_without_a_thread_takes_it_in_silence() -> None:
    engine = TorchEngine(tiny_llama())
    engine.end_session("a")
    await engine.generate(request(0, 5, max_tokens=1, session="a"))
    await engine.close()
    engine.end_session("a")


def test_after_a_rollout_nothing_is_kept() -> None:
    engine = TorchEngine(tiny_llama())
    with rollout(engine, tools=None, sampling_params={"max_tokens": 4}) as episodes:
        results = episodes([user("Hello there."), user("What is the weather?")])
        asyncio.run(settled(engine))
        assert [t["error"] for t in results] == [None, None]
        assert len(caches(engine)) == 0


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"structured_outputs": {"regex": "a"}}, "VLLMEngine, VLLMSampler and ServerEngine can"),
        ({"adapter": "mine"}, "no adapters by name, and extra asks for 'mine'"),
        ({"raw_logprobs": True, "priority": 3}, "extra has 'priority', which TorchEngine does not know"),
    ],
)
async def test_what_it_would_have_to_leave_undone_is_refused(extra: dict[str, Any], said: str) -> None:
    async with TorchEngine(tiny_llama()) as engine:
        with pytest.raises(EngineError, match=said):
            await engine.generate(request(0, 5, max_tokens=1, extra=extra))
        assert len((await engine.generate(request(0, 5, max_tokens=1))).tokens) == 1
