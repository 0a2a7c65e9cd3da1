"""An object with MiniMind's `rollout(prompt_ids, attention_mask, num_generations, max_new_tokens, temperature)` as a
sampler, which `Batching` makes an engine of.

What is promised: a row's prompt goes in whole, padded on the left, with a mask; what comes out is read without looking
for padding. An answer ends with its first stop token, which is part of it, with its log-probability; or where the
object's own `completion_mask` ends; or with its row. So a pad token that is the stop token too cuts nothing off.

torch is loaded with the first call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
            perhaps `completion_mask` [B*G, R], 1 over an answer's own tokens: ones, then zeros. Lists will do too.
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
            EngineError: the answer has not one row an item, or no token ids or log-probabilities, or a mask of another
                shape, or with gaps.
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
        bare = isinstance(result, Mapping) and not hasattr(result, "per_token_logps")  # of transformers' own, some have
        if result is None or bare or inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise EngineError(
                f"{name} returned {'None' if result is None else f'a {type(result).__name__}'}; it must be a plain "
                "function, and return an object with completion_ids and per_token_logps"
            )
        ids = getattr(result, "completion_ids", None)
        whole = getattr(result, "output_ids", None)
        logps = getattr(result, "per_token_logps", None)
        if (ids is None and whole is None) or logps is None:
            missing = "token ids (completion_ids)" if logps is not None else "log-probabilities (per_token_logps)"
            raise EngineError(f"{name} returned no {missing}; what has text only cannot be recorded token by token")
        if ids is None:
            rows = [row[width:] for row in _rows(name, "answers", whole, count)]
        else:
            rows = _rows(name, "answers", ids, count)
        values = _rows(name, "rows of log-probabilities", logps, count)
        for row, scores in zip(rows, values, strict=True):
            if len(scores) > len(row):
                raise EngineError(
                    f"{name} returned {len(scores)} log-probabilities for a row of {len(row)} tokens; per_token_logps "
                    "must be those of completion_ids alone, without the prompt's"
                )
        mask = getattr(result, "completion_mask", None)
        return rows, values, [len(row) for row in rows] if mask is None else _lengths(name, mask, rows)


def _rows(name: str, what: str, given: Any, count: int) -> list[list[Any]]:
    """A tensor, an array or lists [count, R] as lists."""
    rows = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(rows, (list, tuple)):
        raise EngineError(f"{name} returned a {type(given).__name__} as {what}; it must be a tensor, or lists of lists")
    if len(rows) != count:
        raise EngineError(f"{name} returned {len(rows)} {what} to {count} prompts with num_generations=1")
    lists = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    wrong = next((row for row in lists if not isinstance(row, (list, tuple))), None)
    if wrong is not None:
        raise EngineError(f"{name} returned {wrong!r:.80} in place of a row, as {what}; they must be [{count}, R]")
    return [list(row) for row in lists]


def _lengths(name: str, mask: Any, rows: list[list[int]]) -> list[int]:
    """How many ones each row of a `completion_mask` begins with; there is nothing but zeros behind them."""
    own = _rows(name, "rows of completion_mask", mask, len(rows))
    for ones, row in zip(own, rows, strict=True):
        if len(ones) != len(row):
            raise EngineError(
                f"{name} returned a completion_mask of {len(ones)} entries for a row of {len(row)} tokens; it must "
                "have the shape of completion_ids"
            )
        count = sum(1 for one in ones if one == 1)
        if ones != [1] * count + [0] * (len(ones) - count):
            raise EngineError(
                f"{name} returned a completion_mask with a row that is not ones and then zeros ({ones!r:.60}); an "
                "answer begins at its row's first token and has no gaps"
            )
    return [sum(1 for one in ones if one == 1) for ones in own]


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
