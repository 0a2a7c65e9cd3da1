"""`unspool run` with an environment named by an import path, on a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.small import script, small_template
from unspool.cli import app
from unspool.data import read_jsonl

_MODULE = """
from unspool import StepResult, TextEnv, ToolManager

class Word(TextEnv):
    def __init__(self, word="please", price=0.0):
        self.word, self.price = word, price

    def act(self, text):
        right = text == self.word
        return StepResult("yes" if right else "no", (1.0 if right else 0.0) - self.price, right)

def made(trajectory, price):
    return Word(trajectory["word"], price)

nothing = 3
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr("unspool.cli.run.load_engine", lambda *_: script("now", "please", logprobs=True))
    monkeypatch.setattr("unspool.cli.run.load_template", lambda *_: small_template())
    monkeypatch.setattr("unspool.cli.run.model_folder", lambda path: path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "words_env.py").write_text(_MODULE, encoding="utf-8")
    rows = [{"question": "Say it.", "word": "now"}, {"question": "Say it.", "word": "please"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text("data: {path: data.jsonl}\noutput: {dir: out, jsonl: true}\n", encoding="utf-8")

    def run(*overrides: str) -> Any:
        return CliRunner().invoke(app, ["run", "run.yaml", *overrides])

    return run


def test_a_class_is_the_world_of_every_conversation(start: Any, tmp_path: Path) -> None:
    result = start("env=words_env:Word", "env_args={price: 0.25}")
    assert result.exit_code == 0, result.output
    outs = read_jsonl(tmp_path / "out/trajectories.jsonl")
    assert [(out["stop_reason"], out["turns"], out["reward"]) for out in outs] == [("env_done", 2, 0.5)] * 2


def test_a_function_makes_it_of_the_trajectory(start: Any, tmp_path: Path) -> None:
    result = start("env=words_env:made", "env_args={price: 0.5}")
    assert result.exit_code == 0, result.output
    outs = read_jsonl(tmp_path / "out/trajectories.jsonl")
    assert [(out["turns"], out["reward"]) for out in outs] == [(1, 0.5), (2, 0.0)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env=words_env:Word", "tools=[unspool.world:calculator]"], "give tools or env, not both"),
        (["env_args={price: 1}"], "env_args are of env, which is not given"),
        (["env=words_env:nothing"], "env: 'words_env:nothing' is a int; name a class"),
        (["env=words_env:Word", "env_args={prize: 1}"], "env_args: 'words_env:Word' does not take them"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_runs(start: Any, overrides: list[str], words: str) -> None:
    result = start(*overrides)
    assert result.exit_code == 2
    assert words in result.stderr
