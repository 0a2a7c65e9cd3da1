"""The configuration of `unspool run`: typed, and what it does not know is refused with the nearest right key."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from unspool.cli import app
from unspool.cli.config import load_config
from unspool.cli.keys import keys, show_keys
from unspool.cli.summary import summarise, summary_table
from unspool.cli.tasks import final_answer, load_object, load_prompts
from unspool.rollout import RolloutStats
from unspool.types import InvalidValueError

ROOT = Path(__file__).parents[2]
MINIMAL = "data: {task: chain_sum}\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_demos_configuration_is_valid() -> None:
    config = load_config(ROOT / "examples" / "demo.yaml")
    assert (config.model.path, config.tools, config.num_generations) == ("embedded", ["unspool.world:calculator"], 4)


def test_overrides_go_on_top_and_are_typed(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    config = load_config(path, ["sampling.temperature=0.7", "data.task_args.max_terms=4", "tools=[a:b, c:d]", "seed=3"])
    assert (config.sampling.temperature, config.data.task_args, config.tools, config.seed) == (
        0.7,
        {"max_terms": 4},
        ["a:b", "c:d"],
        3,
    )


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        (MINIMAL, ["sampling.temprature=1"], "unknown key sampling.temprature; did you mean sampling.temperature?"),
        (MINIMAL, ["sampilng.top_p=1"], "unknown key sampilng; did you mean sampling?"),
        (MINIMAL, ["model.zzz=1"], "unknown key model.zzz; known: path, adapter, dtype"),
        (MINIMAL, ["sampling.temperature=hot"], "sampling.temperature: Input should be a valid number"),
        (MINIMAL, ["sampling.top_p=2"], r"sampling.top_p: .* less than or equal to 1 \(it is 2\)"),
        (MINIMAL, ["seed"], "'seed' is no override; write section.key=value"),
        (MINIMAL, ["seed.x=1"], "seed.x cannot be set: seed is a value, not a section"),
        (MINIMAL, ["seed=[1"], "the value of seed is not valid YAML"),
        ("sampling: {}\n", [], "data is missing"),
        ("data: {}\n", [], "give exactly one of data.path and data.task"),
        ("data: {task: a, path: b}\n", [], "give exactly one of data.path and data.task"),
        ("- 1\n", [], "must hold keys and values, not a list"),
        ("a: [\n", [], "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_the_remedy(
    tmp_path: Path, text: str, overrides: list[str], sentence: str
) -> None:
    path = written(tmp_path, text + ("" if "seed.x=1" not in overrides else "seed: 1\n"))
    with pytest.raises(InvalidValueError, match=sentence):
        load_config(path, overrides)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"cannot read the configuration .*gone\.yaml: No such file"):
        load_config(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("calculator", "no import path; write package.module:name"),
        ("unspool.wrld:calculator", "cannot import unspool.wrld"),
        ("unspool.world:calculatr", "unspool.world has no 'calculatr'"),
    ],
)
def test_import_paths_that_lead_nowhere_are_told_apart(path: str, sentence: str) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        load_object(path)


def test_a_reasoning_gym_task_brings_its_own_reward(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, MINIMAL), ["data.size=3", "data.seed=5", "data.system=Be brief."])
    prompts, reward = load_prompts(config.data)
    assert [prompt["id"] for prompt in prompts] == ["chain_sum-5-0", "chain_sum-5-1", "chain_sum-5-2"]
    assert prompts[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert reward is not None
    said = [{"role": "assistant", "content": f" {prompts[0]['ground_truth']}\n"}]
    assert reward({**prompts[0], "messages": said}) == 1.0
    assert reward({**prompts[0], "messages": [{"role": "assistant", "content": "no idea"}]}) < 1.0
    assert load_prompts(config.data)[0] == prompts


def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "data: {task: chain_smu}\n"))
    with pytest.raises(InvalidValueError, match="cannot make the task 'chain_smu'"):
        load_prompts(config.data)


def test_an_answer_is_what_was_said_last_without_a_call() -> None:
    assert final_answer({"messages": [{"role": "assistant", "content": " 19 "}]}) == "19"
    assert final_answer({"messages": [{"role": "assistant", "content": "19", "tool_calls": [{}]}]}) == ""
    assert final_answer({"messages": [{"role": "tool", "content": "19"}]}) == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["run", "keys", "show"]),
        (["run", "--help"], ["CONFIG", "KEY=VALUE", "output.dir", "unspool keys"]),
        (["show", "--help"], ["FILE", "--index", "--tokenizer", "--messages"]),
    ],
)
def test_help_names_what_there_is(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert all(word in result.output for word in words)


def test_every_key_is_listed_with_its_type_its_default_and_its_meaning() -> None:
    rows = {key: (kind, default) for key, kind, default, _ in keys()}
    assert rows["model.dtype"] == ("bfloat16 | float32 | auto", "bfloat16")
    assert rows["limits.max_turns"] == ("whole number", "6")
    assert rows["template.file"] == ("path", "null")
    assert rows["tools"] == ("list of texts", "[]")
    assert rows["template.kwargs"] == ("keys and values", "{}")
    assert rows["output.overwrite"] == ("true | false", "false")
    assert [key for key, _, _, meaning in keys() if not meaning] == []
    stream = io.StringIO()
    show_keys(Console(file=stream, width=160))
    assert re.search(r"^sampling\.top_k +whole number +-1 +sample among", stream.getvalue(), re.MULTILINE)
    result = CliRunner().invoke(app, ["keys"])
    assert result.exit_code == 0 and all(key in result.output for key in rows)


def test_figures_of_no_trajectories_are_figures_too() -> None:
    summary = summarise([], RolloutStats())
    assert (summary["trajectories"], summary["reward_mean"], summary["success"], summary["calling"]) == (
        0,
        None,
        None,
        0,
    )
    stream = io.StringIO()
    Console(file=stream).print(summary_table(summary))
    assert "none given" in stream.getvalue()


def test_shares_of_rewards_are_of_those_that_have_one() -> None:
    common = {"messages": [], "tool_errors": [], "turns": 1, "stop_reason": "stop", "spans": []}
    cause = "Error: [red]\x1b[2J"
    results = [{**common, "reward": 1.0}, {**common, "reward": 0.0}, {**common, "reward": None, "reward_error": cause}]
    summary = summarise(results, RolloutStats())
    assert (summary["reward_mean"], summary["success"], summary["reward_errors"]) == (0.5, 0.5, 1)
    stream = io.StringIO()
    Console(file=stream, width=120).print(summary_table(summary))
    assert "1, the first: Error: [red]\u241b[2J" in stream.getvalue()
