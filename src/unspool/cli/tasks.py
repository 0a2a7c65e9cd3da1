"""Prompts and rewards of `unspool run`: files, reasoning_gym tasks, and functions named by an import path."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from unspool.cli.config import DataConfig
from unspool.data import read_prompts
from unspool.types import InvalidValueError, MissingExtraError, Trajectory
from unspool.world import EnvWorld, Tool, World
from unspool.world.making import make_world

Reward = Callable[[Trajectory], float]


def load_object(path: str) -> Any:
    """What `package.module:name` (or `package.module.name`) names.

    Raises:
        InvalidValueError: says which part was not found.
    """
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module or not name:
        raise InvalidValueError(f"{path!r} is no import path; write package.module:name")
    try:
        return getattr(_imported(module, path), name)
    except AttributeError:
        raise InvalidValueError(f"{module} has no {name!r} (asked for as {path!r})") from None


def _imported(module: str, path: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise InvalidValueError(f"cannot import {module} for {path!r}: {error}") from error
    except Exception as error:  # whatever a user's module does when it is run
        raise InvalidValueError(f"cannot import {module} for {path!r}: {type(error).__name__}: {error}") from error


def load_reward(path: str) -> Reward:
    """The function that `reward` names; what cannot be called is refused before anything runs."""
    found = load_object(path)
    if not callable(found) or inspect.iscoroutinefunction(found):
        what = "an async function" if callable(found) else f"a {type(found).__name__}"
        raise InvalidValueError(
            f"reward: {path!r} is {what}; name a plain function from a finished trajectory to a number"
        )
    reward: Reward = found
    return reward


def load_world(path: str, arguments: dict[str, Any], timeout: float) -> Callable[[Trajectory], Awaitable[World]]:
    """What makes the world of each conversation: the object that `env` names, called with `env_args`.

    A class is called with them alone; a function with the trajectory first, where it takes more than they are.
    """
    found = load_object(path)
    if not callable(found) or isinstance(found, Tool):
        raise InvalidValueError(
            f"env: {path!r} is a {type(found).__name__}; name a class derived from unspool.Env, or "
            "a function that makes one"
        )
    maker = functools.partial(found, **arguments)
    try:
        inspect.signature(found).bind_partial(**arguments)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"env_args: {path!r} does not take them ({error})") from error

    async def make(trajectory: Trajectory) -> World:
        made = await make_world(maker, trajectory)
        assert made is not None
        return EnvWorld(made.env, timeout=timeout) if isinstance(made, EnvWorld) else made

    return make


def load_prompts(config: DataConfig) -> tuple[list[Trajectory], Reward | None]:
    """The trajectories to run, and the reward that belongs to their task, if it has one."""
    if config.path is not None:
        prompts = read_prompts(config.path)
        prompts = prompts if config.size is None else prompts[: config.size]
        reward = None
    else:
        prompts, reward = _reasoning_gym(config)
    if config.system is not None:
        system = {"role": "system", "content": config.system}
        prompts = [{**prompt, "messages": [system, *prompt["messages"]]} for prompt in prompts]
    return prompts, reward


def _reasoning_gym(config: DataConfig) -> tuple[list[Trajectory], Reward]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError(
            f"the task {config.task!r} needs reasoning_gym: pip install 'unspool[train]'"
        ) from error
    try:
        data = reasoning_gym.create_dataset(
            config.task, **{"seed": config.seed, "size": config.size or 16, **config.task_args}
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise InvalidValueError(f"reasoning_gym cannot make the task {config.task!r}: {error}") from error
    entries = list(data)
    prompts = [
        {
            "id": f"{config.task}-{config.seed}-{index}",
            "messages": [{"role": "user", "content": entry["question"]}],
            "ground_truth": entry["answer"],
            "user_data": {"task": config.task, "entry": index},
        }
        for index, entry in enumerate(entries)
    ]

    def reward(trajectory: Trajectory) -> float:
        """The task's own score of what the last assistant message says."""
        entry = entries[trajectory["user_data"]["entry"]]
        return float(data.score_answer(final_answer(trajectory), entry))

    return prompts, reward


def final_answer(trajectory: Trajectory) -> str:
    """The text of the last message, where the model wrote it and did not ask for a tool; else nothing."""
    last = trajectory["messages"][-1] if trajectory["messages"] else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    return str(last.get("content") or "").strip()
