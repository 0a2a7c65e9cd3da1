"""An engine over a blocking batch sampler: the dynamic active batch.

A batch is cut whenever the sampler is idle and the event loop has nothing else ready to run, and takes every request
that waits. So where tools answer at once a round of all live episodes is one call, and where they are slow nobody
waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from unspool.engines.protocol import EngineBase, GenerateRequest, Generation, SampledSequence, Sampler
from unspool.threads import run_in_thread
from unspool.types import EngineError, SamplingParams

_log = logging.getLogger(__name__)

_YIELDS = 16  # turns of an event loop whose queue cannot be looked at, before it is taken for idle
_MOST_YIELDS = 256  # turns after which a loop that never runs dry (two of these on one loop, say) is not waited for


@dataclass(eq=False, slots=True)
class _Waiting:
    request: GenerateRequest
    answer: asyncio.Future[Generation]

    @property
    def key(self) -> tuple[SamplingParams, tuple[int, ...]]:
        """What requests of one call have in common."""
        return replace(self.request.params, max_tokens=None), self.request.stop_token_ids


class _Queue:
    """The requests of one event loop, and the task that serves them while there are any."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.server: asyncio.Task[None] | None = None


class Batching(EngineBase):
    """Makes an engine of a sampler (`sample(batch, sampling_params)`, blocking, whole batch at once).

    Requests whose sampling parameters are equal but for `max_tokens` go in one call; the call gets the largest
    `max_tokens` of its rows, and an answer longer than its own is cut there, with stop reason `length`.

    Args:
        sampler: see `unspool.engines.protocol.Sampler`. `sample` is called from one thread at a time. If it has an
            `end_session(session)`, that is called when an episode is over, from the episode's own thread.
        logprobs: whether its answers carry log-probabilities; None: found out from the first answer.
    """

    def __init__(self, sampler: Sampler, *, logprobs: bool | None = None) -> None:
        self.sampler = sampler
        self._declared = logprobs
        self.logprobs = bool(logprobs)
        self._one_call = threading.Lock()
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "_declared": self._declared, "logprobs": self.logprobs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sampler"], logprobs=state["_declared"])  # type: ignore[misc]

    @property
    def version(self) -> int:  # type: ignore[override]
        """The sampler's own weight version, where it counts one."""
        return int(getattr(self.sampler, "version", 0))

    @property
    def context_length(self) -> int | None:  # type: ignore[override]
        """The sampler's own, where it says one."""
        length: int | None = getattr(self.sampler, "context_length", None)
        return length

    async def generate(self, request: GenerateRequest) -> Generation:
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(loop, _Queue())
        item = _Waiting(request, loop.create_future())
        queue.waiting.append(item)
        if queue.server is None or queue.server.done():
            queue.server = loop.create_task(self._serve(queue))
        return await item.answer

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Hand the weights to the sampler, between two calls."""
        update = getattr(self.sampler, "update_weights", None)
        if update is None:
            raise EngineError(f"{type(self.sampler).__name__} has no update_weights; give its weights to it directly")
        await run_in_thread(self._alone, update, source, version)

    def end_session(self, session: str) -> None:
        """Tell the sampler, where it has an `end_session`, perhaps while it samples."""
        ended = getattr(self.sampler, "end_session", None)
        if ended is None:
            return
        try:
            ended(session)
        except Exception:  # the episode is over and well: what it leaves behind is not its fault
            _log.exception("%s.end_session failed; the session is over all the same", type(self.sampler).__name__)

    async def _serve(self, queue: _Queue) -> None:
        while queue.waiting:
            await _run_dry()
            batch = [item for item in queue.waiting if not item.answer.done()]  # done: cancelled while it waited
            queue.waiting.clear()
            calls: dict[object, list[_Waiting]] = {}
            for item in batch:
                calls.setdefault(item.key, []).append(item)
            for rows in calls.values():
                await self._call(rows)

    async def _call(self, rows: list[_Waiting]) -> None:
        requests = [row.request for row in rows]
        limits = [request.params.max_tokens for request in requests]
        longest = None if None in limits else max(limit for limit in limits if limit is not None)
        batch = [
            {
                "input_ids": request.input_ids,
                "session": request.session,
                "seed": request.seed,
                "max_tokens": request.params.max_tokens,
                "stop_token_ids": request.stop_token_ids,
                **request.extra,
            }
            for request in requests
        ]
        try:
            params = replace(requests[0].params, max_tokens=longest)
            responses = await run_in_thread(self._alone, self.sampler.sample, batch, params)
            if isinstance(responses, str) or not isinstance(responses, Sequence):
                raise EngineError(
                    f"{type(self.sampler).__name__}.sample must return a list of SampleResponse, "
                    f"not {type(responses).__name__}"
                )
            if len(responses) != len(batch):
                raise EngineError(
                    f"{type(self.sampler).__name__}.sample returned {len(responses)} answers to {len(batch)} requests"
                )
        except Exception as error:
            for row in rows:
                if not row.answer.done():
                    row.answer.set_exception(error)
            return
        for row, response in zip(rows, responses, strict=True):
            if row.answer.done():
                continue
            try:
                row.answer.set_result(self._read(response, row.request.params.max_tokens))
            except Exception as error:
                row.answer.set_exception(error)

    def _alone(self, function: Any, *args: Any) -> Any:
        with self._one_call:
            return function(*args)

    def _read(self, response: Any, limit: int | None) -> Generation:
        sequences = getattr(response, "sequences", None)
        if sequences is None:
            raise EngineError(f"the sampler answered a {type(response).__name__}; it must be a SampleResponse")
        if len(sequences) != 1:
            raise EngineError(f"the sampler answered {len(sequences)} sequences to one request; rollouts need 1")
        sequence: SampledSequence = sequences[0]
        tokens = list(sequence.tokens)
        logprobs = None if sequence.logprobs is None else sampled_logprobs(tokens, sequence.logprobs)
        if self._declared is None:
            self._declared = self.logprobs = logprobs is not None
        if limit is None or len(tokens) <= limit:
            return Generation(tokens, logprobs, stop_reason=sequence.stop_reason)
        return Generation(tokens[:limit], logprobs and logprobs[:limit], stop_reason="length")


def sampled_logprobs(tokens: Sequence[int], entries: Sequence[Any]) -> list[float]:
    """The log-probability of each sampled token, from floats or from top-k maps.

    An entry may be a number, a mapping from token id to log-probability (or to an object with `.logprob`), or a list
    of (token id, log-probability) pairs. Of a map the sampled token's own entry is taken, wherever it stands.

    Raises:
        EngineError: where counts differ, or a map lacks the sampled token.
    """
    if len(tokens) != len(entries):
        raise EngineError(f"the sampler returned {len(entries)} log-probabilities for {len(tokens)} tokens")
    return [_own_logprob(token, entry) for token, entry in zip(tokens, entries, strict=True)]


def _own_logprob(token: int, entry: Any) -> float:
    if isinstance(entry, (list, tuple)):
        entry = {pair[0]: pair[1] for pair in entry}
    if isinstance(entry, Mapping):
        if token not in entry:
            raise EngineError(f"the sampler's log-probabilities of token {token} do not hold that token itself")
        entry = entry[token]
    value = getattr(entry, "logprob", entry)
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise EngineError(f"the sampler's log-probability of token {token} is {value!r}, which is no number")
    return float(value)


async def _run_dry() -> None:
    """Return once the running event loop has nothing else that is ready to run."""
    loop = asyncio.get_running_loop()
    ready: Any = getattr(loop, "_ready", None)  # asyncio's own loops; others are given some turns
    if ready is None:
        for _ in range(_YIELDS):
            await asyncio.sleep(0)
        return
    for _ in range(_MOST_YIELDS):
        await asyncio.sleep(0)
        if not ready:
            return
