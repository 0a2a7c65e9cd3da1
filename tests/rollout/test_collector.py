"""The garbage collector's setting: held back while many episodes live, given back afterwards."""

from __future__ import annotations

import asyncio
import gc

from tests.small import script, small_template, user
from unspool import MultiTurnRollout, ScriptedEngine
from unspool.rollout.collector import seldom


def test_many_episodes_hold_full_collections_back_until_the_last_rollout_ends() -> None:
    before = gc.get_threshold()
    with seldom(5000):
        assert gc.get_threshold() == (50_000, before[1], 1000)
        with seldom(5000):
            pass
        assert gc.get_threshold()[2] == 1000
    assert gc.get_threshold() == before
    with seldom(10):
        assert gc.get_threshold() == before


async def test_a_rollout_that_is_cancelled_gives_the_setting_back() -> None:
    before, seen = gc.get_threshold(), []
    started = asyncio.Event()

    async def reply(request: object) -> list[int]:
        seen.append(gc.get_threshold())
        started.set()
        await asyncio.Event().wait()
        return []

    task = asyncio.create_task(MultiTurnRollout(ScriptedEngine(reply), small_template()).acall([user("a")] * 1000))
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen[0][2] == 1000
    assert gc.get_threshold() == before


def test_a_finished_episode_leaves_no_cycles_of_ours_behind() -> None:
    rollout = MultiTurnRollout(script("ok"), small_template(), progress=False)
    rollout([user("warm up")])
    gc.collect()
    gc.disable()
    try:
        rollout([user("a")] * 50)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = {type(left) for left in gc.garbage}  # Jinja leaves some of its own for each render
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert {kind for kind in kinds if kind.__module__.partition(".")[0] in ("unspool", "asyncio", "_asyncio")} == set()
    assert not any("coroutine" in kind.__name__ for kind in kinds)
