"""`unspool doctor` as a user runs it: what is printed, what a program reads, and the exit codes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.small import TEMPLATE, small_tokenizer
from unspool.cli import app
from unspool.cli.doctor import show_diagnosis
from unspool.template import doctor

GOOD = TEMPLATE.read_text(encoding="utf-8")
NO_TOOLS = GOOD.replace("{%- if tools -%}", "{%- if false -%}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with a template that has nothing wrong."""
    small_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(GOOD, encoding="utf-8")
    (tmp_path / "bad.jinja").write_text(NO_TOOLS, encoding="utf-8")
    return tmp_path / "model"


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_verdict_comes_first_and_the_exit_code_is_0(folder: Path) -> None:
    done = run(folder)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "Ready for rollouts"
    assert re.search(r"^ok parser +hermes: the template has", done.stdout, re.MULTILINE)


def test_what_is_broken_comes_next_with_its_remedy_and_the_exit_code_is_1(folder: Path) -> None:
    done = run(folder, "--template", folder.parent / "bad.jinja")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "Not ready: it ignores tools, so the model is not told of any"
    first = next(number for number, line in enumerate(lines) if line.startswith("broken tools"))
    assert "[no_tools]" in lines[first]
    assert lines[first + 1].strip().startswith("→ pass chat_template=")
    assert not [line for line in lines[:first] if line.startswith(("ok", "note"))]
    assert all(len(line) <= 80 for line in lines)


def test_json_has_all_of_it_and_the_same_exit_codes(folder: Path) -> None:
    good, bad = run(folder, "--json"), run(folder, "--json", "--template", folder.parent / "bad.jinja")
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert json.loads(good.stdout) == doctor(str(folder)).to_dict()
    assert [f["code"] for f in json.loads(bad.stdout)["findings"] if f["level"] == "broken"] == ["no_tools"]


def test_rollouts_without_tools_need_none(folder: Path) -> None:
    done = run(folder, "--no-tools", "--template", folder.parent / "bad.jinja")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "Ready for rollouts, with 1 note"


def test_a_parser_can_be_named(folder: Path) -> None:
    assert run(folder, "--parser", "react", "--template", folder.parent / "bad.jinja").exit_code == 0
    assert "unread_calls" in run(folder, "--parser", "pythonic").stdout


def test_a_template_is_examined_with_the_embedded_tokenizer_where_no_other_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unspool.cli.doctor.model_folder", lambda name: {"embedded": str(folder)}[name])
    assert run("--template", folder.parent / "bad.jinja").exit_code == 1
    assert run().exit_code == 0


def no_tokenizer(root: Path) -> list[str | Path]:
    (root / "empty").mkdir()
    (root / "empty" / "chat_template.jinja").write_text(GOOD, encoding="utf-8")
    return [root / "empty"]


def damaged(root: Path) -> list[str | Path]:
    (root / "damaged").mkdir()
    (root / "damaged" / "tokenizer.json").write_text("{", encoding="utf-8")
    return [root / "damaged"]


def binary(root: Path) -> list[str | Path]:
    (root / "x.jinja").write_bytes(b"\xff\xfe\x00")
    return [root / "model", "--template", root / "x.jinja"]


def unknown_class(root: Path) -> list[str | Path]:
    (root / "unknown").mkdir()
    (root / "unknown" / "tokenizer_config.json").write_text('{"tokenizer_class": "Nope"}', encoding="utf-8")
    return [root / "unknown"]


WRONG = {
    "a folder without a tokenizer": (no_tokenizer, "holds no tokenizer .*--template .*chat_template.jinja"),
    "a damaged tokenizer": (damaged, "no tokenizer can be loaded from"),
    "a class that there is not": (unknown_class, r"instantiate the backend tokenizer from one of: \(1\) a .tokenizers"),
    "an empty name": (lambda root: [""], "the name '' is empty; give the folder of a tokenizer"),
    "no folder": (lambda root: [root / "nowhere"], "there is no folder .*nowhere"),
    "a bare name that is no folder": (lambda root: ["nowhere"], "there is no folder nowhere"),
    "a file": (lambda root: [root / "bad.jinja"], "bad.jinja is a file"),
    "a template that is not there": (lambda root: [root / "model", "--template", root / "n.jinja"], "cannot read"),
    "a template that is no text": (binary, "is no UTF-8 text"),
    "a parser that there is not": (lambda root: [root / "model", "--parser", "hermse"], "Did you mean 'hermes'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_examined_is_one_sentence_and_exit_code_2(what: str, folder: Path) -> None:
    arguments, said = WRONG[what]
    done = run(*arguments(folder.parent))
    assert done.exit_code == 2
    assert not done.stdout
    assert re.search(said, done.stderr)
    assert done.stderr.startswith("unspool: ") and done.stderr.count("\n") == 1


def test_code_of_a_tokenizer_is_not_run_unless_asked_for(folder: Path) -> None:
    """A tokenizer that brings its own class: refused, in one sentence; nothing of it is carried out."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["tokenizer_class"] = "MyTokenizer"
    config["auto_map"] = {"AutoTokenizer": ["mine.MyTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    told = folder / "ran"
    code = (
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(told)!r}).touch()\nclass MyTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    (folder / "mine.py").write_text(code, encoding="utf-8")
    run(folder)
    assert not told.exists()
    assert run(folder, "--trust-remote-code").exit_code == 0
    assert told.exists()


HOSTILE = "\x1b[2J\x1b]0;x\x07\u202e[bold]markup[/bold]\u200b"


def test_what_a_template_says_is_shown_and_never_carried_out() -> None:
    refuses = GOOD.replace('["system", "user", "tool"]', '["system", "user"]').replace(
        'raise_exception("unknown role " ~ message.role)', f"raise_exception({HOSTILE!r})"
    )
    found = doctor(small_tokenizer(), chat_template=refuses)
    out = io.StringIO()
    show_diagnosis(found, Console(file=out, width=80, force_terminal=True, color_system=None))
    assert not re.search("[\x1b\x07\u202e\u200b]", out.getvalue())
    assert "[bold]markup[/bold]" in re.sub(r"\s+", "", out.getvalue())
    for_programs = io.StringIO()
    show_diagnosis(found, Console(file=for_programs, width=80), as_json=True)
    assert for_programs.getvalue().isascii()
    assert json.loads(for_programs.getvalue()) == found.to_dict()


def test_a_terminal_that_is_no_utf8_is_written_to_all_the_same() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    show_diagnosis(doctor(small_tokenizer(), chat_template=NO_TOOLS), Console(file=out, width=80))
    out.flush()
    assert b"Not ready" in raw.getvalue()
