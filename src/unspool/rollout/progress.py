"""The live display of a rollout: a line on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unspool.rollout.stats import RolloutStats

if TYPE_CHECKING:
    from rich.table import Table


@contextmanager
def progress_display(stats: RolloutStats, show: bool | None) -> Iterator[None]:
    """Show `stats` on standard error while the block runs.

    Args:
        show: True or False; None: where standard error is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield
        return
    from rich.console import Console
    from rich.live import Live

    with Live(_Line(stats), console=Console(stderr=True), refresh_per_second=8, transient=False):
        yield


class _Line:
    """The figures as rich draws them, read anew at every refresh."""

    def __init__(self, stats: RolloutStats) -> None:
        from rich.progress_bar import ProgressBar

        self.stats = stats
        self.bar = ProgressBar(total=max(stats.total, 1), width=24)

    def __rich__(self) -> Table:
        from rich.table import Table

        stats = self.stats
        self.bar.update(stats.done)
        row = Table.grid(padding=(0, 2))
        row.add_row(
            "rollout",
            self.bar,
            f"{stats.done}/{stats.total} done",
            f"{stats.active} active",
            f"{stats.tools_running} in tools",
            f"{stats.tokens_per_second:,.0f} tokens/s",
            f"[red]{stats.failed} failed[/]" if stats.failed else "0 failed",
            f"{stats.seconds:.1f} s",
        )
        return row
