"""From unspool's requests to vLLM's sampling parameters: pure functions on plain data, which need no vLLM.

What this module promises:

- Every parameter of a request reaches vLLM or is refused with a sentence; none is dropped.
- A request that names stop tokens ends at those alone, as with every engine of unspool; one that names none ends at
  the model's own. The stop token is part of the answer.
- Text is made only for requests with stop strings, with special tokens in it, so that a stop string may hold some.
- Where the engine's log-probabilities are the model's own instead of those that tokens are drawn from, a request
  whose parameters make a difference between the two is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from unspool.engines.meaning import LogprobMeaning
from unspool.types import EngineError, SamplingParams

OWN_EXTRAS: Final = frozenset({"adapter", "structured_outputs"})
"""Keys of a request's `extra` that unspool gives a meaning; every other one is a field of vLLM's SamplingParams."""

_SET_HERE: Final = frozenset(
    {"n", "seed", "stop", "stop_token_ids", "max_tokens", "temperature", "top_k", "top_p", "repetition_penalty"}
    | {"logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens", "output_kind"}
    | {"stream_interval", "skip_clone", "structured_outputs"}
)
"""Fields that come from the request itself."""

_CHANGE_DISTRIBUTION: Final = (
    *("min_p", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens"),
)

_RAW: Final = LogprobMeaning(temperature=False, truncation=False, penalty=False)

MEANINGS: Final[Mapping[str, LogprobMeaning]] = {"processed_logprobs": LogprobMeaning(), "raw_logprobs": _RAW}
"""What the log-probabilities of vLLM's `logprobs_mode`s are of. The two that are logits are not log-probabilities."""


def meaning_of(mode: str) -> LogprobMeaning:
    """What an engine's log-probabilities are of, by its `logprobs_mode`.

    Raises:
        EngineError: the mode returns logits.
    """
    if mode not in MEANINGS:
        raise EngineError(
            f"this vLLM returns {mode}, which are no log-probabilities; make it with logprobs_mode='processed_logprobs'"
        )
    return MEANINGS[mode]


def check_meaning(meaning: LogprobMeaning, params: SamplingParams, extra: Mapping[str, Any]) -> None:
    """Refuse a request whose distribution the engine's log-probabilities are not of.

    Raises:
        EngineError: with the parameters, and the way out.
    """
    wrong = meaning.missing(params)
    if not meaning.truncation:
        wrong += [f"{name}={extra[name]!r}" for name in _CHANGE_DISTRIBUTION if extra.get(name)]
    if wrong:
        raise EngineError(
            f"this vLLM returns the model's own log-probabilities (logprobs_mode='raw_logprobs'), not those of the "
            f"distribution that {', '.join(wrong)} make; make it with logprobs_mode='processed_logprobs'"
        )


def sampling_fields(
    params: SamplingParams,
    *,
    seed: int,
    stop_token_ids: Collection[int] = (),
    extra: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    known: Collection[str],
) -> dict[str, Any]:
    """The arguments of `vllm.SamplingParams` for one request, but for `structured_outputs` and `output_kind`.

    Args:
        seed: of the request; any whole number (its low 63 bits count, as vLLM takes -1 for none).
        max_tokens: most tokens, in place of `params.max_tokens`.
        known: the names of the fields that vLLM's SamplingParams have.

    Raises:
        EngineError: something is asked for that vLLM does not have, or that is set in another way.
    """
    if params.num_samples != 1:
        raise EngineError(f"num_samples is {params.num_samples}; send one request for each sample")
    if params.prompt_logprobs is not None:
        raise EngineError(
            f"prompt_logprobs is {params.prompt_logprobs}, and rollouts with vLLM in process give none; leave it None"
        )
    fields: dict[str, Any] = {
        "max_tokens": params.max_tokens if max_tokens is None else max_tokens,
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "repetition_penalty": params.repetition_penalty,
        "seed": seed & (2**63 - 1),
        "stop": list(params.stop),
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": bool(stop_token_ids),
        "logprobs": params.logprobs or 0,
        "flat_logprobs": True,
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,
    }
    fields.update(_passed_through(extra or {}, known))
    return fields


def _passed_through(extra: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What of `extra` is vLLM's own."""
    passed = {name: value for name, value in extra.items() if name not in OWN_EXTRAS}
    for name in passed:
        if name in _SET_HERE:
            raise EngineError(f"extra has {name!r}, which is a sampling parameter; give it there")
        if name not in known or name.startswith("_"):
            raise EngineError(
                f"extra has {name!r}, which vLLM's sampling parameters do not have; it may hold 'adapter', "
                "'structured_outputs' and fields of vllm.SamplingParams"
            )
    return passed


def room(prompt: list[int], context: int, vocabulary: int) -> int:
    """How many tokens may follow a prompt.

    Raises:
        EngineError: none may, or the prompt holds what is no token of the model.
    """
    if not prompt:
        raise EngineError("input_ids is empty; a prompt needs at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocabulary:
        raise EngineError(
            f"token id {low if low < 0 else high} is not in the model's vocabulary of {vocabulary}; "
            "encode with the tokenizer of this model"
        )
    if len(prompt) >= context:
        raise EngineError(
            f"the prompt has {len(prompt)} tokens and leaves no room in the context of {context} tokens; shorten it, "
            "or make the engine with a larger max_model_len"
        )
    return context - len(prompt)
