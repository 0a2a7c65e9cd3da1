"""(g) Slow tools on the real vLLM: wall time against the ideal schedule, and against two lockstep loops.

32 trajectories of 3 turns, 16 tokens sampled in each. A tool takes as long as a turn's generation does with all 32 in
the batch, measured at the start, and one call in ten, drawn once, ten times as long. The bound is the longer of two:
the critical path (the longest, over the trajectories, of its tools and its own turns, a turn as long as measured), and
the time that all tokens take in one plain batch of 32, both measured in the same run. Beside it stands a bound that
nothing can reach, as all begin at once: the critical path with every turn at the pace of one that runs alone.

unspool runs `MultiTurnRollout` over `VLLMEngine`. The lockstep loops feed the same engine with the same tokens: all
sample together, then all tools run, side by side or one after another.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from benchmarks.real_model import ANSWER, Endless, answer_text, folder
from benchmarks.report import Result, Target
from benchmarks.vllm_fixed import FixedTurns, fresh_prompts, make_engine, sample_plainly, seconds_of
from unspool import ChatTemplate, MultiTurnRollout
from unspool.engines import VLLMEngine
from unspool.types import Message
from unspool.world import Step

EPISODES, TURNS, SAMPLED = 32, 3, 16
SLOW_SHARE, SLOWER = 10, 10
UNSPOOL, PARALLEL, SERIAL = "unspool, `VLLMEngine`", "lockstep, parallel tools", "lockstep, serial tools"

Waits = list[list[float]]
"""Seconds of each tool call, by trajectory and turn."""


class Slow(Endless):
    """Answers after the seconds given, call by call. For one trajectory."""

    def __init__(self, text: str, waits: list[float]) -> None:
        super().__init__(text)
        self._waits = iter(waits)

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(next(self._waits))
        return await super().step(message)


@dataclass(frozen=True)
class Paces:
    """Seconds of a turn alone, of a turn with all in the batch, and of all tokens in one plain batch."""

    alone: float
    together: float
    everything: float

    def bound(self, waits: Waits, *, alone: bool = False) -> float:
        turn = self.alone if alone else self.together
        critical = max(sum(calls) + (len(calls) + 1) * turn for calls in waits)
        return max(critical, self.everything)


def draw_waits(episodes: int, turns: int, quick: float) -> Waits:
    """One call in ten is slow, drawn from a fixed seed."""
    calls = [(episode, turn) for episode in range(episodes) for turn in range(turns - 1)]
    slow = set(random.Random(2).sample(calls, max(1, len(calls) // SLOW_SHARE)))
    return [
        [quick * (SLOWER if (episode, turn) in slow else 1) for turn in range(turns - 1)] for episode in range(episodes)
    ]


async def measure_paces(engine: VLLMEngine, template: ChatTemplate, episodes: int, turns: int) -> Paces:
    async def batch(rows: int, tokens: int) -> float:
        return await seconds_of(sample_plainly(engine, fresh_prompts(template, rows)[1], tokens))

    await batch(episodes, SAMPLED)  # kernels are compiled in the first batch
    return Paces(
        alone=min([await batch(1, SAMPLED) for _ in range(3)]),
        together=await batch(episodes, SAMPLED),
        everything=await batch(episodes, turns * SAMPLED),
    )


async def run_unspool(engine: VLLMEngine, template: ChatTemplate, waits: Waits) -> float:
    text = answer_text(template.tokenizer, ANSWER)
    rollout = MultiTurnRollout(
        FixedTurns(engine, sessions=False),
        template,
        [Slow(text, calls) for calls in waits],
        sampling_params={"max_tokens": SAMPLED},
        max_turns=len(waits[0]) + 1,
        progress=False,
    )
    trajectories = fresh_prompts(template, len(waits))[0]
    started = time.perf_counter()
    results = await rollout.acall(trajectories)
    elapsed = time.perf_counter() - started
    if any(result["turns"] != len(waits[0]) + 1 for result in results):
        raise RuntimeError(f"an episode failed: {[result['error'] for result in results if result['error']]}")
    return elapsed


async def run_lockstep(engine: VLLMEngine, template: ChatTemplate, waits: Waits, *, side_by_side: bool) -> float:
    contexts = fresh_prompts(template, len(waits))[1]
    answer = [{"role": "tool", "name": "lookup", "content": answer_text(template.tokenizer, ANSWER)}]
    started = time.perf_counter()
    for turn in range(len(waits[0]) + 1):
        answers = await sample_plainly(engine, contexts, SAMPLED)
        if turn == len(waits[0]):
            break
        if side_by_side:
            await asyncio.gather(*(asyncio.sleep(calls[turn]) for calls in waits))
        else:
            for calls in waits:
                await asyncio.sleep(calls[turn])
        for row, said in enumerate(answers):
            ids = [*contexts[row], *said.tokens]
            contexts[row] = [*ids, *template.bridge(ids, answer)]
    return time.perf_counter() - started


async def _measure(episodes: int, turns: int) -> tuple[Paces, Waits, dict[str, float]]:
    async with make_engine() as engine:
        template = ChatTemplate(str(folder()))
        paces = await measure_paces(engine, template, episodes, turns)
        waits = draw_waits(episodes, turns, paces.together)
        return (
            paces,
            waits,
            {
                UNSPOOL: await run_unspool(engine, template, waits),
                PARALLEL: await run_lockstep(engine, template, waits, side_by_side=True),
                SERIAL: await run_lockstep(engine, template, waits, side_by_side=False),
            },
        )


def run(quick: bool = False) -> Result:
    """Measure all three."""
    episodes, turns = (4, 2) if quick else (EPISODES, TURNS)
    paces, waits, seconds = asyncio.run(_measure(episodes, turns))
    bound, unreachable = paces.bound(waits), paces.bound(waits, alone=True)
    result = Result(
        "g",
        f"wall time of {episodes} episodes × {turns} turns of {SAMPLED} tokens on vLLM, tools of "
        f"{paces.together:.1f} s, one in ten {SLOWER} times that",
        ("wall, s", "/ bound", "/ every turn alone"),
    )
    result.add("the longer of critical path and tokens (bound)", bound, 1.0, bound / unreachable)
    for name, wall in seconds.items():
        result.add(name, wall, wall / bound, wall / unreachable)
    result.targets = [
        Target("wall time, / bound", seconds[UNSPOOL] / bound, 1.15),
        Target("wall time, / lockstep with parallel tools", seconds[UNSPOOL] / seconds[PARALLEL], 1.0),
        Target("wall time, / lockstep with serial tools", seconds[UNSPOOL] / seconds[SERIAL], 1.0),
    ]
    calls = [call for each in waits for call in each]
    result.facts = {"episodes": episodes, "calls": len(calls), "slow calls": sum(c > min(calls) for c in calls)}
    return result
