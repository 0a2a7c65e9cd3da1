"""What a benchmark found, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console
from rich.table import Table

Cell: TypeAlias = float | int | str | None


@dataclass(frozen=True)
class Target:
    """A figure that the project holds itself to."""

    what: str
    value: float
    bound: float
    kind: Literal["at most", "at least"] = "at most"

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.kind == "at most" else self.value >= self.bound


@dataclass
class Result:
    """One benchmark's table.

    Attributes:
        name: a letter, a to g.
        title: what was measured.
        columns: the heads of the columns behind the contestant's name, with units.
        rows: contestant and its cells; None where a cell does not apply.
        targets: what is asked of unspool, and what it was.
        facts: counts that do not depend on the clock: turns, tokens, episodes.
        notes: what else a reader needs, such as peers that are not installed.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, tuple[Cell, ...]]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    facts: dict[str, float | int | str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, contestant: str, *cells: Cell) -> None:
        """Add a row; as many cells as columns."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{contestant}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append((contestant, cells))

    def show(self, console: Console) -> None:
        """Print it."""
        table = Table(title=f"({self.name}) {self.title}", title_justify="left", show_edge=False, pad_edge=False)
        table.add_column("", no_wrap=True)
        for column in self.columns:
            table.add_column(column, justify="right")
        for contestant, cells in self.rows:
            table.add_row(contestant, *map(_text, cells), style="bold" if contestant.startswith("unspool") else "")
        console.print()
        console.print(table)
        for target in self.targets:
            verdict = "[green]met[/]" if target.met else "[yellow]missed[/]"
            console.print(
                f"target: {target.what} {target.kind} {_text(target.bound)}: {_text(target.value)}, {verdict}"
            )
        for note in self.notes:
            console.print(f"[dim]{note}[/]", highlight=False)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.2f}" if abs(cell) >= 0.1 else f"{cell:.3f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def write_json(results: Sequence[Result], path: Path) -> None:
    """Every figure of a run, as one object by benchmark."""
    whole = {
        result.name: {
            **asdict(result),
            "rows": [
                {"contestant": who, **dict(zip(result.columns, cells, strict=True))} for who, cells in result.rows
            ],
            "targets": [{**asdict(target), "met": target.met} for target in result.targets],
        }
        for result in results
    }
    path.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
