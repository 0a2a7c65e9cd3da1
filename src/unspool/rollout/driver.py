"""Runs the episodes of a rollout side by side, each on a task of its own, and hands them back as they end.

One episode never waits for another: the engine and the tool managers decide what runs together. A list given comes
back as a list of the same length in the same order, whatever happens to single episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, cast

from unspool.episode import Limits, run_episode
from unspool.loop import run_sync, submit
from unspool.policy import Policy
from unspool.policy.extra import Extra
from unspool.rollout.base import Rollout
from unspool.rollout.collector import seldom
from unspool.rollout.jobs import Job, check_worlds, finished, make_jobs
from unspool.rollout.progress import progress_display
from unspool.rollout.stats import RolloutStats
from unspool.threads import run_in_thread
from unspool.trace import TraceWriter
from unspool.types import (
    InvalidTypeError,
    InvalidValueError,
    RolloutInterrupted,
    SamplingParams,
    ToolInfo,
    Trajectory,
    check_value,
    is_count,
)
from unspool.world.making import Given, comes_alive
from unspool.world.protocol import World

logger = logging.getLogger("unspool")

Worlds = Given | Sequence[Given | None] | None


class RolloutPolicy(Policy, Protocol):
    """What a rollout needs of a policy beyond turns. `records` says whether turns are recorded token by token."""

    @property
    def records(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def update_weights(self, source: Any, version: int | None = None) -> None: ...

    def with_template_kwargs(self, **kwargs: Any) -> Policy: ...

    def with_extra(self, extra: Extra) -> RolloutPolicy: ...


class EpisodeRollout(Rollout):
    """A rollout of one policy. `MultiTurnRollout` and `APIMultiTurnRollout` are its public faces; see there."""

    extra_name = "extra"
    """What a call names the one thing that goes with its requests."""

    def __init__(
        self,
        policy: RolloutPolicy,
        tool_manager: Worlds,
        sampling_params: SamplingParams,
        limits: Limits,
        *,
        trace: TraceWriter | None,
        seed: int | None,
        num_generations: int,
        concurrency: int | None,
        progress: bool | None,
    ) -> None:
        check_worlds(tool_manager)
        if not isinstance(limits, Limits):
            raise InvalidTypeError(f"limits must be Limits(...), not {limits!r}")
        check_value("num_generations", num_generations, is_count, "a whole number, at least 1")
        check_value(
            "concurrency", concurrency, lambda v: v is None or is_count(v), "at least 1, or None for all at once"
        )
        self.policy = policy
        self.tool_manager = tool_manager
        self.sampling_params = _one_sample(sampling_params)
        self.limits = limits
        self.trace = trace
        self.num_generations = num_generations
        self.concurrency = concurrency
        self.progress = progress
        self.seed = next(s for s in (seed, sampling_params.seed, secrets.randbits(63)) if s is not None)
        self.stats = RolloutStats()
        self._calls = itertools.count()
        self._name = secrets.token_hex(4)

    # ------------------------------------------------------------------ entries

    def __call__(
        self,
        trajectories: list[Trajectory],
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        tool_manager: Worlds = None,
        global_step: int | None = None,
        **extra: Extra,
    ) -> list[Trajectory]:
        """Run them all and wait; from a script, a notebook, or any thread.

        Args:
            trajectories: dicts with `messages`; see `MultiTurnRollout`.
            sampling_params, tool_manager: instead of those given at construction.
            global_step: of the training run; it enters the seeds and the names of trace files.
            extra: `extra=...` (or `extra_body=...` with an API): on top of that given at construction.

        Raises:
            RolloutInterrupted: on Ctrl-C; `.results` has every trajectory, unfinished ones `cancelled`.
        """
        run = self._run(trajectories, sampling_params, tool_manager, global_step, extra)
        future = submit(run.collect())
        try:
            return future.result()
        except KeyboardInterrupt:
            run.interrupt()
            raise RolloutInterrupted(future.result()) from None

    async def acall(
        self,
        trajectories: list[Trajectory],
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        tool_manager: Worlds = None,
        global_step: int | None = None,
        **extra: Extra,
    ) -> list[Trajectory]:
        """The same on the caller's event loop; cancelling it cancels every episode."""
        return await self._run(trajectories, sampling_params, tool_manager, global_step, extra).collect()

    async def stream(
        self,
        trajectories: list[Trajectory],
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        tool_manager: Worlds = None,
        global_step: int | None = None,
        **extra: Extra,
    ) -> AsyncGenerator[Trajectory, None]:
        """The finished trajectories as they end, in completion order. Leaving the loop early cancels the rest."""
        run = self._run(trajectories, sampling_params, tool_manager, global_step, extra)
        async with contextlib.aclosing(run.stream()) as outputs:
            async for _, output in outputs:
                yield output

    def update_weights(self, source: Any, version: int | None = None) -> None:
        """Give the engine new weights and wait until it has them; see `Engine.update_weights`."""
        run_sync(self.policy.update_weights(source, version))

    def close(self) -> None:
        """Close the engine."""
        run_sync(self.policy.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(
        self,
        trajectories: list[Trajectory],
        sampling_params: SamplingParams | Mapping[str, Any] | None,
        tool_manager: Worlds,
        global_step: int | None,
        extra: Mapping[str, Extra],
    ) -> _Run:
        policy = self._with(extra)
        params = self.sampling_params if sampling_params is None else _one_sample(SamplingParams.of(sampling_params))
        own_seed = None if sampling_params is None else params.seed  # a call's own goes before the run's
        call = next(self._calls)
        jobs = make_jobs(
            trajectories,
            self.tool_manager if tool_manager is None else tool_manager,
            run_seed=self.seed if own_seed is None else own_seed,
            step=("call", call) if global_step is None else ("step", global_step),
            prefix=f"{self._name}-{call}",
            num_generations=self.num_generations,
        )
        self.stats = RolloutStats(total=len(jobs))
        return _Run(self, policy, jobs, params, global_step, self.stats)

    def _with(self, given: Mapping[str, Extra]) -> RolloutPolicy:
        """The policy of one call, with what the call says goes with its requests."""
        unknown = [name for name in given if name != self.extra_name]
        if unknown:
            raise InvalidTypeError(f"a call of a rollout has no argument {unknown[0]!r}; it has {self.extra_name}")
        extra = given.get(self.extra_name)
        return self.policy if extra is None else self.policy.with_extra(extra)


def _one_sample(params: SamplingParams) -> SamplingParams:
    if params.num_samples != 1:
        raise InvalidValueError(
            f"num_samples must be 1 in a rollout, not {params.num_samples}; for groups use num_generations"
        )
    return params


class _Run:
    """One call of a rollout."""

    def __init__(
        self,
        rollout: EpisodeRollout,
        policy: RolloutPolicy,
        jobs: list[Job],
        params: SamplingParams,
        step: int | None,
        stats: RolloutStats,
    ) -> None:
        self.rollout, self.policy, self.params, self.step, self.stats = rollout, policy, params, step, stats
        self.jobs = dict(enumerate(jobs))  # those that have not ended: a finished episode is its output alone
        self._interrupted = False
        self._cancel: Callable[[], object] | None = None
        self._shared: tuple[World, list[ToolInfo]] | None = None

    def interrupt(self) -> None:
        """End every episode as `cancelled`, from any thread; what has ended stays as it is."""
        self._interrupted = True
        if self._cancel is not None:
            self._cancel()

    async def collect(self) -> list[Trajectory]:
        outputs: list[Trajectory] = [{}] * len(self.jobs)
        async with contextlib.aclosing(self.stream()) as stream:
            async for index, output in stream:
                outputs[index] = output
        return outputs

    async def stream(self) -> AsyncGenerator[tuple[int, Trajectory], None]:
        """(index, output) of each episode as it ends."""
        if not self.jobs:
            return
        await self.policy.start()
        loop, done = asyncio.get_running_loop(), asyncio.Queue[asyncio.Task[Trajectory]]()
        room = asyncio.Semaphore(self.rollout.concurrency) if self.rollout.concurrency else None
        tasks: dict[asyncio.Task[Trajectory], int] = {}  # those under way
        context = contextvars.copy_context()  # one for all, where each callback would else get a copy
        for index, job in self.jobs.items():
            task = loop.create_task(self._one(index, job, room))
            task.add_done_callback(done.put_nowait, context=context)
            tasks[task] = index
        self._cancel = lambda: loop.call_soon_threadsafe(_cancel_all, tasks)
        if self._interrupted:
            _cancel_all(tasks)
        try:
            with progress_display(self.stats, self.rollout.progress), seldom(len(tasks)):
                while tasks:
                    task = await done.get()
                    index = tasks.pop(task)
                    output = self._output(index, task)
                    del task
                    self.stats.ended(output)
                    yield index, output
        finally:
            self._cancel = None
            self.stats.close()
            _cancel_all(tasks)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _output(self, index: int, task: asyncio.Task[Trajectory]) -> Trajectory:
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return task.result()
        job = self.jobs.pop(index)
        if error is None:
            job.episode.end("cancelled")
        else:
            job.episode.end("api_error", f"{type(error).__name__}: {error}")
        output = finished(job, recorded=self.policy.records)
        if self.rollout.trace is not None and job.episode.turns:  # a finished turn is kept, whatever came later
            self.rollout.trace.write(output, global_step=self.step)
        return output

    async def _one(self, index: int, job: Job, room: asyncio.Semaphore | None) -> Trajectory:
        if room is None:
            await self._episode(job)
        else:
            async with room:
                await self._episode(job)
        output = finished(job, recorded=self.policy.records)
        if self.rollout.trace is not None:
            try:
                await run_in_thread(self.rollout.trace.write, output, global_step=self.step)
            except Exception:
                logger.exception("the trace of %s was not written", job.id)
        del self.jobs[index]  # its record goes now, however long it takes until the output is fetched
        return output

    async def _episode(self, job: Job) -> None:
        self.stats.active += 1
        try:
            if job.problem is not None:
                raise job.problem
            policy: Policy = self.policy
            if job.template_kwargs:
                policy = self.policy.with_template_kwargs(**job.template_kwargs)
            await run_episode(
                policy,
                job.world,
                self.rollout.limits,
                tools=self._offered(job),
                params=self.params,
                session=job.session,
                seed=job.seed,
                episode=job.episode,
                observer=self.stats,
                trajectory=job.opening(),
            )
        except Exception as error:  # of the preparation: `run_episode` raises none
            job.episode.end("api_error", f"{type(error).__name__}: {error}")
        finally:
            self.stats.active -= 1

    def _offered(self, job: Job) -> list[ToolInfo] | None:
        """The tools of an episode; episodes that share a world share one list of them."""
        if job.tools is not None or job.world is None or comes_alive(job.world):
            return job.tools  # what a world of the episode's own offers is known when it is open
        if self._shared is None or self._shared[0] is not job.world:
            world = cast(World, job.world)
            self._shared = world, world.tool_infos()
        return self._shared[1]


def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
