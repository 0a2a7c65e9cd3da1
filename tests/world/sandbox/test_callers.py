"""Callers that wait, cancel, die or call at once, and episodes with code of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from examples.scripted import call, says, small_template
from tests.world.sandbox.runs import WORKING, isolated, open_descriptors, sandboxed, wait_until
from unspool import Limits, MultiTurnRollout, PythonTool, ToolManager


def test_a_cancelled_call_ends_its_processes(means: str) -> None:
    async def cancel() -> None:
        manager = ToolManager([PythonTool(isolation=means, timeout=60)])
        before = await asyncio.to_thread(sandboxed)
        work = asyncio.ensure_future(manager.call("python", {"code": "import time\ntime.sleep(60)"}))
        assert await asyncio.to_thread(wait_until, lambda: len(sandboxed() - before) > 1)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    began = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - began < 30


def test_a_call_may_be_cancelled_at_any_step(means: str) -> None:
    async def cancel() -> None:
        manager = ToolManager([PythonTool(isolation=means, timeout=60)])
        for steps in range(12):
            work = asyncio.ensure_future(manager.call("python", {"code": "import time\ntime.sleep(60)"}))
            for _ in range(steps):
                await asyncio.sleep(0)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
        assert await manager.call("python", {"code": "'still here'"}) == "'still here'"

    asyncio.run(cancel())


def test_many_calls_leave_no_descriptor_and_no_thread(means: str) -> None:
    async def many() -> None:
        manager = ToolManager([PythonTool(isolation=means, timeout=0.3)])
        codes = ["1", "1 / 0", "while True: print('x' * 1000)", "while True: pass"]
        await manager.call("python", {"code": "1"})
        before = open_descriptors()
        await asyncio.gather(*(manager.call("python", {"code": code}) for code in codes * 4))
        assert await asyncio.to_thread(wait_until, lambda: open_descriptors() == before)

    threads = threading.active_count()
    asyncio.run(many())
    assert wait_until(lambda: threading.active_count() <= threads)


def descendants() -> list[int]:
    """All that descends from this process, the oldest first."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= new
    return sorted(family - {os.getpid()})


def in_namespace(pid: int) -> int | None:
    """The number of a sandbox's process in its own namespace."""
    with contextlib.suppress(OSError):
        numbers = re.findall(r"NSpid:(.*)", (Path("/proc") / str(pid) / "status").read_text())[0].split()
        return int(numbers[-1]) if len(numbers) > 1 else None
    return None


def test_a_supervisor_that_is_gone_is_told_with_the_output_so_far(means: str) -> None:
    async def end_it() -> str:
        manager = ToolManager([PythonTool(isolation=means, timeout=60)])
        here = in_namespace(os.getpid()) is not None
        code = "import os, time\nprint('so far', flush=True)\nos.fork()\ntime.sleep(600)"
        work = asyncio.ensure_future(manager.call("python", {"code": code}))
        inside = {}

        def forked() -> bool:
            inside.clear()
            inside.update({pid: in_namespace(pid) for pid in descendants() if in_namespace(pid) is not None})
            return len(inside) >= (4 if here else 3)

        assert await asyncio.to_thread(wait_until, forked)
        assert len([pid for pid, number in inside.items() if number == 1]) == 1
        os.kill(next(pid for pid, number in inside.items() if number == 1), signal.SIGKILL)
        return await work

    assert asyncio.run(end_it()) == (
        "Error: the code's sandbox was ended before the code: from within, or for want of memory on the whole machine\n"
        "so far"
    )


@pytest.mark.parametrize("means", [*WORKING, "none"])
def test_a_killed_caller_leaves_no_process_and_no_folder(means: str, tmp_path: Path) -> None:
    script = (
        "from unspool import PythonTool, ToolManager\n"
        f"tools = ToolManager([PythonTool(isolation={means!r}, timeout=600)])\n"
        "print('ready', flush=True)\n"
        "tools('python', {'code': 'import os, time\\nos.fork() or os.setsid()\\ntime.sleep(600)'})"
    )
    before = sandboxed()
    places = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=places) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        assert wait_until(lambda: len(sandboxed() - before) >= 3)
        started = sandboxed() - before
        caller.kill()
    assert wait_until(lambda: not started & sandboxed())
    assert list(tmp_path.iterdir()) == []


def test_calls_from_several_threads_and_loops_at_once(means: str) -> None:
    manager = ToolManager([PythonTool(isolation=means)])
    answers: list[str] = []
    private = [
        threading.Thread(target=lambda n=n: answers.append(manager("python", {"code": f"{n}"}))) for n in range(4)
    ]
    own = [
        threading.Thread(target=lambda n=n: answers.append(asyncio.run(manager.call("python", {"code": f"{n}"}))))
        for n in range(4, 8)
    ]
    for thread in [*private, *own]:
        thread.start()
    for thread in [*private, *own]:
        thread.join()
    assert sorted(answers) == [f"{n}" for n in range(8)]


def test_waiting_for_a_turn_does_not_count_as_running(means: str) -> None:
    manager = ToolManager([PythonTool(isolation=means, timeout=30, concurrency=1)], timeout=0.5)

    async def several() -> list[str]:
        return await asyncio.gather(
            *(manager.call("python", {"code": "import time\ntime.sleep(0.2)\n'ok'"}) for _ in range(4))
        )

    assert asyncio.run(several()) == ["'ok'"] * 4


@isolated
@pytest.mark.parametrize(("episodes", "timeout"), [(5, 3.0), pytest.param(50, 8.0, marks=pytest.mark.slow)])
def test_episodes_with_code_of_every_kind(episodes: int, timeout: float) -> None:
    template = small_template()
    codes = ["print(6 * 7)", "1 / 0", "import os\nos.kill(os.getppid(), 9)", "import time\ntime.sleep(600)"]
    manager = ToolManager([PythonTool(timeout=timeout, concurrency=episodes)])
    engines = says(template, *(call("python", code=code) for code in codes), "done")
    rollout = MultiTurnRollout(engines, template, manager, max_turns=7, limits=Limits(max_turns=7), progress=False)
    results = rollout([{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(episodes)])
    told = [
        "42",
        "Error: the code raised ZeroDivisionError",
        "Error: the code raised PermissionError",
        f"Error: the code ran longer than {timeout:g} s",
    ]
    for result in results:
        assert result["stop_reason"] == "stop", result["error"]
        answers = [message["content"] for message in result["messages"] if message["role"] == "tool"]
        assert [text.startswith(start) for text, start in zip(answers, told, strict=True)] == [True] * 4, answers
        assert [failure["kind"] for failure in result["tool_errors"]] == ["exception"] * 3
