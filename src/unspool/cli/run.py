"""`unspool run`: from a configuration to finished trajectories, on disk and in a table.

Each trajectory's trace is written when it ends, so what is done survives whatever comes later.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from unspool.cli.config import ModelConfig, RunConfig, TemplateConfig
from unspool.cli.show import render_trajectory
from unspool.cli.summary import summarise, summary_table
from unspool.cli.tasks import Reward, load_object, load_prompts
from unspool.data import write_jsonl, write_parquet
from unspool.engines.quiet import quiet_transformers
from unspool.episode import Limits
from unspool.rollout import MultiTurnRollout
from unspool.template import ChatTemplate
from unspool.trace import TraceWriter
from unspool.types import InvalidValueError, RolloutInterrupted, SamplingParams, Trajectory
from unspool.world import ToolManager

if TYPE_CHECKING:
    from unspool.engines import TorchEngine

EMBEDDED = "embedded"
_ORDER = "_order"  # in a trajectory while it runs: the place of its prompt


def run(config: RunConfig, console: Console | None = None) -> list[Trajectory]:
    """Run a configuration and write its output; returns the trajectories, in the order of their prompts.

    Raises:
        UnspoolError: the configuration cannot be run; nothing was started.
        RolloutInterrupted: Ctrl-C; what was finished is written all the same.
    """
    console = console or Console()
    prompts, task_reward = load_prompts(config.data)
    if not prompts:
        raise InvalidValueError("there are no prompts to run; look at data.path and data.size")
    reward = load_object(config.reward) if config.reward else task_reward
    tools = (
        ToolManager([load_object(path) for path in config.tools], timeout=config.tool_timeout) if config.tools else None
    )
    output = config.output
    output.dir.mkdir(parents=True, exist_ok=True)
    if config.model.path == EMBEDDED:
        console.print("embedded model: made on its first use, which takes some 20 s more")
    folder = model_folder(config.model.path)
    noted = {"tokenizer": folder}
    trace = TraceWriter(output.dir / "traces", success_callback=_succeeded, metadata=noted) if output.traces else None
    template = load_template(config.template, folder)
    console.print(f"loading {config.model.path} ({config.model.dtype})")
    rollout = MultiTurnRollout(
        load_engine(config.model, folder),
        template,
        tools,
        SamplingParams(**config.sampling.model_dump()),
        limits=Limits(**config.limits.model_dump()),
        seed=config.seed,
        num_generations=config.num_generations,
        concurrency=config.concurrency,
    )
    with rollout:
        results = asyncio.run(_collect(rollout, prompts, reward, trace))
    if not results:
        raise InvalidValueError("no trajectory was finished; nothing was written")
    _write(config, results, noted)
    summary = summarise(results, rollout.stats)
    (output.dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if output.show:
        console.print()
        render_trajectory(_most_telling(results), rollout.template, console=console)
    console.print(summary_table(summary))
    console.print(f"written to {output.dir}")
    expected = len(prompts) * config.num_generations
    if len(results) < expected:
        console.print(f"{len(results)} of {expected} trajectories were finished and are kept")
        raise RolloutInterrupted(results)
    return results


async def _collect(
    rollout: MultiTurnRollout, prompts: list[Trajectory], reward: Reward | None, trace: TraceWriter | None
) -> list[Trajectory]:
    """All trajectories in order, each scored and traced as it ends."""
    results: list[tuple[int, Trajectory]] = []
    numbered = [{**prompt, _ORDER: index} for index, prompt in enumerate(prompts)]  # ids need not tell prompts apart
    with suppress(asyncio.CancelledError):  # Ctrl-C: what is done is kept
        async for trajectory in rollout.stream(numbered):
            order = trajectory.pop(_ORDER)
            if reward is not None:
                score(trajectory, reward)
            if trace is not None:
                trace.write(trajectory)
            results.append((order, trajectory))
    results.sort(key=lambda pair: (pair[0], pair[1].get("sample") or 0))
    return [trajectory for _, trajectory in results]


def score(trajectory: Trajectory, reward: Reward) -> None:
    """Put `reward` into the trajectory; a reward that raises is a `reward_error`, not a zero."""
    try:
        trajectory["reward"] = float(reward(trajectory))
    except Exception as error:
        trajectory["reward"] = None
        trajectory["reward_error"] = f"{type(error).__name__}: {error}"


def _succeeded(trajectory: Trajectory) -> bool:
    return (trajectory.get("reward") or 0.0) >= 1.0


def model_folder(path: str) -> str:
    """The folder (or hub name) of a model, made first where the embedded one is asked for."""
    if path == EMBEDDED:
        from unspool.engines.embedded import ensure_embedded_model

        return str(ensure_embedded_model())
    if not Path(path).is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise InvalidValueError(
            f"model.path: {path} is no folder; give a model's folder, {EMBEDDED!r}, or a name such as owner/model"
        )
    return path


def load_engine(config: ModelConfig, folder: str) -> TorchEngine:
    """The engine that the configuration describes."""
    from unspool.engines import TorchEngine
    from unspool.engines.embedded import embedded_adapter

    adapter = str(embedded_adapter()) if config.adapter == EMBEDDED else config.adapter
    options: dict[str, Any] = {} if config.max_batch_size is None else {"max_batch_size": config.max_batch_size}
    with quiet_transformers():
        return TorchEngine.from_pretrained(
            folder,
            adapter=adapter,
            dtype=config.dtype,
            device=config.device or _gpu(),
            threads=config.threads,
            **options,
        )


def _gpu() -> str | None:
    import torch

    return "cuda" if torch.cuda.is_available() else None


def load_template(config: TemplateConfig, folder: str) -> ChatTemplate:
    """The chat template that the configuration describes."""
    source = None
    if config.file is not None:
        try:
            source = config.file.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidValueError(f"template.file: cannot read {config.file}: {error.strerror}") from error
    return ChatTemplate(folder, chat_template=source, parser=config.parser, thinking=config.thinking, **config.kwargs)


def _write(config: RunConfig, results: list[Trajectory], noted: dict[str, str]) -> None:
    output = config.output
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (output.dir / "config.yaml").write_text(text, encoding="utf-8")
    if output.parquet:
        write_parquet(results, output.dir / "trajectories.parquet", metadata=noted)
    if output.jsonl:
        write_jsonl(results, output.dir / "trajectories.jsonl")


def _most_telling(results: list[Trajectory]) -> Trajectory:
    """A finished trajectory worth a look: one that succeeded, with the most turns among those."""
    return max(results, key=lambda t: (t["error"] is None, t.get("reward") or 0.0, t["turns"]))
