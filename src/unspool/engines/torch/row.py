"""One request on its way through the engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from unspool.engines.protocol import Generation, GenerationStop
from unspool.types import EngineError, SamplingParams

Alternatives: TypeAlias = list[tuple[int, float]]
"""The likeliest tokens at one place and their log-probabilities at temperature 1."""

_arrivals = itertools.count()


class Decoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...


class StopStrings:
    """Watches the text of the sampled tokens for strings that end a turn.

    Only a tail of the answer is decoded: a string of n bytes lies within the last n + 1 tokens, as each carries a
    byte at least; some more stand before it, because decoders treat the first token of a text in their own way.
    """

    _MARGIN = 8

    def __init__(self, tokenizer: Decoder, strings: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._window = max(len(text.encode("utf-8", "surrogatepass")) for text in strings) + self._MARGIN

    def hit(self, tokens: list[int]) -> bool:
        """Whether the last token completes a stop string; to be asked after every token."""
        tail = tokens[-self._window :]
        text = self._tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)


@dataclass(eq=False, slots=True)
class Row:
    """A request and what has been sampled for it.

    The thread of the engine alone changes a row, but for `cancelled`, which the caller sets. Everything needed to
    go on is here: a row that leaves the batch (preempted, or its cache made stale by new weights) comes back by a
    forward pass over `ids`, and its random stream has not moved.
    """

    prompt: list[int]
    params: SamplingParams
    stops: frozenset[int]
    limit: int  # most new tokens
    random: random.Random
    resolve: Callable[[Generation | EngineError], None]  # called once, from the thread of the engine
    session: str = ""  # its cache is kept under this name; none: not at all
    stop_strings: StopStrings | None = None
    wants_raw: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False
    alone: bool = False  # was in a batch that failed: runs by itself, so that it can harm no other
    seen: Tensor | None = None  # [V] bool, kept where there is a repetition penalty
    done: bool = False
    order: int = field(default_factory=lambda: next(_arrivals))
    _numbers: list[float] | None = None

    @property
    def ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.tokens

    def last(self, count: int) -> list[int]:
        """The last `count` of `ids`; all where there are fewer."""
        missing = count - len(self.tokens)
        return self.prompt[-missing:] + self.tokens if missing > 0 else self.tokens[-count:]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.limit - len(self.tokens)

    def numbers(self, count: int) -> list[float]:
        """Those in [0, 1) that make the next token: the same until `take`, however often a step is tried."""
        if self._numbers is None:
            self._numbers = [self.random.random() for _ in range(count)]
        return self._numbers

    def take(
        self, token: int, logprob: float, raw_logprob: float, version: int, alternatives: Alternatives | None = None
    ) -> GenerationStop | None:
        """Append a sampled token; say why the row ends with it, or None."""
        self._numbers = None
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.wants_raw:
            self.raw_logprobs.append(raw_logprob)
        if alternatives is not None:
            self.alternatives.append(alternatives[: self.params.logprobs])
        if self.seen is not None:
            self.seen[token] = True
        if token in self.stops or (self.stop_strings is not None and self.stop_strings.hit(self.tokens)):
            return "stop"
        return "length" if self.remaining == 0 else None

    def finish(self, reason: GenerationStop) -> None:
        """Hand the answer to whoever waits for it."""
        self.done = True
        extra: dict[str, Any] = {"raw_logprobs": self.raw_logprobs} if self.wants_raw else {}
        if self.params.logprobs:
            extra["top_logprobs"] = self.alternatives
        self.resolve(Generation(self.tokens, self.logprobs, self.versions, reason, extra))

    def fail(self, error: EngineError) -> None:
        """Hand an error to whoever waits for an answer."""
        self.done = True
        self.resolve(error)


def failure(row: Row, error: Exception) -> EngineError:
    """What whoever waits for the row is told when something raised."""
    if isinstance(error, EngineError):  # says itself what was wrong; one of its own for each who waits
        own = EngineError(str(error))
        own.__cause__ = error
        return own
    told = EngineError(
        f"a row of {row.length} tokens failed ({type(error).__name__}: {error}); "
        "if memory ran out, allow less in a batch (max_batch_tokens, max_batch_size)"
    )
    told.__cause__ = error
    return told


def closed() -> EngineError:
    """What whoever waits for a row of an engine that ends is told."""
    return EngineError("the engine was closed; call start() before generating again")
