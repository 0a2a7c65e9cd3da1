"""What the engine needs to know of a kind of server: how to ask, how to read, and its endpoints.

The engine itself knows no kind. A kind builds bodies and reads answers, and never opens a connection of its own: it
is handed a `Post` that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from unspool.engines.protocol import GenerateRequest
from unspool.types import EngineError

End = Literal["stop", "length", "abort"]

_MOST: Final = 0.01
"""A log-probability above this is none: servers can be set to return logits instead."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One try of a turn, as it is sent.

    Attributes:
        request: the turn that is asked for.
        prompt: its context, and behind it what earlier tries have sampled already.
        max_tokens: how many tokens may still come; None: as many as fit.
        seed: of this try.
        model: the name of the model that the server knows; "" where it needs none.
        rid: our name of the try, unique.
    """

    request: GenerateRequest
    prompt: list[int]
    max_tokens: int | None
    seed: int
    model: str
    rid: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sampled in one try; `end` is `"abort"` where it was told to stop before the turn's end."""

    tokens: list[int]
    logprobs: list[float]
    end: End
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Lists with an entry for each token."""


class Post(Protocol):
    """Ask one server something: the decoded answer, or its text. Raises `SendError`."""

    async def __call__(self, path: str, body: Mapping[str, Any] | None = None, *, get: bool = False) -> Any: ...


class Kind(Protocol):
    """A kind of server.

    Attributes:
        path: where turns are asked for.
        waiting: name of the metric that counts requests which wait in the server.
        metrics_remedy: how to start the server so that it has metrics.
        logprobs_remedy: how to get log-probabilities of the distribution that is sampled from.
        shaping: names in `extra` that change the distribution as penalties or truncation do.
    """

    path: str
    waiting: str
    metrics_remedy: str
    logprobs_remedy: str
    shaping: frozenset[str]

    def body(self, asked: Asked) -> dict[str, Any]:
        """The body of a request for a turn."""
        ...

    def read(self, data: Any, asked: Asked) -> Answer:
        """The answer to it. Raises EngineError where it breaks the contract."""
        ...

    def likeliest(self, data: Any) -> float:
        """The log-probability of the likeliest first token, of an answer to a request with `logprobs` 1."""
        ...

    def from_the_start(self, request: GenerateRequest) -> bool:
        """Whether a turn that was interrupted must be sampled from its start, because the server could not go on
        with what it has: what a stop string, a grammar or a penalty has seen of it would be lost."""
        ...

    async def pause(self, post: Post) -> None:
        """Take up no more requests; those that run answer at once with what they have."""
        ...

    async def resume(self, post: Post) -> None: ...

    async def load(self, post: Post, path: Path, tag: str) -> None:
        """Load weights into a paused server, drop what is cached of the old ones, and have it remember `tag`."""
        ...

    async def tag(self, post: Post) -> str | None:
        """The tag of the weights that the server has; None: it does not say."""
        ...

    async def abort(self, post: Post, rid: str) -> None:
        """Stop a request whose connection was closed."""
        ...


def checked_ids(ids: object, remedy: str) -> list[int]:
    """Token ids of an answer.

    Raises:
        EngineError: they are none.
    """
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise EngineError(f"the server returned no token ids; {remedy}")
    return ids


def checked_logprobs(values: Sequence[object], count: int) -> list[float]:
    """The log-probabilities of `count` tokens of the same answer.

    Raises:
        EngineError: there are more or fewer, or they cannot be log-probabilities.
    """
    if len(values) != count:
        raise EngineError(f"the server returned {len(values)} log-probabilities for {count} tokens")
    checked: list[float] = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value <= _MOST:
            raise EngineError(
                f"the server returned {value!r} as a log-probability; it must be a number, at most 0 (a server that is "
                "set to return logits cannot be used)"
            )
        checked.append(float(value))
    return checked


def as_mapping(data: object, what: str) -> Mapping[str, Any]:
    """Raises EngineError where a part of an answer is no JSON object."""
    if not isinstance(data, Mapping):
        raise EngineError(f"{what} is {data!r:.80}, where a JSON object was to be expected")
    return data
