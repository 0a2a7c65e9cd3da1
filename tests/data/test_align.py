"""The causal shift: entry i of everything aligned speaks of input_ids[i + 1]."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unspool.data import align, align_response, pad_batch
from unspool.types import InvalidTypeError, InvalidValueError

A, B, C, D, E = 11, 12, 13, 14, 15
LP_D, LP_E = -0.25, -1.5


def test_prompt_abc_and_response_de_give_the_worked_example() -> None:
    ids, mask, shifted_mask, old_logps = align_response([A, B, C], [D, E], [1, 1], [LP_D, LP_E])
    assert ids == [A, B, C, D, E]
    assert mask == [0, 0, 0, 1, 1]
    assert shifted_mask == [0, 0, 1, 1]
    assert old_logps == [0.0, 0.0, LP_D, LP_E]


def test_the_place_holders_are_one_fewer_than_the_prompt_tokens() -> None:
    old_logps = align_response([A, B, C], [D, E], [1, 1], [LP_D, LP_E]).old_logps
    assert old_logps == [0.0] * (3 - 1) + [LP_D, LP_E]
    assert len(old_logps) == 5 - 1


def test_the_mask_without_its_last_entry_is_the_classic_error() -> None:
    mask = align_response([A, B, C], [D, E], [1, 1], [LP_D, LP_E]).mask
    assert mask[:-1] == [0, 0, 0, 1]
    assert align({"input_ids": [A, B, C, D, E], "loss_mask": mask})["loss_mask"] == [0, 0, 1, 1]


def test_a_tool_answer_inside_the_response_stays_masked() -> None:
    row = align_response([A], [B, C, D, E], [1, 0, 0, 1], [-0.1, 0.0, 0.0, -0.4])
    assert row.mask == [0, 1, 0, 0, 1]
    assert row.shifted_mask == [1, 0, 0, 1]
    assert row.old_logps == [-0.1, 0.0, 0.0, -0.4]


def test_without_a_prompt_the_first_response_token_is_scored_by_nothing() -> None:
    row = align_response([], [D, E], [1, 1], [LP_D, LP_E])
    assert (row.mask, row.shifted_mask, row.old_logps) == ([1, 1], [1], [LP_E])


def test_a_response_whose_lists_differ_in_length_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="response_old_logps has 1 entries for 2 response tokens"):
        align_response([A], [D, E], [1, 1], [LP_D])


def test_a_trajectory_of_lists_is_shifted_whole() -> None:
    aligned = align(
        {
            "input_ids": [A, B, C, D, E],
            "labels": [-100, -100, -100, D, E],
            "loss_mask": [0, 0, 0, 1, 1],
            "logprobs": [0.0, 0.0, 0.0, LP_D, LP_E],
            "versions": [-1, -1, -1, 3, 4],
            "messages": [],
        }
    )
    assert aligned == {
        "targets": [B, C, D, E],
        "labels": [-100, -100, D, E],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, LP_D, LP_E],
        "versions": [-1, -1, 3, 4],
    }


def test_no_logprobs_stay_none() -> None:
    assert align({"input_ids": [A, B], "logprobs": None}) == {"targets": [B], "logprobs": None}


@pytest.mark.parametrize("ids", [[], [A]])
def test_no_token_or_a_single_one_leaves_nothing_to_score(ids: list[int]) -> None:
    assert align({"input_ids": ids, "loss_mask": [1] * len(ids)}) == {"targets": [], "loss_mask": []}


def test_tensors_are_shifted_along_their_last_axis() -> None:
    aligned = align(
        {"input_ids": torch.tensor([[A, B, C], [C, D, E]]), "loss_mask": torch.tensor([[0, 0, 1], [0, 1, 1]])}
    )
    assert aligned["targets"].tolist() == [[B, C], [D, E]]
    assert aligned["loss_mask"].tolist() == [[0, 1], [1, 1]]


def test_numpy_arrays_are_shifted_like_tensors() -> None:
    aligned = align(
        {
            "input_ids": np.array([[A, B, C], [0, D, E]]),
            "loss_mask": np.array([[0, 0, 1], [0, 1, 1]]),
            "attention_mask": np.array([[1, 1, 1], [0, 1, 1]], dtype=bool),
        }
    )
    assert aligned["targets"].tolist() == [[B, C], [D, E]]
    assert aligned["loss_mask"].tolist() == [[0, 1], [0, 1]]


def test_the_first_token_of_a_left_padded_row_is_never_scored() -> None:
    rows = [
        {"input_ids": [D, E], "loss_mask": [1, 1], "labels": [D, E]},
        {"input_ids": [A, B, C, D], "loss_mask": [0, 0, 1, 1], "labels": [-100, -100, C, D]},
    ]
    aligned = align(pad_batch(rows, side="left"))
    assert aligned["targets"].tolist() == [[0, D, E], [B, C, D]]
    assert aligned["attention_mask"].tolist() == [[False, False, True], [True, True, True]]
    assert aligned["loss_mask"].tolist() == [[0, 0, 1], [0, 1, 1]]
    assert aligned["labels"].tolist() == [[-100, -100, E], [-100, C, D]]


def test_a_padded_batch_aligns_with_what_a_model_scores() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25]},
        {"input_ids": [4, 3], "loss_mask": [0, 1], "logprobs": [0.0, -0.75]},
    ]
    batch = pad_batch(rows)
    aligned = align(batch)
    logits = torch.randn(2, 4, 7)
    scores = logits[:, :-1].log_softmax(-1).gather(2, aligned["targets"].unsqueeze(-1)).squeeze(-1)
    assert scores.shape == aligned["loss_mask"].shape == aligned["logprobs"].shape == (2, 3)
    assert math.isclose(float(scores[1, 0]), float(logits[1, 0].log_softmax(-1)[3]))
    assert aligned["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert aligned["logprobs"].tolist() == [[0.0, -0.5, -0.25], [-0.75, 0.0, 0.0]]


def test_an_array_of_another_length_is_named() -> None:
    with pytest.raises(InvalidValueError, match="'loss_mask' has 2 positions and 'input_ids' 3"):
        align({"input_ids": [A, B, C], "loss_mask": [0, 1]})


def test_what_is_no_row_and_no_batch_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="pad_batch"):
        align([{"input_ids": [A]}])  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="list of lists"):
        align({"input_ids": [[A, B], [C, D]]})
    with pytest.raises(InvalidValueError, match="input_ids"):
        align({"messages": []})


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8),
)
def test_every_scored_target_is_a_trained_response_token(prompt: list[int], response: list[tuple[int, bool]]) -> None:
    ids, trained = [token for token, _ in response], [int(flag) for _, flag in response]
    logps = [-float(index + 1) if flag else 0.0 for index, flag in enumerate(trained)]
    row = align_response(prompt, ids, trained, logps)
    targets = align({"input_ids": row.input_ids})["targets"]
    assert len(targets) == len(row.shifted_mask) == len(row.old_logps) == len(row.input_ids) - 1
    assert [t for t, m in zip(targets, row.shifted_mask, strict=True) if m] == [t for t, m in response if m]
    assert [lp for lp, m in zip(row.old_logps, row.shifted_mask, strict=True) if m] == [lp for lp in logps if lp]
