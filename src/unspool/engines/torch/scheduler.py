"""The one thread that runs the model, and what it does between two forward passes.

What this module promises:

- Everything that touches the model happens on this thread, one forward pass at a time: a prefill of new rows, or a
  decoding step of all that are in the batch. Between any two, commands are run (new weights, pause), cancelled rows
  leave, and new rows join.
- No forward pass holds more than `max_batch_tokens` (rows x width of the cache after it) or `max_batch_size` rows.
  Rows are let in with some room to grow; where it runs out, the newest row waits and is prefilled again later.
- A row's fate is its own. A forward pass that fails is tried again row by row (with half the tokens where memory ran
  out), a row whose logits are unusable fails alone, and the thread lives on until it is stopped.
"""

from __future__ import annotations

import itertools
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from unspool.engines.torch.batch import Batch, Model
from unspool.engines.torch.row import Alternatives, Row
from unspool.engines.torch.sampling import Draw, SamplingPlan, choices, draw, wide
from unspool.types import EngineError

_log = logging.getLogger(__name__)

_HEADROOM = 64
"""Tokens of growth that must fit for a row to be let in beside others."""


class Scheduler:
    """Rows in, answers out; see the module's docstring. Its methods may be called from any thread."""

    def __init__(
        self, model: Model, *, max_batch_tokens: int, max_batch_size: int, version: int, threads: int | None
    ) -> None:
        self.version = version
        self._model = model
        self._max_tokens = max_batch_tokens
        self._max_rows = max_batch_size
        self._threads = threads
        self._wake = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._paused = False
        self._batch = Batch(model)
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
        row.fail(_closed())

    def cancel(self, row: Row) -> None:
        """Let the row leave before the next forward pass."""
        row.cancelled = True
        with self._wake:
            self._wake.notify()

    def command(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the thread, between two forward passes."""
        future: Future[Any] = Future()
        with self._wake:
            if not self._stopping:
                self._commands.append((work, future))
                self._wake.notify()
                return future
        future.set_exception(_closed())
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
                self._drop_cancelled()
                if not self._paused:
                    self._forward()
            except Exception as error:
                _log.exception("the engine's scheduler failed; its running rows fail with it")
                rows = list(self._batch.rows)
                self._clear()
                for row in rows:
                    row.fail(_failure(row, error))
        self._shut_down()
        self.ended.set_result(None)

    def _await_work(self) -> bool:
        """Sleep until there is something to do; False: stop."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._stopping or self._commands or (not self._paused and (self._waiting or self._batch.rows))
            )
            return not self._stopping

    def _hold(self, paused: bool) -> None:
        self._paused = paused

    def _run_commands(self) -> None:
        while True:
            with self._wake:
                if not self._commands:
                    return
                work, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
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
        newcomers = self._next_rows()
        if newcomers:
            self._prefill(newcomers)
        elif self._batch.rows:
            self._make_room()
            self._decode()

    def _next_rows(self) -> list[Row]:
        """Rows to prefill now: from the head of the queue, those that fit and are of like length."""
        with self._wake:
            if not self._waiting:
                return []
            head = self._waiting[0]
            if head.alone or any(row.alone for row in self._batch.rows):
                if self._batch.rows:
                    return []
                return [self._waiting.popleft()]
            chosen = self._companions(head)
            taken = set(map(id, chosen))
            if taken:
                self._waiting = deque(row for row in self._waiting if id(row) not in taken)
            return chosen

    def _companions(self, head: Row) -> list[Row]:
        """The head of the queue and those after it that fit into the batch beside all that are in it."""
        chosen: list[Row] = []
        count, width = len(self._batch), self._batch.width
        growth = max((row.remaining for row in self._batch.rows), default=0)
        for row in itertools.islice(self._waiting, self._max_rows):
            # Others of like length go along; much shorter or longer ones would be mostly padding.
            if head.length > 2 * row.length + _HEADROOM or row.length > 2 * head.length + _HEADROOM:
                continue
            width, growth = max(width, row.length), max(growth, row.remaining)
            count += 1
            fits = count <= self._max_rows and count * (width + min(growth, _HEADROOM)) <= self._max_tokens
            if row.alone or not (fits or count == 1):  # one row by itself always fits
                break
            chosen.append(row)
        return chosen

    def _make_room(self) -> None:
        """Send the newest rows back to the queue until the next step fits."""
        rows = self._batch.rows
        while len(rows) > 1 and len(rows) * (self._batch.width + 1) > self._max_tokens:
            newest = max(range(len(rows)), key=lambda i: rows[i].order)
            row = rows[newest]
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
        self._batch.keep(indices)
        self._plan = None

    def _clear(self) -> None:
        self._batch.clear()
        self._plan = None

    @torch.no_grad()
    def _prefill(self, rows: list[Row]) -> None:
        fresh = Batch(self._model)
        try:
            live = self._sample(rows, fresh.prefill(rows), self._plan_for(rows))
            fresh.keep(live)
            self._batch.join(fresh)
        except Exception as error:
            self._isolate(rows, error)
        self._plan = None

    @torch.no_grad()
    def _decode(self) -> None:
        rows = self._batch.rows
        try:
            if self._plan is None:
                self._plan = self._plan_for(rows)
            live = self._sample(rows, self._batch.decode(), self._plan)
            if len(live) < len(rows):
                self._keep(live)
        except Exception as error:
            self._clear()
            self._isolate(rows, error)

    def _isolate(self, rows: list[Row], error: Exception) -> None:
        """After a failed forward pass: a row that was alone in it fails; several are tried again with less company."""
        traceback.clear_frames(error.__traceback__)  # they hold tensors; memory may be what was short
        rows = [row for row in rows if not row.done]
        if len(rows) < 2:
            for row in rows:
                row.fail(_failure(row, error))
            return
        if isinstance(error, torch.OutOfMemoryError):
            together = [*rows, *self._batch.rows]
            tried = len(together) * max(row.length for row in together)
            self._max_tokens = max(1, min(self._max_tokens, tried) // 2)
            _log.warning("memory ran out at %d tokens: from now on at most %d run together", tried, self._max_tokens)
        else:
            _log.warning("a forward pass of %d rows failed (%s): they are run one by one", len(rows), error)
            for row in rows:
                row.alone = True
        with self._wake:
            self._waiting.extendleft(sorted(rows, key=lambda row: row.order, reverse=True))

    def _plan_for(self, rows: list[Row]) -> SamplingPlan:
        return SamplingPlan.of([row.params for row in rows], [row.wants_raw for row in rows], self._model.device)

    def _sample(self, rows: list[Row], logits: Tensor, plan: SamplingPlan) -> list[int]:
        """Give each row its next token; the indices of the rows that go on."""
        device, size = logits.device, logits.shape[-1]
        numbers = [row.numbers(choices(size)) for row in rows]
        uniform = torch.tensor(numbers, dtype=wide(device), device=device)
        drawn = draw(logits, plan, uniform, self._seen(rows, size))
        tokens, sound = drawn.tokens.tolist(), drawn.sound.tolist()
        logprobs, raw = drawn.logprobs.tolist(), drawn.raw_logprobs.tolist()
        beside = _alternatives(plan, drawn)
        live: list[int] = []
        for i, row in enumerate(rows):
            if not sound[i]:
                row.fail(
                    EngineError(
                        f"the model's logits hold NaN or infinity after {row.length} tokens; "
                        "check its weights and dtype"
                    )
                )
                continue
            try:
                reason = row.take(tokens[i], logprobs[i], raw[i], self.version, beside.get(i))
            except Exception as error:  # the tokenizer, at a stop string
                row.fail(_failure(row, error))
                continue
            if reason is None:
                live.append(i)
            else:
                row.finish(reason)
        return live

    def _seen(self, rows: list[Row], size: int) -> Tensor | None:
        """[n, size] bool: the tokens of those rows that have a repetition penalty."""
        masks: list[Tensor] = []
        for row in rows:
            if row.params.repetition_penalty == 1:
                continue
            if row.seen is None:
                row.seen = torch.zeros(size, dtype=torch.bool, device=self._model.device)
                row.seen[torch.tensor(row.ids, device=self._model.device)] = True
            masks.append(row.seen)
        return torch.stack(masks) if masks else None

    def _shut_down(self) -> None:
        with self._wake:
            rows = [*self._batch.rows, *self._waiting]
            commands = list(self._commands)
            self._waiting.clear()
            self._commands.clear()
        self._batch.clear()
        for row in rows:
            row.fail(_closed())
        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(_closed())


def _alternatives(plan: SamplingPlan, drawn: Draw) -> dict[int, Alternatives]:
    """For each row that asks: the likeliest tokens and their log-probabilities."""
    if plan.alternatives is None or drawn.alternatives is None:
        return {}
    pairs = zip(*(part.tolist() for part in drawn.alternatives), strict=True)
    rows = plan.alternatives[0].tolist()
    return {row: list(zip(ids, values, strict=True)) for row, (ids, values) in zip(rows, pairs, strict=True)}


def _failure(row: Row, error: Exception) -> EngineError:
    failure = EngineError(
        f"a row of {row.length} tokens failed ({type(error).__name__}: {error}); "
        "if memory ran out, allow less in a batch (max_batch_tokens, max_batch_size)"
    )
    failure.__cause__ = error
    return failure


def _closed() -> EngineError:
    return EngineError("the engine was closed; call start() before generating again")
