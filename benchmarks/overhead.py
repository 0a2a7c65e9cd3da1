"""(b) CPU time of a turn as one conversation grows.

One conversation of 64 turns: 63 tokens sampled, a tool answer of 512 tokens, again and again, on the real Qwen3
tokenizer and chat template. A turn here is everything between two calls of the engine: read what was sampled, run the
tool, write what comes next, build the next context; the engine itself answers at once. It is timed with the process's
CPU clock at each call of the engine. The bound does what cannot be avoided, on the same texts: append the sampled
ids, encode the tool's text alone, append those.

Contestants take turns, repetition by repetition. A cell is the median over repetitions and over the few turns around
the one named (one turn alone is noise); a ratio is the median over repetitions of the ratio to the bound's total in
the same repetition.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks import peers
from benchmarks.report import Result, Target
from benchmarks.workload import (
    TOOL_NAME,
    Conversation,
    Run,
    encode,
    lookup_tool,
    make_conversation,
    qwen3,
    template,
    tool_infos,
)
from unspool import GenerateRequest, Generation, Limits, ScriptedEngine, ToolManager, run_episode
from unspool.policy import TokenPolicy

SAMPLED, ANSWER = 63, 512
BOUND = "append, encode the tool text (bound)"


Contestant = Callable[[Conversation], Run]


def bound(conversation: Conversation) -> Run:
    """Append, and encode the tool's text alone."""
    run = Run()
    ids: list[int] = []
    run.mark()
    for turn, topic in zip(conversation.turns, conversation.topics, strict=False):
        ids += turn
        ids += encode(conversation.answers[topic])
        run.mark()
    return run


def unspool(conversation: Conversation) -> Run:
    """The real loop: `run_episode` over `TokenPolicy` and `ToolManager`, with an async tool."""
    run = Run()

    def reply(request: GenerateRequest) -> Generation:
        run.mark()
        return Generation(conversation.turns[len(run.marks) - 1])

    policy = TokenPolicy(ScriptedEngine(reply, keep_requests=False), template())
    world = ToolManager([lookup_tool(conversation.answers)])
    episode = asyncio.run(run_episode(policy, world, Limits(max_turns=None), messages=conversation.messages))
    if episode.stop_reason != "stop":
        raise RuntimeError(f"the episode ended with {episode.stop_reason}: {episode.error}")
    run.ids = episode.record.input_ids
    return run


def encode_again(conversation: Conversation) -> Run:
    """Render and encode the whole conversation every turn, with the tokenizer's own `apply_chat_template`."""
    run = Run()
    tokenizer, reader = qwen3(), template()
    messages = [*conversation.messages]
    run.mark()
    for turn, topic in zip(conversation.turns, conversation.topics, strict=False):
        messages.append(reader.parse(turn).to_dict())
        messages.append({"role": "tool", "name": TOOL_NAME, "content": conversation.answers[topic]})
        run.ids = tokenizer.apply_chat_template(
            messages, tools=tool_infos(), add_generation_prompt=True, return_dict=False
        )
        run.mark()
    return run


def canonical_turns(conversation: Conversation, ids: Sequence[int]) -> int:
    """How many turns, each with the answer to it, stand in `ids` just as the template renders them all."""
    reader = template()
    messages = [*conversation.messages]
    for turn, topic in zip(conversation.turns, conversation.topics, strict=False):
        messages.append(reader.parse(turn).to_dict())
        messages.append({"role": "tool", "name": TOOL_NAME, "content": conversation.answers[topic]})
    whole = reader.encode(messages, tool_infos())
    wanted, found = (_messages(part)[-2 * len(conversation.topics) - 1 :] for part in (whole, ids[: len(whole)]))
    same = [a == b for a, b in zip(wanted, found, strict=False)][: 2 * len(conversation.topics)]
    return sum(turn and answer for turn, answer in zip(same[::2], same[1::2], strict=False))


def _messages(ids: Sequence[int]) -> list[list[int]]:
    """The ids cut before each `<|im_start|>`."""
    (start,) = encode("<|im_start|>")
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == start:
            parts.append([])
        parts[-1].append(token)
    return parts


def contestants() -> dict[str, tuple[Contestant, int]]:
    """Each contestant, and how many repetitions lie between two of its own: the slow ones run seldom."""
    found: dict[str, tuple[Contestant, int]] = {
        BOUND: (bound, 1),
        "unspool": (unspool, 1),
        "encode the whole conversation": (encode_again, 8),
    }
    return {**found, **peers.overhead_contestants()}


def run(quick: bool = False) -> Result:
    """Measure them all."""
    calls, repetitions = (4, 1) if quick else (64, 25)
    shown = (1, 2, 4) if quick else (1, 16, 64)
    conversation = make_conversation(random.Random(0), calls, SAMPLED, ANSWER, 20)
    everyone = contestants()
    warm_up = make_conversation(random.Random(1), 4, SAMPLED, ANSWER, 20)
    runs: dict[str, list[Run]] = {name: [] for name in everyone}
    ratios: dict[str, list[float]] = {name: [] for name in everyone}
    for contestant, _ in everyone.values():
        contestant(warm_up)
    for repetition in range(repetitions):
        for name, (contestant, every) in everyone.items():
            if repetition % every:
                continue
            gc.collect()
            runs[name].append(contestant(conversation))
            ratios[name].append(runs[name][-1].total / runs[BOUND][-1].total)
    result = Result(
        "b",
        f"CPU time of a turn in one conversation of {calls} turns, {SAMPLED} sampled + {ANSWER} tool tokens, Qwen3",
        (*(f"turn {turn}, ms" for turn in shown), f"all {calls}, s", "/ bound", "canonical turns"),
    )
    for name, mine in runs.items():
        times = {turn: _around([run.turns for run in mine], turn) for turn in shown}
        total = median(run.total for run in mine)
        canonical = f"{canonical_turns(conversation, mine[-1].ids)}/{calls}" if mine[-1].ids else None
        result.add(name, *(times[turn] * 1e3 for turn in shown), total, median(ratios[name]), canonical)
        if name == "unspool":
            result.targets = [
                Target("unspool / bound, all turns", median(ratios[name]), 2.0),
                Target(f"unspool, turn {shown[-1]} / turn 1", times[shown[-1]] / times[1], 1.2),
            ]
            result.facts["canonical"] = canonical_turns(conversation, mine[-1].ids)
            result.facts["input_ids"] = len(mine[-1].ids)
    result.facts["turns"] = len(runs["unspool"][-1].turns)
    result.notes = peers.notes()
    return result


def _around(runs: Sequence[Sequence[float]], turn: int, width: int = 5) -> float:
    """Median over runs and over up to `width` turns around `turn` (from 1)."""
    count = len(runs[0])
    first = min(max(turn - 1 - width // 2, 0), max(count - width, 0))
    return median(time for run in runs for time in run[first : first + width])
