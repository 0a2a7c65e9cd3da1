"""(d) CPU time of a rollout in one process with its model, over that of one plain batch.

16 trajectories of 3 turns, 48 tokens sampled in each, a tool answer of 40 tokens after each turn but the last, through
`MultiTurnRollout` and `TorchEngine` on the embedded model (SmolLM2-135M) in bfloat16. The bound is one call of
transformers' `generate` on the same 16 first prompts, 144 tokens each: as many sampled tokens, none in between. So the
ratio holds everything that turns cost: the tool answers' tokens, prefills, joining and leaving, templates, record.

Turns are of 48 tokens exactly, whatever is sampled: no token ends one, and the engine says `stop` where it would say
`length`, as that would end the episode. Both sides sample at temperature 1 with no truncation, and take turns,
repetition by repetition; the ratio is that of the least CPU time of each.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable

from benchmarks.real_model import ANSWER, Endless, answer_text, folder
from benchmarks.report import Result, Target
from unspool import ChatTemplate, GenerateRequest, Generation, MultiTurnRollout, TorchEngine

EPISODES, TURNS, SAMPLED = 16, 3, 48
THREADS = 2
_QUESTION = "Count the ships in the harbour, look up where each of them comes from, and tell me what they carry."


class FixedTurns(TorchEngine):
    """An engine whose turns all have `max_tokens` tokens and end as if the model had wanted it."""

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = await super().generate(dataclasses.replace(request, stop_token_ids=(-1,)))
        return dataclasses.replace(answer, stop_reason="stop")


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of the whole process, all its threads, over one call."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def plain_batch(engine: TorchEngine, prompt: list[int], rows: int, tokens: int) -> Callable[[], object]:
    """One call of transformers' `generate`."""
    import torch
    from transformers import GenerationConfig

    unreachable = engine.model.config.get_text_config().vocab_size  # no row ends before `tokens`, whatever is sampled
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0, eos_token_id=unreachable
    )
    ids = torch.tensor([prompt] * rows)

    def run() -> None:
        made = engine.model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        if made.shape[1] != len(prompt) + tokens:
            raise RuntimeError(f"generate made {made.shape[1] - len(prompt)} tokens, not {tokens}")

    return run


def rollout_of_turns(engine: TorchEngine, template: ChatTemplate, episodes: int, turns: int) -> Callable[[], object]:
    """The same number of tokens in turns."""
    world = Endless(answer_text(engine.tokenizer, ANSWER))
    rollout = MultiTurnRollout(
        engine,
        template,
        world,
        sampling_params={"max_tokens": SAMPLED, "temperature": 1.0},
        max_turns=turns,
        progress=False,
        seed=0,
    )
    trajectories = [{"messages": [{"role": "user", "content": _QUESTION}]} for _ in range(episodes)]

    def run() -> None:
        for result in rollout(trajectories):
            if result["turns"] != turns or sum(result["loss_mask"]) != turns * SAMPLED:
                raise RuntimeError(f"an episode of {result['turns']} turns: {result['error']}")

    return run


def run(quick: bool = False) -> Result:
    """Measure both."""
    import torch

    episodes, turns, times = (2, 2, 1) if quick else (EPISODES, TURNS, 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        engine = FixedTurns.from_pretrained(folder(), dtype="bfloat16")
        template = ChatTemplate(engine.tokenizer)
        prompt = template.encode([{"role": "user", "content": _QUESTION}])
        contestants = {
            "one plain `generate` (bound)": plain_batch(engine, prompt, episodes, turns * SAMPLED),
            "unspool, `MultiTurnRollout`, `TorchEngine`": rollout_of_turns(engine, template, episodes, turns),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(times):
            for name, work in contestants.items():
                seconds[name].append(cpu_seconds(work))
    finally:
        torch.set_num_threads(threads)
    result = Result(
        "d",
        f"CPU time of {episodes} episodes × {turns} turns × {SAMPLED} tokens, {ANSWER}-token answers, real model",
        ("CPU, s", "/ bound", "sampled tokens a CPU second"),
    )
    best = {name: min(values) for name, values in seconds.items()}
    tokens = episodes * turns * SAMPLED
    bound, own = contestants
    for name, value in best.items():
        result.add(name, value, value / best[bound], tokens / value)
    result.targets = [Target(f"{own}, / bound", best[own] / best[bound], 1.30)]
    result.facts = {"episodes": episodes, "turns": episodes * turns, "sampled tokens": tokens, "threads": THREADS}
    pairs = zip(seconds[bound], seconds[own], strict=True)
    result.notes = ["each repetition's ratio: " + ", ".join(f"{mine / plain:.2f}" for plain, mine in pairs)]
    return result
