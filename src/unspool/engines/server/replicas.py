"""Who serves whom: the servers of an engine, the episodes that have a seat with one, and those that wait for one.

What this module promises:

- An episode keeps its seat until it ends, its server is lost or overloaded, or it was idle for long while others wait.
- A new episode goes to the live server with the fewest seats taken that has room. Where none has, episodes wait in
  the order in which they came, without a connection; those that lost their server come before new ones.
- Nothing here opens a connection. All of it may be used from several event loops and threads at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from unspool.engines.meaning import LogprobMeaning
from unspool.types import EngineError

MaxEpisodes = int | Literal["auto"] | None

MOST_SEATS: Final = 100_000
"""Episodes whose seats are remembered at once; beyond them the one that was not heard of for longest loses its seat."""

IDLE_SECONDS: Final = 600.0
"""An episode that has asked nothing for so long may lose its seat to one that waits: nobody may have said its end."""

_FIRST: Final = 8
"""Episodes that a server gets before it was asked for its queue ("auto"); then as many again as it has."""


@dataclass(eq=False, slots=True)
class Call:
    """One request under way. `interrupt` ends it from any thread, as no fault of the server's."""

    loop: asyncio.AbstractEventLoop
    work: asyncio.Future[Any]
    version: int
    why: str | None = None

    def interrupt(self, why: str) -> None:
        self.why = why
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.work.cancel)


@dataclass(eq=False, slots=True)
class Replica:
    """One server. `live`: requests may be sent to it; else it is looked after until it is. `paused`: it may be."""

    url: str
    live: bool = False
    paused: bool = False
    seats: int = 0
    calls: set[Call] = field(default_factory=set)
    held_until: float = 0.0
    quota: int = _FIRST
    heard: float = 0.0
    error: str = "it was not asked yet"
    model: str = ""
    context: int | None = None
    meaning: LogprobMeaning | None = None


@dataclass(eq=False, slots=True)
class Seat:
    """An episode's place with a server. Without a session it lasts for one request."""

    session: str
    replica: Replica
    running: int = 0
    used: float = field(default_factory=time.monotonic)


@dataclass(eq=False, slots=True)
class _Waiter:
    session: str
    loop: asyncio.AbstractEventLoop
    ready: asyncio.Future[None]
    seat: Seat | None = None

    def call(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_settle, self.ready)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class _Bell:
    """Wakes whoever waits for something, on whatever loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []

    def ring(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.call()

    async def until(self, good: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something is so; False: it was not within `seconds`."""
        end = None if seconds is None else time.monotonic() + seconds
        loop = asyncio.get_running_loop()
        while True:
            waiter = _Waiter("", loop, loop.create_future())
            with self._lock:
                self._waiters.append(waiter)
            if good():
                return True
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            await asyncio.wait({waiter.ready}, timeout=left)


class Fleet:
    """See the module's docstring.

    Args:
        urls: of the servers.
        max_episodes: most seats of a server; "auto": as many as do not make requests wait in it; None: no bound.
        recover_timeout: seconds that an episode waits while no server is live.
        waiting: called when episodes begin to wait for room: `keep` says until when they do.
    """

    def __init__(
        self, urls: Iterable[str], max_episodes: MaxEpisodes, recover_timeout: float, waiting: Callable[[], None]
    ) -> None:
        self.replicas = [Replica(url) for url in urls]
        self.open = False
        """Whether requests may be sent: not while the engine is paused or gets new weights."""
        self.closed = False
        self.version = 0
        self._max_episodes = max_episodes
        self._recover_timeout = recover_timeout
        self._waiting = waiting
        self._lock = threading.RLock()
        self._seats: OrderedDict[str, Seat] = OrderedDict()
        self._queue: deque[_Waiter] = deque()
        self._before: deque[_Waiter] = deque()
        """Episodes that run, and wait because their server is lost or overloaded."""
        self._dark_since: float | None = time.monotonic()
        self._kept = False
        self.gate_moved = _Bell()
        self.calls_ended = _Bell()
        self.server_changed = _Bell()

    # ------------------------------------------------------------------ seats

    async def take(self, session: str, *, moved: bool = False) -> Seat:
        """A seat for one request of an episode: the one it has, or a new one, as soon as there is one.

        Raises:
            EngineError: no server was live for `recover_timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(session, loop, loop.create_future())
        with self._lock:
            first = moved or session in self._seats
            if not ((first or not self.queue) and self._give(waiter)):
                (self._before if first else self._queue).append(waiter)
        began = time.monotonic()
        try:
            while waiter.seat is None:
                self._call_keeper()
                await asyncio.wait({waiter.ready}, timeout=self._patience(began))
            return waiter.seat
        except BaseException:
            with self._lock:
                if waiter.seat is not None:
                    self.leave(waiter.seat)
                else:
                    (self._before if waiter in self._before else self._queue).remove(waiter)
            raise

    def _patience(self, began: float) -> float:
        """Seconds to wait before one has to look again whether a server is live."""
        with self._lock:
            if self.closed:
                raise EngineError("the engine was closed")
            if self._dark_since is None:
                return self._recover_timeout
            left = max(began, self._dark_since) + self._recover_timeout - time.monotonic()
            if left > 0:
                return left
            last = "; ".join(f"{replica.url}: {replica.error}" for replica in self.replicas)
        raise EngineError(f"no server came back within recover_timeout={self._recover_timeout:g} s ({last})")

    def _admit(self) -> None:
        """Give seats to those that wait, as long as there is room."""
        if not self.queue or self._dark_since is not None:
            return
        self._before = deque(waiter for waiter in self._before if not self._give(waiter))
        while not self._before and self._queue and self._give(self._queue[0]):
            self._queue.popleft()

    def _give(self, waiter: _Waiter) -> bool:
        """Give a seat, if there is room."""
        seat = self._seats.get(waiter.session)
        if seat is None or not seat.replica.live:
            replica = self._roomiest()
            if replica is None:
                return False
            self._free(seat)
            seat = self._new_seat(waiter.session, replica)
        seat.running += 1
        seat.used = time.monotonic()
        waiter.seat = seat
        waiter.call()
        return True

    def _new_seat(self, session: str, replica: Replica) -> Seat:
        seat = Seat(session, replica)
        replica.seats += 1
        replica.quota -= 1
        if session:
            self._seats[session] = seat
            if len(self._seats) > MOST_SEATS:
                self._free(next((other for other in self._seats.values() if not other.running), None))
        return seat

    def _roomiest(self) -> Replica | None:
        """The live server with the fewest seats taken of those that have room; one that asked for rest comes last."""
        now = time.monotonic()
        able = [replica for replica in self.replicas if replica.live and self._has_room(replica)]
        return min(able, key=lambda replica: (replica.held_until > now, replica.seats), default=None)

    def _has_room(self, replica: Replica) -> bool:
        if self._max_episodes is None:
            return True
        return replica.quota > 0 if self._max_episodes == "auto" else replica.seats < self._max_episodes

    def leave(self, seat: Seat) -> None:
        """A request is over."""
        with self._lock:
            seat.running -= 1
            seat.used = time.monotonic()
            if self._seats.get(seat.session) is seat:
                self._seats.move_to_end(seat.session)
            elif not seat.session:
                self._free(seat)
                self._admit()

    def end(self, session: str) -> None:
        """An episode is over."""
        with self._lock:
            self._free(self._seats.get(session))
            self._admit()

    def move(self, seat: Seat) -> bool:
        """Let an episode's next request go to the server that has most room, if there is another one."""
        with self._lock:
            now = time.monotonic()
            others = (replica for replica in self.replicas if replica.live and replica is not seat.replica)
            room = any(self._has_room(replica) and replica.held_until <= now for replica in others)
            if room and self._seats.get(seat.session) is seat:
                self._free(seat)
            return room

    def _free(self, seat: Seat | None) -> None:
        """Take a seat away; the requests that run on it go on."""
        if seat is None:
            return
        if self._seats.get(seat.session) is seat:
            del self._seats[seat.session]
        elif seat.session:
            return  # it is free already
        seat.replica.seats -= 1

    # ------------------------------------------------------------------ calls

    def enter(self, seat: Seat, work: asyncio.Future[Any]) -> Call | None:
        """Note a request that is about to be sent; None: it must not be sent now."""
        with self._lock:
            if not self.open or not seat.replica.live:
                return None
            call = Call(asyncio.get_running_loop(), work, self.version)
            seat.replica.calls.add(call)
            return call

    def done(self, replica: Replica, call: Call) -> None:
        with self._lock:
            replica.calls.discard(call)
            ended = not replica.calls
        if ended:
            self.calls_ended.ring()

    def gate(self, *, opened: bool) -> None:
        """Let requests through, or hold them."""
        with self._lock:
            self.open = opened
        self.gate_moved.ring()

    # ------------------------------------------------------------------ servers

    def lose(self, replica: Replica, error: str) -> bool:
        """Take a server out, and end what runs on it; False: it was out already."""
        with self._lock:
            was, replica.live, replica.error = replica.live, False, error
            calls = list(replica.calls)
            if self._dark_since is None and not any(other.live for other in self.replicas):
                self._dark_since = time.monotonic()
        for call in calls:
            call.interrupt(f"{replica.url} is lost: {error}")
        self.server_changed.ring()
        return was

    def close(self) -> None:
        """Take all servers out; whoever waits is told."""
        with self._lock:
            self.closed, self._kept = True, False
            waiters = [*self._before, *self._queue]
        for replica in self.replicas:
            self.lose(replica, "the engine was closed")
        for waiter in waiters:
            waiter.call()

    def restore(self, replica: Replica) -> None:
        """Let requests be sent to a server."""
        with self._lock:
            replica.live, replica.error, replica.held_until, replica.quota = True, "", 0.0, _FIRST
            replica.heard = time.monotonic()
            self._dark_since = None
            self._admit()
        self.server_changed.ring()

    def hold(self, replica: Replica, seconds: float) -> None:
        """A server asked for rest."""
        with self._lock:
            replica.held_until = max(replica.held_until, time.monotonic() + seconds)

    @property
    def live(self) -> list[Replica]:
        with self._lock:
            return [replica for replica in self.replicas if replica.live]

    @property
    def queue(self) -> int:
        """Episodes that wait for a seat."""
        return len(self._queue) + len(self._before)

    def _call_keeper(self) -> None:
        """Have somebody look after those that wait, where room can come of itself."""
        with self._lock:
            wanted = self._max_episodes is not None and not self._kept
            self._kept = self._kept or wanted
        if wanted:
            self._waiting()

    def keep(self) -> bool:
        """Whether somebody still waits; where not, whoever looks after them may go: the next one calls again."""
        with self._lock:
            self._kept = self.queue > 0
            return self._kept

    def told(self, replica: Replica, waiting: float) -> None:
        """A server said how many requests wait in it: where none do, it may get as many episodes again as it has."""
        with self._lock:
            replica.quota = 0 if waiting > 0 else max(_FIRST, replica.seats)
            self._admit()

    def tidy(self) -> None:
        """Take their seats from episodes that were idle for long, while others wait."""
        with self._lock:
            limit = time.monotonic() - IDLE_SECONDS
            for seat in [seat for seat in self._seats.values() if not seat.running and seat.used < limit]:
                self._free(seat)
            self._admit()
