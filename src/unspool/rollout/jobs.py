"""From what a user hands in to the episodes to run, and from finished episodes to what the user gets back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from unspool.episode import Episode
from unspool.template.switches import check_switches
from unspool.types import InvalidTypeError, InvalidValueError, MessageDict, ToolInfo, Trajectory
from unspool.world.making import Given, comes_alive, for_one_episode, problem_with


@dataclass(eq=False, slots=True)
class Job:
    """One episode to run. `problem` says why it cannot be, where its trajectory is no use."""

    trajectory: Trajectory
    id: str
    world: Given | None
    session: str
    seed_key: tuple[object, ...]
    group: int | None = None
    sample: int | None = None
    tools: list[ToolInfo] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    problem: Exception | None = None
    world_seed: int = 0
    episode: Episode = field(default_factory=lambda: Episode([]))

    def seed(self, turn: int) -> int:
        """The seed of a turn (from 0)."""
        return derive_seed(*self.seed_key, turn)

    def opening(self) -> Trajectory | None:
        """What a world of the episode's own is made and opened with; None where it has none."""
        if not comes_alive(self.world):
            return None
        facts = {"id": self.id, "seed": self.world_seed, "group": self.group, "sample": self.sample}
        known = {name: fact for name, fact in facts.items() if fact is not None}
        return {**known, **self.trajectory, "messages": [_own_copy(message) for message in self.episode.messages]}


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**63) that the parts decide, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def make_jobs(
    trajectories: Sequence[Trajectory],
    worlds: Given | Sequence[Given | None] | None,
    *,
    run_seed: int,
    step: object,
    prefix: str,
    num_generations: int,
) -> list[Job]:
    """One job a trajectory, or `num_generations` of them next to each other, each with its own copy.

    Raises:
        InvalidTypeError: `trajectories` is no list, or a tool manager is none.
        InvalidValueError: as many tool managers as trajectories (or as members of groups) were not given.
    """
    if isinstance(trajectories, Mapping) or not isinstance(trajectories, Sequence) or isinstance(trajectories, str):
        raise InvalidTypeError(
            f"trajectories must be a list of dicts, not {type(trajectories).__name__}; wrap a single one in a list"
        )
    aligned = _aligned(worlds, len(trajectories), num_generations)
    seen: Counter[str] = Counter()
    jobs: list[Job] = []
    for index, trajectory in enumerate(trajectories):
        for sample in range(num_generations):
            grouped = num_generations > 1
            given = trajectory.get("id") if isinstance(trajectory, Mapping) else None
            ident = str(index if given is None else given)
            job = Job(
                trajectory={},
                id=ident,
                world=aligned[len(jobs)],
                session=f"{prefix}-{len(jobs)}",
                seed_key=(run_seed, step, ident, seen[ident]),
                world_seed=derive_seed(run_seed, step, ident, seen[ident] - sample, "world"),
                group=index if grouped else None,
                sample=sample if grouped else None,
            )
            seen[ident] += 1
            try:
                _read(job, trajectory, copy=grouped)
            except Exception as error:
                job.problem = error
            jobs.append(job)
    return jobs


def check_worlds(worlds: object, name: str = "tool_manager") -> None:
    """Refuse what is no world and makes none, or a list with such a thing."""
    for world in worlds if isinstance(worlds, (list, tuple)) else [worlds]:
        wrong = None if world is None else problem_with(world)
        if wrong is not None:
            raise InvalidTypeError(
                f"{name} must be a ToolManager, an Env or what makes one, a list of one for each trajectory, or None, "
                f"and {wrong} neither; put tools into ToolManager([...])"
            )


def _check_shared(worlds: Sequence[Given | None]) -> None:
    """Refuse one world with state for two episodes."""
    seen: set[int] = set()
    for world in worlds:
        if world is not None and for_one_episode(world):
            if id(world) in seen:
                raise InvalidValueError(
                    f"one {type(world).__name__} cannot serve several episodes, because it has the state of one; give "
                    "a function (or class) that makes one, which is called for each episode, or a list of one for each"
                )
            seen.add(id(world))


def _aligned(worlds: Given | Sequence[Given | None] | None, count: int, members: int) -> Sequence[Given | None]:
    """A world for each episode. A list is one for each trajectory, or one for each member of each group."""
    check_worlds(worlds)
    each: list[Given | None]
    if not isinstance(worlds, (list, tuple)):
        each = [worlds] * (count * members)  # type: ignore[list-item]
    elif len(worlds) in (count * members, count):
        each = [world for world in worlds for _ in range(count * members // max(1, len(worlds)))]
    else:
        wanted = "" if members == 1 else f" or one for each of their {members} members"
        raise InvalidValueError(
            f"tool_manager is a list of {len(worlds)} for {count} trajectories; give one for each{wanted}"
        )
    _check_shared(each)
    return each


def _read(job: Job, trajectory: Trajectory, *, copy: bool) -> None:
    """Take what a trajectory says into its job; raise where it says nothing usable."""
    if not isinstance(trajectory, Mapping):
        raise InvalidTypeError(f"a trajectory must be a dict with 'messages', not {type(trajectory).__name__}")
    job.trajectory = deepcopy(dict(trajectory)) if copy else dict(trajectory)
    messages = trajectory.get("messages")
    if not messages and comes_alive(job.world):
        messages = []  # the world has the first word
    elif not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidValueError("a trajectory needs 'messages': a list with at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidValueError(f"every message is a dict with a 'role'; this one is not: {message!r:.80}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise InvalidValueError(
                f"every message needs a 'content', or 'tool_calls'; this one has none: {message!r:.80}"
            )
    job.episode.messages = [_own_copy(message) for message in messages]
    job.tools = _tools(trajectory.get("tools"))
    switches = trajectory.get("chat_template_kwargs") or {}
    if not isinstance(switches, Mapping):
        raise InvalidTypeError(f"chat_template_kwargs must be a dict of switches, not {switches!r:.80}")
    check_switches(switches)
    job.template_kwargs = dict(switches)


def _tools(given: object) -> list[ToolInfo] | None:
    """The tools that a trajectory brings; many data sets keep them as JSON text."""
    if isinstance(given, str):
        with suppress(ValueError):
            given = json.loads(given)
    if given is None:
        return None
    if isinstance(given, (list, tuple)) and all(isinstance(tool, Mapping) for tool in given):
        return list(given)
    raise InvalidTypeError(f"a trajectory's 'tools' must be a list of dicts (OpenAI's form), not {given!r:.80}")


def _own_copy(message: Mapping[str, Any]) -> MessageDict:
    """A message that shares nothing mutable with the one given."""
    return {key: value if isinstance(value, str) else deepcopy(value) for key, value in message.items()}


_SOMETIMES = ("branches", "branch", "reward", "reward_error", "env_info", "group", "sample", "usage")
_ARRAYS = ("input_ids", "labels", "loss_mask", "logprobs", "versions", "spans")


def _passed_through(trajectory: Trajectory) -> Trajectory:
    """What the user gave; of an earlier output that is run again, nothing that speaks of the earlier run."""
    if not ("timings" in trajectory and "stop_reason" in trajectory):
        return trajectory
    return {key: value for key, value in trajectory.items() if key not in _SOMETIMES and key not in _ARRAYS}


def _summed(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counters added up by name, nested ones too; what is no number is left out."""
    total: dict[str, Any] = {}
    for count in counts:
        for name, value in count.items():
            if isinstance(value, Mapping):
                below = total.get(name)
                total[name] = _summed([below if isinstance(below, Mapping) else {}, value])
            elif isinstance(value, int | float) and not isinstance(value, bool):
                total[name] = total.get(name, 0) + value
    return total


def finished(job: Job, *, recorded: bool) -> Trajectory:
    """The output trajectory: what came in, and what happened; the arrays of tokens only where they were recorded."""
    episode = job.episode
    tokens = episode.record.to_trajectory() if recorded else {}
    tokens.pop("tools", None)
    output: Trajectory = {
        **_passed_through(job.trajectory),
        **tokens,
        "messages": episode.messages if episode.messages else job.trajectory.get("messages", []),
        "turns": len(episode.turns),
        "stop_reason": episode.stop_reason,
        "truncated": episode.truncated,
        "error": episode.error,
        "tool_errors": episode.tool_errors,
        "timings": episode.timings,
        "id": job.id,
    }
    if episode.reward is not None:
        output["reward"] = episode.reward
    if episode.reward_error is not None:
        output["reward_error"] = episode.reward_error
    usage = _summed(turn.usage for turn in episode.turns)
    if usage:
        output["usage"] = usage
    if episode.info:
        output["env_info"] = episode.info
    if job.group is not None:
        output["group"], output["sample"] = job.group, job.sample
    return output
