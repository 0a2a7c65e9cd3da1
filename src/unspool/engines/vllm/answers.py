"""What vLLM returns, read: ids, log-probabilities, versions and why it stopped. Pure functions on its plain objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from unspool.engines.batching import sampled_logprobs
from unspool.engines.protocol import Generation, GenerationStop
from unspool.types import EngineError

_STOPS: Final[Mapping[str, GenerationStop]] = {"stop": "stop", "length": "length", "repetition": "length"}

Alternatives = list[tuple[int, float]]
"""The likeliest tokens at one place with their log-probabilities, likeliest first."""


@dataclass
class Answer:
    """A turn, or a part of one, as it grows.

    Attributes:
        finish: vLLM's reason; None: it goes on.
        cached: tokens of the prompt that were not computed but found in the cache.
        cached: how many tokens of the context were not computed anew.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0

    def add(self, output: Any, wanted: int, version: int) -> None:
        """Append a `RequestOutput`.

        Args:
            wanted: how many alternatives were asked for.
            version: of tokens of which vLLM does not say it.
        """
        self.cached = output.num_cached_tokens or 0
        output = output.outputs[0]
        tokens = list(output.token_ids)
        entries = output.logprobs
        if entries is None:
            raise EngineError(f"vLLM returned no log-probabilities with {len(tokens)} tokens")
        self.tokens += tokens
        self.logprobs += own_logprobs(tokens, entries)
        if wanted:
            self.alternatives += [_likeliest(entry, wanted) for entry in entries]
        self.finish = output.finish_reason
        if self.finish is not None:
            self.versions = versions_of(output.weight_versions, len(self.tokens), version)

    def generation(self) -> Generation:
        """The finished turn.

        Raises:
            EngineError: vLLM failed on it, or somebody else aborted it.
        """
        stop = _STOPS.get(self.finish or "")
        if stop is None:
            raise EngineError(_failed(self.finish, len(self.tokens)))
        extra: dict[str, Any] = {"cached_tokens": self.cached}
        if self.alternatives:
            extra["top_logprobs"] = self.alternatives
        return Generation(self.tokens, self.logprobs, self.versions, stop, extra)


def _failed(reason: str | None, tokens: int) -> str:
    if reason == "abort":
        return f"the request was aborted after {tokens} tokens by somebody else's hand on the engine; ask again"
    return f"vLLM ended the request after {tokens} tokens with {reason!r}; its log says why"


def own_logprobs(tokens: list[int], entries: Any) -> list[float]:
    """Each sampled token's own log-probability, from vLLM's flat form or from maps."""
    if getattr(entries, "token_ids", None) == tokens:  # flat, and nothing but the sampled tokens in it
        return list(entries.logprobs)
    return sampled_logprobs(tokens, list(entries))


def _likeliest(entry: Mapping[int, Any], wanted: int) -> Alternatives:
    """Tokens that cannot be drawn (-inf, cut by top-k or top-p) are left out."""
    pairs = [(token, float(getattr(value, "logprob", value))) for token, value in entry.items()]
    pairs = sorted((pair for pair in pairs if pair[1] > float("-inf")), key=lambda pair: -pair[1])
    return pairs[:wanted]


def versions_of(spans: Sequence[Any] | None, count: int, otherwise: int) -> list[int]:
    """The version of each of the last `count` tokens, from vLLM's spans over all tokens of the request.

    A label that is no number (vLLM's own before one is set) counts as `otherwise`.
    """
    versions: list[int] = []
    for span in reversed(spans or ()):
        left = count - len(versions)
        if left <= 0:
            break
        label = int(span.version) if span.version.lstrip("-").isdigit() else otherwise
        versions += [label] * min(span.end - span.start, left)
    versions.reverse()
    return [otherwise] * (count - len(versions)) + versions
