"""The one thread that runs the model, and what it does between two forward passes.

What this module promises:

- Everything that touches the model happens on this thread, one forward pass at a time: a prefill of new rows, or a
  decoding step of all that are in the batch. Between any two, commands are run (new weights, pause), cancelled rows
  leave, and new rows join.
- No forward pass holds more than `max_batch_tokens` (rows x width of the cache after it) or `max_batch_size` rows.
  Rows are let in with some room to grow; where it runs out, the newest row waits and is prefilled again later.
- The cache of a row that ends is kept for the next turn of its session, which is fed its new tokens alone. It goes
  when the session is over; new weights drop all that is kept, and where memory runs out it goes first.
- A row's fate is its own. A forward pass that fails is tried again row by row (with half the tokens where memory ran
  out), a row whose logits are unusable fails alone, and the thread lives on until it is stopped.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from unspool.engines.torch.batch import Batch, Newcomer
from unspool.engines.torch.kept import KeptCaches
from unspool.engines.torch.model import Model
from unspool.engines.torch.row import Row, closed, failure
from unspool.engines.torch.sampling import SamplingPlan
from unspool.engines.torch.step import plan_for, sample

_log = logging.getLogger(__name__)

_HEADROOM = 64
"""Tokens of growth that must fit for a row to be let in beside others."""

_SLACK = 32
"""Tokens that a row may have to be fed beyond twice its new ones, so that it is prefilled together with others."""

_QUIET = 0.002
"""Seconds without a new request after which nobody waits for the next turns of rows that have just ended."""

_FIRST = 0.0005
"""The same for the first request of an idle engine: others may be on their way from the same loop."""

_LONGEST = 0.02
"""Seconds that such a wait lasts at most, however steadily requests come."""


class Scheduler:
    """Rows in, answers out; see the module's docstring. Its methods may be called from any thread."""

    def __init__(
        self,
        model: Model,
        *,
        max_batch_tokens: int,
        max_batch_size: int,
        max_kept_tokens: int,
        version: int,
        threads: int | None,
    ) -> None:
        self.version = version
        self._model = model
        self._max_tokens, self._max_rows = max_batch_tokens, max_batch_size
        self._threads = threads
        self._wake = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._paused = False
        self._batch = Batch(model)
        self.kept = KeptCaches(max_kept_tokens)
        self._ended = 0  # rows that have ended since somebody last waited for their next turns
        self._plan: SamplingPlan | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._thread = threading.Thread(target=self._run, name="unspool-torch-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from any thread

    def submit(self, row: Row) -> None:
        """Queue a row; its `resolve` is called when it is done."""
        with self._wake:
            if not self._stopping:
                self._waiting.append(row)
                self._wake.notify()
                return
        row.fail(closed())

    def cancel(self, row: Row) -> None:
        """Let the row leave before the next forward pass."""
        row.cancelled = True
        with self._wake:
            self._wake.notify()

    def end_session(self, session: str) -> None:
        """Drop what is kept of a session, soon; its rows have ended or were cancelled."""
        with self._wake:
            self.kept.over.append(session)
            self._wake.notify()

    def command(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the thread, between two forward passes."""
        future: Future[Any] = Future()
        with self._wake:
            if not self._stopping:
                self._commands.append((work, future))
                self._wake.notify()
                return future
        future.set_exception(closed())
        return future

    def pause(self) -> Future[Any]:
        """Hold before the next forward pass; done when no forward pass runs any more."""
        return self.command(lambda: self._hold(True))

    def resume(self) -> Future[Any]:
        """Go on."""
        return self.command(lambda: self._hold(False))

    def refresh(self, version: int) -> None:
        """The weights have changed (called within a command): rows go on from a cache made with the new ones."""
        self.version = version
        self.kept.clear()
        self._requeue(list(self._batch.rows))

    def ask_to_stop(self) -> None:
        """Fail what is queued or running, and end the thread, after the present forward pass; `ended` says when."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self) -> None:
        """The same, and wait for it. Called again, do nothing."""
        self.ask_to_stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._await_work():
            try:
                self._run_commands()
                self.kept.drop_over()  # before rows leave: one that is cancelled and ends meanwhile would be kept
                self._drop_cancelled()
                if not self._paused:
                    self._forward()
            except Exception as error:
                _log.exception("the engine's scheduler failed; its running rows fail with it")
                rows = list(self._batch.rows)
                self._clear()
                for row in rows:
                    row.fail(failure(row, error))
        self._shut_down()
        self.ended.set_result(None)

    def _await_work(self) -> bool:
        """Sleep until there is something to do; False: stop."""
        with self._wake:
            while not (self._stopping or self._commands or self.kept.over):
                if not self._paused and (self._waiting or self._batch.rows):
                    break
                self._wake.wait()
            return not self._stopping

    def _hold(self, paused: bool) -> None:
        self._paused = paused

    def _run_commands(self) -> None:
        while True:
            with self._wake:
                if not self._commands:
                    return
                work, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # whatever it is, it belongs to whoever asked
                    future.set_exception(error)

    def _drop_cancelled(self) -> None:
        with self._wake:
            if any(row.cancelled for row in self._waiting):
                self._waiting = deque(row for row in self._waiting if not row.cancelled)
        if any(row.cancelled for row in self._batch.rows):
            self._keep([i for i, row in enumerate(self._batch.rows) if not row.cancelled])

    def _forward(self) -> None:
        """One forward pass, if there is anything to pass."""
        self._gather()
        newcomers = self._next_rows()
        if newcomers:
            self._prefill(newcomers)
        elif self._batch.rows:
            self._make_room()
            self._decode()

    def _gather(self) -> None:
        """Let requests that are about to come be prefilled together, where hardly anything runs meanwhile.

        Those are the next turns of rows that have just ended, tools being quick, and the first ones of a rollout. One
        conversation by itself is never waited for: as many requests have come as rows have ended.
        """
        with self._wake:
            if not self._waiting and not self._batch.rows:
                return
            ended, self._ended = self._ended, 0
            if self._batch.rows and ended < len(self._batch.rows):
                return
            wanted = min(ended or self._max_rows, self._max_rows)
            latest = time.monotonic() + _LONGEST
            while (there := len(self._waiting)) < wanted and time.monotonic() < latest:
                self._wake.wait_for(
                    lambda there=there: len(self._waiting) > there or self._commands or self._stopping,  # type: ignore[misc]
                    _QUIET if ended else _FIRST,
                )
                if len(self._waiting) <= there:
                    return

    def _next_rows(self) -> list[Newcomer]:
        """Rows to prefill now: from the head of the queue, those that fit and have about as much to be fed."""
        with self._wake:
            if not self._waiting:
                return []
            if self._waiting[0].alone or any(row.alone for row in self._batch.rows):
                return [] if self._batch.rows else [Newcomer(self._waiting.popleft())]
            chosen = self._companions()
            taken = {id(one.row) for one in chosen}
            if taken:
                self._waiting = deque(row for row in self._waiting if id(row) not in taken)
        for one in chosen:
            if one.kept is not None:
                self.kept.take(one.row.session)
        return chosen

    def _companions(self) -> list[Newcomer]:
        """The head of the queue and those after it that fit into the batch beside all that are in it."""
        chosen: list[Newcomer] = []
        sessions: set[str] = set()
        count, width = len(self._batch), self._batch.width
        growth = max((row.remaining for row in self._batch.rows), default=0)
        for row in itertools.islice(self._waiting, self._max_rows):
            kept = None if row.session in sessions else self.kept.peek(row.session)  # unless a row before takes it
            held = 0 if kept is None else kept.in_common(row.ids)
            one = Newcomer(row, kept, held) if held else Newcomer(row)
            # Others with about as much to feed go along; with much less or more it would be mostly padding, or
            # tokens computed again.
            head = chosen[0] if chosen else one
            if head.new > 2 * one.new + _SLACK or one.new > 2 * head.new + _SLACK:
                continue
            width, growth = max(width, row.length), max(growth, row.remaining)
            count += 1
            fits = count <= self._max_rows and count * (width + min(growth, _HEADROOM)) <= self._max_tokens
            if row.alone or not (fits or count == 1):  # one row by itself always fits
                break
            chosen.append(one)
            if one.kept is not None:
                sessions.add(row.session)
        return chosen

    def _make_room(self) -> None:
        """Send the newest rows back to the queue until the next step fits."""
        rows = self._batch.rows
        while len(rows) > 1 and len(rows) * (self._batch.width + 1) > self._max_tokens:
            newest = max(range(len(rows)), key=lambda i: rows[i].order)
            row = rows[newest]
            self._remember([newest])
            self._keep([i for i in range(len(rows)) if i != newest])
            self._requeue([row])
            rows = self._batch.rows

    def _requeue(self, rows: list[Row]) -> None:
        """Put rows back at the head of the queue, to be prefilled with all they have."""
        leaving = set(map(id, rows))
        self._keep([i for i, row in enumerate(self._batch.rows) if id(row) not in leaving])
        with self._wake:
            self._waiting.extendleft(sorted(rows, key=lambda row: row.order, reverse=True))

    # no_grad and not inference_mode: a trainer may share the model, and a buffer that the model makes in its forward
    # function must not become a tensor that no backward pass can use. On a real model neither is faster.
    @torch.no_grad()
    def _keep(self, indices: list[int]) -> None:
        rows = [self._batch.rows[i] for i in indices]
        self._plan = None
        try:
            self._batch.keep(indices)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            _log.warning("memory ran out: the rows that run, and what was kept between turns, are computed anew")
            self._clear()
            self.kept.clear()
            self._requeue(rows)

    def _clear(self) -> None:
        self._batch.clear()
        self._plan = None

    @torch.no_grad()
    def _remember(self, indices: list[int]) -> None:
        """Keep the caches of rows that are about to leave the batch, where they have a session."""
        if not self.kept.enabled:
            return
        try:
            for i in indices:
                session = self._batch.rows[i].session
                kept = self._batch.release(i) if session else None
                if kept is not None:
                    self.kept.put(session, kept)
        except torch.OutOfMemoryError:
            _log.warning("memory ran out: what was kept between turns is dropped")
            self.kept.clear()

    @torch.no_grad()
    def _prefill(self, newcomers: list[Newcomer]) -> None:
        rows = [one.row for one in newcomers]
        running, self._batch = self._batch, Batch(self._model)
        try:
            self._take(self._batch.prefill(newcomers), plan_for(rows, self._model.device))
        except Exception as error:
            self._batch = running
            self._isolate(rows, error)
            return
        joined, self._batch = self._batch, running
        self._plan = None
        try:
            running.join(joined)
        except Exception as error:
            rows = [*running.rows, *joined.rows]
            joined.clear()
            self._clear()  # of some layers it may hold the cache of all rows, of others not
            self._isolate(rows, error)

    @torch.no_grad()
    def _decode(self) -> None:
        rows = self._batch.rows
        try:
            if self._plan is None:
                self._plan = plan_for(rows, self._model.device)
            self._take(self._batch.decode(), self._plan)
        except Exception as error:
            self._clear()
            self._isolate(rows, error)

    def _take(self, logits: Tensor, plan: SamplingPlan) -> None:
        """Give every row of the batch its next token; those that end with it leave."""
        live, ended = sample(self._batch.rows, logits, plan, self.version)
        if len(live) < len(self._batch.rows):
            self._ended += len(ended)
            self._remember(ended)
            self._keep(live)

    def _isolate(self, rows: list[Row], error: Exception) -> None:
        """After a failed pass: a row that was alone fails; others, and where memory is short those beside running rows,
        are tried again with less company."""
        traceback.clear_frames(error.__traceback__)  # they hold tensors; memory may be what was short
        rows = [row for row in rows if not row.done]
        short = isinstance(error, torch.OutOfMemoryError)
        if short and len(self.kept):
            _log.warning("memory ran out: what was kept between turns is dropped")
            self.kept.clear()
            self._requeue(rows)
            return
        if not rows or (len(rows) == 1 and not (short and self._batch.rows)):
            for row in rows:
                row.fail(failure(row, error))
            return
        if short:
            together = [*rows, *self._batch.rows]
            tried = len(together) * max(row.length for row in together)
            self._max_tokens = max(1, min(self._max_tokens, tried) // 2)
            _log.warning("memory ran out at %d tokens: from now on at most %d run together", tried, self._max_tokens)
        else:
            _log.warning("a forward pass of %d rows failed (%s): they are run one by one", len(rows), error)
            for row in rows:
                row.alone = True
        self._requeue(rows)

    def _shut_down(self) -> None:
        with self._wake:
            rows, commands = [*self._batch.rows, *self._waiting], list(self._commands)
            self._waiting.clear()
            self._commands.clear()
        self._batch.clear()
        self.kept.clear()
        for row in rows:
            row.fail(closed())
        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(closed())
