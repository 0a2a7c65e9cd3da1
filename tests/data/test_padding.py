"""Batches of tensors: what is padding comes from lengths, and nothing is cut or dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unspool.data import pad_batch, training_rows
from unspool.record import Record
from unspool.types import InvalidTypeError, InvalidValueError

EOS = 2


def row(prompt: list[int], sampled: list[int], **more: Any) -> dict[str, Any]:
    record = Record()
    record.append_prompt(prompt)
    record.append_sampled(sampled, logprobs=[-0.5] * len(sampled), versions=7)
    return {**record.to_trajectory(), **more}


def test_right_padding_has_the_documented_shapes_dtypes_and_values() -> None:
    batch = pad_batch([row([5, 6], [7, EOS], reward=1), row([5], [EOS], reward=0.5)])
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()} == {
        "input_ids": (torch.int32, (2, 4)),
        "attention_mask": (torch.bool, (2, 4)),
        "loss_mask": (torch.int32, (2, 4)),
        "labels": (torch.int64, (2, 4)),
        "versions": (torch.int32, (2, 4)),
        "logprobs": (torch.float32, (2, 4)),
        "rewards": (torch.float32, (2,)),
    }
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2], [5, 2, 0, 0]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 2], [-100, 2, -100, -100]]
    assert batch["versions"].tolist() == [[-1, -1, 7, 7], [-1, 7, -1, -1]]
    assert batch["logprobs"].tolist() == [[0.0, 0.0, -0.5, -0.5], [0.0, -0.5, 0.0, 0.0]]
    assert batch["rewards"].tolist() == [1.0, 0.5]


def test_left_padding_moves_every_array_to_the_right() -> None:
    batch = pad_batch([row([5, 6], [7, EOS]), row([5], [EOS])], side="left", pad_token_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2], [9, 9, 5, 2]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 2], [-100, -100, -100, 2]]
    assert batch["versions"].tolist() == [[-1, -1, 7, 7], [-1, -1, -1, 7]]


def test_a_stop_token_that_is_also_the_padding_token_stays_attended_and_trained() -> None:
    batch = pad_batch([row([5, 6, 7], [8, EOS]), row([EOS, 5], [EOS])], pad_token_id=EOS)
    assert batch["input_ids"].tolist()[1] == [EOS, 5, EOS, EOS, EOS]
    assert batch["attention_mask"].int().tolist()[1] == [1, 1, 1, 0, 0]
    assert batch["loss_mask"].tolist()[1] == [0, 0, 1, 0, 0]
    assert batch["labels"].tolist()[1] == [-100, -100, EOS, -100, -100]


def test_the_width_is_rounded_up_or_given() -> None:
    rows = [row([5, 6], [7, 8, EOS])]
    assert pad_batch(rows, multiple_of=4)["input_ids"].shape == (1, 8)
    assert pad_batch(rows, length=6)["input_ids"].shape == (1, 6)
    assert pad_batch(rows, length=6, multiple_of=4)["input_ids"].shape == (1, 8)


def test_a_row_that_is_too_long_is_an_error_and_not_cut() -> None:
    with pytest.raises(InvalidValueError, match="row 1 has 5 tokens and length is 4"):
        pad_batch([row([5], [EOS]), row([5, 6, 7], [8, EOS])], length=4)


def test_no_trajectories_give_an_empty_batch() -> None:
    assert pad_batch([]) == {}


def test_logprobs_that_no_row_has_are_left_out() -> None:
    rows = [{**row([5], [EOS]), "logprobs": None}, {**row([5], [EOS]), "logprobs": None}]
    assert set(pad_batch(rows)) == {"input_ids", "attention_mask", "loss_mask", "labels", "versions"}


def test_logprobs_that_only_some_rows_have_are_an_error_naming_both() -> None:
    with pytest.raises(InvalidValueError, match="row 1 has no 'logprobs' but row 0 has"):
        pad_batch([row([5], [EOS]), {**row([5], [EOS]), "logprobs": None}])


@pytest.mark.parametrize("left_out", [(), ("spans",)])
def test_a_row_in_which_nothing_was_sampled_has_no_say_in_whether_there_are_logprobs(left_out: tuple[str, ...]) -> None:
    refused = {key: value for key, value in row([5, 6, 7], []).items() if key not in left_out}
    assert refused["logprobs"] in (None, [0.0, 0.0, 0.0])
    refused["logprobs"] = [0.0, 0.0, 0.0]
    assert "logprobs" not in pad_batch([refused, {**row([5], [EOS]), "logprobs": None}])
    for mine in ([0.0, 0.0, 0.0], None):
        batch = pad_batch([{**refused, "logprobs": mine}, row([5], [EOS])])
        assert batch["logprobs"].tolist() == [[0.0, 0.0, 0.0], [0.0, -0.5, 0.0]]


def test_a_row_whose_turns_are_not_trained_was_sampled_all_the_same() -> None:
    untrained = row([5], [6, EOS])
    untrained["loss_mask"] = [0, 0, 0]
    with pytest.raises(InvalidValueError, match="row 1 has no 'logprobs' but row 0 has"):
        pad_batch([untrained, {**row([5], [EOS]), "logprobs": None}])


def test_a_reward_that_only_some_rows_have_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="row 0 has no 'reward' but row 1 has"):
        pad_batch([row([5], [EOS]), row([5], [EOS], reward=1.0)])


def test_a_trajectory_of_messages_alone_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"row 0 \(id 'x'\) has no input_ids"):
        pad_batch([{"messages": [], "id": "x"}])


def test_an_array_that_does_not_fit_its_ids_is_named() -> None:
    with pytest.raises(InvalidValueError, match="row 0 has 1 loss_mask for 2 input_ids"):
        pad_batch([{"input_ids": [1, 2], "loss_mask": [1]}])


@pytest.mark.parametrize("options", [{"side": "both"}, {"multiple_of": 0}, {"length": 0}])
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(options))):
        pad_batch([row([5], [EOS])], **options)


def test_a_single_trajectory_instead_of_a_list_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="wrap it in a list"):
        pad_batch(row([5], [EOS]))  # type: ignore[arg-type]


def branched() -> dict[str, Any]:
    record = Record()
    record.append_prompt([1, 2])
    record.append_sampled([3, 4], logprobs=[-0.1, -0.2], versions=0)
    other = record.fork(2, "edited")
    record.append_bridge([5])
    record.append_sampled([6], logprobs=[-0.3], versions=1)
    other.append_prompt([7])
    other.append_sampled([8, 9], logprobs=[-0.4, -0.5], versions=1)
    return {**other.to_trajectory(), "id": "b", "reward": 2.0}


def test_a_trajectory_with_branches_is_refused_rather_than_cut_to_one() -> None:
    with pytest.raises(InvalidValueError, match=r"2 branches .* training_rows"):
        pad_batch([branched()])


def test_training_rows_train_every_sampled_token_once() -> None:
    rows = training_rows([row([5], [EOS], id="a", reward=1.0), branched()])
    assert [(each["id"], each["input_ids"], each["loss_mask"]) for each in rows] == [
        ("a", [5, 2], [0, 1]),
        ("b", [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]),
        ("b", [1, 2, 3, 4, 7, 8, 9], [0, 0, 0, 0, 0, 1, 1]),
    ]
    assert pad_batch(rows)["rewards"].tolist() == [1.0, 2.0, 2.0]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3))), min_size=1, max_size=5),
    st.sampled_from(["left", "right"]),
    st.integers(0, 3),
)
def test_the_attended_tokens_are_the_rows_whatever_the_padding_token(
    pairs: list[tuple[list[int], list[int]]], side: Any, pad: int
) -> None:
    rows = [row(prompt, sampled) for prompt, sampled in pairs]
    batch = pad_batch(rows, side=side, pad_token_id=pad)
    for index, each in enumerate(rows):
        attended = batch["attention_mask"][index]
        for name in ("input_ids", "labels", "loss_mask", "versions", "logprobs"):
            assert batch[name][index][attended].tolist() == each[name]
        assert not batch["loss_mask"][index][~attended].any()
