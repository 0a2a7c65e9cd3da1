"""The seam between policies and inference: token ids in, token ids out.

An engine answers one request at a time and decides itself what it runs together. A sampler answers a whole
batch at once and blocks; `Batching` makes an engine of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from unspool.types import SamplingParams

GenerationStop = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    Attributes:
        input_ids: the whole context, list of token ids.
        params: how to sample; `params.max_tokens` is already bounded by what the trajectory has left.
        session: unique to the episode, the same for all its turns, so that an engine can keep its prefix.
        seed: of this turn alone; the same run gives the same seeds whatever the schedule.
        stop_token_ids: tokens that end the turn; the one sampled is part of the answer.
        extra: what an engine may need besides. `adapter`: name of a LoRA adapter that the engine has.
            `structured_outputs`: a mapping with one of `json` (a schema), `regex`, `choice`, `grammar` and
            `structural_tag`, which holds the answer to that form. Anything else is the engine's own and passed through.
    """

    input_ids: list[int]
    params: SamplingParams
    session: str = ""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled, as it was sampled, the stop token included.

    Attributes:
        tokens: the ids that the engine sampled.
        logprobs: for each token, the natural log of its probability under the distribution that it was
            sampled from (temperature, truncation and renormalisation included); None: the engine has none.
        versions: for each token, the weight version that produced it; None: the engine's current one.
        stop_reason: `"stop"` (a stop token or stop string) or `"length"` (max_tokens, or the context is full).
        extra: per-token extras of the engine (lists as long as `tokens`), or anything else, carried through.
            `retries`: where the turn was asked for again, a list of dicts: `error` (str), `kept` (tokens that the
            failed try had sampled and that stand at the start of `tokens`), `seconds` (from the failure to the next
            try).
    """

    tokens: list[int]
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    stop_reason: GenerationStop = "stop"
    extra: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """Token-level inference. `logprobs` says whether generations carry log-probabilities."""

    @property
    def version(self) -> int: ...

    @property
    def logprobs(self) -> bool: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Cancelling the call aborts the request."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Take new weights; `version` counts on from the present one where it is not given."""
        ...


class EngineBase:
    """What every engine of unspool shares: a version, a life as a context manager, and doing nothing by default.

    `end_session` and `context_length` are not part of the protocol; an engine that has them is asked.
    """

    version: int = 0
    logprobs: bool = False
    context_length: int | None = None
    """Most tokens of prompt and answer together that the engine can hold; None: not known."""

    async def start(self) -> None:
        """Make ready; called again, do nothing."""

    async def close(self) -> None:
        """Give everything back; called again, do nothing."""

    async def pause(self) -> None:
        """Hold running generations until `resume`."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    def end_session(self, session: str) -> None:
        """No further request of this session will come: what is kept for it may go. Returns at once, never raises."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One answer of a sampler: see `Generation` for what the fields mean."""

    stop_reason: GenerationStop
    tokens: list[int]
    logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """What a sampler answers for one item of a batch."""

    sequences: Sequence[SampledSequence]


class Sampler(Protocol):
    """A blocking batch sampler.

    `batch` items are dicts: `input_ids` (list of int), `session` (str), `seed` (int), `max_tokens` (int or None),
    `stop_token_ids` (tuple of int). The answer is as long as the batch, in its order.
    """

    def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> Sequence[SampleResponse]: ...
