"""The doctor's page: its tables are what the script prints, and it names every code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from scripts import doctor_table

from unspool.template import diagnosis

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tables_are_what_the_script_prints() -> None:
    assert len(doctor_table.FAMILIES) == 20
    assert f"\n{doctor_table.of_families()}\n" in PAGE
    assert f"\n{doctor_table.of_tokenizers()}\n" in PAGE


def codes() -> set[str]:
    """The codes in the source: the third argument of every `Finding(...)`."""
    found = set()
    for file in Path(diagnosis.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                found |= {node.args[2].value} if isinstance(node.args[2], ast.Constant) else {node.args[2].id}  # type: ignore[attr-defined]
    return {str(code) for code in found} - {"code"} | {"one_call_only", "no_render"}


def test_the_page_names_every_code() -> None:
    assert len(codes()) > 30
    assert not [code for code in codes() if f"`{code}`" not in PAGE]
