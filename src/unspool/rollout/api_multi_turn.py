"""`APIMultiTurnRollout`: rollouts over an OpenAI-compatible API, for data collection and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unspool.episode import Limits
from unspool.policy.chat import NO_CAP, ChatPolicy
from unspool.policy.extra import Extra
from unspool.policy.openai import OpenAI
from unspool.rollout.driver import EpisodeRollout, Worlds
from unspool.trace import TraceWriter
from unspool.types import InvalidValueError, SamplingParams, Trajectory


class APIMultiTurnRollout(EpisodeRollout):
    """Drives many tool-using conversations with a model behind an API at once.

    Args:
        api: an `OpenAI`.
        tool_manager: see `MultiTurnRollout`; None: no tools.
        sampling_params: `SamplingParams` or a mapping of their names. What is at its default is left to the server,
            except the temperature.
        max_turns: assistant turns of a trajectory.
        concurrency: most episodes at once, and so most requests and connections; None: all of them.
        extra_body: further fields of every request, or a function of the turn (from 0) that returns those of that turn;
            on top of all others, whatever their name. A call may name its own, on top of this. With
            `return_token_ids` true, against a server that returns ids (vLLM), the turns are recorded.
        trace_dir, trace_callback, success_callback: see `MultiTurnRollout`.
        seed: of the run; the seeds of turns are derived from it and sent. None: `sampling_params.seed`, and where that
            is None too, none are sent.
        limits: all limits at once, instead of `max_turns`.
        progress: show live figures on standard error; None: where that is a terminal.
        num_generations: rollouts of each prompt.

    Trajectories are as those of `MultiTurnRollout`. The output adds messages, turns, stop_reason, truncated, error,
    tool_errors, timings, id, `usage` (what the API counted, summed over the turns) where it says so, and
    `group`/`sample`; where turns are recorded, input_ids, labels, loss_mask, logprobs, versions and spans as well.
    """

    extra_name = "extra_body"

    def __init__(
        self,
        api: OpenAI,
        tool_manager: Worlds = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        max_turns: int | None = 6,
        concurrency: int | None = 8,
        extra_body: Extra | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[Trajectory], bool] | None = None,
        success_callback: Callable[[Trajectory], bool] | None = None,
        *,
        seed: int | None = None,
        limits: Limits | None = None,
        progress: bool | None = None,
        num_generations: int = 1,
    ) -> None:
        if limits is None:
            limits = Limits(max_turns=max_turns)
        elif isinstance(limits, Limits):
            if max_turns not in (6, limits.max_turns):
                raise InvalidValueError("give max_turns inside limits, or no limits")
            if limits.max_trajectory_tokens is not None:
                raise InvalidValueError(NO_CAP)
        params = SamplingParams.of(sampling_params)
        super().__init__(
            ChatPolicy(api, params, extra_body=extra_body, send_seed=seed is not None or params.seed is not None),
            tool_manager,
            params,
            limits,
            trace=None
            if trace_dir is None
            else TraceWriter(trace_dir, trace_callback=trace_callback, success_callback=success_callback),
            seed=seed,
            num_generations=num_generations,
            concurrency=concurrency,
            progress=progress,
        )
