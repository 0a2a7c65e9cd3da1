"""`unspool run` from a file to files, on a scripted engine: what a user hands in, and all that can be wrong with it."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.small import by_session, small_template, small_tokenizer
from unspool import GenerateRequest
from unspool.cli import app
from unspool.cli.config import ModelConfig, load_config
from unspool.cli.loading import load_torch
from unspool.cli.run import run
from unspool.data import read_jsonl, read_parquet, write_parquet
from unspool.trace import read_trace
from unspool.types import InvalidValueError, Trajectory

ROOT = Path(__file__).parents[2]
Start = Callable[..., list[Trajectory]]


def question(request: GenerateRequest) -> str:
    return small_template().decode(request.input_ids).split("user\n")[-1].split("<|im_end|>")[0]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """No model: every question is answered with itself. The list says what was loaded."""
    loaded: list[str] = []

    def engine(*_: object) -> Any:
        loaded.append("engine")
        return by_session(lambda request: [question(request)], logprobs=True)

    def template(*_: object) -> Any:
        loaded.append("template")
        return small_template()

    monkeypatch.setattr("unspool.cli.run.load_engine", engine)
    monkeypatch.setattr("unspool.cli.run.load_template", template)
    monkeypatch.setattr("unspool.cli.run.model_folder", lambda path: path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return loaded


def configured(folder: Path, rows: list[dict[str, Any]] | None = None, **keys: str) -> list[str]:
    """The arguments of a run on these rows, into `out`."""
    path = folder / "data.jsonl"
    rows = [{"question": "a"}, {"question": "b"}] if rows is None else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "run.yaml").write_text(f"data: {{path: {path}}}\noutput: {{dir: out}}\n", encoding="utf-8")
    return ["run", "run.yaml", *(f"{key}={value}" for key, value in keys.items())]


def invoked(folder: Path, rows: list[dict[str, Any]] | None = None, **keys: str) -> Any:
    return CliRunner().invoke(app, configured(folder, rows, **keys))


def refused(folder: Path, **keys: str) -> str:
    """The one sentence."""
    result = invoked(folder, **keys)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    return str(result.stderr).removeprefix("unspool: ").strip()


def said(trajectory: Trajectory) -> str:
    return str(trajectory["messages"][-1]["content"])


# --------------------------------------------------------------------------- data of every form


@pytest.mark.parametrize(
    "columns",
    [{}, {"id": [3, 1, 2]}, {"id": ["same", "same", "same"]}, {"id": [None, "b", 0]}, {"_order": [2, 1, 0]}],
    ids=["no ids", "whole numbers", "all the same", "some", "an order of its own"],
)
@pytest.mark.parametrize("column", ["question", "prompt", "messages"])
@pytest.mark.usefixtures("scripted")
def test_results_come_in_the_order_of_the_prompts(tmp_path: Path, columns: dict[str, list[Any]], column: str) -> None:
    texts = ["first", "second", "third"]
    asked = [text if column == "question" else [{"role": "user", "content": text}] for text in texts]
    rows = [
        {column: asked[index], "more": index, **{name: values[index] for name, values in columns.items()}}
        for index in range(3)
    ]
    result = invoked(tmp_path, rows, num_generations="2", **{"output.jsonl": "true"})
    assert result.exit_code == 0, result.stderr
    for table in (read_parquet(tmp_path / "out/trajectories.parquet"), read_jsonl(tmp_path / "out/trajectories.jsonl")):
        assert [said(t) for t in table] == [text for text in texts for _ in range(2)]
        assert [(t["group"], t["sample"], t["more"]) for t in table] == [(g, s, g) for g in range(3) for s in range(2)]
        assert [t.get("_order") for t in table] == [v for v in columns.get("_order", [None] * 3) for _ in range(2)]
    traces = [read_trace(path) for path in (tmp_path / "out/traces").iterdir()]
    assert sorted(map(said, traces)) == sorted(texts * 2)
    assert json.loads((tmp_path / "out/summary.json").read_text(encoding="utf-8"))["trajectories"] == 6


@pytest.mark.usefixtures("scripted")
def test_prompts_are_read_from_parquet_too(tmp_path: Path) -> None:
    write_parquet([{"prompt": "p"}, {"prompt": "q"}], tmp_path / "data.parquet")
    result = invoked(tmp_path, **{"data.path": "data.parquet", "data.system": "Be brief."})
    assert result.exit_code == 0, result.stderr
    table = read_parquet(tmp_path / "out/trajectories.parquet")
    assert [[message["content"] for message in t["messages"]] for t in table] == [
        ["Be brief.", "p", "p"],
        ["Be brief.", "q", "q"],
    ]


@pytest.mark.usefixtures("scripted")
def test_a_column_named_reward_that_is_no_number_is_no_reward(tmp_path: Path) -> None:
    result = invoked(tmp_path, [{"question": "a", "reward": "much"}, {"question": "b", "reward": 1}])
    assert result.exit_code == 0, result.stderr
    summary = json.loads((tmp_path / "out/summary.json").read_text(encoding="utf-8"))
    assert (summary["reward_mean"], summary["success"]) == (1.0, 1.0)


# --------------------------------------------------------------------------- modules of one's own


@pytest.mark.usefixtures("scripted")
def test_modules_in_the_working_folder_are_found(tmp_path: Path) -> None:
    code = "def add(a: int, b: int) -> int:\n    return a + b\n\n"
    code += "def is_a(t):\n    return t['messages'][-1]['content'] == 'a'\n"
    (tmp_path / "a_module_of_my_own.py").write_text(code, encoding="utf-8")
    result = invoked(tmp_path, tools="[a_module_of_my_own:add]", reward="a_module_of_my_own:is_a")
    assert result.exit_code == 0, result.stderr
    assert [t["reward"] for t in read_parquet(tmp_path / "out/trajectories.parquet")] == [1.0, 0.0]
    assert sorted(path.name for path in (tmp_path / "out/traces").iterdir()) == ["fail-1.json", "ok-0.json"]


@pytest.mark.usefixtures("scripted")
def test_rewards_that_raise_are_counted_and_the_first_cause_is_shown(tmp_path: Path) -> None:
    code = "def half(t):\n    return {'a': 0.5}[t['messages'][-1]['content']]\n\ndef nan(t):\n    return float('nan')\n"
    (tmp_path / "rewards_that_raise.py").write_text(code, encoding="utf-8")
    result = invoked(tmp_path, [{"question": q} for q in "abb"], reward="rewards_that_raise:half")
    assert result.exit_code == 0, result.stderr
    assert "rewards that raised" in result.stdout and "2, the first: KeyError: 'b'" in result.stdout
    summary = json.loads((tmp_path / "out/summary.json").read_text(encoding="utf-8"))
    assert (summary["reward_errors"], summary["reward_error"]) == (2, "KeyError: 'b'")
    assert (summary["reward_mean"], summary["success"]) == (0.5, 0.0)

    result = invoked(tmp_path, reward="rewards_that_raise:nan", **{"output.dir": "nan"})
    assert result.exit_code == 0, result.stderr
    summary = json.loads((tmp_path / "nan/summary.json").read_text(encoding="utf-8"))
    assert (summary["reward_mean"], summary["success"], summary["reward_errors"]) == (None, None, 2)


# --------------------------------------------------------------------------- what cannot be run


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"data.path": "gone.jsonl"}, "gone.jsonl cannot be read: No such file or directory"),
        ({"data.path": "empty.jsonl"}, "there are no prompts to run; look at data.path and data.size"),
        ({"tools": "[gone_tools:add]"}, "cannot import gone_tools for 'gone_tools:add': No module named 'gone_tools'"),
        ({"tools": "[broken_module:add]"}, "cannot import broken_module for 'broken_module:add': ZeroDivisionError: "),
        ({"reward": "unspool.world:calculatr"}, "unspool.world has no 'calculatr'"),
        ({"reward": "math:pi"}, "reward: 'math:pi' is a float; name a plain function from a finished trajectory"),
        ({"reward": "asyncio:sleep"}, "reward: 'asyncio:sleep' is an async function; name a plain function"),
        ({"template.file": "gone.jinja"}, "template.file: cannot read gone.jinja: No such file or directory"),
        ({"template.parser": "hermse"}, "no tool-call parser is called 'hermse'. Did you mean 'hermes'?"),
        ({"model.path": "gone"}, "model.path: gone is no folder; give the folder of one, 'embedded', or a name"),
        ({"model.adapter": "gone"}, "model.adapter: gone is no folder; give the folder of one, 'embedded', or a name"),
        ({"model.device": "gpu"}, "model.device: 'gpu' cannot be used ("),
        ({"model.device": "cuda:77"}, "model.device: 'cuda:77' cannot be used ("),
        ({"output.dir": "run.yaml"}, "output.dir: run.yaml cannot be used (File exists); give a folder that can be"),
        ({"output.dir": "/proc/none/x"}, "output.dir: /proc/none/x cannot be used (No such file or directory); give"),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_one_sentence_before_anything_is_loaded(
    scripted: list[str], tmp_path: Path, keys: dict[str, str], sentence: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken_module.py").write_text("1 / 0\n", encoding="utf-8")
    assert refused(tmp_path, **keys).startswith(sentence)
    assert scripted == []


def test_a_folder_that_holds_no_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    said = "{} has no {}; give the folder that has it"
    assert refused(tmp_path, **{"model.path": "hollow"}) == "model.path: " + said.format("hollow", "config.json")
    assert refused(tmp_path, **{"model.adapter": "hollow"}) == (
        "model.adapter: " + said.format("hollow", "adapter_config.json")
    )
    (hollow / "config.json").write_text("{}", encoding="utf-8")
    no_tokenizer = "model.path: no tokenizer can be loaded from hollow ("
    assert refused(tmp_path, **{"model.path": "hollow"}).startswith(no_tokenizer)
    (hollow / "tokenizer.json").write_text("{", encoding="utf-8")
    assert refused(tmp_path, **{"model.path": "hollow"}).startswith(no_tokenizer)
    tokenizer = copy(small_tokenizer())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(hollow)
    assert refused(tmp_path, **{"model.path": "hollow"}).endswith("(in a configuration that is template.file)")
    tokenizer.chat_template = small_template().source
    tokenizer.save_pretrained(hollow)
    assert refused(tmp_path, **{"model.path": "hollow"}).startswith("model.path: hollow cannot be loaded (")


def test_a_name_that_the_hub_does_not_give_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Unreachable:
        def model_info(self, name: str, timeout: float) -> None:
            asked.append(name)
            raise ConnectionError("Name or service not known\nand advice")

    kept: list[str | None] = [None]
    monkeypatch.setattr("huggingface_hub.HfApi", Unreachable)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: kept[0])
    monkeypatch.chdir(tmp_path)
    assert refused(tmp_path, **{"model.path": "owner/model"}) == (
        "model.path: owner/model is neither a folder nor a model that the hub gives (Name or service not known); "
        "check the name and the network, or give the folder of a model"
    )
    assert asked == ["owner/model"]
    with pytest.raises(InvalidValueError, match=r"model\.adapter: owner/lora is neither"):
        load_torch(ModelConfig(adapter="owner/lora"), str(tmp_path))
    (tmp_path / "snapshot").mkdir()
    kept[0] = str(tmp_path / "snapshot/config.json")
    assert str(tmp_path / "snapshot") in refused(tmp_path, **{"model.path": "owner/model"})


# --------------------------------------------------------------------------- a folder with results


def test_results_of_an_earlier_run_are_not_mixed_with_new_ones(scripted: list[str], tmp_path: Path) -> None:
    assert invoked(tmp_path, [{"question": q} for q in "abc"]).exit_code == 0
    scripted.clear()
    assert refused(tmp_path) == (
        "output.dir: out holds results of an earlier run; give another folder, or output.overwrite=true to replace them"
    )
    assert scripted == [] and len(list((tmp_path / "out/traces").iterdir())) == 3

    mine = [tmp_path / "out/notes.txt", tmp_path / "out/traces/notes.json"]
    for path in mine:
        path.write_text("mine", encoding="utf-8")
    overwritten = invoked(tmp_path, [{"question": "z"}], **{"output.overwrite": "true", "output.parquet": "false"})
    assert overwritten.exit_code == 0, overwritten.stderr
    assert sorted(path.name for path in (tmp_path / "out").rglob("*") if path not in mine) == [
        "config.yaml",
        "fail-0.json",
        "summary.json",
        "traces",
    ]
    assert [path.read_text(encoding="utf-8") for path in mine] == ["mine", "mine"]


@pytest.mark.usefixtures("scripted")
def test_what_is_refused_leaves_earlier_results_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoked(tmp_path).exit_code == 0
    before = sorted(path for path in (tmp_path / "out").rglob("*"))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow/config.json").write_text("{}", encoding="utf-8")
    refused(tmp_path, **{"output.overwrite": "true", "model.path": "hollow"})
    assert sorted(path for path in (tmp_path / "out").rglob("*")) == before


@pytest.mark.usefixtures("scripted")
def test_the_configuration_that_was_run_can_be_run_again(tmp_path: Path) -> None:
    config = load_config(tmp_path / configured(tmp_path)[1], ["output.dir=kept", "data.system=é"])
    results = run(config, Console(file=io.StringIO()))
    assert len(results) == 2
    assert load_config(tmp_path / "kept/config.yaml") == config


# --------------------------------------------------------------------------- Ctrl-C

_PROGRAM = """
    import asyncio, sys
    from tests.small import by_session, say, small_template
    from unspool import ScriptedEngine
    from unspool.cli import main, run

    asked = 0

    async def reply(request):
        global asked
        asked += 1
        if asked > FINISHED:
            if not FINISHED:
                print("ready", flush=True)
            await asyncio.Event().wait()
        return say("done")

    run.load_engine = lambda *_: ScriptedEngine(reply)
    run.load_template = lambda *_: small_template()
    run.model_folder = lambda path: path
    main()
"""
_READY = "def ready(trajectory):\n    print('ready', flush=True)\n    return 1.0\n"


@pytest.mark.parametrize(
    ("finished", "sentence"),
    [
        (1, "unspool: interrupted; 1 finished trajectory is kept\n"),
        (0, "unspool: interrupted before any trajectory was finished\n"),
    ],
)
def test_ctrl_c_keeps_what_was_finished_and_exits_with_130(tmp_path: Path, finished: int, sentence: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(_PROGRAM).replace("FINISHED", str(finished)), encoding="utf-8")
    (tmp_path / "says_ready.py").write_text(_READY, encoding="utf-8")
    arguments = configured(tmp_path, reward="says_ready:ready")
    process = subprocess.Popen(
        [sys.executable, "program.py", *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() not in ("ready\n", ""):
            pass
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, sentence)
    if finished:
        assert [t["stop_reason"] for t in read_parquet(tmp_path / "out/trajectories.parquet")] == ["stop"]
        assert [path.name for path in (tmp_path / "out/traces").iterdir()] == ["ok-0.json"]
        assert "written to out" in printed
    else:
        assert [path.name for path in (tmp_path / "out").rglob("*")] == ["traces"]
