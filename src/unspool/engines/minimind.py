"""An object with MiniMind's `rollout(prompt_ids, attention_mask, num_generations, max_new_tokens, temperature)` as a
sampler, which `Batching` makes an engine of.

What is promised: a row's prompt goes in whole, padded on the left, with a mask; what comes out is read without looking
for padding. An answer ends with its first stop token, which is part of it, with its log-probability; or where the
object's own `completion_mask` ends; or with its row. So a pad token that is the stop token too cuts nothing off.

torch is loaded with the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from unspool.engines.protocol import SampledSequence, SampleResponse
from unspool.types import EngineError, InvalidValueError, SamplingParams


class RolloutEngine(Protocol):
    """What is asked of the object: MiniMind's rollout engines have it, and so has `TorchRolloutEngine`."""

    def rollout(
        self, prompt_ids: Any, attention_mask: Any, num_generations: int, max_new_tokens: int, temperature: float = 0.8
    ) -> Any:
        """Sample `num_generations` answers to each prompt.

        Args:
            prompt_ids: int64 tensor [B, P].
            attention_mask: int64 tensor [B, P], 0 over padding.

        Returns:
            An object with `completion_ids` [B*G, R] (or `output_ids` [B*G, P+R]) and `per_token_logps` [B*G, R], and
            perhaps `completion_mask` [B*G, R], 1 over an answer's own tokens.
        """
        ...


class RolloutSampler:
    """See the module's docstring. Stop tokens are those of the request, and the end token of the object's tokenizer.

    What the interface has no word for is refused: truncated distributions, penalties, stop strings, alternatives.
    Seeds are not passed on either: the object draws from its own random numbers.

    Args:
        engine: the object.
        device: where the prompts are put; None: the object's own `device`, else the CPU.
    """

    def __init__(self, engine: RolloutEngine, *, device: object = None) -> None:
        self.engine = engine
        self.device = getattr(engine, "device", None) if device is None else device
        self.version = int(getattr(engine, "version", 0) or 0)

    def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> list[SampleResponse]:
        """One call of `rollout` for the batch, each item a row of it.

        Raises:
            InvalidValueError: the parameters cannot be said through this interface.
            EngineError: the answer has not one row an item, or no token ids or log-probabilities.
        """
        import torch

        limit = _sayable(sampling_params)
        tokenizer = getattr(self.engine, "tokenizer", None)
        prompts = [item["input_ids"] for item in batch]
        width = max(map(len, prompts))
        pad = getattr(tokenizer, "pad_token_id", None) or 0  # the mask covers it, whatever it is
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], dtype=torch.long)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.long)
        place: Any = self.device or "cpu"
        result = self.engine.rollout(
            prompt_ids=ids.to(place),
            attention_mask=mask.to(place),
            num_generations=1,
            max_new_tokens=limit,
            temperature=sampling_params.temperature,
        )
        rows, logps, lengths = self._read(result, len(batch), width)
        end = getattr(tokenizer, "eos_token_id", None)
        return [
            _answer(row, values, length, {*item["stop_token_ids"], end}, limit)
            for row, values, length, item in zip(rows, logps, lengths, batch, strict=True)
        ]

    def update_weights(self, source: Any, version: int | None = None) -> None:
        """Hand a model over by the object's `update_policy`, and count the version."""
        update = getattr(self.engine, "update_policy", None)
        if update is None:
            name = type(self.engine).__name__
            raise EngineError(f"{name} has no update_policy; give its weights to it directly")
        update(source)
        self.version = self.version + 1 if version is None else version

    def _read(self, result: Any, count: int, width: int) -> tuple[list[list[int]], list[list[float]], list[int]]:
        """The rows of ids, of log-probabilities, and how far into each row the answer reaches."""
        name = f"{type(self.engine).__name__}.rollout"
        completion = getattr(result, "completion_ids", None)
        if completion is None:
            whole = getattr(result, "output_ids", None)
            completion = None if whole is None else whole[:, width:]
        logps = getattr(result, "per_token_logps", None)
        if completion is None or logps is None:
            missing = "token ids (completion_ids)" if completion is None else "log-probabilities (per_token_logps)"
            raise EngineError(f"{name} returned no {missing}; what has text only cannot be recorded token by token")
        for what, tensor in (("answers", completion), ("rows of log-probabilities", logps)):
            if len(tensor) != count:
                raise EngineError(f"{name} returned {len(tensor)} {what} to {count} prompts with num_generations=1")
        rows: list[list[int]] = completion.tolist()
        mask = getattr(result, "completion_mask", None)
        lengths = [len(row) for row in rows] if mask is None else [int(sum(row)) for row in mask.tolist()]
        return rows, logps.tolist(), lengths


def _sayable(params: SamplingParams) -> int:
    """`max_tokens`, where the rest can be said too."""
    neutral = SamplingParams()
    for name in ("top_k", "top_p", "repetition_penalty", "stop", "logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value != getattr(neutral, name) and not (name == "top_k" and value == 0):
            raise InvalidValueError(
                f"{name} is {value!r}, which rollout(...) of this engine has no parameter for; leave it out, or use "
                "TorchEngine"
            )
    if params.max_tokens is None:
        raise InvalidValueError("max_tokens is None, and this engine's rollout(...) needs max_new_tokens; set it")
    return params.max_tokens


def _answer(
    row: Sequence[int], logps: Sequence[float], length: int, stops: set[int | None], limit: int
) -> SampleResponse:
    end = next((at + 1 for at, token in enumerate(row[:length]) if token in stops), None)
    count = length if end is None else end
    if len(logps) < count:
        raise EngineError(
            f"an answer of {count} tokens has {len(logps)} log-probabilities; per_token_logps needs one for each"
        )
    reason = "length" if end is None and count >= limit else "stop"
    return SampleResponse([SampledSequence(reason, list(row[:count]), list(logps[:count]))])  # type: ignore[arg-type]
