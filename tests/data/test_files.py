"""Files give back what they were given: the user's own keys, every bit of every float, None and absence apart."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.data import read_jsonl, read_metadata, read_parquet, read_prompts, write_jsonl, write_parquet
from unspool.record import Cause, Record
from unspool.types import InvalidTypeError, InvalidValueError, MissingExtraError

Pair = tuple[Callable[..., int], Callable[..., list[dict[str, Any]]], str]
JSONL: Pair = (write_jsonl, read_jsonl, "rows.jsonl")
PARQUET: Pair = (write_parquet, read_parquet, "rows.parquet")
both = pytest.mark.parametrize("kind", [JSONL, PARQUET], ids=["jsonl", "parquet"])


def finished(**more: Any) -> dict[str, Any]:
    record = Record()
    record.append_prompt([1, 2])
    record.append_sampled([3, 4], logprobs=[-0.1, -1e-300], versions=[0, 1])
    record.append_bridge([5], message=2, metadata={"why": "tool"})
    record.append_sampled([6], logprobs=[-2.0 / 3.0], versions=1, trained=False)
    return {
        **record.to_trajectory(),
        "id": "hotpotqa/42",
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None, "tool_calls": []}],
        "user_data": {"ground_truth": "4"},
        "turns": 2,
        "stop_reason": "stop",
        "truncated": False,
        "error": None,
        "tool_errors": [],
        "timings": {"total": 0.1 + 0.2},
        **more,
    }


def identical(left: Any, right: Any) -> bool:
    """Equal, with equal types and equal bits (nan is nan, -0.0 is not 0.0)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(identical(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(identical, left, right))
    return repr(left) == repr(right)


@both
def test_a_finished_trajectory_comes_back_identical(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    rows = [finished(), finished(logprobs=None, error="boom: no", stop_reason="api_error"), {"messages": []}]
    assert write(rows, tmp_path / name) == 3
    assert identical(read(tmp_path / name), rows)


@both
def test_the_users_own_keys_come_back_identical(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    rows = [
        {"meta": {"a": [1, {"b": None}], "": "ü\u2028\U0001f600"}, "large": 2**53 + 1, "huge": 2**200, "_keys": ["x"]},
        {"meta": None, "large": -(2**63), "surrogate": "a\udcff", "\udc80key": 1, "nul\0key": "\0", "_keys_": 0},
        {"text": "line\nbreak\r\n\x85\x1b", "": 0, "float": 1e-320, "zero": -0.0, "true": True, "one": 1},
        {},
    ]
    write(rows, tmp_path / name)
    assert identical(read(tmp_path / name), rows)


@both
def test_none_and_absence_are_told_apart(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    rows = [{"id": None, "logprobs": None, "note": None}, {"id": "a"}, {"note": 1}, {"logprobs": [-0.5]}]
    write(rows, tmp_path / name)
    assert read(tmp_path / name) == rows


@both
def test_the_order_of_the_keys_is_kept(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    write([{"b": 1, "a": 2, "id": "x"}, {"id": "y", "a": 1, "b": 2}], tmp_path / name)
    assert [list(row) for row in read(tmp_path / name)] == [["b", "a", "id"], ["id", "a", "b"]]


@both
def test_a_record_with_branches_is_the_same_record_again(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    record = Record()
    record.append_prompt([1])
    record.append_sampled([2], logprobs=[-0.5])
    branch = record.fork(1, Cause.EDITED)
    branch.append_prompt([3])
    branch.append_sampled([4])
    write([branch.to_trajectory()], tmp_path / name)
    assert Record.from_trajectory(read(tmp_path / name)[0]).to_trajectory() == branch.to_trajectory()


@both
def test_tuples_come_back_as_lists(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    write([{"user_data": [("ground_truth", 4)], "input_ids": (1, 2)}], tmp_path / name)
    assert read(tmp_path / name) == [{"user_data": [["ground_truth", 4]], "input_ids": [1, 2]}]


@both
def test_nan_and_infinity_come_back(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    rows = [{"reward": float("nan"), "x": [float("inf"), float("-inf")]}]
    write(rows, tmp_path / name)
    assert identical(read(tmp_path / name), rows)


@both
def test_an_arrays_odd_values_do_not_get_lost(kind: Pair, tmp_path: Path) -> None:
    write, read, name = kind
    rows = [
        {"input_ids": [1, None], "labels": [2**64], "loss_mask": [True], "versions": [[1]], "logprobs": [None, -0.5]},
        {"input_ids": "text", "turns": 2**70, "truncated": 1, "id": 7, "stop_reason": "\ud800", "reward": "high"},
    ]
    write(rows, tmp_path / name)
    assert identical(read(tmp_path / name), rows)


@both
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {1, 2}]}, r"row 1: user_data\.a\[1\] is of type set"),
        ({"a": {3: 4}}, r"row 1: user_data\.a has the key 3, which is no string"),
        (b"bytes", "row 1: user_data is of type bytes"),
        ([10**5000], "row 1: user_data cannot be written as JSON"),
    ],
)
def test_what_json_cannot_hold_is_named_by_row_and_key_and_leaves_the_old_file(
    kind: Pair, value: object, said: str, tmp_path: Path
) -> None:
    write, read, name = kind
    write([{"id": "old"}], tmp_path / name)
    with pytest.raises(InvalidValueError, match=said):
        write([{"id": "new"}, {"id": "bad", "user_data": value}], tmp_path / name)
    assert read(tmp_path / name) == [{"id": "old"}]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@both
def test_a_value_that_contains_itself_is_named(kind: Pair, tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidValueError, match="row 0: loop is nested too deeply, or contains itself"):
        kind[0]([{"loop": loop}], tmp_path / kind[2])


@both
def test_rows_that_are_no_dicts_are_refused(kind: Pair, tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match="row 0"):
        kind[0]([["messages"]], tmp_path / kind[2])


@both
def test_no_rows_make_a_file_of_no_rows_in_folders_that_are_made(kind: Pair, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / kind[2]
    assert kind[0]([], path) == 0
    assert kind[1](path) == []


@both
def test_rows_may_come_from_a_generator(kind: Pair, tmp_path: Path) -> None:
    assert kind[0](({"index": index} for index in range(1500)), tmp_path / kind[2]) == 1500
    assert kind[1](tmp_path / kind[2]) == [{"index": index} for index in range(1500)]


@both
def test_a_missing_file_is_named(kind: Pair, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=f"{kind[2]} cannot be read"):
        kind[1](tmp_path / kind[2])


texts = st.text(st.characters(exclude_categories=())).filter(
    lambda text: text == text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10)
known = st.sampled_from(
    ["id", "input_ids", "labels", "logprobs", "versions", "turns", "truncated", "error", "reward", "_keys", "messages"]
)
rows_of_json = st.lists(
    st.dictionaries(known | texts, values | st.lists(st.integers()) | st.lists(st.floats())), max_size=4
)
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@both
@in_one_folder
@given(rows=rows_of_json)
def test_any_json_comes_back_identical(kind: Pair, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    write, read, name = kind
    write(rows, tmp_path / name)
    back = read(tmp_path / name)
    for row in [*rows, *back] if kind is PARQUET else []:
        for key in ("reward", "logprobs"):  # documented: an int among these comes back as the equal float
            if type(row.get(key)) is int and abs(row[key]) <= 2**53:
                row[key] = float(row[key])
            if isinstance(row.get(key), list) and all(type(x) in (int, float) and abs(x) <= 2**53 for x in row[key]):
                row[key] = [float(x) for x in row[key]]
    assert identical(back, rows)


@st.composite
def records(draw: st.DrawFn) -> Record:
    root = Record()
    root.append_prompt(draw(st.lists(st.integers(0, 2**31 - 1))))
    paths = [root]
    for _ in range(draw(st.integers(0, 6))):
        record = draw(st.sampled_from(paths))
        what = draw(st.sampled_from(["sampled", "bridge", "prompt", "fork"]))
        tokens = draw(st.lists(st.integers(0, 200_000), max_size=5))
        if what == "sampled":
            logprob = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
            logprobs = draw(st.none() | st.lists(logprob, min_size=len(tokens), max_size=len(tokens)))
            record.append_sampled(
                tokens, logprobs=logprobs, versions=draw(st.integers(0, 9)), trained=draw(st.booleans())
            )
        elif what == "bridge" and record.turns:
            record.append_bridge(tokens, metadata=draw(st.dictionaries(st.text(max_size=3), st.integers(), max_size=1)))
        elif what == "fork":
            paths.append(record.fork(draw(st.integers(0, len(record.spans))), draw(st.sampled_from(Cause))))
        else:
            record.append_prompt(tokens)
    return draw(st.sampled_from(paths))


@both
@in_one_folder
@given(trees=st.lists(records(), min_size=1, max_size=3))
def test_any_record_comes_back_identical(kind: Pair, trees: list[Record], tmp_path: Path) -> None:
    write, read, name = kind
    rows = [tree.to_trajectory() for tree in trees]
    write(rows, tmp_path / name)
    back = read(tmp_path / name)
    assert identical(back, rows)
    assert [Record.from_trajectory(row).to_trajectory() for row in back] == rows


# --------------------------------------------------------------------------- JSONL alone


def test_each_line_is_one_ascii_json_object(tmp_path: Path) -> None:
    write_jsonl([{"text": "é\u2028\n"}, {"n": 1}], tmp_path / "rows.jsonl")
    lines = (tmp_path / "rows.jsonl").read_bytes().split(b"\n")
    assert lines == [b'{"text": "\\u00e9\\u2028\\n"}', b'{"n": 1}', b""]


def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \n')
    with pytest.raises(InvalidValueError, match=r"rows\.jsonl, line 3: not JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("line", [b"[1]", b"{", b'"x"', b"\xff{}", b"9" * 5000, b"[" * 100_000], ids=range(6))
def test_lines_that_are_no_objects_can_be_skipped_with_a_report(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}')
    with caplog.at_level(logging.WARNING):
        assert read_jsonl(path, on_error="skip") == [{"a": 1}, {"a": 2}]
    assert "rows.jsonl, line 2" in caplog.text
    errors: list[InvalidValueError] = []
    assert read_jsonl(path, on_error=errors.append) == [{"a": 1}, {"a": 2}]
    assert len(errors) == 1 and "line 2" in str(errors[0])


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"a": 1}, {"a": 2}]


# --------------------------------------------------------------------------- Parquet alone


def test_arrays_and_plain_facts_are_native_columns(tmp_path: Path) -> None:
    write_parquet([finished(group=0, sample=1, reward=1), finished(logprobs=None)], tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    types = {field.name: str(field.type).replace("item: ", "").replace("element: ", "") for field in table.schema}
    assert types == {
        "id": "string",
        "messages": "string",
        "tools": "string",
        "user_data": "string",
        "input_ids": "list<int64>",
        "labels": "list<int64>",
        "loss_mask": "list<int64>",
        "logprobs": "list<double>",
        "versions": "list<int64>",
        "spans": "string",
        "turns": "int64",
        "stop_reason": "string",
        "truncated": "bool",
        "error": "string",
        "tool_errors": "string",
        "timings": "string",
        "group": "int64",
        "sample": "int64",
        "reward": "double",
        "_keys": "list<string>",
    }
    row = table.to_pylist()[0]
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6]
    assert row["logprobs"] == [0.0, 0.0, -0.1, -1e-300, 0.0, -2.0 / 3.0]
    assert json.loads(row["messages"])[0] == {"role": "user", "content": "2+2?"}
    assert json.loads(table.schema.metadata[b"unspool.schema"])["version"] == 1


def test_float32_logprobs_are_exact(tmp_path: Path) -> None:
    import torch

    logprobs = torch.randn(100).abs().neg().tolist()
    write_parquet([{"logprobs": logprobs}], tmp_path / "rows.parquet")
    assert read_parquet(tmp_path / "rows.parquet")[0]["logprobs"] == logprobs


def test_metadata_is_kept_beside_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet([finished()], path, metadata={"model": "/models/é\udcff"})
    assert read_metadata(path) == {"model": "/models/é\udcff"}


@pytest.mark.parametrize("metadata", [{"unspool.schema": "1"}, {"model": 3}])
def test_metadata_that_cannot_be_kept_is_refused(metadata: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((InvalidValueError, InvalidTypeError), match="metadata"):
        write_parquet([], tmp_path / "rows.parquet", metadata=metadata)


def test_a_file_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    schema = pa.schema(
        [pa.field("x", pa.int64())], metadata={"unspool.schema": '{"version": 2, "keys": "k", "columns": []}'}
    )
    pq.write_table(pa.table({"x": [1]}, schema=schema), tmp_path / "rows.parquet")
    with pytest.raises(InvalidValueError, match="schema version 2; this unspool reads up to 1"):
        read_parquet(tmp_path / "rows.parquet")


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"hello")
    with pytest.raises(InvalidValueError, match=r"rows\.parquet is no Parquet file"):
        read_parquet(tmp_path / "rows.parquet")


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'unspool\[train\]'"):
        write_parquet([], tmp_path / "rows.parquet")


# --------------------------------------------------------------------------- prompts


def test_prompts_come_from_messages_prompt_or_question(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    user = {"role": "user", "content": "hi"}
    write_jsonl(
        [{"messages": [user], "id": "a"}, {"prompt": "hi"}, {"prompt": [user]}, {"question": "hi", "answer": "4"}], path
    )
    assert read_prompts(path) == [
        {"messages": [user], "id": "a"},
        {"messages": [user], "prompt": "hi"},
        {"messages": [user], "prompt": [user]},
        {"messages": [user], "question": "hi", "answer": "4"},
    ]
    (tmp_path / "prompts.json").write_text('[{"prompt": "hi"}]')
    assert read_prompts(tmp_path / "prompts.json") == [{"prompt": "hi", "messages": [user]}]


def test_prompts_come_from_plain_parquet_types(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    messages = [{"role": "system", "content": None}, {"role": "user", "content": "hi", "name": "Ada"}]
    table = pa.table(
        {
            "messages": [messages],
            "when": [datetime.datetime(2026, 1, 2)],
            "price": [decimal.Decimal("1.50")],
            "image": [b"\x00\xff"],
        }
    )
    pq.write_table(table, path)
    rows = read_prompts(path)
    assert rows == [{"messages": messages, "when": "2026-01-02T00:00:00", "price": "1.50", "image": "AP8="}]
    write_jsonl(rows, tmp_path / "again.jsonl")


def test_prompts_come_from_text_columns_of_parquet_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["2+2?"], "answer": ["4"]}), tmp_path / "p.parquet")
    assert read_prompts(tmp_path / "p.parquet") == [
        {"question": "2+2?", "answer": "4", "messages": [{"role": "user", "content": "2+2?"}]}
    ]
    pq.write_table(pa.table({"messages": ['[{"role": "user", "content": "x"}]']}), tmp_path / "p.parquet")
    assert read_prompts(tmp_path / "p.parquet") == [{"messages": [{"role": "user", "content": "x"}]}]


def test_prompts_come_from_what_unspool_wrote(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi", "name": None}]}
    write_parquet([row], tmp_path / "p.parquet")
    assert read_prompts(tmp_path / "p.parquet")[0]["messages"][0]["content"] == "hi"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "hi"}, r"row 0: no 'messages', 'prompt' or 'question' among its columns \['text'\]"),
        ({"messages": []}, "row 0: 'messages' must be a list of messages"),
        ({"prompt": [{"content": "no role"}]}, "row 0: 'prompt' must be a list of messages"),
    ],
)
def test_a_row_without_a_prompt_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_jsonl([row], tmp_path / "p.jsonl")
    with pytest.raises(InvalidValueError, match=said):
        read_prompts(tmp_path / "p.jsonl")


def test_prompts_of_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"\.csv"):
        read_prompts(tmp_path / "p.csv")
