"""Runs of code in a sandbox, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unspool import PythonTool, ToolManager
from unspool.types import Message, ToolCall
from unspool.world.sandbox.means import problem

# Where one is missing, the tests run with the others; without any they are skipped.
WORKING = [means for means in ("bubblewrap", "kernel") if problem(means) is None]


isolated = pytest.mark.skipif(not WORKING, reason="neither bubblewrap nor namespaces work here")


def answer(means: str, code: str, **options: object) -> str:
    """What the model reads; an error also has to be an entry with the same words.

    Where time is not what is tried, there is enough of it for a machine that is busy with other tests.
    """
    manager = ToolManager([PythonTool(isolation=means, **{"timeout": 60.0, **options})])  # type: ignore[arg-type]
    message = Message("", tool_calls=[ToolCall("python", {"code": code}, id="c1")])
    step = asyncio.run(manager.step(message))
    content = step.messages[0]["content"]
    assert isinstance(content, str)
    assert [(one.kind, one.error) for one in step.failures] == (
        [("exception", content)] if content.startswith("Error: the code") else []
    )
    return content


def cause(text: str) -> str:
    return text.splitlines()[0]


def sandboxed() -> set[int]:
    """The processes of this machine that run code in sandboxes."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"inside.main(enter" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
