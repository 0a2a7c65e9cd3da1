"""Traces: one whole file for each trajectory, whatever is in it and whoever else writes; a failure changes nothing."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.record import Record
from unspool.trace import TraceWriter, read_document, read_trace
from unspool.trace.writer import safe_id
from unspool.types import InvalidTypeError, InvalidValueError


def finished(**more: Any) -> dict[str, Any]:
    record = Record()
    record.append_prompt([1, 2])
    record.append_sampled([3, 4], logprobs=[-0.1, -2.0 / 3.0], versions=[0, 1])
    return {
        **record.to_trajectory(),
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "id": "hotpotqa/42",
        "turns": 1,
        "stop_reason": "stop",
        "truncated": False,
        "error": None,
        "tool_errors": [],
        "timings": {"total": 0.5},
        **more,
    }


def written(writer: TraceWriter, trajectory: dict[str, Any], **options: Any) -> Path:
    path = writer.write(trajectory, **options)
    assert path is not None
    return path


# --------------------------------------------------------------------------- names


def test_the_folder_is_made_at_construction(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_at_construction(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidValueError, match=r"trace_dir .* cannot be used"):
            TraceWriter(bad)


def test_the_default_prefix_is_fail_and_the_id_is_made_safe(tmp_path: Path) -> None:
    assert written(TraceWriter(tmp_path), finished()).name == "fail-hotpotqa_42.json"


def test_the_step_is_six_digits_in_front(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, success_callback=lambda trajectory: trajectory["turns"] == 1)
    assert written(writer, finished(), global_step=7).name == "step000007-ok-hotpotqa_42.json"
    assert written(writer, finished(), global_step=12345678).name == "step12345678-ok-hotpotqa_42.json"


def test_four_members_of_a_group_with_one_id_give_four_files(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    names = [written(writer, finished(sample=sample), global_step=0).name for sample in range(4)]
    assert names == [f"step000000-fail-hotpotqa_42{suffix}.json" for suffix in ("", "-1", "-2", "-3")]
    assert [read_trace(tmp_path / name)["sample"] for name in names] == [0, 1, 2, 3]


def test_a_second_run_in_the_same_folder_replaces_nothing(tmp_path: Path) -> None:
    first = written(TraceWriter(tmp_path), finished(run=1))
    second = written(TraceWriter(tmp_path), finished(run=2))
    assert (first.name, second.name) == ("fail-hotpotqa_42.json", "fail-hotpotqa_42-1.json")
    assert read_trace(first)["run"] == 1


@pytest.mark.parametrize(
    ("given_id", "safe"),
    [
        ("hotpotqa/42", "hotpotqa_42"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("..", "unnamed"),
        ("", "unnamed"),
        (None, "unnamed"),
        (7, "7"),
        (".hidden", "hidden"),
        ("C:\\x y\0\n", "C__x_y__"),
        ("\ud800", "_"),
        ("问题-1", "问题-1"),
    ],
    ids=range(10),
)
def test_any_id_becomes_part_of_a_file_name(given_id: object, safe: str, tmp_path: Path) -> None:
    assert safe_id(given_id) == safe
    path = written(TraceWriter(tmp_path), finished(id=given_id))
    assert path.parent == tmp_path and path.name == f"fail-{safe}.json"


def test_long_ids_are_cut_and_stay_apart(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    paths = {written(writer, finished(id="é" * 5000 + end), global_step=1).name for end in "ab"}
    assert len(paths) == 2 and all(len(name.encode()) < 130 and "-1.json" not in name for name in paths)


@given(st.text(st.characters(exclude_categories=())) | st.integers() | st.none())
def test_no_id_leaves_the_folder(given_id: object) -> None:
    safe = safe_id(given_id)
    assert safe and not safe.startswith(".") and Path(safe).name == safe and len(safe.encode()) <= 96


# --------------------------------------------------------------------------- content


def test_the_file_is_one_object_with_the_arrays_apart(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, success_callback=lambda trajectory: True, metadata={"model": "/m"})
    document = json.loads(written(writer, finished(ground_truth="4")).read_bytes())
    assert list(document) == [
        "trajectory",
        "ground_truth",
        "stop_reason",
        "truncated",
        "turns",
        "success",
        "error",
        "tokens",
        "metadata",
    ]
    tokens = document.pop("tokens")
    assert tokens == {
        "input_ids": [1, 2, 3, 4],
        "labels": [-100, -100, 3, 4],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.1, -2.0 / 3.0],
        "versions": [-1, -1, 0, 1],
        "spans": [
            {"origin": "prompt", "length": 2, "turn": 0, "message": 0},
            {"origin": "sampled", "length": 2, "turn": 0, "message": 0},
        ],
    }
    assert set(document.pop("trajectory")) == set(finished(ground_truth="4")) - set(tokens)
    assert document == {
        "ground_truth": "4",
        "stop_reason": "stop",
        "truncated": False,
        "turns": 1,
        "success": True,
        "error": None,
        "metadata": {"model": "/m"},
    }


@pytest.mark.parametrize(
    ("more", "truth"),
    [
        ({"ground_truth": [1]}, [1]),
        ({"ground_truth": None, "user_data": {"ground_truth": 2}}, None),
        ({"user_data": {"ground_truth": 2}}, 2),
        ({"user_data": [("level", 1), ("ground_truth", "x")]}, "x"),
        ({"user_data": [["ground_truth", {"a": 1}]]}, {"a": 1}),
        ({"user_data": "ground_truth"}, None),
        ({}, None),
    ],
)
def test_the_ground_truth_is_the_trajectorys_or_its_user_datas(
    more: dict[str, Any], truth: Any, tmp_path: Path
) -> None:
    assert read_document(written(TraceWriter(tmp_path), finished(**more)))["ground_truth"] == truth


def test_a_trajectory_with_branches_is_read_back_as_it_was(tmp_path: Path) -> None:
    record = Record()
    record.append_prompt([1])
    record.append_sampled([2], logprobs=[-0.5])
    branch = record.fork(1, "bpe")
    branch.append_prompt([3])
    trajectory = {"id": "x", **branch.to_trajectory()}
    path = written(TraceWriter(tmp_path), trajectory)
    assert read_trace(path) == trajectory
    assert "branches" not in read_document(path)["trajectory"]
    assert Record.from_trajectory(read_trace(path)).to_trajectory() == branch.to_trajectory()


def test_a_trajectory_of_messages_alone_has_no_tokens(tmp_path: Path) -> None:
    path = written(TraceWriter(tmp_path), {"messages": [], "id": "api"})
    assert read_document(path)["tokens"] == {}
    assert read_trace(path) == {"messages": [], "id": "api"}


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_what_json_cannot_hold_is_stored_as_its_repr(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    odd = {
        "set": {1},
        "bytes": b"\xff",
        "nan": float("nan"),
        "keys": {1: "a", "1": "b"},
        "huge": 10**5000,
        "bad": Unspeakable(),
        "loop": loop,
        "surrogate": "\udcff",
    }
    writer = TraceWriter(tmp_path)
    stored = read_trace(written(writer, finished(odd=odd)))["odd"]
    assert writer.failures == 0
    assert stored["set"] == "{1}"
    assert stored["bytes"] == "b'\\xff'"
    assert stored["nan"] == "nan"
    assert stored["keys"] == {"1": "a", "1_": "b"}
    assert stored["huge"] == hex(10**5000)
    assert stored["bad"] == "<Unspeakable without a repr>"
    assert "[[...]]" in json.dumps(stored["loop"])
    assert stored["surrogate"] == "\udcff"


def test_the_trajectory_is_left_as_it_was(tmp_path: Path) -> None:
    trajectory = finished(user_data=[("ground_truth", {"a": (1, 2)})])
    before = copy.deepcopy(trajectory)
    TraceWriter(tmp_path).write(trajectory)
    assert trajectory == before


texts = st.text(st.characters(exclude_categories=())).filter(
    lambda text: text == text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=10,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(texts, json_values))
def test_any_trajectory_of_json_values_is_read_back_identical(tmp_path: Path, trajectory: dict[str, Any]) -> None:
    assert read_trace(written(TraceWriter(tmp_path), trajectory)) == trajectory


@pytest.mark.parametrize("content", [b"", b"[]", b'{"trajectory": {}}', b"\xff", b"[" * 100_000], ids=range(5))
def test_a_file_that_is_no_trace_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"x\.json is no trace"):
        read_trace(tmp_path / "x.json")


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"x\.json cannot be read"):
        read_trace(tmp_path / "x.json")


# --------------------------------------------------------------------------- callbacks and failures


def test_the_callbacks_get_the_whole_output(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    writer = TraceWriter(tmp_path, trace_callback=lambda t: seen.append(t) or True, success_callback=seen.append)
    trajectory = finished()
    written(writer, trajectory)
    assert seen[0] is trajectory and seen[1] is trajectory


def test_a_trace_callback_that_says_no_stores_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, trace_callback=lambda trajectory: False)
    assert writer.write(finished()) is None
    assert (list(tmp_path.iterdir()), writer.failures) == ([], 0)


def raising(trajectory: dict[str, Any]) -> bool:
    raise RuntimeError("callback broke")


def test_a_raising_trace_callback_stores_nothing_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert TraceWriter(tmp_path, trace_callback=raising).write(finished()) is None
    assert list(tmp_path.iterdir()) == []
    assert "trace_callback raised" in caplog.text and "callback broke" in caplog.text


def test_a_raising_success_callback_means_fail_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        path = written(TraceWriter(tmp_path, success_callback=raising), finished())
    assert path.name == "fail-hotpotqa_42.json" and read_document(path)["success"] is False
    assert "success_callback raised" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), GeneratorExit()])
def test_a_callback_that_ends_the_program_is_one_that_raises(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(trajectory: dict[str, Any]) -> bool:
        raise error

    assert TraceWriter(tmp_path, trace_callback=leave).write(finished()) is None
    assert written(TraceWriter(tmp_path, success_callback=leave), finished()).name == "fail-hotpotqa_42.json"
    assert "trace_callback raised" in caplog.text and "success_callback raised" in caplog.text


def test_ctrl_c_in_a_callback_passes_on_the_main_thread_alone(tmp_path: Path) -> None:
    def interrupted(trajectory: dict[str, Any]) -> bool:
        raise KeyboardInterrupt

    writer = TraceWriter(tmp_path, success_callback=interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.write(finished())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(writer.write, finished()).result() == tmp_path / "fail-hotpotqa_42.json"


@pytest.mark.parametrize("name", ["trace_callback", "success_callback"])
def test_a_callback_that_cannot_be_called_is_refused_at_construction(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match=f"{name} must be a function of the trajectory, or None, not True"):
        TraceWriter(tmp_path, **{name: True})  # type: ignore[arg-type]


def test_a_write_that_fails_is_logged_and_counted_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path / "traces")
    (tmp_path / "traces").rmdir()
    with caplog.at_level(logging.WARNING):
        assert writer.write(finished()) is None
        assert writer.write("no dict") is None  # type: ignore[arg-type]
        assert writer.write(finished(), global_step="soon") is None  # type: ignore[arg-type]
    assert writer.failures == 3
    assert "a trace was not written" in caplog.text


def test_a_failed_write_leaves_no_piece_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path)

    def no_space(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", no_space)
    monkeypatch.setattr(os, "open", no_space)
    assert writer.write(finished()) is None
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_hard_links_names_stay_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    writer = TraceWriter(tmp_path)
    names = [written(writer, finished(sample=sample)).name for sample in range(3)]
    assert names == ["fail-hotpotqa_42.json", "fail-hotpotqa_42-1.json", "fail-hotpotqa_42-2.json"]
    assert [read_trace(tmp_path / name)["sample"] for name in names] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_writer_pickles(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(TraceWriter(tmp_path, success_callback=raising)))
    assert written(writer, finished()).exists()


# --------------------------------------------------------------------------- many at once


def write_many(arguments: tuple[Path, int]) -> list[str]:
    folder, start = arguments
    writer = TraceWriter(folder)
    return [written(writer, finished(sample=start + offset)).name for offset in range(25)]


def check_each_has_its_own(folder: Path, names: list[str], count: int) -> None:
    assert len(set(names)) == len(names) == count
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert sorted(read_trace(folder / name)["sample"] for name in names) == list(range(count))


def test_threads_that_write_one_id_at_once_each_get_a_file(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        paths = list(pool.map(lambda sample: written(writer, finished(sample=sample)), range(200)))
    check_each_has_its_own(tmp_path, [path.name for path in paths], 200)


def test_processes_that_write_one_id_at_once_each_get_a_file(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        groups = pool.map(write_many, [(tmp_path, start) for start in range(0, 200, 25)])
    check_each_has_its_own(tmp_path, [name for group in groups for name in group], 200)
