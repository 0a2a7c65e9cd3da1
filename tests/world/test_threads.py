import asyncio
import subprocess
import sys
import threading
import time

import pytest

from unspool.threads import DaemonThreads, run_in_thread


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


async def test_an_idle_thread_is_used_again():
    threads = DaemonThreads()
    names = {await threads.start(lambda: threading.current_thread().name).future}
    for _ in range(20):
        await asyncio.sleep(0.001)  # a thread gives its result away just before it is idle
        names.add(await threads.start(lambda: threading.current_thread().name).future)
    assert len(names) <= 3


async def test_the_pool_grows_while_all_are_busy_and_keeps_a_few(release):
    threads = DaemonThreads(max_idle=4)
    calls = [threads.start(release.wait) for _ in range(30)]
    assert await threads.start(lambda: 7).future == 7
    assert threads.alive >= 30
    release.set()
    await asyncio.gather(*(call.future for call in calls))
    await _until(lambda: threads.alive <= 4)


async def test_idle_threads_expire():
    threads = DaemonThreads(idle_seconds=0.05)
    await threads.start(int).future
    await _until(lambda: threads.alive == 0)
    assert await threads.start(int).future == 0


async def test_a_call_given_up_before_it_begins_never_runs(monkeypatch):
    threads = DaemonThreads()
    ran = []
    started = []

    def hold(thread):
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", hold)
    call = threads.start(lambda: ran.append(1))
    assert call.abandon() is False
    monkeypatch.undo()
    started[0].start()
    await _until(lambda: not started[0].is_alive() or threads._idle)
    assert ran == []


async def test_when_the_system_gives_no_more_threads_calls_wait_for_one(monkeypatch, release):
    threads = DaemonThreads()
    first = threads.start(release.wait)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    second = threads.start(lambda: "second")
    release.set()
    assert await first.future is True
    assert await second.future == "second"


async def test_without_any_thread_the_call_is_an_error(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        DaemonThreads().start(int)


async def test_errors_arrive_also_those_that_a_future_refuses():
    def stop() -> None:
        raise StopIteration("x")

    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration: x"):
        await run_in_thread(stop)
    assert await run_in_thread(int, "11", base=2) == 3


def test_a_result_for_a_closed_loop_is_dropped(release):
    threads = DaemonThreads()
    errors = []

    async def start() -> None:
        threads.start(release.wait)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start())
    loop.close()
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        release.set()
        deadline = time.monotonic() + 20
        while not threads._idle and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        threading.excepthook = hook
    assert errors == []
    assert threads._idle


HANGS_AT_EXIT = """
import asyncio, threading
from unspool.world import ToolManager, tool

@tool(timeout=0.1)
def hang() -> str:
    threading.Event().wait()

manager = ToolManager([hang])
print(manager("hang"))
print(asyncio.run(manager.call("hang")))
"""


def test_the_interpreter_exits_though_tools_hang():
    done = subprocess.run([sys.executable, "-c", HANGS_AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["Error: hang gave no answer within 0.1 s"] * 2
    assert done.stderr == ""


FORKS = """
import os, sys
from unspool.world import ToolManager, tool

@tool
def one() -> int:
    return 1

manager = ToolManager([one])
assert manager("one") == "1"
if os.fork() == 0:
    os._exit(0 if manager("one") == "1" else 3)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_tools_run_in_a_forked_process():
    subprocess.run([sys.executable, "-c", FORKS], timeout=60, check=True)


def test_importing_tools_is_cheap():
    code = "import sys, unspool.world; print(sorted({'pydantic', 'docstring_parser', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


async def _until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other threads
            await asyncio.sleep(0.001)
