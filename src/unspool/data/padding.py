"""One batch of tensors from many trajectories; nothing is cut, and nothing is guessed from token ids.

What is padding is known from lengths alone: where the padding token is also the stop token, a sampled stop token
stays attended and trained. Arrays stay in input order; `align` shifts them. A batch of B rows and width L has:

| key | shape | dtype | in padding | there |
|---|---|---|---|---|
| `input_ids` | [B, L] | int32 | `pad_token_id` | always |
| `attention_mask` | [B, L] | bool | False | always |
| `loss_mask` | [B, L] | int32 | 0 | where every row has it |
| `labels` | [B, L] | int64, as torch's losses want them | -100 | where every row has it |
| `versions` | [B, L] | int32 | -1 | where every row has it |
| `logprobs` | [B, L] | float32 | 0.0 | where every row that sampled anything has it |
| `rewards` | [B] | float32 | | where every row has a `reward` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from unspool.record import IGNORE_INDEX, Record
from unspool.types import InvalidTypeError, InvalidValueError, MissingExtraError

if TYPE_CHECKING:
    import torch

_COLUMNS = (
    ("loss_mask", 0, "int32"),
    ("labels", IGNORE_INDEX, "int64"),
    ("versions", -1, "int32"),
    ("logprobs", 0.0, "float32"),
)
_ONE_PATH = ("branches", "branch", "spans", "messages")


def pad_batch(
    trajectories: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int = 0,
    side: Literal["right", "left"] = "right",
    multiple_of: int | None = None,
    length: int | None = None,
) -> dict[str, torch.Tensor]:
    """Trajectories as rows of tensors; shapes and dtypes stand at the top of this module.

    A key that no row has (or that is None in all) is left out; one that only some rows have is an error.

    Args:
        trajectories: what a rollout returned, or rows with the same arrays. One that branched is refused, since it
            is several rows: pass `training_rows(trajectories)`.
        side: where the padding goes.
        multiple_of: round L up to a multiple of this.
        length: pad to this width instead of to the longest row; a longer row is an error.

    Returns:
        the tensors; `{}` for no trajectories.

    Raises:
        InvalidValueError: naming the row and what is wrong with it.
    """
    if isinstance(trajectories, Mapping):
        raise InvalidTypeError("pad_batch takes a list of trajectories, not a single one; wrap it in a list")
    if side not in ("right", "left"):
        raise InvalidValueError(f"side must be 'right' or 'left', not {side!r}")
    if not trajectories:
        return {}
    lengths = [_row_length(index, row) for index, row in enumerate(trajectories)]
    width = _width(lengths, multiple_of, length)
    slices = [slice(0, count) if side == "right" else slice(width - count, width) for count in lengths]
    torch = _torch()
    attention_mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for index, where in enumerate(slices):
        attention_mask[index, where] = True
    batch = {"attention_mask": attention_mask}
    for name, fill, dtype in (("input_ids", pad_token_id, "int32"), *_COLUMNS):
        rows = _deciding(trajectories) if name == "logprobs" else dict(enumerate(trajectories))
        if _all_have(rows, name):
            column = torch.full((len(lengths), width), fill, dtype=getattr(torch, dtype))
            _fill(column, {index: row[name] for index, row in rows.items()}, slices, name)
            batch[name] = column
    if _all_have(dict(enumerate(trajectories)), "reward"):
        batch["rewards"] = torch.tensor([float(row["reward"]) for row in trajectories], dtype=torch.float32)
    return batch


def _fill(column: torch.Tensor, arrays: Mapping[int, Sequence[float]], slices: Sequence[slice], name: str) -> None:
    for index, array in arrays.items():
        where = slices[index]
        if len(array) != where.stop - where.start:
            raise InvalidValueError(
                f"row {index} has {len(array)} {name} for {where.stop - where.start} input_ids; it needs one a token"
            )
        column[index, where] = _torch().as_tensor(array, dtype=column.dtype)


def training_rows(trajectories: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each path to train: trajectories that never branched as they are, the others as several rows.

    Rows of a trajectory that branched keep its other keys (`id`, `reward`, `group`, ...) but `messages`, which are
    one path's alone; a sampled span that paths share has loss mask 1 in the first of them only (`Record.to_rows`).
    """
    rows: list[dict[str, Any]] = []
    for trajectory in trajectories:
        if "branches" not in trajectory:
            rows.append(dict(trajectory))
            continue
        rest = {key: value for key, value in trajectory.items() if key not in _ONE_PATH}
        rows += [{**rest, **arrays} for arrays in Record.from_trajectory(trajectory).to_rows()]
    return rows


def _row_length(index: int, row: Mapping[str, Any]) -> int:
    if row.get("input_ids") is None:
        raise InvalidValueError(
            f"row {index} (id {row.get('id')!r}) has no input_ids; leave out trajectories that hold messages alone"
        )
    if len(row.get("branches") or ()) > 1:
        raise InvalidValueError(
            f"row {index} (id {row.get('id')!r}) has {len(row['branches'])} branches and would lose all but one; "
            "pass training_rows(trajectories)"
        )
    return len(row["input_ids"])


def _width(lengths: Sequence[int], multiple_of: int | None, length: int | None) -> int:
    for name, value in (("multiple_of", multiple_of), ("length", length)):
        if value is not None and value < 1:
            raise InvalidValueError(f"{name} must be at least 1, or None, not {value}")
    width = max(lengths)
    if length is not None and width > length:
        raise InvalidValueError(
            f"row {lengths.index(width)} has {width} tokens and length is {length}; nothing is cut here: "
            "leave the row out or give a greater length"
        )
    width = length or width
    return width if multiple_of is None else -(-width // multiple_of) * multiple_of


def _deciding(rows: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The rows, by index, whose log-probabilities say whether there are any: where nothing was sampled, any would do.

    Where nothing was sampled in any row, all of them.
    """
    return {index: row for index, row in enumerate(rows) if _sampled(row)} or dict(enumerate(rows))


def _sampled(row: Mapping[str, Any]) -> bool:
    """Whether any token of the row was sampled; a row that does not say counts as one where some were."""
    mask, spans, versions, logprobs = (row.get(name) for name in ("loss_mask", "spans", "versions", "logprobs"))
    if mask is None or any(mask):
        return True
    if spans is not None:
        return any(span.get("origin") == "sampled" and span.get("length") for span in spans)
    if versions is not None:
        return any(version >= 0 for version in versions)
    return logprobs is not None and any(logprobs)


def _all_have(rows: Mapping[int, Mapping[str, Any]], name: str) -> bool:
    """Whether every row has it (True) or none (False); what is None is not there."""
    have = {index: row.get(name) is not None for index, row in rows.items()}
    if len(set(have.values())) > 1:
        without = next(index for index, has in have.items() if not has)
        having = next(index for index, has in have.items() if has)
        raise InvalidValueError(
            f"row {without} has no {name!r} but row {having} has; leave such rows out, or set {name!r} to None in all"
        )
    return all(have.values())


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "Tensors need torch, which is not installed: run `pip install 'unspool[torch]'`."
        ) from error
    return torch
