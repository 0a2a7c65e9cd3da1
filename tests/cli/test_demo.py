"""The main job: `unspool run examples/demo.yaml`, smaller, with the real model, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unspool import Record
from unspool.data import read_metadata, read_parquet
from unspool.trace import read_trace

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
UNSPOOL = str(Path(sys.executable).parent / "unspool")


def test_the_demo_calls_tools_and_leaves_everything_that_it_promises(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        [UNSPOOL, "run", "examples/demo.yaml", "data.size=3", f"output.dir={folder}", "model.threads=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "quiet where there is no terminal, and nothing to warn of"
    for words in ("results", "tokens/s", "engine busy", "<tool_call>", "written to"):
        assert words in done.stdout

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["trajectories"], summary["failed"]) == (12, 0)
    assert summary["well_formed"] >= 0.8
    assert summary["two_or_more_call_turns"] > 0.5
    assert 0 < summary["engine_busy"] <= 1

    trajectories = read_parquet(folder / "trajectories.parquet")
    assert [(t["group"], t["sample"]) for t in trajectories] == [(g, s) for g in range(3) for s in range(4)]
    assert Path(read_metadata(folder / "trajectories.parquet")["tokenizer"]).is_dir()
    traces = sorted((folder / "traces").iterdir())
    assert len(traces) == 12
    assert {path.name.split("-")[0] for path in traces} <= {"ok", "fail"}
    for trajectory in [*trajectories, *map(read_trace, traces)]:
        record = Record.from_trajectory(trajectory)
        assert record.logprobs is not None
        assert sum(record.loss_mask) == sum(len(span.tokens) for span in record.spans if span.origin == "sampled")

    shown = subprocess.run([UNSPOOL, "show", str(traces[0])], capture_output=True, text=True, timeout=120, check=True)
    assert "S| <tool_call>" in shown.stdout
    assert "B| <|im_start|>tool" in shown.stdout


def test_a_run_that_cannot_be_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    for overrides, sentence in (
        (["model.path=/nowhere"], "unspool: model.path: /nowhere is no folder; give the folder of one, 'embedded'"),
        (["tools=[unspool.world:calculatr]"], "unspool: unspool.world has no 'calculatr'"),
        (["sampling.temprature=1"], "unspool: unknown key sampling.temprature; did you mean sampling.temperature?"),
    ):
        done = subprocess.run(
            [UNSPOOL, "run", "examples/demo.yaml", f"output.dir={tmp_path}", *overrides],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.strip().startswith(sentence)
        assert done.stderr.count("\n") == 1
