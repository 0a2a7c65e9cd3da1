"""(a) Wall time against the ideal schedule.

64 episodes of 4 turns, a turn of 40 decoding steps of 10 ms, so 400 ms, whatever runs beside it. Each turn but the last
calls a tool, which takes 10 ms, or, one call in ten, 2 s; which calls are slow is drawn once and the same for all.
The ideal is the critical path: the longest, over the episodes, of the sum of its own turns and tools. Then the same
with tools that take no time.

unspool runs its real rollout, with the Qwen3 tokenizer and template, over an engine that takes any number of requests
at once, and over a sampler that blocks for a whole batch and takes no more until it is done (`Batching` cuts the
batches; a round that waits for one still running costs it up to a turn: that is the sampler's nature). The lockstep
loops do nothing but wait: all live episodes sample together, then all tools run, one after another or side by side.
Nothing here computes, so other work on the machine shows little.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks import peers
from benchmarks.report import Cell, Result, Target
from benchmarks.workload import TOOL_DESCRIPTION, TOOL_NAME, Load, template
from unspool import (
    GenerateRequest,
    MultiTurnRollout,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    ScriptedEngine,
    Tool,
    ToolManager,
    tool,
)

SLOW_SHARE = 10
Seconds = dict[str, float]
"""What each tool call takes, by the topic that it asks for."""

Contestant = Callable[[Load, float, Seconds], float]
"""Given the load, a turn's seconds and the tools' seconds: the wall time."""


def ideal(load: Load, latency: float, seconds: Seconds) -> float:
    """The critical path, computed."""
    return max(len(one.turns) * latency + sum(seconds[topic] for topic in one.topics) for one in load.conversations)


def over_async_engine(load: Load, latency: float, seconds: Seconds) -> float:
    return _rollout(load, ScriptedEngine(_reply(load), latency, keep_requests=False), _async_tool(load, seconds))


def over_async_engine_with_threads(load: Load, latency: float, seconds: Seconds) -> float:
    return _rollout(load, ScriptedEngine(_reply(load), latency, keep_requests=False), _blocking_tool(load, seconds))


def over_batch_sampler(load: Load, latency: float, seconds: Seconds) -> float:
    return _rollout(load, _Sampler(load, latency), _async_tool(load, seconds))


def lockstep_serial_tools(load: Load, latency: float, seconds: Seconds) -> float:
    return asyncio.run(_lockstep(load, latency, seconds, side_by_side=False))


def lockstep_parallel_tools(load: Load, latency: float, seconds: Seconds) -> float:
    return asyncio.run(_lockstep(load, latency, seconds, side_by_side=True))


CONTESTANTS: dict[str, Contestant] = {
    "unspool, async engine": over_async_engine,
    "unspool, async engine, blocking tools on threads": over_async_engine_with_threads,
    "unspool, blocking batch sampler": over_batch_sampler,
    "lockstep, parallel tools": lockstep_parallel_tools,
    "lockstep, serial tools": lockstep_serial_tools,
}


def _rollout(load: Load, engine: object, lookup: Tool) -> float:
    rollout = MultiTurnRollout(engine, template(), ToolManager([lookup]), progress=False)
    started = time.perf_counter()
    results = rollout(load.trajectories)
    elapsed = time.perf_counter() - started
    for result, conversation in zip(results, load.conversations, strict=True):
        if result["stop_reason"] != "stop" or result["turns"] != len(conversation.turns):
            raise RuntimeError(f"an episode ended with {result['stop_reason']}: {result['error']}")
    return elapsed


def _turns(load: Load) -> Callable[[str], list[int]]:
    """The next turn of a session; sessions are numbered in the order of the trajectories."""
    told = [0] * len(load.conversations)

    def next_turn(session: str) -> list[int]:
        index = int(session.rsplit("-", 1)[1])
        told[index] += 1
        return load.conversations[index].turns[told[index] - 1]

    return next_turn


def _reply(load: Load) -> Callable[[GenerateRequest], list[int]]:
    next_turn = _turns(load)
    return lambda request: next_turn(request.session)


class _Sampler:
    """Blocks for a turn's time, whatever the size of the batch."""

    def __init__(self, load: Load, latency: float) -> None:
        self._next_turn = _turns(load)
        self._latency = latency

    def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> list[SampleResponse]:
        time.sleep(self._latency)
        return [SampleResponse([SampledSequence("stop", self._next_turn(item["session"]))]) for item in batch]


def _async_tool(load: Load, seconds: Seconds) -> Tool:
    answers = load.answers

    async def lookup(topic: str) -> str:
        if seconds[topic]:
            await asyncio.sleep(seconds[topic])
        return answers[topic]

    return tool(name=TOOL_NAME, description=TOOL_DESCRIPTION)(lookup)


def _blocking_tool(load: Load, seconds: Seconds) -> Tool:
    answers = load.answers

    def lookup(topic: str) -> str:
        if seconds[topic]:
            time.sleep(seconds[topic])
        return answers[topic]

    return tool(name=TOOL_NAME, description=TOOL_DESCRIPTION)(lookup)


async def _lockstep(load: Load, latency: float, seconds: Seconds, *, side_by_side: bool) -> float:
    started = time.perf_counter()
    for turn in range(max(len(one.turns) for one in load.conversations)):
        await asyncio.sleep(latency)
        waits = [seconds[one.topics[turn]] for one in load.conversations if turn < len(one.topics)]
        if side_by_side:
            await asyncio.gather(*map(asyncio.sleep, waits))
        else:
            for wait in waits:
                await asyncio.sleep(wait)
    return time.perf_counter() - started


def tool_seconds(load: Load, quick: float, slow: float) -> Seconds:
    """Which of the calls are slow: one in ten, drawn from a fixed seed."""
    topics = [topic for one in load.conversations for topic in one.topics]
    slow_ones = set(random.Random(2).sample(topics, max(1, len(topics) // SLOW_SHARE)))
    return {topic: slow if topic in slow_ones else quick for topic in topics}


def run(quick: bool = False) -> Result:
    """Measure them all."""
    episodes, turns, steps, step = (6, 3, 2, 0.005) if quick else (64, 4, 40, 0.01)
    latency = steps * step
    load = Load.of(episodes, turns - 1, 28, 14, 16)
    slow = tool_seconds(load, *((0.002, 0.05) if quick else (0.01, 2.0)))
    instant = dict.fromkeys(slow, 0.0)
    result = Result(
        "a",
        f"wall time of {episodes} episodes × {turns} turns of {latency * 1e3:.0f} ms",
        ("slow tools, s", "/ ideal", "instant tools, s", "/ ideal"),
    )
    best = ideal(load, latency, slow), ideal(load, latency, instant)
    result.add("ideal (computed)", best[0], 1.0, best[1], 1.0)
    for name, contestant in {**CONTESTANTS, **peers.schedule_runs()}.items():
        contestant(Load.of(2, turns - 1, 28, 14, 16), 0.0, _nothing(turns))
        cells: list[Cell] = []
        for seconds, bound in zip((slow, instant), best, strict=True):
            elapsed = contestant(load, latency, seconds)
            cells += [elapsed, elapsed / bound]
        result.add(name, *cells)
        if name == "unspool, async engine":
            result.targets = [Target(f"{name}, slow tools, / ideal", float(cells[1] or 0), 1.03)]
    result.facts = {
        "episodes": episodes,
        "calls": len(slow),
        "slow calls": sum(s == max(slow.values()) for s in slow.values()),
    }
    result.notes = peers.notes()
    return result


def _nothing(turns: int) -> Seconds:
    return {topic: 0.0 for one in Load.of(2, turns - 1, 28, 14, 16).conversations for topic in one.topics}
