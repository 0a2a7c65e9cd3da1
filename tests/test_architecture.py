"""Imports point one way, heavy parts load when they are used, and the code is typed, linted and of readable size."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "unspool"

# From the bottom up: a module may import from its own room and from rooms above it in this list, never from below.
ROOMS = [
    {"types", "_atomic", "threads"},
    {"deadline", "loop", "spans"},
    {"record"},
    {"template", "engines", "data", "trace"},
    {"policy", "world"},
    {"episode"},
    {"rollout"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "unspool"}
    rooms = {name.split(".")[1] for name in names if name.startswith("unspool.")}
    return {room for room in rooms if room in LEVEL}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no place in the order of rooms"
    wrong = {
        other
        for other in imported_rooms(path)
        if LEVEL[other] > LEVEL[room] or (LEVEL[other] == LEVEL[room] and other != room and LEVEL[room] > 0)
    }
    allowed = {("world", "policy"), ("policy", "world")}
    assert not {other for other in wrong if (room, other) not in allowed}


def test_importing_unspool_loads_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys, time; t = time.process_time(); import unspool; d = time.process_time() - t;"
        "from unspool import MultiTurnRollout, ToolManager, ChatTemplate, ScriptedEngine, tool, Record;"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'pyarrow', 'rich', 'openai', 'httpx', 'numpy'};"
        "heavy &= set(sys.modules);"
        "print(d, sorted(heavy))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(" ", 1)
        for _ in range(3)
    ]
    assert min(float(seconds) for seconds, _ in runs) < 0.3
    assert {heavy.strip() for _, heavy in runs} == {"[]"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_says_what_it_promises_and_is_of_readable_size(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring and len(docstring) > 20
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 50, f"{node.name} has {lines} lines"


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=["lint", "format", "types"]
)
def test_the_code_is_clean(command: list[str]) -> None:
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run([str(tool), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
