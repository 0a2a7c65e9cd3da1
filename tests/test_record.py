"""The record: append-only spans, branches that share them, and views that agree with one another."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.record import Cause, Record
from unspool.types import RecordError

SYS, U1, HEAD = 10, 11, 12
A1, A2, END = 20, 21, 2
TOOL, NEXT = 30, 31


def two_turns() -> Record:
    record = Record()
    record.append_prompt([SYS, U1, HEAD])
    record.append_sampled([A1, END], logprobs=[-0.5, -0.25], versions=3, message=1)
    record.append_bridge([TOOL, NEXT], message=2)
    record.append_sampled([A2, END], logprobs=[-1.0, 0.0], versions=[3, 4], message=3)
    return record


def test_every_view_speaks_of_the_same_positions() -> None:
    assert two_turns().to_arrays() == {
        "input_ids": [SYS, U1, HEAD, A1, END, TOOL, NEXT, A2, END],
        "labels": [-100, -100, -100, A1, END, -100, -100, A2, END],
        "loss_mask": [0, 0, 0, 1, 1, 0, 0, 1, 1],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, 0.0],
        "versions": [-1, -1, -1, 3, 3, -1, -1, 3, 4],
    }


def test_a_turn_excluded_from_training_is_masked_but_keeps_its_log_probabilities() -> None:
    record = Record()
    record.append_prompt([U1])
    record.append_sampled([A1, END], logprobs=[-0.5, -0.25], trained=False)
    arrays = record.to_arrays()
    assert arrays["loss_mask"] == [0, 0, 0]
    assert arrays["labels"] == [-100, -100, -100]
    assert arrays["logprobs"] == [0.0, -0.5, -0.25]
    assert arrays["versions"] == [-1, 0, 0]


def test_without_log_probabilities_there_is_none_for_the_whole_record() -> None:
    record = two_turns()
    record.append_bridge([TOOL])
    record.append_sampled([A1])
    assert record.logprobs is None


@pytest.mark.parametrize(
    ("logprobs", "sentence"),
    [
        ([-0.5], "2 tokens were sampled but 1 log-probabilities given"),
        ([-0.5, 0.5], "0.5 is no log-probability"),
        ([-0.5, math.nan], "nan is no log-probability"),
        ([-math.inf, -1.0], "-inf is no log-probability"),
    ],
)
def test_log_probabilities_that_are_none_are_refused(logprobs: list[float], sentence: str) -> None:
    record = Record()
    record.append_prompt([U1])
    with pytest.raises(RecordError, match=sentence):
        record.append_sampled([A1, END], logprobs=logprobs)
    assert record.input_ids == [U1]


@pytest.mark.parametrize("token", [-1, 1.0, True, "7", None])
def test_what_is_no_token_id_is_refused(token: object) -> None:
    record = Record()
    with pytest.raises(RecordError, match="is no token id"):
        record.append_prompt([U1, token])  # type: ignore[list-item]


def test_ids_of_numpy_become_plain_ints() -> None:
    numpy = pytest.importorskip("numpy")
    record = Record()
    record.append_prompt(numpy.array([1, 2], dtype=numpy.int64))
    assert [type(token) for token in record.input_ids] == [int, int]


def test_a_bridge_needs_a_sampled_turn_before_it() -> None:
    record = Record()
    record.append_prompt([U1])
    with pytest.raises(RecordError, match="a bridge follows a sampled turn"):
        record.append_bridge([TOOL])


def test_a_branch_shares_the_spans_of_the_common_past_and_knows_its_cause() -> None:
    root = two_turns()
    branch = root.fork(2, Cause.EDITED)
    branch.append_prompt([99], message=2)
    branch.append_sampled([A1], logprobs=[-2.0])
    assert branch.input_ids == [SYS, U1, HEAD, A1, END, 99, A1]
    assert branch.spans[0] is root.spans[0]
    assert branch.spans[1] is root.spans[1]
    assert (branch.parent, branch.forked_at, branch.cause) == (root, 2, "edited")
    assert root.input_ids == two_turns().input_ids
    assert branch.turns == 2


def test_a_branch_parts_at_a_span_boundary_only() -> None:
    with pytest.raises(RecordError, match="cannot fork at span 5: this record has 4 spans"):
        two_turns().fork(5, Cause.EDITED)
    with pytest.raises(ValueError, match="mood"):
        two_turns().fork(1, "mood")


def test_every_sampled_token_is_trained_once_whatever_the_number_of_branches() -> None:
    root = two_turns()
    for token in (50, 51):
        branch = root.fork(2, "edited")
        branch.append_prompt([token])
        branch.append_sampled([A1, END], logprobs=[-2.0, -1.0])
    assert [span.tokens for span in root.unique_spans() if span.origin == "sampled"] == [
        (A1, END),
        (A2, END),
        (A1, END),
        (A1, END),
    ]
    rows = root.to_rows()
    assert [row["loss_mask"] for row in rows] == [
        [0, 0, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1],
    ]
    assert rows[1]["labels"] == [-100] * 6 + [A1, END]


def test_a_path_that_another_continues_is_no_row_of_its_own() -> None:
    root = two_turns()
    branch = root.fork(4, "unknown")
    branch.append_bridge([TOOL])
    branch.append_sampled([A1], logprobs=[-1.0])
    assert [len(row["input_ids"]) for row in root.to_rows()] == [11]
    empty = two_turns()
    empty.fork(2, "truncated")
    assert [len(row["input_ids"]) for row in empty.to_rows()] == [9]


tokens = st.lists(st.integers(0, 60_000), max_size=6)
turns = st.lists(st.tuples(tokens, st.lists(st.integers(0, 60_000), min_size=1, max_size=6)), min_size=1, max_size=4)


def spoken(record: Record, script: list[tuple[list[int], list[int]]], logprobs: bool) -> Record:
    for fed, sampled in script:
        if record.turns:
            record.append_bridge(fed, message=record.turns)
        else:
            record.append_prompt(fed)
        values = [-0.1 * (token % 7) for token in sampled] if logprobs else None
        record.append_sampled(
            sampled,
            logprobs=values,
            versions=record.turns,
            trained=len(sampled) % 2 == 0,
            metadata={"router": sampled} if len(fed) % 3 == 0 else None,
        )
    return record


@given(turns, turns, st.booleans(), st.booleans(), st.data())
def test_a_record_survives_its_trajectory_form(
    script: list[tuple[list[int], list[int]]],
    other: list[tuple[list[int], list[int]]],
    first: bool,
    second: bool,
    data: st.DataObject,
) -> None:
    record = spoken(Record(), script, first)
    record.messages = [{"role": "user", "content": "hi"}]
    if data.draw(st.booleans()):
        record = record.fork(data.draw(st.integers(0, len(record.spans))), "bpe")
        record = spoken(record, other, second)
    trajectory = json.loads(json.dumps(record.to_trajectory()))
    again = Record.from_trajectory(trajectory)
    assert again.to_trajectory() == record.to_trajectory()
    assert [branch.to_arrays() for branch in again.branches] == [branch.to_arrays() for branch in record.branches]
    assert [branch.cause for branch in again.branches] == [branch.cause for branch in record.branches]
    assert again.to_rows() == record.to_rows()


@given(turns)
def test_what_is_not_trained_has_no_label_and_what_was_fed_has_no_probability(
    script: list[tuple[list[int], list[int]]],
) -> None:
    arrays = spoken(Record(), script, True).to_arrays()
    assert len({len(array) for array in arrays.values()}) == 1
    for token, label, mask, version in zip(
        arrays["input_ids"], arrays["labels"], arrays["loss_mask"], arrays["versions"], strict=True
    ):
        assert label == (token if mask else -100)
        assert mask == 0 or version >= 0


def test_arrays_that_do_not_agree_with_the_spans_are_refused() -> None:
    trajectory = two_turns().to_trajectory()
    trajectory["loss_mask"] = [0, *trajectory["loss_mask"][:-1]]
    with pytest.raises(RecordError, match="'loss_mask' does not agree with its spans"):
        Record.from_trajectory(trajectory)
    with pytest.raises(RecordError, match="has no 'spans'"):
        Record.from_trajectory({"input_ids": [], "labels": [], "loss_mask": [], "logprobs": None, "versions": []})
