"""`MultiTurnRollout`: token-level rollouts over an engine, or a batch sampler, and a chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unspool.episode import Limits
from unspool.policy import TokenPolicy
from unspool.policy.extra import Extra
from unspool.rollout.driver import EpisodeRollout, Worlds
from unspool.template import ChatTemplate
from unspool.template.switches import check_switches
from unspool.trace import TraceWriter
from unspool.types import InvalidValueError, SamplingParams, Trajectory


class MultiTurnRollout(EpisodeRollout):
    """Drives many tool-using conversations with a model at once, and records every token as it was sampled.

    Args:
        sampler: an `Engine`, or a `Sampler` (blocking, a whole batch at once), which is put behind `Batching`.
        template: a `ChatTemplate`, or a tokenizer (or its name) to make one of.
        tool_manager: a `ToolManager` (any `World`), an `Env`, or a list of one for each trajectory; None: no tools.
            What has state belongs to one episode: give what makes it, a class or a function of the trajectory, which is
            called once for each episode.
        sampling_params: `SamplingParams` or a mapping of their names.
        max_turns: assistant turns of a trajectory.
        max_trajectory_tokens: hard cap on `len(input_ids)` of a trajectory.
        trace_dir: folder of a JSON file for each trajectory; it is made here.
        trace_callback: gets the finished trajectory, says whether to store its trace (in `trace_dir`).
        success_callback: gets the finished trajectory, says how its trace's name begins: `ok-` (True) or `fail-`
            (False, and the default).
        seed: of the run; None: `sampling_params.seed`, else drawn. Turn seeds are derived from it, the step (or
            the call), the trajectory's id, and the turn, so they do not depend on the schedule.
        limits: all limits at once, instead of `max_turns` and `max_trajectory_tokens`.
        progress: show live figures on standard error; None: where that is a terminal.
        num_generations: rollouts of each prompt; above 1 the result has that many members a prompt, next to each
            other, each with `group` (the prompt's index) and `sample`.
        concurrency: most episodes at once; None: all of them.
        chat_template_kwargs: switches of the template (`enable_thinking`, ...) for every trajectory; a trajectory's
            own `chat_template_kwargs` go on top.
        extra: goes with every request of the engine (`GenerateRequest.extra`: `adapter`, `structured_outputs`, ...), or
            a function of the turn (from 0) that returns what goes with it. A call may name its own, on top of this.

    A trajectory is a dict: `messages`, and optionally `tools` (else the manager's), `id`, `chat_template_kwargs`, and
    anything else, which is passed through. The output adds, all in input order and of length L = `len(input_ids)`:

        input_ids: list of int. labels: the id where trained, else -100. loss_mask: 1 where trained, else 0.
        logprobs: natural log under the sampling distribution, 0.0 where not sampled; or None as a whole.
        versions: weight version of each sampled token, -1 elsewhere.
        spans: the origin of every run of tokens. messages, turns, stop_reason, truncated, error, tool_errors,
        timings (seconds), id, and `group`/`sample`.
    """

    def __init__(
        self,
        sampler: object,
        template: ChatTemplate | Any,
        tool_manager: Worlds = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        max_turns: int | None = 6,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[Trajectory], bool] | None = None,
        success_callback: Callable[[Trajectory], bool] | None = None,
        *,
        seed: int | None = None,
        limits: Limits | None = None,
        progress: bool | None = None,
        num_generations: int = 1,
        concurrency: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        extra: Extra | None = None,
    ) -> None:
        if limits is None:
            limits = Limits(max_turns=max_turns, max_trajectory_tokens=max_trajectory_tokens)
        elif isinstance(limits, Limits) and (
            max_trajectory_tokens is not None or max_turns not in (6, limits.max_turns)
        ):
            raise InvalidValueError("give max_turns and max_trajectory_tokens inside limits, or no limits")
        params = SamplingParams.of(sampling_params)
        policy = TokenPolicy(sampler, template, params, extra=extra)
        if chat_template_kwargs:
            check_switches(chat_template_kwargs)
            policy = policy.with_template_kwargs(**chat_template_kwargs)
        self.template = policy.template
        super().__init__(
            policy,
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
