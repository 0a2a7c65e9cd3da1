"""An engine whose answers you write: for tests of tools, environments, limits and schedules, without a model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from unspool.engines.protocol import EngineBase, GenerateRequest, Generation
from unspool.types import InvalidTypeError

Reply = Generation | Sequence[int]


class ScriptedEngine(EngineBase):
    """Answers each request with `reply(request)`, after `latency` seconds, any number of requests at once.

    Args:
        reply: a function of the request, plain or async, that returns a `Generation` or token ids. What plain ids
            may not do is exceed `max_tokens`: they are cut there, with stop reason `length`, as a model would be.
        latency: seconds that each answer takes.
        logprobs: whether answers carry log-probabilities; plain ids get -1.0 each where they do.

    `requests` holds every request in the order of arrival; `running` counts those under way.
    """

    def __init__(
        self,
        reply: Callable[[GenerateRequest], Reply | Awaitable[Reply]],
        latency: float = 0.0,
        *,
        logprobs: bool = False,
        version: int = 0,
        context_length: int | None = None,
        keep_requests: bool = True,
    ) -> None:
        if not callable(reply):
            raise InvalidTypeError(f"reply must be a function of the request, not {type(reply).__name__}")
        self._reply = reply
        self._latency = latency
        self._keep = keep_requests
        self.logprobs = logprobs
        self.version = version
        self.context_length = context_length
        self.requests: list[GenerateRequest] = []
        self.running = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        if self._keep:
            self.requests.append(request)
        self.running += 1
        try:
            if self._latency:
                await asyncio.sleep(self._latency)
            reply = self._reply(request)
            if inspect.isawaitable(reply):
                reply = await reply
        finally:
            self.running -= 1
        return reply if isinstance(reply, Generation) else self._from_ids(list(reply), request.params.max_tokens)

    def _from_ids(self, tokens: list[int], limit: int | None) -> Generation:
        cut = limit is not None and len(tokens) > limit
        if cut:
            tokens = tokens[:limit]
        return Generation(
            tokens,
            logprobs=[-1.0] * len(tokens) if self.logprobs else None,
            stop_reason="length" if cut else "stop",
        )

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Count the version; the script itself has no weights."""
        self.version = self.version + 1 if version is None else version
