"""(f) Turns on the real vLLM over one plain batch of it, and what a turn prefills with the prefix cache.

16 trajectories of 3 turns, 48 tokens sampled in each, a tool answer of 40 tokens after each turn but the last, through
`MultiTurnRollout` and `VLLMEngine` on the embedded model (SmolLM2-135M) in bfloat16, once with vLLM's prefix cache and
once with sessions that stay open between turns. The bound is the engine alone, given 16 such prompts at once for 144
tokens each: as many sampled tokens, none in between.

Turns are of 48 tokens exactly, whatever is sampled: nothing ends one early, and the engine says `stop` where it would
say `length`, as that would end the episode. The contestants take turns, repetition by repetition, each with prompts
that no cache knows yet; the ratio is that of the least wall time of each, since vLLM runs in processes of its own.

What a turn prefills is its context less what vLLM says it took from its cache. At best that is what is new (of the
first turn all of it) and what fills no block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.real_model import ANSWER, Endless, answer_text, folder
from benchmarks.report import Result, Target
from benchmarks.vllm_fixed import BLOCK, FixedTurns, fresh_prompts, make_engine, sample_plainly, seconds_of
from unspool import ChatTemplate, MultiTurnRollout
from unspool.engines import VLLMEngine

EPISODES, TURNS, SAMPLED, TIMES = 16, 3, 48, 3
PLAIN = "one plain batch of vLLM (bound)"
CACHE, SESSIONS = "unspool, `VLLMEngine`, prefix cache", "unspool, `VLLMEngine`, resumable sessions"

Run = Callable[[], Awaitable[object]]


def rollout_of_turns(
    engine: VLLMEngine, template: ChatTemplate, episodes: int, turns: int, *, sessions: bool, prefilled: list[int]
) -> Run:
    """A rollout of new prompts; what each turn prefilled beyond its new tokens goes into `prefilled`."""
    rollout = MultiTurnRollout(
        FixedTurns(engine, sessions=sessions),
        template,
        Endless(answer_text(template.tokenizer, ANSWER)),
        sampling_params={"max_tokens": SAMPLED, "temperature": 1.0},
        max_turns=turns,
        progress=False,
        seed=0,
    )

    async def run() -> None:
        for result in await rollout.acall(fresh_prompts(template, episodes)[0]):
            if result["turns"] != turns or sum(result["loss_mask"]) != turns * SAMPLED:
                raise RuntimeError(f"an episode of {result['turns']} turns: {result['error']}")
            prefilled.extend(prefilled_beyond_new(result["spans"]))

    return run


def prefilled_beyond_new(spans: list[dict[str, Any]]) -> list[int]:
    """For each turn, tokens that were prefilled although an earlier turn had fed or sampled them."""
    beyond, length, known = [], 0, 0
    for span in spans:
        if span["origin"] == "sampled":
            computed = length - span["metadata"]["cached_tokens"]
            beyond.append(computed - (length - known))
            known = length + span["length"]
        length += span["length"]
    return beyond


async def _measure(episodes: int, turns: int, times: int) -> tuple[dict[str, float], dict[str, list[int]]]:
    async with make_engine() as engine:
        template = ChatTemplate(str(folder()))
        beyond: dict[str, list[int]] = {CACHE: [], SESSIONS: []}

        async def plain() -> None:
            await sample_plainly(engine, fresh_prompts(template, episodes)[1], turns * SAMPLED)

        contestants: dict[str, Run] = {
            PLAIN: plain,
            **{
                name: rollout_of_turns(
                    engine, template, episodes, turns, sessions=name == SESSIONS, prefilled=beyond[name]
                )
                for name in beyond
            },
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        await plain()  # kernels are compiled in the first batch
        for _ in range(times):
            for name, work in contestants.items():
                seconds[name].append(await seconds_of(work()))
    return {name: min(measured) for name, measured in seconds.items()}, beyond


def run(quick: bool = False) -> Result:
    """Measure all three."""
    episodes, turns, times = (2, 2, 1) if quick else (EPISODES, TURNS, TIMES)
    least, beyond = asyncio.run(_measure(episodes, turns, times))
    result = Result(
        "f",
        f"wall time of {episodes} episodes × {turns} turns of {SAMPLED} tokens on vLLM, best of {times}",
        ("wall, s", "/ bound", "prefilled beyond new tokens, most a turn"),
    )
    for name, seconds in least.items():
        result.add(name, seconds, seconds / least[PLAIN], max(beyond[name]) if beyond.get(name) else None)
    result.targets = [
        Target("wall time with the prefix cache, / bound", least[CACHE] / least[PLAIN], 1.45),
        Target("wall time with resumable sessions, / bound", least[SESSIONS] / least[PLAIN], 1.35),
        Target("tokens prefilled in a turn beyond the new ones, prefix cache", max(beyond[CACHE]), BLOCK),
    ]
    result.facts = {"episodes": episodes, "turns": episodes * turns, "tokens": episodes * turns * SAMPLED}
    return result
