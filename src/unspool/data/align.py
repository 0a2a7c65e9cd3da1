"""The causal shift, in one place.

Records are in input order: entry i of every array speaks of `input_ids[i]`. A causal model's logits at position i
score `input_ids[i + 1]`, so per-token log-probabilities have one entry fewer, and whatever is compared with them must
lose its *first* entry. After `align`, entry i of every array speaks of the target `input_ids[i + 1]`:

    input_ids            A   B   C   D   E
    loss_mask            0   0   0   1   1
    targets                  B   C   D   E        input_ids[1:]
    aligned loss_mask        0   0   1   1        loss_mask[1:]; [:-1] gives 0 0 0 1: D is lost

Code outside this module slices nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from unspool.record import IGNORE_INDEX
from unspool.types import InvalidTypeError, InvalidValueError

_PER_TOKEN = ("labels", "loss_mask", "logprobs", "versions", "attention_mask")


def align(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of one trajectory or of a padded batch, as a causal loss wants them.

    Args:
        batch: a trajectory (lists of length L), or tensors or NumPy arrays of shape [L] or [B, L] (`pad_batch`).
            `input_ids` is required; `labels`, `loss_mask`, `logprobs`, `versions` and `attention_mask` are shifted
            where they are there, None stays None, other keys are left out.

    Returns:
        `targets` (`input_ids[1:]`, int64 as torch tensors: they are an index) and the shifted arrays under their own
        names and dtypes, each of length L - 1 (0 for L = 0). Where there is an `attention_mask`, a target that only
        padding could predict (the first token of a left-padded row) is not scored: attention and loss mask 0,
        label -100.

    Raises:
        InvalidValueError: where an array is not as long as `input_ids`; the message names it.
    """
    if not isinstance(batch, Mapping):
        raise InvalidTypeError(
            f"align takes one trajectory or one padded batch as a mapping, not {type(batch).__name__}; "
            "make a batch of trajectories with pad_batch"
        )
    if batch.get("input_ids") is None:
        raise InvalidValueError("there is no 'input_ids' to align; only token-level rollouts have them")
    length = _length(batch["input_ids"], "input_ids")
    targets = _shift(batch["input_ids"])
    aligned: dict[str, Any] = {"targets": targets.long() if hasattr(targets, "long") else targets}
    for name in _PER_TOKEN:
        if name not in batch:
            continue
        if batch[name] is not None and _length(batch[name], name) != length:
            raise InvalidValueError(
                f"{name!r} has {_length(batch[name], name)} positions and 'input_ids' {length}; "
                "give all of them in input order, not shifted"
            )
        aligned[name] = None if batch[name] is None else _shift(batch[name])
    if aligned.get("attention_mask") is not None:
        scored = _both(batch["attention_mask"])
        aligned["attention_mask"] = scored
        for name, fill in (("loss_mask", 0), ("labels", IGNORE_INDEX)):
            if aligned.get(name) is not None:
                aligned[name] = _where(scored, aligned[name], fill)
    return aligned


class AlignedResponse(NamedTuple):
    """A prompt and its response as one row (see `align_response`); L is the length of both together."""

    input_ids: list[int]
    """Prompt and response, L."""
    mask: list[int]
    """In input order, L: 0 over the prompt, then the response's own mask."""
    shifted_mask: list[int]
    """For the targets `input_ids[1:]`, L - 1."""
    old_logps: list[float]
    """For the same targets, L - 1; 0.0, a place-holder that the mask covers, inside the prompt."""


def align_response(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_mask: Sequence[int],
    response_old_logps: Sequence[float],
) -> AlignedResponse:
    """One row from the tuple form of `rollout_single`: prompt and response apart, masks for the response alone.

    A response's first token is scored by the prompt's last position, so `len(prompt_ids) - 1` place-holders stand
    before the response's log-probabilities. Without a prompt the first response token has nothing to be scored by
    and is left out of both shifted lists.

    Raises:
        InvalidValueError: where the three response lists differ in length.
    """
    count = len(response_ids)
    for name, values in (("response_mask", response_mask), ("response_old_logps", response_old_logps)):
        if len(values) != count:
            raise InvalidValueError(
                f"{name} has {len(values)} entries for {count} response tokens; it needs one a token"
            )
    ids = [*prompt_ids, *response_ids]
    mask = [0] * len(prompt_ids) + list(response_mask)
    logps = [0.0] * len(prompt_ids) + list(response_old_logps)
    shifted = align({"input_ids": ids, "loss_mask": mask, "logprobs": logps})
    return AlignedResponse(ids, mask, shifted["loss_mask"], shifted["logprobs"])


def _is_list(array: Any) -> bool:
    return isinstance(array, (list, tuple))


def _length(array: Any, name: str) -> int:
    if not _is_list(array):
        return int(array.shape[-1])
    if array and _is_list(array[0]):
        raise InvalidValueError(f"{name!r} is a list of lists; align one trajectory, or a batch made by pad_batch")
    return len(array)


def _shift(array: Any) -> Any:
    return list(array[1:]) if _is_list(array) else array[..., 1:]


def _both(mask: Any) -> Any:
    """Where a target and the position that predicts it are both tokens."""
    if _is_list(mask):
        return [now and later for now, later in pairwise(mask)]
    return mask[..., :-1] * mask[..., 1:]


def _where(scored: Any, array: Any, fill: int) -> Any:
    if _is_list(array):
        return [value if good else fill for good, value in zip(scored, array, strict=True)]
    return array + (fill - array) * (scored == 0)
