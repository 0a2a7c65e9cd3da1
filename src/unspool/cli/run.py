"""`unspool run`: from a configuration to finished trajectories, on disk and in a table.

What can be wrong with a configuration is found before a model is loaded. Each trajectory's trace is written when it
ends, so what is done survives whatever comes later.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console

from unspool.cli.config import RunConfig
from unspool.cli.engines import check_engine, extra_of_run, load_engine, make_api
from unspool.cli.loading import load_template, model_folder, template_source
from unspool.cli.output import TRACES, check_output, clear_output, write_output
from unspool.cli.render import render_trajectory
from unspool.cli.summary import reward_of, summarise, summary_table
from unspool.cli.tasks import Reward, load_object, load_prompts, load_reward, load_world
from unspool.engines.embedded import EMBEDDED
from unspool.episode import Limits
from unspool.rollout import APIMultiTurnRollout, MultiTurnRollout
from unspool.rollout.driver import EpisodeRollout
from unspool.trace import TraceWriter
from unspool.types import InvalidValueError, RolloutInterrupted, SamplingParams, Trajectory
from unspool.world import ToolManager
from unspool.world.making import Given

_API_CONCURRENCY = 8
_ORDER = "_unspool_order"  # in a trajectory while it runs: the place of its prompt


def run(config: RunConfig, console: Console | None = None) -> list[Trajectory]:
    """Run a configuration and write its output; returns the trajectories, in the order of their prompts.

    Raises:
        UnspoolError: the configuration cannot be run; nothing was started.
        RolloutInterrupted: Ctrl-C; what was finished is written all the same, and is its `results`.
    """
    console = console or Console()
    parts = _prepare(config)
    output = config.output
    rollout, noted = (
        _api_rollout(config, parts, console) if config.engine == "api" else _rollout(config, parts, console)
    )
    with rollout:
        clear_output(output.dir)
        trace = TraceWriter(output.dir / TRACES, success_callback=_succeeded, metadata=noted) if output.traces else None
        results = asyncio.run(_collect(rollout, parts, trace))
    if not results:
        raise RolloutInterrupted([])
    summary = summarise(results, rollout.stats)
    write_output(config, results, summary, noted)
    if output.show:
        console.print()
        template = rollout.template if isinstance(rollout, MultiTurnRollout) else None
        render_trajectory(_most_telling(results), template, console=console)
    console.print(summary_table(summary))
    console.print(f"written to {output.dir}", markup=False)
    if len(results) < len(parts.prompts) * config.num_generations:
        raise RolloutInterrupted(results)
    return results


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a run needs beside a model."""

    prompts: list[Trajectory]
    reward: Reward | None
    world: Given | None
    params: SamplingParams
    limits: Limits


def _prepare(config: RunConfig) -> _Parts:
    """Everything that can be had, and refused, without a model."""
    prompts, task_reward = load_prompts(config.data)
    if not prompts:
        raise InvalidValueError("there are no prompts to run; look at data.path and data.size")
    reward = load_reward(config.reward) if config.reward else task_reward
    world: Given | None = None
    if config.env is not None:
        world = load_world(config.env, config.env_args, config.env_timeout)
    elif config.tools:
        world = ToolManager([load_object(path) for path in config.tools], timeout=config.tool_timeout)
    params = SamplingParams(**config.sampling.model_dump(exclude={"extra"}))
    limits = Limits(**config.limits.model_dump())
    template_source(config.template)
    check_engine(config)
    check_output(config.output)
    return _Parts(prompts, reward, world, params, limits)


def _folder(config: RunConfig, console: Console) -> str:
    if config.model.path == EMBEDDED:
        console.print("embedded model: made on its first use, which takes some 20 s more")
    return model_folder(config.model.path)


def _rollout(config: RunConfig, parts: _Parts, console: Console) -> tuple[EpisodeRollout, dict[str, str]]:
    """The rollout, and what is noted beside its trajectories."""
    folder = _folder(config, console)
    template = load_template(config.template, folder)
    if config.engine == "server":
        console.print(f"asking {', '.join(config.server.urls)}", markup=False)
    else:
        console.print(f"loading {config.model.path} ({config.model.dtype}, {config.engine})", markup=False)
    rollout = MultiTurnRollout(
        load_engine(config, folder),
        template,
        parts.world,
        parts.params,
        limits=parts.limits,
        seed=config.seed,
        num_generations=config.num_generations,
        concurrency=config.concurrency,
        extra=extra_of_run(config),
    )
    return rollout, {"tokenizer": folder}


def _api_rollout(config: RunConfig, parts: _Parts, console: Console) -> tuple[EpisodeRollout, dict[str, str]]:
    api = make_api(config)
    console.print(f"asking {config.api.base_url or 'the OpenAI API'} for {api.model}", markup=False)
    rollout = APIMultiTurnRollout(
        api,
        parts.world,
        parts.params,
        concurrency=config.concurrency or _API_CONCURRENCY,
        extra_body=extra_of_run(config),
        limits=parts.limits,
        seed=config.seed,
        num_generations=config.num_generations,
    )
    return rollout, {}


async def _collect(rollout: EpisodeRollout, parts: _Parts, trace: TraceWriter | None) -> list[Trajectory]:
    """All trajectories in order, each scored and traced as it ends."""
    results: list[tuple[int, Trajectory]] = []
    numbered = [{**prompt, _ORDER: index} for index, prompt in enumerate(parts.prompts)]  # ids need not tell them apart
    with suppress(asyncio.CancelledError):  # Ctrl-C: what is done is kept
        async for trajectory in rollout.stream(numbered):
            order = trajectory.pop(_ORDER)
            if parts.reward is not None:
                score(trajectory, parts.reward)
            if trace is not None:
                trace.write(trajectory)
            results.append((order, trajectory))
    results.sort(key=lambda pair: (pair[0], pair[1].get("sample") or 0))
    return [trajectory for _, trajectory in results]


def score(trajectory: Trajectory, reward: Reward) -> None:
    """Put `reward` into the trajectory; a reward that raises, or is no finite number, is a `reward_error`, no zero."""
    try:
        value = float(reward(trajectory))
        if not math.isfinite(value):
            raise InvalidValueError(f"the reward is {value}; give a finite number")
        trajectory["reward"] = value
    except Exception as error:
        trajectory["reward"] = None
        trajectory["reward_error"] = f"{type(error).__name__}: {error}"


def _succeeded(trajectory: Trajectory) -> bool:
    return (reward_of(trajectory) or 0.0) >= 1.0


def _most_telling(results: list[Trajectory]) -> Trajectory:
    """A finished trajectory worth a look: one that succeeded, with the most turns among those."""
    return max(results, key=lambda t: (t["error"] is None, reward_of(t) or 0.0, t["turns"]))
