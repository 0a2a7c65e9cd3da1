"""What an inference server's log-probabilities are of, found out by asking it, and what follows for a request.

A record holds log-probabilities of the distribution that was sampled from. Servers differ in what they return: some
the model's own values whatever the sampling parameters say (vLLM's default), some with the temperature applied and the
truncation not (SGLang), some all of it. Where a request's parameters make no difference between the two, any server
will do; where they make one that the returned values lack, the request is refused: they cannot be corrected afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from unspool.types import SamplingParams

_EQUAL: Final = 0.05
"""Log-probabilities of one token that differ by less are one value: in bfloat16 what runs beside a request, and what is
cached of it, changes the arithmetic. Where that hides a difference, a parameter is taken for one that is missing."""

_CERTAIN: Final = 1e-3
"""A log-probability as near to 0 as this is that of the only token that was left to choose."""


@dataclass(frozen=True, slots=True)
class LogprobMeaning:
    """Which sampling parameters are in the log-probabilities that a server returns.

    Attributes:
        temperature: whether they are those at the request's temperature; else at 1.
        truncation: whether top-k and top-p are in them, the rest renormalised.
        penalty: whether the repetition penalty is.
    """

    temperature: bool = True
    truncation: bool = True
    penalty: bool = True

    def missing(self, params: SamplingParams) -> list[str]:
        """The parameters of a request, as `name=value`, that change its distribution and not what is returned.

        A greedy request (temperature 0) reports the model's own log-probability at temperature 1, penalties included.
        """
        wrong: list[str] = []
        greedy = params.temperature == 0
        if not self.temperature and not greedy and params.temperature != 1:
            wrong.append(f"temperature={params.temperature:g}")
        if not self.truncation and not greedy:
            wrong += [f"top_k={params.top_k}"] if params.top_k > 0 else []
            wrong += [f"top_p={params.top_p:g}"] if params.top_p < 1 else []
        if not self.penalty and params.repetition_penalty != 1:
            wrong.append(f"repetition_penalty={params.repetition_penalty:g}")
        return wrong


SAMPLED_FROM: Final = LogprobMeaning()
"""Log-probabilities of the very distribution that was sampled from, whatever the parameters."""


async def probe_meaning(ask: Callable[[SamplingParams], Awaitable[float]]) -> LogprobMeaning:
    """Find out what a server's log-probabilities are of, with five requests for one token each.

    Args:
        ask: the log-probability that the server reports for the likeliest first token behind some fixed prompt (whose
            tokens a penalty bears on), under these parameters.

    The penalty that is tried is one below 1, which makes the prompt's own tokens by far the likeliest; one above 1 may
    pass unseen, where what is likely does not stand in the prompt.
    """
    plain = await ask(SamplingParams(max_tokens=1))
    half = await ask(SamplingParams(max_tokens=1, temperature=0.5))
    double = await ask(SamplingParams(max_tokens=1, temperature=2.0))
    cut = await ask(SamplingParams(max_tokens=1, top_k=1))
    punished = await ask(SamplingParams(max_tokens=1, repetition_penalty=0.1))
    return LogprobMeaning(
        temperature=abs(half - double) > _EQUAL,
        truncation=abs(cut) < _CERTAIN and abs(plain) > _EQUAL,
        penalty=abs(punished - plain) > _EQUAL,
    )
