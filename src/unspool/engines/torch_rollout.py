"""MiniMind's rollout engine over `TorchEngine`: padded tensors in, padded tensors out.

`TorchRolloutEngine.rollout` samples what `TorchEngine` samples; nothing is generated or scored a second time. So
`per_token_logps` are those of the distribution that was sampled from, temperature included, and the stop token is in
`completion_ids` with its own. Where a row ends says `completion_mask`, never a token id.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unspool.engines.protocol import EngineBase, GenerateRequest, Generation
from unspool.engines.torch import TorchEngine
from unspool.loop import run_sync
from unspool.types import InvalidTypeError, InvalidValueError, SamplingParams

_VALUES_AT_ONCE = 1 << 24
"""Most logits that `compute_per_token_logps` holds in float32 at a time (64 MiB)."""


class Decodes(Protocol):
    """What is used of a tokenizer."""

    pad_token_id: int | None
    eos_token_id: int | None

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What `rollout` sampled: N = B * G rows, those of one prompt next to each other.

    Attributes:
        output_ids: int64 [N, P+R], prompt and answer, as they were padded.
        completion_ids: int64 [N, R], the answers, the stop token included, padded on the right.
        per_token_logps: float32 [N, R], under the distribution sampled from; 0.0 over padding.
        completions: N texts, special tokens left out.
        prompt_ids: int64 [N, P], as given, each row G times.
        attention_mask: int64 [N, P+R], 0 over padding on either side.
        completion_mask: int64 [N, R], 1 over the answer's own tokens.
        raw_logps: float32 [N, R], the same tokens under the model's own distribution (temperature 1).
    """

    output_ids: Tensor
    completion_ids: Tensor
    per_token_logps: Tensor
    completions: list[str]
    prompt_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    raw_logps: Tensor


class TorchRolloutEngine(EngineBase):
    """MiniMind's `rollout` and `update_policy`, and an `Engine` besides: for `rollout_batch` and every other rollout.

    Args:
        policy_model: a causal language model, as `TorchEngine` takes it; a DistributedDataParallel or compiled one is
            unwrapped. It is shared with the trainer, not copied: do not train while a rollout runs.
        tokenizer: its end token ends an answer, its pad token fills rows.
        device: where to move the model; None: leave it where it is.
        autocast_ctx: taken and not needed: it is for the second forward pass that MiniMind makes for log-probabilities,
            and there is none here. Tokens are sampled, and their log-probabilities taken, in the weights' own dtype.
    """

    logprobs = True

    def __init__(
        self,
        policy_model: torch.nn.Module,
        tokenizer: Decodes,
        device: str | torch.device | None = None,
        autocast_ctx: object = None,
    ) -> None:
        _check_model(policy_model)
        if not callable(getattr(tokenizer, "batch_decode", None)):
            raise InvalidTypeError(f"tokenizer must be a Hugging Face tokenizer, not {type(tokenizer).__name__}")
        self.policy_model = policy_model
        self.tokenizer = tokenizer
        self.autocast_ctx = autocast_ctx
        self.engine = self._around(policy_model, device=device)

    def _around(self, model: torch.nn.Module, **options: Any) -> TorchEngine:
        end = self.tokenizer.eos_token_id
        tokenizer: Any = self.tokenizer
        return TorchEngine(
            unwrapped(model), tokenizer=tokenizer, stop_token_ids=None if end is None else [end], **options
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.engine.model.parameters()).device

    # ------------------------------------------------------------------ MiniMind's interface

    def rollout(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor | None,
        num_generations: int,
        max_new_tokens: int,
        temperature: float = 0.8,
    ) -> RolloutResult:
        """Sample `num_generations` answers to each prompt. Seeds come from torch's own generator (`manual_seed`).

        Args:
            prompt_ids: int64 [B, P], padded on either side; lists of lists will do too.
            attention_mask: [B, P], 0 over padding, which alone says what is padding; None: there is none.
            num_generations: G, answers a prompt.
            max_new_tokens: most tokens of an answer.
            temperature: 0 is greedy.

        Returns:
            Tensors on the device of `prompt_ids`; R is the length of the longest answer.

        Raises:
            InvalidValueError, InvalidTypeError: shapes or values that cannot be used.
            EngineError: a prompt is empty or too long.
        """
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature)
        prompt_ids = _tensor("prompt_ids", prompt_ids)
        if prompt_ids.is_floating_point() or prompt_ids.is_complex() or prompt_ids.dtype == torch.bool:
            raise InvalidTypeError(f"prompt_ids must be token ids, int64 [B, P], not {prompt_ids.dtype}")
        if attention_mask is None:
            attention_mask = torch.ones_like(prompt_ids)
        attention_mask = _tensor("attention_mask", attention_mask)
        prompts = _prompts(prompt_ids, attention_mask, num_generations)
        base = int(torch.randint(1 << 62, ()))
        requests = [
            GenerateRequest(prompt, params, f"rollout-{base}-{row}", base + row, extra={"raw_logprobs": True})
            for row, prompt in enumerate(prompts)
        ]
        answers = run_sync(self._all(requests))
        return self._padded(answers, prompt_ids, attention_mask, num_generations)

    async def _all(self, requests: list[GenerateRequest]) -> list[Generation]:
        tasks = [asyncio.ensure_future(self.engine.generate(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after a failure nobody wants the others
                task.cancel()

    def _padded(self, answers: list[Generation], prompts: Tensor, mask: Tensor, members: int) -> RolloutResult:
        place = prompts.device
        width = max(len(answer.tokens) for answer in answers)
        pad = next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)

        def rows(values: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
            padded = [[*row, *[fill] * (width - len(row))] for row in values]
            return torch.tensor(padded, dtype=dtype, device=place)

        tokens = [answer.tokens for answer in answers]
        completion = rows(tokens, pad, torch.long)
        own = rows([[1] * len(row) for row in tokens], 0, torch.long)
        repeated = prompts.repeat_interleave(members, dim=0)
        return RolloutResult(
            output_ids=torch.cat([repeated, completion], dim=1),
            completion_ids=completion,
            per_token_logps=rows([answer.logprobs or [] for answer in answers], 0.0, torch.float32),
            completions=self.tokenizer.batch_decode(tokens, skip_special_tokens=True),
            prompt_ids=repeated,
            attention_mask=torch.cat([mask.long().repeat_interleave(members, dim=0).to(place), own], dim=1),
            completion_mask=own,
            raw_logps=rows([answer.extra["raw_logprobs"] for answer in answers], 0.0, torch.float32),
        )

    def update_policy(self, model: torch.nn.Module) -> None:
        """Sample from `model` from now on, and count the version: the same one, trained meanwhile, or another.

        Blocks until the next token would come from it. Another model is shared as the first one was; what is still
        being sampled from the first goes on with the first.

        Raises:
            InvalidTypeError: it is no such model; nothing has changed then.
        """
        _check_model(model)
        if unwrapped(model) is self.engine.model:
            run_sync(self.engine.update_weights(self.engine.model))
        else:
            self.engine = self._around(model, version=self.engine.version + 1)
        self.policy_model = model

    # ------------------------------------------------------------------ an engine

    @property
    def version(self) -> int:  # type: ignore[override]
        """The version of the weights that the next token is sampled with."""
        return self.engine.version

    @property
    def context_length(self) -> int | None:  # type: ignore[override]
        """Most tokens of prompt and answer together."""
        return self.engine.context_length

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `TorchEngine.generate`."""
        return await self.engine.generate(request)

    async def start(self) -> None:
        """See `TorchEngine.start`."""
        await self.engine.start()

    async def close(self) -> None:
        """See `TorchEngine.close`."""
        await self.engine.close()

    async def pause(self) -> None:
        """See `TorchEngine.pause`."""
        await self.engine.pause()

    async def resume(self) -> None:
        """See `TorchEngine.resume`."""
        await self.engine.resume()

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """See `TorchEngine.update_weights`: the values are copied into the model that is sampled from."""
        await self.engine.update_weights(source, version)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, inside DistributedDataParallel or torch.compile."""
    inner: Any = model
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        inner = inner.module
    found: torch.nn.Module = getattr(inner, "_orig_mod", inner)
    return found


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError(f"policy_model must be a torch module, not {type(model).__name__}")
    inner = unwrapped(model)
    if not callable(getattr(inner, "get_input_embeddings", None)):
        raise InvalidTypeError(
            "policy_model must be a causal language model of Hugging Face's (a PreTrainedModel), and "
            f"{type(inner).__name__} is another module; derive it from PreTrainedModel, or give the model that it wraps"
        )


def _tensor(name: str, given: object) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of several lengths are a ValueError
        raise InvalidTypeError(
            f"{name} must be a tensor [B, P], or lists of that shape, not {given!r:.60} ({error})"
        ) from None


def _prompts(prompt_ids: Tensor, attention_mask: Tensor, members: int) -> list[list[int]]:
    """The prompts without padding, each `members` times, members of one next to each other."""
    if prompt_ids.ndim != 2 or prompt_ids.shape != attention_mask.shape or not len(prompt_ids):
        raise InvalidValueError(
            f"prompt_ids has shape {list(prompt_ids.shape)} and attention_mask {list(attention_mask.shape)}; "
            "both must be [B, P], with at least one prompt"
        )
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise InvalidValueError(f"num_generations must be a whole number, at least 1, not {members!r}")
    own = [ids[mask.bool()].tolist() for ids, mask in zip(prompt_ids, attention_mask, strict=True)]
    return [prompt for prompt in own for _ in range(members)]


def compute_per_token_logps(
    model: torch.nn.Module, input_ids: Tensor, n_keep: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the last `n_keep` tokens of each row at temperature 1; gradients flow.

    Entry j scores `input_ids[:, L - n_keep + j]` by the logits one place before it: log_softmax of `logits[:, :-1]`,
    gathered at `input_ids[:, 1:]`. With `n_keep = L - 1` that is every token that something stands before.

    Args:
        model: a causal language model whose output has `logits`; DistributedDataParallel is unwrapped.
        input_ids: int64 [B, L].
        n_keep: how many tokens from the end.
        attention_mask: [B, L], 0 over padding on either side; None: there is none. Positions follow from it.

    Returns:
        float32 [B, n_keep]; over padding whatever the model says there. The log-softmax is taken in float32, for so
        many rows at a time that the copy stays small.

    Raises:
        InvalidValueError: `n_keep` is above L - 1.
    """
    batch, length = input_ids.shape
    if n_keep <= 0:
        return input_ids.new_empty((batch, 0), dtype=torch.float32)
    if n_keep > length - 1:
        raise InvalidValueError(
            f"n_keep is {n_keep} for rows of {length} tokens; nothing stands before the first one, so {length - 1} is "
            "the most"
        )
    if input_ids.is_inference():
        input_ids = input_ids.clone()
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    logits = inner(input_ids, **_forward_options(inner, attention_mask, n_keep)).logits[:, -n_keep - 1 : -1]
    targets = input_ids[:, -n_keep:]
    rows = max(1, _VALUES_AT_ONCE // logits[0].numel())
    parts = [
        checkpoint(_scored, some, ids, use_reentrant=False) if some.requires_grad else _scored(some, ids)
        for some, ids in zip(torch.split(logits, rows), torch.split(targets, rows), strict=True)
    ]
    return torch.cat(parts)


def _scored(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 [b, n] from logits [b, n, V] and targets [b, n]."""
    return functional.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _forward_options(model: torch.nn.Module, attention_mask: Tensor | None, n_keep: int) -> dict[str, Any]:
    """What the model's forward function takes of: the mask, positions that do not count padding, fewer logits."""
    takes = inspect.signature(unwrapped(model).forward).parameters
    options: dict[str, Any] = {}
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
        if "position_ids" in takes:
            options["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    if "logits_to_keep" in takes:
        options["logits_to_keep"] = n_keep + 1
    return options


def create_rollout_engine(
    engine_type: str = "torch",
    policy_model: torch.nn.Module | None = None,
    tokenizer: Decodes | None = None,
    device: str | torch.device | None = None,
    autocast_ctx: object = None,
    sglang_base_url: str | None = None,
    sglang_model_path: str | None = None,
    sglang_shared_path: str | None = None,
) -> TorchRolloutEngine:
    """A rollout engine by its name. There is one: `torch`, which has no use for the `sglang_` arguments.

    Raises:
        InvalidValueError: another name, or no model or tokenizer.
        InvalidTypeError: the model is none of Hugging Face's, or the tokenizer none.
    """
    if engine_type != "torch":
        raise InvalidValueError(
            f"engine_type is {engine_type!r}, and there is only 'torch'; an engine object of your own can be given to "
            "rollout_batch directly"
        )
    if policy_model is None or tokenizer is None:
        raise InvalidValueError(
            "engine_type 'torch' samples from a model in this process: give policy_model and tokenizer"
        )
    return TorchRolloutEngine(policy_model, tokenizer, device, autocast_ctx)
