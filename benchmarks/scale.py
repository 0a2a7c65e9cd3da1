"""(c) Ten thousand live episodes in one process: turns a CPU second, and memory an episode.

10,000 episodes of 3 turns (two tool calls and an answer; some 280 tokens of the Qwen3 tokenizer each), all live at
once, an engine that takes 10 ms, an async tool. Each contestant runs in a fresh process of its own, several times in
turn; the best run counts, as noise only ever adds.

CPU is the process's own (`time.process_time`, every thread, the kernel's share too) from the call of the rollout to its
results. Memory is what the operating system says (resident set, `/proc/self/statm`): after a garbage collection with
all results kept, less what it was just before the call, with the inputs already there; and the highest it ever was
(`VmHWM`), less the same. The results hold every list that a trainer gets: ids, labels, mask,
log-probabilities, versions.

The bound is the same sleeps in as many asyncio tasks, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.report import Result, Target
from benchmarks.workload import Load, lookup_tool, qwen3, template

LATENCY = 0.01
TURNS, SAMPLED, ANSWER, LAST = 3, 28, 14, 16
BOUND = "asyncio, the same sleeps (bound)"


def load_of(episodes: int) -> Load:
    return Load.of(episodes, TURNS - 1, SAMPLED, ANSWER, LAST)


@dataclass
class Measured:
    """One run in a process of its own; bytes and seconds."""

    cpu: float
    wall: float
    kept: int
    peak: int
    turns: int
    tokens: int


Work = Callable[[Load, float], Any]
"""Runs a load at a latency. Its results are kept while memory is measured: dicts with `turns` and `input_ids`, or
tuples that begin with the turns and the ids."""


def bound(load: Load, latency: float) -> list[tuple[int, tuple[()]]]:
    async def one() -> tuple[int, tuple[()]]:
        for _ in range(TURNS):
            await asyncio.sleep(latency)
        return TURNS, ()

    async def everyone() -> list[tuple[int, tuple[()]]]:
        return await asyncio.gather(*(one() for _ in load.trajectories))

    return asyncio.run(everyone())


def unspool(load: Load, latency: float) -> list[dict[str, Any]]:
    """`MultiTurnRollout` over a ScriptedEngine that takes 10 ms and gives log-probabilities."""
    from unspool import GenerateRequest, Generation, MultiTurnRollout, ScriptedEngine, ToolManager

    draw = random.Random(1).random

    def reply(request: GenerateRequest) -> Generation:
        index = int(request.session.rsplit("-", 1)[1])
        turn = told[index]
        told[index] += 1
        tokens = load.conversations[index].turns[turn]
        return Generation(tokens, [-draw() for _ in tokens])

    told = [0] * len(load.trajectories)
    engine = ScriptedEngine(reply, latency=latency, logprobs=True, keep_requests=False)
    rollout = MultiTurnRollout(engine, template(), ToolManager([lookup_tool(load.answers)]), progress=False)
    results = rollout(load.trajectories)
    for result in results:
        if result["stop_reason"] != "stop":
            raise RuntimeError(f"an episode ended with {result['stop_reason']}: {result['error']}")
    return results


OWN: dict[str, Work] = {BOUND: bound, "unspool": unspool}


def measure(name: str, episodes: int) -> Measured:
    """Run a contestant here and now. Meant for a process of its own: memory is that of the whole process."""
    work = OWN.get(name) or peers.scale_works()[name]  # peers take long to import
    work(load_of(20), LATENCY)
    load = load_of(episodes)
    gc.collect()
    before = _resident()
    cpu, wall = time.process_time(), time.perf_counter()
    results = work(load, LATENCY)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    gc.collect()
    kept = _resident() - before
    pairs = [(one["turns"], one["input_ids"]) if isinstance(one, dict) else one for one in results]
    turns = sum(turns for turns, *_ in pairs)
    tokens = sum(len(ids) for _, ids, *_ in pairs)
    return Measured(cpu, wall, kept, _peak() - before, turns, tokens)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure_apart(name: str, episodes: int) -> Measured:
    """The same in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.scale", name, str(episodes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def run(quick: bool = False) -> Result:
    """Measure them all."""
    qwen3()
    episodes, repetitions = (40, 1) if quick else (10_000, 3)
    runs: dict[str, list[Measured]] = {name: [] for name in (*OWN, *peers.scale_works())}
    for repetition in range(repetitions):
        for name, mine in runs.items():
            if repetition == 0 or name in OWN:
                mine.append(measure_apart(name, episodes))
    best = {name: min(mine, key=lambda one: one.cpu) for name, mine in runs.items()}
    ours = best["unspool"]
    result = Result(
        "c",
        f"{episodes:,} live episodes × {TURNS} turns, {ours.tokens / episodes:.0f} tokens each, engine of 10 ms, Qwen3",
        ("CPU, s", "wall, s", "turns / CPU s", "CPU a turn, us", "KiB an episode", "at the peak, KiB"),
    )
    for name, one in best.items():
        kept = min(other.kept for other in runs[name]) / 1024 / episodes
        peak = min(other.peak for other in runs[name]) / 1024 / episodes
        result.add(name, one.cpu, one.wall, one.turns / one.cpu, one.cpu / one.turns * 1e6, kept, peak)
        if name == "unspool":
            result.targets = [
                Target("unspool, turns / CPU second", one.turns / one.cpu, 4000, "at least"),
                Target("unspool, KiB an episode with its results", kept, 28),
            ]
    result.facts = {"episodes": episodes, "turns": ours.turns, "tokens": ours.tokens}
    result.notes = peers.notes()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="measure one contestant in this process, and print JSON")
    parser.add_argument("name")
    parser.add_argument("episodes", type=int)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.name, arguments.episodes))))


if __name__ == "__main__":
    main()
