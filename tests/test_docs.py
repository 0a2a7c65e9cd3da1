"""The documents are true: their examples run and print what they show, and what they name exists."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

import unspool
from examples.scripted import call, says, small_template
from unspool import (
    APIMultiTurnRollout,
    Cause,
    ChatTemplate,
    Limits,
    MultiTurnRollout,
    OpenAI,
    SamplingParams,
    Tool,
    ToolManager,
    tool,
)
from unspool.cli import app
from unspool.cli.config import RunConfig, load_config
from unspool.cli.summary import summarise
from unspool.rollout import RolloutStats
from unspool.template.parsers import PARSERS
from unspool.types import StopReason
from unspool.world import PythonTool, Step, ToolFailure
from unspool.world.sandbox.means import MEANS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_ROOM = re.compile(r"`((?:src|tests|docs|examples|scripts|benchmarks)/[\w./-]*|[\w-]+\.(?:toml|txt)|Makefile|LICENSE)`")
_REAL_MODEL = "ensure_embedded_model"
_VLLM = "import VLLMEngine"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block; `shown` is the text of a `text` block right behind it, which is what it prints."""

    page: Path
    line: int
    language: str
    code: str
    shown: str | None = None


def blocks(page: Path, language: str | None = None) -> list[Block]:
    text = text_of(page)
    found = list(_FENCE.finditer(text))
    result = []
    for index, match in enumerate(found):
        following = found[index + 1] if index + 1 < len(found) else None
        shown = None
        if following and following[1] == "text" and not text[match.end() : following.start()].strip():
            shown = following[2]
        result.append(Block(page, text.count("\n", 0, match.start()) + 2, match[1], match[2], shown))
    return [block for block in result if language in (None, block.language)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def code_words(page: Path) -> set[str]:
    """Everything that stands between backticks in the prose."""
    return {match[1] for match in re.finditer(r"`([^`\n]+)`", prose(page))}


def each(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{name_of(page)}:{block.line}") for page in PAGES for block in blocks(page, language)
    ]


# ------------------------------------------------------------------ examples


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    needs = {_REAL_MODEL: pytest.mark.slow, _VLLM: pytest.mark.vllm}
    return [mark for name, mark in needs.items() if name in text_of(page)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=marks_of(page))
        for page in PAGES
        if blocks(page, "python") and page.name != "README.zh-CN.md"
    ],
)
def test_the_examples_of_a_page_run_in_order_and_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("a_page_of_the_documents")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page, "python"):
        place = f"{name_of(page)}:{block.line}"
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)  # noqa: S102 - the documents are ours
        if block.shown is not None:
            same = doctest.OutputChecker().check_output(block.shown, printed.getvalue(), doctest.ELLIPSIS)
            assert same, f"{place} prints\n{printed.getvalue()}\nand the page shows\n{block.shown}"
        else:
            assert not printed.getvalue(), f"{place} prints something, and the page does not show it"


@pytest.mark.parametrize("block", each("yaml"))
def test_every_configuration_is_valid(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(block.code, encoding="utf-8")
    load_config(path)


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.code.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;", line):
            words = shlex.split(part, comments=True)
            if words:
                yield words


@pytest.mark.parametrize("block", each("bash"))
def test_every_command_exists_and_takes_what_it_is_given(block: Block) -> None:
    from typer.main import get_command

    group: Any = get_command(app)
    targets = set(re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for words in commands(block):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif Path(words[0]).name == "unspool":
            command, arguments = words[1], words[2:]
            assert command in group.commands, words
            parsed = group.commands[command].make_context(command, arguments).params
            if command == "run":
                load_config(ROOT / "examples/demo.yaml", parsed["overrides"] or [])


def test_the_two_readmes_have_the_same_code() -> None:
    def code(block: Block) -> str:
        if block.language == "python":
            return ast.dump(ast.parse(block.code))
        return re.sub(r"\s+#.*$", "", block.code, flags=re.MULTILINE)

    english, chinese = (
        [(b.language, code(b)) for b in blocks(ROOT / name)] for name in ("README.md", "README.zh-CN.md")
    )
    assert english == chinese
    assert "README.zh-CN.md" in text_of(ROOT / "README.md")
    assert "README.md" in text_of(ROOT / "README.zh-CN.md")


# ------------------------------------------------------------------ links and paths


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.replace("`", "").strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_every_path_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)} links to {target}"
    for path in _ROOM.findall(prose(page)):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = text_of(DOCS / "index.md")
    assert not [page.name for page in DOCS.glob("*.md") if page.name != "index.md" and f"({page.name}" not in index]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_places_on_somebodys_machine(page: Path) -> None:
    assert not re.search(r"/work/|/root/|/home/\w", text_of(page))


# ------------------------------------------------------------------ names


def parameters(function: Any) -> set[str]:
    names = {p.name for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_KEYWORD,)}
    return names - {"self"}


def names_of(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def a_whole_trajectory() -> dict[str, Any]:
    """A trajectory with every field that a rollout adds."""

    class Graded(ToolManager):
        async def step(self, message: Any) -> Step:
            return Step((await super().step(message)).messages, reward=1.0)

    @tool
    def add(a: int, b: int) -> int:
        return a + b

    template = small_template()
    lines = [call("add", a=1, b=2), "3", call("add", a=2, b=2)]
    run = MultiTurnRollout(
        says(template, *lines), template, Graded([add]), progress=False, num_generations=2, limits=Limits()
    )
    return run([{"messages": [{"role": "user", "content": "1 + 2?"}]}])[0]


def of_torch_engine() -> set[str]:
    from unspool import TorchEngine

    return parameters(TorchEngine.__init__) | (parameters(TorchEngine.from_pretrained) - {"path"})


def of_minimind() -> set[str]:
    from unspool.engines import RolloutResult
    from unspool.rollout import SingleRollout, rollout_batch, rollout_single

    of_functions = parameters(rollout_batch) | parameters(rollout_single)
    return of_functions | set(SingleRollout._fields) | names_of(RolloutResult)


_NAMED: dict[str, Callable[[], set[str]]] = {
    "docs/rollouts.md": lambda: (
        parameters(MultiTurnRollout.__init__)
        | parameters(MultiTurnRollout.__call__)
        | names_of(Limits)
        | names_of(SamplingParams)
        | set(a_whole_trajectory())
        | set(get_args(StopReason))
        | {name for name in names_of(RolloutStats) if not name.startswith("_")}
    ),
    "docs/tools.md": lambda: (
        parameters(ToolManager.__init__)
        | parameters(tool)
        | names_of(Tool)
        | names_of(Step)
        | names_of(ToolFailure)
        | {"bad_json", "unclosed", "unknown_tool", "bad_arguments", "exception", "timeout", "truncated", "limit"}
    ),
    "docs/sandbox.md": lambda: parameters(PythonTool.__init__) | set(MEANS) | {"auto"},
    "docs/templates.md": lambda: (parameters(ChatTemplate.__init__) | set(PARSERS)) - {"tokenizer_or_name"},
    "docs/engines.md": of_torch_engine,
    "docs/minimind.md": of_minimind,
    "docs/api.md": lambda: (
        parameters(OpenAI.__init__)
        | parameters(APIMultiTurnRollout.__init__)
        | parameters(APIMultiTurnRollout.__call__)
        | set(get_args(StopReason))
        | {"usage", "return_token_ids"}
    ),
    "docs/concepts.md": lambda: {str(cause) for cause in Cause},
    "README.md": lambda: set(get_args(StopReason)) | set(a_whole_trajectory()),
    "README.zh-CN.md": lambda: set(get_args(StopReason)) | set(a_whole_trajectory()),
}


@pytest.mark.parametrize("page", _NAMED)
def test_a_page_leaves_no_name_of_its_subject_out(page: str) -> None:
    words = {word.partition("=")[0] for word in code_words(ROOT / page)}
    assert not sorted(_NAMED[page]() - words)


def test_the_reference_names_all_that_is_public_and_nothing_else() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", text_of(DOCS / "reference.md"), re.MULTILINE)
    named = [name for name, _ in rows]
    assert sorted(named) == sorted(unspool.__all__)
    assert all(len(line) > 10 for _, line in rows)


def keys(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{before}{name}.")
        else:
            yield f"{before}{name}", field.get_default(call_default_factory=True)


def test_the_command_page_has_every_key_of_the_configuration_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(.+?)` \|", text_of(DOCS / "cli.md"), re.MULTILINE))
    expected = {key: str(value) if isinstance(value, Path) else value for key, value in keys(RunConfig)}
    assert {key: yaml.safe_load(value) for key, value in rows.items() if key in expected} == expected
    figures = summarise([a_whole_trajectory()], RolloutStats(total=1))
    assert not set(figures) - code_words(DOCS / "cli.md")
