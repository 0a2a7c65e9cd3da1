"""The live display: figures on a terminal, silence elsewhere."""

from __future__ import annotations

import io

import pytest

from tests.small import script, small_template, user
from unspool import MultiTurnRollout
from unspool.rollout.progress import progress_display
from unspool.rollout.stats import RolloutStats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_live_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    MultiTurnRollout(script("ok", RuntimeError("gone")), small_template())([user("a"), user("b"), user("c")])
    shown = terminal.getvalue()
    for words in ("3/3 done", "0 active", "0 in tools", "tokens/s", "0 failed"):
        assert words in shown


def test_failures_are_counted_in_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "140")
    stats = RolloutStats(total=2, done=1, failed=1, tools_running=4, active=5)
    with progress_display(stats, None):
        pass
    assert "1/2 done" in terminal.getvalue()
    assert "5 active" in terminal.getvalue()
    assert "4 in tools" in terminal.getvalue()
    assert "1 failed" in terminal.getvalue()


def test_what_is_no_terminal_is_shown_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    MultiTurnRollout(script("ok"), small_template())([user("a")])
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    MultiTurnRollout(script("ok"), small_template(), progress=True)([user("a")])
    assert "1/1 done" in capsys.readouterr().err
