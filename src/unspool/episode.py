"""The one loop: a policy and a world take turns until one of them, or a limit, ends the episode.

The order of checks in a turn is fixed: sample, `length`?, trajectory cap?, no calls: done, turn cap?, tools. No tool
runs after a turn that was cut, nor behind the last turn that is allowed. An error ends the episode as a value on it
(`api_error`); only cancellation leaves `run_episode` as an exception. A world that was opened is closed, whatever
ended the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from unspool.deadline import Deadline, TimeUpError
from unspool.policy import Policy, Turn
from unspool.policy.protocol import end_session
from unspool.record import Record
from unspool.types import (
    InvalidTypeError,
    Message,
    MessageDict,
    SamplingParams,
    StopReason,
    ToolCall,
    ToolInfo,
    Trajectory,
    check_value,
    is_count,
)
from unspool.world.making import Given, make_world, stateful_parts
from unspool.world.protocol import LiveWorld, Step, World
from unspool.world.taken import give_back, take
from unspool.world.waiting import is_from_outside, running_task

T = TypeVar("T")

logger = logging.getLogger("unspool")

_NO_MORE_CALLS = "no more tool calls are allowed in this conversation; answer with what you have"

_CLOSING = 15.0
"""Seconds that a world may take to close."""

TRUNCATING: frozenset[StopReason] = frozenset({"length", "max_turns", "timeout"})
"""The stop reasons that mean: a limit ended the episode."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an episode that does not end by itself.

    Attributes:
        max_turns: assistant turns; None: no limit.
        max_trajectory_tokens: hard cap on `len(input_ids)`; it shrinks `max_tokens`, and a bridge that would reach it
            ends the episode.
        max_tool_calls: well-formed calls that are run; further ones are answered with an error that says so.
        timeout: wall-clock seconds over the whole episode.
        malformed_calls: what a call that is not well-formed does: `answer`, the model is told what is wrong; `end`,
            the episode ends with `parse_error`.
    """

    max_turns: int | None = 6
    max_trajectory_tokens: int | None = None
    max_tool_calls: int | None = None
    timeout: float | None = None
    malformed_calls: Literal["answer", "end"] = "answer"

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_trajectory_tokens", 1), ("max_tool_calls", 0)):
            wanted = f"at least {least}, or None for no limit"
            check_value(name, getattr(self, name), lambda v, least=least: v is None or is_count(v, least), wanted)  # type: ignore[misc]
        check_value("timeout", self.timeout, lambda v: v is None or v > 0, "above 0 seconds, or None for no limit")
        check_value("malformed_calls", self.malformed_calls, ("answer", "end").__contains__, "'answer' or 'end'")


@dataclass(eq=False, slots=True)
class Episode:
    """An episode as far as it has come. `stop_reason` is None while it runs.

    Attributes:
        record: the tokens; a branch of the first record where the conversation branched.
        messages: the conversation.
        turns: what the policy said, each `Turn` with its calls, their token spans and their status.
        tool_errors: dicts with `turn`, `name`, `call_id`, `kind`, `error`.
        timings: seconds: `generate` and `tools` as summed waiting times, `total`.
        reward: the sum of what the world gave; None where it gave nothing. Where the world evaluates the whole, what
            that gave; then None for an episode that failed or was timed out.
        reward_error: why evaluating failed.
        info: further facts that the world gave, the latest of each name.
    """

    messages: list[MessageDict]
    record: Record = field(default_factory=Record)
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason | None = None
    truncated: bool = False
    error: str | None = None
    tool_errors: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "tools": 0.0, "total": 0.0})
    reward: float | None = None
    reward_error: str | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def end(self, reason: StopReason, error: str | None = None) -> None:
        """Close the episode; the first reason given stands."""
        if self.stop_reason is None:
            self.stop_reason, self.truncated, self.error = reason, reason in TRUNCATING, error


Phase = Literal["generate", "tools"]


class Observer(Protocol):
    """Told what an episode is doing while it does it."""

    def phase(self, name: Phase, change: int) -> None:
        """One more (+1) or one fewer (-1) episode is in this phase."""
        ...

    def sampled(self, tokens: int) -> None: ...


async def run_episode(
    policy: Policy,
    world: Given | None,
    limits: Limits | None = None,
    *,
    messages: Sequence[MessageDict] = (),
    tools: Sequence[ToolInfo] | None = None,
    params: SamplingParams | None = None,
    session: str = "",
    seed: Callable[[int], int] | int = 0,
    episode: Episode | None = None,
    observer: Observer | None = None,
    trajectory: Trajectory | None = None,
) -> Episode:
    """Run one conversation to its end.

    Args:
        policy: who speaks.
        world: who answers: a World, an Env, or what makes one, which is called here; None: the first turn is the last.
        limits: see `Limits`.
        messages: the conversation so far.
        tools: what is offered to the model; None: what the world offers.
        params: how to sample; None: the policy's own.
        session: unique to the episode.
        seed: a function from the turn (from 0) to its seed, or the seed of the first, from which the others count.
        episode: to be filled in, for a caller that wants to see it even if it is cancelled.
        observer: told what is going on.
        trajectory: what a world is opened (and made) with; None: one of the messages alone.

    Returns:
        The episode, ended. What the policy or the world raised is in `error`.
    """
    episode = Episode(list(messages)) if episode is None else episode
    drive = _Drive(policy, world, limits or Limits(), episode, observer)
    started = time.perf_counter()
    try:
        await drive.open(trajectory)
        await drive.run(tools, params, session, seed if callable(seed) else lambda turn: seed + turn)
        await drive.evaluate()
    except TimeUpError as error:
        episode.end("timeout", f"{error} (in {drive.doing})")
    except BaseException as error:
        if is_from_outside(error, drive.task):
            raise
        drive.failed(error)  # a policy or a world raised it
    finally:
        episode.timings["total"] = time.perf_counter() - started
        end_session(policy, session)
        await drive.close()
    return episode


class _Drive:
    """One run of the loop; it exists to keep what the turns share."""

    def __init__(
        self, policy: Policy, world: Given | None, limits: Limits, episode: Episode, observer: Observer | None
    ) -> None:
        self.policy, self.given, self.limits = policy, world, limits
        self.world: World | None = None
        self.held: list[object] = []
        self.trajectory: Trajectory = {}
        self.evaluating: Callable[[Trajectory], Awaitable[float | None]] | None = None
        self.over = False
        self.episode, self.observer = episode, observer
        self.doing: str = "start"
        self.calls_run = 0
        self.deadline = None if limits.timeout is None else Deadline(limits.timeout)
        self.task = running_task()

    def failed(self, error: BaseException) -> None:
        logger.debug("an episode ended with an error (in %s)", self.doing, exc_info=error)
        self.episode.end("api_error", f"{type(error).__name__}: {error}")

    async def hold(self, work: Awaitable[T]) -> T:
        return await (work if self.deadline is None else self.deadline.hold(work))

    # ------------------------------------------------------------------ the life of the world

    async def open(self, trajectory: Trajectory | None) -> None:
        """Make the world and open it, where it has to be; what it says first goes behind the messages."""
        if self.given is None or (isinstance(self.given, World) and not isinstance(self.given, type | LiveWorld)):
            self._have(self.given)
            return
        messages = [dict(message) for message in self.episode.messages]
        self.trajectory = {"messages": messages} if trajectory is None else trajectory
        started = self._begin("tools")
        try:
            self.doing = "making the world"
            await self.hold(self._make())
            if isinstance(self.world, LiveWorld):
                self.doing = "opening the world"
                self.evaluating = getattr(self.world, "evaluate", None)
                opened = await self.hold(self.world.open(self.trajectory))
                self._take(opened if isinstance(opened, Step) else Step(opened))
        finally:
            self._end("tools", started)

    async def _make(self) -> None:
        # Kept here, not where it is waited for: a wait that is cut short loses the result.
        self._have(await make_world(self.given, self.trajectory))
        if self.over:
            await self.close()

    def _have(self, world: World | None) -> None:
        """Take a world for this episode; one that another episode has stays that one's, to be closed by it."""
        parts = stateful_parts(world)
        take(parts, self)
        self.world, self.held = world, parts

    async def evaluate(self) -> None:
        """Ask for the reward of the whole, where the world gives one."""
        evaluating, self.evaluating = self.evaluating, None
        if evaluating is None:
            return
        episode = self.episode
        facts = ("turns", "stop_reason", "truncated", "error", "tool_errors", "reward")
        finished = {**self.trajectory, "messages": episode.messages, **{name: getattr(episode, name) for name in facts}}
        finished["turns"], episode.reward = len(episode.turns), None
        try:
            episode.reward = await self.hold(evaluating(finished))
        except BaseException as error:
            if is_from_outside(error, self.task):
                raise
            logger.debug("an episode could not be evaluated", exc_info=error)
            episode.reward_error = f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        """Close the world; neither a cancellation nor a failure keeps it from that, nor a world that hangs for ever."""
        self.over = True
        if self.evaluating is not None:  # it failed, or was timed out: the sum so far would pass for the evaluation
            self.evaluating = self.episode.reward = None
        try:
            if isinstance(self.world, LiveWorld):
                await self._close(self.world)
        finally:
            give_back(self.held, self)

    async def _close(self, world: LiveWorld) -> None:
        closing, cancelled = asyncio.ensure_future(_close(world)), None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # ------------------------------------------------------------------ the turns

    async def run(
        self,
        tools: Sequence[ToolInfo] | None,
        params: SamplingParams | None,
        session: str,
        seed: Callable[[int], int],
    ) -> None:
        episode, limits = self.episode, self.limits
        offered = list(tools) if tools is not None else self.world.tool_infos() if self.world is not None else []
        while episode.stop_reason is None:
            started = self._begin("generate")
            try:
                extending = self.policy.extend(
                    episode.record,
                    episode.messages,
                    offered,
                    params=params,
                    session=session,
                    seed=seed(len(episode.turns)),
                    max_total=limits.max_trajectory_tokens,
                )
                said = await self.hold(extending)
            finally:
                self._end("generate", started)
            if self._note(said):
                await self._answer(said)

    def _note(self, said: Turn) -> bool:
        """Keep a turn, and say whether the world may answer it; every check of the loop's order stands here."""
        episode, limits = self.episode, self.limits
        episode.record = said.record
        if said.message is None:
            episode.end("length", self._no_room(said))
            return False
        if self.observer is not None:
            self.observer.sampled(said.sampled)
        episode.turns.append(said)
        episode.messages.append(said.record.messages[-1])
        cap = limits.max_trajectory_tokens
        if said.stop_reason == "length" or (cap is not None and len(said.record) >= cap):
            episode.end("length")
        elif self.world is None or not self.world.wants(said.message):
            episode.end("stop")
        elif limits.malformed_calls == "end" and (bad := malformed(said)) is not None:
            episode.end("parse_error", bad)
        elif limits.max_turns is not None and len(episode.turns) >= limits.max_turns:
            episode.end("max_turns")
        return episode.stop_reason is None

    def _no_room(self, said: Turn) -> str | None:
        """A prompt that leaves no room to answer is an error; a later turn without room is an end like another."""
        if self.episode.turns:
            return None
        return (
            f"the prompt has {said.needed} tokens, which leaves no room below the limit of {said.cap} for the whole "
            "trajectory; raise max_trajectory_tokens (or the engine's context) or shorten the prompt"
        )

    async def _answer(self, said: Turn) -> None:
        assert self.world is not None and said.message is not None
        turn = len(self.episode.turns) - 1
        started = self._begin("tools")
        try:
            answering = self.world.step(self._within_budget(said.message))
            if not inspect.isawaitable(answering):
                raise InvalidTypeError(f"{type(self.world).__name__}.step must be an async function")
            step = await self.hold(answering)
        finally:
            self._end("tools", started)
        if not isinstance(step, Step):
            raise InvalidTypeError(f"{type(self.world).__name__}.step must return a Step, not {type(step).__name__}")
        self._take(step, turn)

    def _take(self, step: Step, turn: int = -1) -> None:
        episode = self.episode
        episode.messages.extend(step.messages)
        for failure in step.failures:
            episode.tool_errors.append({"turn": turn, **asdict(failure)})
        episode.info.update(step.info)
        if step.reward is not None:
            episode.reward = (episode.reward or 0.0) + step.reward
        if step.done:
            episode.end("env_done")

    def _within_budget(self, message: Message) -> Message:
        """The message, its calls over `max_tool_calls` marked, so that the world answers them with what is wrong."""
        most = self.limits.max_tool_calls
        if most is None or not message.tool_calls:
            return message
        calls: list[ToolCall] = []
        for call in message.tool_calls:
            runs = call.status == "ok" and self.calls_run < most
            self.calls_run += runs
            calls.append(call if runs or call.status != "ok" else call.failed("limit", _NO_MORE_CALLS))
        return replace(message, tool_calls=tuple(calls))

    def _begin(self, name: Phase) -> float:
        self.doing = name
        if self.observer is not None:
            self.observer.phase(name, +1)
        return time.perf_counter()

    def _end(self, name: Phase, started: float) -> None:
        self.episode.timings[name] += time.perf_counter() - started
        if self.observer is not None:
            self.observer.phase(name, -1)


async def _close(world: LiveWorld) -> None:
    try:
        await Deadline(_CLOSING, f"closing {type(world).__name__}").hold(world.close())
    except (Exception, SystemExit, asyncio.CancelledError, GeneratorExit) as error:
        logger.warning("a world was not closed: %s: %s", type(error).__name__, error)


def malformed(said: Turn) -> str | None:
    """What is wrong with the first call of a turn that is not well-formed (`bad_json` or `unclosed`), or None."""
    for call in said.message.tool_calls if said.message is not None else ():
        if call.status in ("bad_json", "unclosed"):
            return f"the call {call.name or '(no name)'} is {call.status}: {call.error}"
    return None
