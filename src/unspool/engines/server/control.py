"""The life of the servers: which answer, what they are, which weights they have, and what is done to all of them.

What this module promises:

- A server serves only after it was found healthy and was asked what it is; after new weights, only with those.
- A lost server is looked after by one task, with growing pauses, until it is back or the engine is closed.
- New weights, pause and resume happen one after another, and none of them is left half done when its caller goes.
- All of this runs on unspool's private loop, whichever loop asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from unspool.engines.meaning import SAMPLED_FROM, LogprobMeaning, probe_meaning
from unspool.engines.protocol import GenerateRequest
from unspool.engines.server.http import Http, SendError, decoded
from unspool.engines.server.kinds import Asked, Kind, Post
from unspool.engines.server.replicas import Fleet, Replica
from unspool.loop import private_loop
from unspool.types import EngineError, SamplingParams

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PROBE: Final = [3, 5, 7, 3, 5, 7, 3, 5]
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_LAST_ANSWERS: Final = 2.0
"""Seconds that answers of paused servers have to arrive; what is not there then had not begun, and is hung up on."""
_QUIET: Final = 5.0
"""A server not heard of for so long may have been started again meanwhile, with the weights that it began with."""
_QUEUE_EVERY: Final = 0.25
_TIDY_EVERY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Times:
    """Time-outs in seconds; see `ServerEngine`."""

    start: float
    request: float
    health: float


class Control:
    """See the module's docstring."""

    def __init__(self, kind: Kind, http: Http, fleet: Fleet, times: Times, model: str | None, *, queue: bool) -> None:
        self.held = False
        self._kind = kind
        self._http = http
        self._fleet = fleet
        self._times = times
        self._model = model
        self._queue = queue
        self._weights: tuple[Path, str] | None = None
        self._one_change = asyncio.Lock()
        self._lock = threading.Lock()
        self._tasks: dict[object, tuple[int, Future[Any]]] = {}
        self._fatal: dict[str, str] = {}
        self._tried: set[str] = set()

    # ------------------------------------------------------------------ tasks on the private loop

    def once(self, key: object, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start something that is done once at a time, or find it being done."""
        with self._lock:
            pid, future = self._tasks.get(key, (0, None))
            if future is None or future.done() or pid != os.getpid():  # a fork has left the work behind
                future = asyncio.run_coroutine_threadsafe(work(), private_loop())
                self._tasks[key] = os.getpid(), future
            return future

    async def _join(self, key: object, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same, awaited; whoever goes away leaves it running."""
        return await asyncio.shield(asyncio.wrap_future(self.once(key, work)))

    async def close(self) -> None:
        """End all that is being done; requests under way fail."""
        with self._lock:
            tasks, self._tasks = self._tasks, {}
        for _, future in tasks.values():
            future.cancel()
        self._fleet.close()

    def _post(self, replica: Replica, seconds: float | None = None) -> Post:
        async def post(path: str, body: Mapping[str, Any] | None = None, *, get: bool = False) -> Any:
            url = replica.url + path
            text = await self._http.send(
                url, body, seconds=self._times.request if seconds is None else seconds, get=get
            )
            return decoded(text, url) if text.lstrip()[:1] in ("{", "[") else text

        return post

    def abort(self, replica: Replica, rid: str) -> None:
        """Have a server stop a request that nobody waits for any more."""

        async def work() -> None:
            try:
                await self._kind.abort(self._post(replica, self._times.health), rid)
            except EngineError as error:
                _log.debug("%s: %s could not be aborted: %s", replica.url, rid, error)

        asyncio.run_coroutine_threadsafe(work(), private_loop())

    # ------------------------------------------------------------------ getting to know servers

    async def start(self) -> None:
        """Return once each server was asked and one is live.

        Raises:
            EngineError: none is within `start_timeout`, or none can be used.
        """
        await self._join("start", self._start)

    async def _start(self) -> None:
        self._fleet.closed = False
        self._tried.clear()
        self._fatal.clear()
        replicas = self._fleet.replicas
        for replica in replicas:
            self._look_after(replica)
        end = time.monotonic() + self._times.start
        bell = self._fleet.server_changed
        await bell.until(lambda: all(r.live or r.url in self._tried for r in replicas), self._times.start)
        await bell.until(
            lambda: bool(self._fleet.live) or all(r.url in self._fatal for r in replicas), end - time.monotonic()
        )
        if not self._fleet.live:
            said = "; ".join(f"{replica.url}: {replica.error}" for replica in replicas)
            raise EngineError(f"no server was ready within start_timeout={self._times.start:g} s ({said})")
        if not self.held:
            self._fleet.gate(opened=True)

    def lost(self, replica: Replica, error: str) -> None:
        """Take a server out, and have it looked after."""
        if self._fleet.lose(replica, error):
            _log.warning("%s is lost: %s; it serves again when it is back", replica.url, error)
        self._look_after(replica)

    def _look_after(self, replica: Replica) -> None:
        self.once(("back", replica.url), partial(self._bring_back, replica))

    async def _bring_back(self, replica: Replica) -> None:
        pause = _FIRST_PAUSE
        while not replica.live:
            try:
                await self._introduce(replica)
            except EngineError as error:
                if str(error) != replica.error and self._weights is not None:
                    _log.warning("%s does not serve yet: %s", replica.url, error)
                replica.error = str(error)
                self._tried.add(replica.url)
                if not isinstance(error, SendError) or not error.again:
                    self._fatal[replica.url] = replica.error
                self._fleet.server_changed.ring()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)
        self._fatal.pop(replica.url, None)
        _log.info("%s serves", replica.url)

    async def _introduce(self, replica: Replica) -> None:
        """Ask a healthy server what it is, give it the weights that all have, and let it serve."""
        await self._post(replica, self._times.health)("/health", get=True)
        await self._name(replica)
        if self._queue:
            await self._waiting(replica)
        async with self._one_change:
            post = self._post(replica)
            if self._weights is not None:
                await self._kind.pause(post)
                await self._kind.load(post, *self._weights)
            if replica.paused or self._weights is not None:
                await self._kind.resume(post)
                replica.paused = False
            replica.error = "it does not answer requests of one token; is it paused?"
            replica.meaning = await probe_meaning(partial(self._likeliest, replica))
            if self.held:
                await self._hold(replica)
            self._fleet.restore(replica)

    async def _name(self, replica: Replica) -> None:
        """The model's name and its context, from the server's list of models."""
        listed = await self._post(replica, self._times.health)("/v1/models", get=True)
        models = listed.get("data") if isinstance(listed, Mapping) else None
        if not isinstance(models, list) or not models:
            raise EngineError(f"{replica.url}/v1/models lists no model; is it a server of this kind?")
        by_name = {str(model.get("id")): model for model in models}
        name = self._model or next((name for name, model in by_name.items() if not model.get("parent")), "")
        if name not in by_name:
            raise EngineError(f"{replica.url} has no model {name!r}; it has {', '.join(by_name)}")
        replica.model = name
        replica.context = by_name[name].get("max_model_len")

    async def _likeliest(self, replica: Replica, params: SamplingParams) -> float:
        params = SamplingParams(
            max_tokens=1,
            temperature=params.temperature,
            top_k=params.top_k,
            repetition_penalty=params.repetition_penalty,
            logprobs=1,
        )
        asked = Asked(GenerateRequest(_PROBE, params), _PROBE, 1, 0, replica.model, f"probe-{random.getrandbits(64):x}")
        data = await self._post(replica, self._times.start)(self._kind.path, self._kind.body(asked))
        self._kind.read(data, asked)
        return self._kind.likeliest(data)

    @property
    def meaning(self) -> LogprobMeaning:
        """What is in the log-probabilities of every server: where they differ, the weakest counts."""
        known = [replica.meaning for replica in self._fleet.replicas if replica.meaning is not None]
        parts = {part.name: all(getattr(one, part.name) for one in known) for part in fields(LogprobMeaning)}
        return LogprobMeaning(**parts) if known else SAMPLED_FROM

    @property
    def context(self) -> int | None:
        """The shortest context of the servers."""
        return min((r.context for r in self._fleet.replicas if r.context is not None), default=None)

    # ------------------------------------------------------------------ watching

    async def check(self, replica: Replica) -> bool:
        """Whether a server still answers, with the weights it should have; one that does not is lost."""
        await self._join(("check", replica.url), partial(self._check, replica))
        return replica.live

    async def _check(self, replica: Replica) -> None:
        if not replica.live:
            return
        post = self._post(replica, self._times.health)
        try:
            await post("/health", get=True)
            if self._weights is not None:
                tag = await self._kind.tag(post)
                if tag is not None and tag != self._weights[1] and not self._one_change.locked():
                    raise EngineError(f"it has weights {tag!r} instead of {self._weights[1]!r}: it was started again")
        except EngineError as error:
            self.lost(replica, str(error))
        else:
            replica.heard = time.monotonic()

    async def fresh(self, replica: Replica) -> None:
        """Before a request to a server that was quiet for long after new weights: check that it still has them."""
        if self._weights is not None and not replica.calls and time.monotonic() - replica.heard > _QUIET:
            await self.check(replica)

    def keep(self) -> None:
        """Look after episodes that wait for room."""
        self.once("keep", self._keep)

    async def _keep(self) -> None:
        while self._fleet.keep():
            await asyncio.sleep(_QUEUE_EVERY if self._queue else _TIDY_EVERY)
            if self._queue:
                await asyncio.gather(*(self._ask_queue(replica) for replica in self._fleet.live))
            self._fleet.tidy()

    async def _ask_queue(self, replica: Replica) -> None:
        try:
            self._fleet.told(replica, await self._waiting(replica))
        except EngineError as error:
            _log.debug("%s: %s", replica.url, error)

    async def _waiting(self, replica: Replica) -> float:
        """How many requests wait in a server."""
        name = self._kind.waiting
        try:
            text = str(await self._post(replica, self._times.health)("/metrics", get=True))
        except SendError as failure:
            if failure.status != 404:
                raise
            text = ""
        values = re.findall(rf"^{re.escape(name)}(?:{{[^\n]*}})? ([^\s]+)", text, re.MULTILINE)
        if not values:
            raise EngineError(
                f"{replica.url}/metrics has no {name}, which max_episodes='auto' needs; {self._kind.metrics_remedy}, "
                "or give a number"
            )
        return sum(map(float, values))

    # ------------------------------------------------------------------ weights

    async def update(self, path: Path, version: int | None) -> None:
        """Give all live servers new weights; see `ServerEngine.update_weights`."""
        await _whole(self._update(path, version))

    async def pause(self) -> None:
        """See `ServerEngine.pause`."""
        await _whole(self._pause())

    async def resume(self) -> None:
        """See `ServerEngine.resume`."""
        await _whole(self._resume())

    async def _update(self, path: Path, version: int | None) -> None:
        async with self._one_change:
            new = self._fleet.version + 1 if version is None else version
            try:
                await self._each(partial(self._reload, path=path, tag=str(new)), "took no new weights")
                self._weights, self._fleet.version = (path, str(new)), new
            finally:
                if not self.held:
                    await self._go_on()

    async def _pause(self) -> None:
        async with self._one_change:
            self.held = True
            try:
                await self._each(self._stop, "cannot be paused")
            except EngineError:
                self.held = False
                await self._go_on()
                raise

    async def _resume(self) -> None:
        async with self._one_change:
            self.held = False
            await self._go_on()

    async def _each(self, work: Callable[[Replica], Awaitable[None]], what: str) -> None:
        """Do something to all live servers while none is asked for anything; those where it fails are lost.

        Raises:
            EngineError: it failed for all, or none is live. They are as they were then.
        """
        self._fleet.gate(opened=False)
        replicas = self._fleet.live
        if not replicas:
            raise EngineError("no server is live: " + "; ".join(f"{r.url}: {r.error}" for r in self._fleet.replicas))
        outcomes = await asyncio.gather(*(work(replica) for replica in replicas), return_exceptions=True)
        failed = [(r, error) for r, error in zip(replicas, outcomes, strict=True) if error is not None]
        if len(failed) == len(replicas):
            raise EngineError(f"{failed[0][0].url} {what}: {failed[0][1]}") from failed[0][1]
        for replica, error in failed:
            self.lost(replica, f"it {what}: {error}")

    async def _stop(self, replica: Replica) -> None:
        """Pause a server; on return nothing of ours runs in it."""
        await self._hold(replica)
        bell = self._fleet.calls_ended
        if not await bell.until(lambda: not replica.calls, _LAST_ANSWERS):
            for call in list(replica.calls):
                call.interrupt("it had not begun when its server was paused")
            await bell.until(lambda: not replica.calls)

    async def _hold(self, replica: Replica) -> None:
        replica.paused = True
        try:
            await self._kind.pause(self._post(replica))
        except SendError as error:
            replica.paused = error.status != 404  # it has no such thing; of other failures one cannot know
            raise

    async def _reload(self, replica: Replica, *, path: Path, tag: str) -> None:
        await self._stop(replica)
        await self._kind.load(self._post(replica), path, tag)
        replica.heard = time.monotonic()

    async def _go_on(self) -> None:
        async def go_on(replica: Replica) -> None:
            try:
                await self._kind.resume(self._post(replica))
                replica.paused = False
            except EngineError as error:
                self.lost(replica, f"it cannot go on: {error}")

        await asyncio.gather(*(go_on(replica) for replica in self._fleet.live if replica.paused))
        self._fleet.gate(opened=True)


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Do something on the private loop to its end, whether or not its caller stays."""
    await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, private_loop())))
