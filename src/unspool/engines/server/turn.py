"""A turn while it is asked for: what earlier tries have sampled of it, and what became of them.

Tokens, log-probabilities and versions grow together and only by whole answers. A try that goes on with kept tokens
has a seed of its own, so that it does not draw the same random numbers again.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from unspool.engines.protocol import GenerateRequest, Generation, GenerationStop
from unspool.engines.server.kinds import Answer, Asked
from unspool.types import EngineError

_SEEDS = 2**63


class Turn:
    """See the module's docstring.

    Args:
        request: what is asked for.
        context: most tokens of prompt and answer together, where that is known.
        from_the_start: whether an interrupted answer is sampled whole again.
        most_empty: how many tries in a row may be interrupted without a token.
    """

    def __init__(self, request: GenerateRequest, context: int | None, *, from_the_start: bool, most_empty: int) -> None:
        self.request = request
        self.stop: GenerationStop | None = None
        self._context = context
        self._from_the_start = from_the_start
        self._most_empty = most_empty
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._extra: dict[str, list[Any]] = {}
        self._retries: list[dict[str, Any]] = []
        self._failed_at: list[float] = []
        self._empty = 0

    @property
    def room(self) -> int | None:
        """How many tokens may still come; None: not known."""
        limit = self.request.params.max_tokens
        left = None if self._context is None else self._context - len(self.request.input_ids)
        least = min((bound for bound in (limit, left) if bound is not None), default=None)
        return None if least is None else least - len(self._tokens)

    def asked(self, model: str) -> Asked:
        """The next try."""
        seed = self.request.seed % _SEEDS
        if self._tokens:
            digest = blake2b(f"{seed} {len(self._tokens)}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") % _SEEDS
        prompt = [*self.request.input_ids, *self._tokens]
        return Asked(self.request, prompt, self.room, seed, model, uuid4().hex)

    def sent(self) -> None:
        """The next try is on its way."""
        now = time.monotonic()
        for failed_at in self._failed_at:
            entry = self._retries[len(self._retries) - len(self._failed_at)]
            entry["seconds"] = now - failed_at
            self._failed_at = self._failed_at[1:]

    def failed(self, error: str) -> None:
        """A try failed, and will be followed by another one."""
        self._retries.append({"error": error, "kept": len(self._tokens), "seconds": 0.0})
        self._failed_at.append(time.monotonic())

    def take(self, answer: Answer, version: int) -> None:
        """Put an answer behind what there is.

        Raises:
            EngineError: the server interrupts every try before it has a token.
        """
        if answer.end == "abort" and self._from_the_start:
            answer = Answer([], [], "abort")
        self._tokens += answer.tokens
        self._logprobs += answer.logprobs
        self._versions += [version] * len(answer.tokens)
        for name, values in answer.extra.items():
            self._extra.setdefault(name, []).extend(values)
        if answer.end != "abort":
            self.stop = answer.end
        elif self._tokens and self._tokens[-1] in self.request.stop_token_ids:
            self.stop = "stop"
        elif self.room == 0:
            self.stop = "length"
        else:
            self._empty = 0 if answer.tokens else self._empty + 1
            if self._empty > self._most_empty:
                raise EngineError(f"the server interrupted a turn {self._empty} times before it had sampled a token")
            self.failed("the server was told to interrupt what it ran (abort)")

    @property
    def empty(self) -> int:
        """How many tries in a row were interrupted without a token."""
        return self._empty

    def generation(self) -> Generation:
        """The whole turn."""
        extra: dict[str, Any] = dict(self._extra)
        if self._retries:
            extra["retries"] = self._retries
        return Generation(self._tokens, self._logprobs, self._versions, self.stop or "length", extra)
