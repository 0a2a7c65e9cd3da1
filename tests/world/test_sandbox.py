"""Code in a sandbox: whatever it does, it is contained, the model is told why, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.scripted import call, says, small_template
from unspool import Limits, MultiTurnRollout, PythonTool, ToolManager
from unspool.types import InvalidTypeError, InvalidValueError, Message, SandboxError, ToolCall
from unspool.world.sandbox import filter as seccomp
from unspool.world.sandbox import readable
from unspool.world.sandbox.means import problem

# Where one is missing, the tests run with the others; without any they are skipped.
WORKING = [means for means in ("bubblewrap", "kernel") if problem(means) is None]


@pytest.fixture(params=WORKING)
def means(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WORKING[:1])
def any_means(request: pytest.FixtureRequest) -> str:
    """For what is the same by whichever means."""
    return str(request.param)


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


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    descriptors = open_descriptors()
    before = sandboxed()
    yield
    # Other workers' sandboxes come and go; one that stays was left by the test.
    left = sandboxed() - before
    assert wait_until(lambda: not left & sandboxed()), "a process is left"
    # The first call of a process makes the private loop, which keeps a few; others close theirs a moment later.
    assert wait_until(lambda: open_descriptors() <= descriptors + 6), "descriptors are left"


isolated = pytest.mark.skipif(not WORKING, reason="neither bubblewrap nor namespaces work here")


@isolated
def test_the_first_means_that_works_is_taken() -> None:
    assert PythonTool().isolation == WORKING[0]


# ------------------------------------------------------------------ what a run answers


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('hi')\nx = 3\nx * 2", "hi\n6"),
        ("x = 1", ""),
        ("", ""),
        ("None", ""),
        ("'a text'", "'a text'"),
        ("def f():\n    return __name__\nf()", "'__main__'"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out')", "out\nerr\nout"),
        ("import sys\nprint('done')\nsys.exit(0)", "done"),
        ("import os\nos.write(1, b'\\xff\\xfe')\nNone", "\ufffd\ufffd"),
        ("print('a\\0b\\ud800')", "a\0b\\ud800"),
    ],
)
def test_the_answer_is_what_was_printed_and_the_value_at_the_end(any_means: str, code: str, expected: str) -> None:
    assert answer(any_means, code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 + 1", "2"),
        ("import sys\nsys.stdin.read()", "''"),
        ("import threading\nthreading.Thread(target=print, args=('late',)).start()", "late"),
        ("import os\nos.environ.get('HOME'), os.getcwd(), os.listdir()", "('/tmp', '/tmp', [])"),
        ("import multiprocessing as m\nm.get_context('fork').Pool(2).map(abs, [-1, 2])", "[1, 2]"),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(5)']).returncode", "5\n0"),
        ("import sqlite3, ssl, ctypes, zoneinfo, asyncio\nasyncio.run(asyncio.sleep(0, 'ok'))", "'ok'"),
    ],
)
def test_ordinary_uses_of_the_system_work_by_each_means(means: str, code: str, expected: str) -> None:
    assert answer(means, code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 / 0", "Error: the code raised ZeroDivisionError: division by zero"),
        ("x = (", "Error: the code raised SyntaxError: '(' was never closed (<code>, line 1)"),
        ("raise SystemExit(3)", "Error: the code ended with exit status 3"),
        ("raise SystemExit('bye')", "Error: the code ended with exit status 1"),
        ("import os\nos._exit(7)", "Error: the code ended with exit status 7"),
        ("input()", "Error: the code raised EOFError: EOF when reading a line"),
        ("import os\nos.abort()", "Error: the code's process was killed by SIGABRT"),
        ("raise KeyboardInterrupt", "Error: the code raised KeyboardInterrupt"),
        ("import sys\nsys.stdout.close()\n1 / 0", "Error: the code raised ZeroDivisionError: division by zero"),
        (
            "import os\nos.closerange(0, 100)\nraise OSError('x')",
            "Error: the code ended with exit status 1",
        ),
        (
            "import ctypes\nctypes.string_at(0)",
            "Error: the code's process was killed by SIGSEGV, as by endless recursion or a bad memory access",
        ),
        (
            "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
            "Error: the code raised E",
        ),
    ],
)
def test_a_run_that_ends_badly_says_how(any_means: str, code: str, expected: str) -> None:
    assert cause(answer(any_means, code)).startswith(expected)


def test_the_traceback_is_that_of_the_code_alone(any_means: str) -> None:
    assert answer(any_means, "def f():\n    return [][1]\nprint('a')\nf()").splitlines() == [
        "Error: the code raised IndexError: list index out of range",
        "a",
        "Traceback (most recent call last):",
        '  File "<code>", line 4, in <module>',
        "    f()",
        '  File "<code>", line 2, in f',
        "    return [][1]",
        "           ~~^^^",
        "IndexError: list index out of range",
    ]


def test_deep_recursion_in_python_and_in_c_ends_the_run_alone(any_means: str) -> None:
    assert "RecursionError" in cause(answer(any_means, "def f(): f()\nf()"))
    deep = "import sys\nsys.setrecursionlimit(10**9)\ng = []\nfor _ in range(10**5): g = [g]\nrepr(g)"
    assert cause(answer(any_means, deep)).startswith("Error: the code")


def test_code_that_cannot_be_code_is_refused_without_a_run(any_means: str) -> None:
    assert answer(any_means, "'\ud800'") == "Error: the code cannot be read: character 1 is U+D800, half of a pair"
    assert answer(any_means, "#" * 10_000_000) == "Error: the code is 10000000 characters long; at most 1000000 are run"
    assert answer(any_means, "x = 1\n" + "#" * 900_000) == ""
    assert "source code string cannot contain null bytes" in cause(answer(any_means, "x\0y"))


def test_printing_an_error_or_a_verdict_fools_nobody(means: str) -> None:
    assert answer(means, "print('exit 1')\nprint('failed x')") == "exit 1\nfailed x"
    # The descriptors that the code holds say only what it says of itself; how it ended comes from outside of it.
    forged = (
        "import os\nfor fd in range(2, 20):\n    try: os.write(fd, b'exit 0\\nsignal 9\\n')\n    except OSError: pass\n"
    )
    assert cause(answer(means, forged + "os._exit(9)")).startswith("Error: the code")
    assert "exit 0" in answer(means, forged)


# ------------------------------------------------------------------ limits


def test_an_endless_loop_is_stopped(means: str) -> None:
    began = time.monotonic()
    assert answer(means, "print('began', flush=True)\nwhile True: pass", timeout=0.5) == (
        "Error: the code ran longer than 0.5 s and was stopped\nbegan"
    )
    assert time.monotonic() - began < 30


def test_ignoring_signals_in_a_process_of_its_own_helps_nobody(means: str) -> None:
    code = (
        "import os, signal, time\n"
        "for n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "if os.fork() == 0: os.setsid()\n"
        "while True: time.sleep(1)"
    )
    assert answer(means, code, timeout=0.5) == "Error: the code ran longer than 0.5 s and was stopped"


def test_a_daemon_does_not_outlive_its_run(means: str) -> None:
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)\n"
        "print('left it')"
    )
    began = time.monotonic()
    assert answer(means, code) == "left it"
    assert time.monotonic() - began < 30  # the daemon holds the output open, and is not waited for


def test_ten_gigabytes_are_not_given(means: str) -> None:
    expected = "Error: the code raised MemoryError (it used more than 100 MB of memory)"
    assert cause(answer(means, "x = bytearray(10 << 30)", memory_mb=100)) == expected
    grows = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    # Its own allocation fails, or the supervisor, which counts libraries too, sees it first.
    assert "used more than 100 MB of memory" in cause(answer(means, grows, memory_mb=100))


def test_memory_is_limited_for_all_processes_together(means: str) -> None:
    code = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0: break\n"
        "x = bytearray(b'x') * (60 << 20)\n"
        "time.sleep(60)"
    )
    assert answer(means, code, memory_mb=100) == "Error: the code used more than 100 MB of memory and was stopped"


def test_memory_that_no_limit_would_count_is_refused(means: str) -> None:
    assert "PermissionError" in cause(answer(means, "import mmap\nmmap.mmap(-1, 1 << 20)"))
    assert "PermissionError" in cause(answer(means, "import os\nos.memfd_create('x')"))


def test_what_lies_in_sockets_counts_as_memory(means: str) -> None:
    bigger = (  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE
        "import socket\na, b = socket.socketpair()\n"
        "for size in (7, 8, 32, 33):\n"
        "    try: print(a.setsockopt(socket.SOL_SOCKET, size, 1 << 30))\n"
        "    except PermissionError: pass"
    )
    assert answer(means, bigger) == ""
    # Shut ends hold on to what nobody has read, and descriptors on their way are open in no process.
    full = (
        "import os, socket, time\n"
        "carrier, _ = socket.socketpair()\n"
        "kept = []\n"
        "for n in range(6):\n"
        "    if os.fork() == 0: break\n"
        "for n in range(100):\n"
        "    a, b = socket.socketpair()\n"
        "    a.setblocking(False)\n"
        "    try:\n"
        "        while True: a.send(b'x' * 32768)\n"
        "    except BlockingIOError: pass\n"
        "    a.close()\n"
        "    if n < 10: socket.send_fds(carrier, [b'k'], [b.fileno()])\n"
        "    else: kept.append(b)\n"
        "time.sleep(60)"
    )
    assert (
        answer(means, full, memory_mb=128, timeout=30)
        == "Error: the code used more than 128 MB of memory and was stopped"
    )
    assert answer(means, "import socket\nlen([socket.socketpair() for _ in range(40)])", memory_mb=128) == "40"


def test_endless_output_is_stopped(means: str) -> None:
    text = answer(means, "while True: print('x' * 1000)")
    assert cause(text) == "Error: the code printed more than 1 MB and was stopped"
    assert len(text) <= 2_000
    assert cause(answer(means, "import os\nwhile True: os.write(2, b'\\0' * 65536)")) == cause(text)


def test_long_output_is_cut_for_the_model_as_any_tools(any_means: str) -> None:
    manager = ToolManager([PythonTool(isolation=any_means, max_chars=200)])
    text = manager("python", {"code": "print('x' * 100_000)"})
    assert 190 < len(text) <= 200
    assert "characters left out" in text


def test_a_fork_bomb_goes_off_in_a_small_room(means: str) -> None:
    many = "Error: the code raised BlockingIOError: [Errno 11] Resource temporarily unavailable"
    expected = f"{many} (the code may have at most 8 processes and threads at once)"
    assert cause(answer(means, "import os\nwhile True: os.fork()", max_processes=8)) == expected
    patient = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    stopped = "Error: the code ran longer than 0.5 s and was stopped"
    assert answer(means, patient, max_processes=8, timeout=0.5) == stopped
    counted = (
        "import os, time\nn = 1\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\n"
        "except BlockingIOError: print(n)"
    )
    assert answer(means, counted, max_processes=8) == "8"


def test_threads_count_as_processes(means: str) -> None:
    code = (
        "import threading\nwait = threading.Event()\n"
        "while True: threading.Thread(target=wait.wait, daemon=True).start()"
    )
    assert cause(answer(means, code, max_processes=8)) == (
        "Error: the code raised RuntimeError: can't start new thread "
        "(the code may have at most 8 processes and threads at once)"
    )


def test_files_take_at_most_what_they_may(means: str) -> None:
    said = "(its files may take at most 4 MB)"
    one = "with open('big', 'wb') as file:\n    while True: file.write(b'x' * 65536)"
    assert cause(answer(means, one, files_mb=4)).endswith(said)
    several = "for n in range(100):\n    with open(f'/dev/shm/{n}', 'wb') as file: file.write(b'x' * 500_000)"
    assert cause(answer(means, several, files_mb=4)).endswith(said)
    empty = "for n in range(10**6): open(str(n), 'w').close()"
    assert cause(answer(means, empty, files_mb=4)).endswith(
        (said, "made more files than fit into 4 MB and was stopped")
    )


# ------------------------------------------------------------------ walls


def test_the_hosts_files_are_not_there(means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret", encoding="utf-8")
    monkeypatch.setenv("UNSPOOL_SECRET", "a secret")
    for path in (secret, Path.home() / ".bashrc", Path("/etc/passwd"), Path("/etc/shadow"), Path(__file__)):
        assert cause(answer(means, f"open({str(path)!r}).read()")) == (
            f"Error: the code raised FileNotFoundError: [Errno 2] No such file or directory: {str(path)!r} "
            "(the code sees /tmp and Python's library, no other files)"
        )
    search = (
        "import glob, os\n"
        "found = [dict(os.environ)]\n"
        f"for path in [*glob.glob('/proc/*/environ'), *glob.glob('/proc/*/cmdline'), '/proc/{os.getpid()}/environ']:\n"
        "    try: found.append(open(path, 'rb').read())\n"
        "    except OSError: pass\n"
        "'secret' in str(found).lower(), os.path.exists('/sys/kernel'), os.path.exists('/proc/1/root/etc')"
    )
    assert answer(means, search) == "(False, False, False)"


def test_nothing_outside_its_folder_can_be_written(means: str, tmp_path: Path) -> None:
    for path in ("/x", "/usr/lib/x", f"{Path(os.__file__).resolve().parent}/x", "/dev/x"):
        assert cause(answer(means, f"open({path!r}, 'w')")) == (
            f"Error: the code raised OSError: [Errno 30] Read-only file system: {path!r} (only /tmp can be written to)"
        )
    assert "FileNotFoundError" in cause(answer(means, f"open({str(tmp_path / 'x')!r}, 'w')"))
    assert list(tmp_path.iterdir()) == []


def test_everything_may_be_deleted_and_the_next_run_finds_all(means: str) -> None:
    code = (
        "import shutil, os\n"
        "for path in ('/tmp', '/dev', os.path.dirname(os.__file__)): shutil.rmtree(path, ignore_errors=True)\n"
        "print('gone')\nos.listdir('/tmp')"
    )
    assert answer(means, code) == "gone\n[]"
    assert answer(means, "import json\njson.loads('[1]')") == "[1]"
    assert Path(os.__file__).exists()


def test_readable_paths_are_seen_and_stay_as_they_are(means: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "table.csv").write_text("1,2", encoding="utf-8")
    tmp_path.chmod(0o755)
    real = os.path.realpath(tmp_path / "data")
    code = f"print(open({real + '/table.csv'!r}).read())\nopen({real + '/x'!r}, 'w')"
    if os.geteuid() == 0:
        (tmp_path / "data").chmod(0o755)
    text = answer(means, code, readable=[tmp_path / "data"])
    assert "Read-only file system" in cause(text)
    assert "1,2" in text.splitlines()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["table.csv"]


def test_folders_in_which_something_listens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "deep"
    folder.mkdir(parents=True)
    (folder / "file").write_text("", encoding="utf-8")
    (folder / "link").symlink_to("/dev/null")
    assert readable.resolved([tmp_path]) == (os.path.realpath(tmp_path),)
    os.mkfifo(folder / "fifo")
    with pytest.raises(InvalidValueError, match="data/deep/fifo' is a pipe, by which code could reach out"):
        PythonTool(readable=[tmp_path])
    with pytest.raises(InvalidValueError, match="data/deep/fifo' is a pipe"):
        PythonTool(readable=[folder / "fifo"])
    (folder / "fifo").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(folder)  # a socket's name has at most 107 bytes
        listener.bind("s")
        with pytest.raises(InvalidValueError, match="data/deep/s' is a socket, by which"):
            PythonTool(readable=[tmp_path])
    monkeypatch.setattr(readable, "_MOST_LOOKED_AT", 2)
    assert readable.resolved([tmp_path]) == (os.path.realpath(tmp_path),)


def test_a_socket_that_comes_into_a_readable_folder_later_cannot_be_spoken_to(
    means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    manager = ToolManager([PythonTool(isolation=means, readable=[tmp_path])])
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as listener:
            listener.bind(f"s{kind.value}")
            Path(f"s{kind.value}").chmod(0o777)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            listener.setblocking(False)
            target = os.path.realpath(f"s{kind.value}")
            code = (
                f"import os, socket\nprint(os.path.exists({target!r}))\n"
                "for make in (lambda: socket.socket(socket.AF_UNIX, KIND), lambda: socket.socketpair(type=KIND)[0]):\n"
                "    try:\n"
                "        one = make()\n"
                f"        one.connect({target!r})\n"
                "        print('connected')\n"
                "    except OSError: print('refused')"
            )
            assert manager("python", {"code": code.replace("KIND", str(kind.value))}) == "True\nrefused\nrefused"
            with pytest.raises(BlockingIOError):
                listener.accept() if kind == socket.SOCK_STREAM else listener.recv(1)


def test_a_readable_folder_that_is_the_cause_is_named(means: str, tmp_path: Path) -> None:
    from unspool.world.sandbox import means as module

    (tmp_path / "one").mkdir()
    secret = tmp_path / "one" / "secret"
    secret.write_text("", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "one"):
        folder.chmod(0o755)
    # What a trial must not see otherwise is shown where it is asked for.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_HIDDEN", (str(secret),))
        tool = PythonTool(isolation=means, readable=[tmp_path / "one"])
    assert ToolManager([tool])("python", {"code": f"import os\nos.path.exists({str(secret)!r})"}) == "True"
    bad = os.path.realpath(tmp_path / "one")

    def fails(which: str, shown: tuple[str, ...] = ()) -> str | None:
        return "not that one" if bad in shown else None

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InvalidValueError) as refused:
        patch.setattr(module, "problem", fails)
        PythonTool(isolation=means, readable=["/etc", bad])
    assert str(refused.value) == (
        f"readable: {bad!r} cannot be shown in the sandbox (not that one); give other folders"
    )


def test_installed_packages_are_there_when_they_are_asked_for(means: str) -> None:
    code = "import pytest\npytest.__name__"
    assert cause(answer(means, code)).startswith("Error: the code raised ModuleNotFoundError")
    assert answer(means, code, packages=True) == "'pytest'"


def test_no_socket_reaches_anything(means: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0unspool-{os.getpid()}-{means}"
        abstract.bind(name)
        abstract.listen()
        for listener in (server, abstract):
            listener.setblocking(False)
        port = server.getsockname()[1]
        for target in (("127.0.0.1", port), ("example.com", 80)):
            text = answer(means, f"import socket\nsocket.create_connection({target!r}, timeout=3)")
            assert cause(text).endswith("(there is no network in the sandbox)"), text
        # Unix ones, netlink, packets, and the way to a virtual machine's host
        families = (
            "import socket\n"
            "for family in (1, 2, 10, 16, 17, 30, 40):\n"
            "    for kind in (1, 2, 3, 5):\n"
            "        for make in (socket.socket, *([socket.socketpair] if family != 1 or kind in (2, 3) else [])):\n"
            "            try: print(make(family, kind))\n"
            "            except OSError as error: assert error.errno in (1, 97), error"
        )
        assert answer(means, families) == ""
        # Pairs that are connected stay so: there is no other end to be had by them, by a name or as a datagram.
        for attempt in ("connect({name!r})", "sendto(b'x', {name!r})", "bind('/tmp/x')", "listen()"):
            pair = f"import socket\na, b = socket.socketpair()\na.{attempt.format(name=name)}"
            assert cause(answer(means, pair)).startswith(
                ("Error: the code raised PermissionError", "Error: the code raised OSError")
            )
        for listener in (server, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_the_parent_cannot_be_signalled(means: str) -> None:
    code = (
        "import os\n"
        f"for kill, pid, number in ((os.kill, os.getppid(), 9), (os.kill, 1, 15), (os.kill, -1, 9), "
        f"(os.kill, {os.getpid()}, 9), (os.killpg, {os.getpid()}, 9)):\n"
        "    try: print(kill(pid, number))\n"
        "    except (PermissionError, ProcessLookupError): print('refused')\n"
        "os.kill(os.getppid(), 9)"
    )
    told = answer(means, code).splitlines()
    assert told[0] == (
        "Error: the code raised PermissionError: [Errno 1] Operation not permitted (the sandbox does not allow it)"
    )
    assert told[1:6] == ["refused"] * 5


def test_calls_that_reach_around_the_sandbox_or_to_its_supervisor_are_refused(means: str) -> None:
    x86 = platform.machine() == "x86_64"
    ioprio_set, sched_setattr = (251, 314) if x86 else (30, 274)
    calls = [
        "tgkill(1, 1, 9)",
        "ptrace(16, 1, 0, 0)",
        "ptrace(0, 0, 0, 0)",
        "unshare(0x10000000)",
        "mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "setns(0, 0)",
        "chroot(b'/tmp')",
        "umount2(b'/tmp', 2)",
        "syscall(425, 8, 0)",
        "process_vm_readv(1, None, 0, None, 0, 0)",
        "shmget(0, 1 << 20, 0o1600)",
        "prlimit64(1, 7, (ctypes.c_ulong * 2)(0, 0), None)",
        "sched_setaffinity(1, 8, b'\\1\\0\\0\\0\\0\\0\\0\\0')",
        "sched_setscheduler(1, 5, ctypes.byref(ctypes.c_int(0)))",
        "sched_setparam(1, ctypes.byref(ctypes.c_int(0)))",
        "setpriority(0, 1, 19)",
        "setpriority(2, 0, 19)",
        f"syscall({ioprio_set}, 1, 1, 3 << 13)",
        f"syscall({ioprio_set}, 3, 0, 3 << 13)",
        f"syscall({sched_setattr}, 1, bytes(48), 0)",
    ]
    # Unfiltered, the supervisor's user may do these to it; where it needs more than that, the kernel says the same.
    code = (
        "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
        f"for call in {calls!r}:\n"
        "    ctypes.set_errno(0)\n"
        "    print(call, eval('c.' + call), ctypes.get_errno())"
    )
    assert answer(means, code).splitlines() == [f"{call} -1 1" for call in calls]


def test_its_own_limits_and_priority_are_the_codes_to_lower(means: str) -> None:
    code = (
        "import os, resource\nos.setpriority(os.PRIO_PROCESS, 0, 5)\nos.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))\nos.getpriority(os.PRIO_PROCESS, os.getpid())"
    )
    assert answer(means, code) == "5"


def test_the_code_is_nobody_and_can_become_nobody_else(means: str) -> None:
    refused = ("Operation not permitted (the sandbox does not allow it)", "Invalid argument")
    assert cause(answer(means, "import os\nos.setuid(0)")).endswith(refused)
    status = "import os\nos.getuid() != 0, os.geteuid() != 0, os.getgid() != 0, 0 in os.getgroups(), os.getpid() < 10"
    assert answer(means, status) == "(True, True, True, False, True)"


def test_the_filter_is_the_same_in_kind_for_both_architectures() -> None:
    for machine in ("x86_64", "aarch64"):
        program = seccomp.program(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
        assert program.endswith(b"\x06\x00\x00\x00\x00\x00\xff\x7f")


# ------------------------------------------------------------------ callers


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


# ------------------------------------------------------------------ making the tool


def test_without_means_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.world.sandbox import means as module

    monkeypatch.setattr(module, "problem", lambda means, readable=(): f"no {means} here")
    with pytest.raises(SandboxError) as refused:
        PythonTool()
    assert str(refused.value) == (
        "code cannot be isolated here (bubblewrap: no bubblewrap here; kernel: no kernel here); install bubblewrap, "
        "allow this user to make user namespaces, or give isolation='none' where the code is to be trusted"
    )
    with pytest.raises(SandboxError, match="no kernel here"):
        PythonTool(isolation="kernel")
    assert PythonTool(isolation="none").isolation == "none"


def test_a_means_whose_trial_goes_wrong_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.world.sandbox import means as module

    module._try.cache_clear()

    def at_work(command: list[str]) -> str | None:
        monkeypatch.setattr(module, "launch", lambda *rest, **named: (command, b"\0\0\0\0"))
        return module.problem("kernel")

    assert at_work([sys.executable, "-c", "print('3 no socket [] False 1')"]) == "a trial ended without a word"
    assert at_work(["/nonexistent/python"]) is not None
    said = "import sys; sys.stderr.write('failed OSError: unshare: Operation not permitted\\n')"
    assert at_work([sys.executable, "-c", said]) == "OSError: unshare: Operation not permitted"
    seen = "import sys; print('8 a socket [] True'); sys.stderr.write('exit 0\\n')"
    assert at_work([sys.executable, "-c", seen]) == "a trial was not contained: 8 a socket [] True"


def test_by_choice_a_plain_process_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("UNSPOOL_SECRET", "a secret")
    inside = answer("none", "import os\nopen('x', 'w').write('1')\nos.getcwd(), 'UNSPOOL_SECRET' in os.environ")
    assert inside.startswith(f"('{tmp_path}/unspool-python-") and inside.endswith("', False)")
    assert answer("none", "while True: pass", timeout=0.5) == "Error: the code ran longer than 0.5 s and was stopped"
    assert "(it used more than 100 MB of memory)" in cause(answer("none", "bytearray(10 << 30)", memory_mb=100))
    assert "printed more than 1 MB" in cause(answer("none", "while True: print('x' * 1000)"))
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    )
    assert answer("none", daemon) == ""
    forking = "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    assert (
        answer("none", forking, max_processes=8) == "Error: the code had more than 8 processes at once and was stopped"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"isolation": "docker"}, "isolation must be 'auto', 'bubblewrap', 'kernel' or 'none', not 'docker'"),
        ({"timeout": float("inf")}, "timeout must be seconds above 0, not inf"),
        ({"timeout": None}, "timeout must be seconds above 0, not None"),
        ({"timeout": 0}, "timeout must be seconds above 0"),
        ({"memory_mb": 8}, "memory_mb must be a whole number, at least 32, not 8"),
        ({"max_processes": 0}, "max_processes must be a whole number, at least 1, not 0"),
        ({"files_mb": 1.5}, "files_mb must be a whole number, at least 1, not 1.5"),
        ({"concurrency": 0}, "concurrency must be a whole number, at least 1, or None, not 0"),
        ({"readable": ["/nonexistent/x"]}, "readable: there is no '/nonexistent/x'"),
        ({"readable": ["/"]}, "readable: '/' is the sandbox's own or the kernel's"),
        ({"readable": ["/tmp/."]}, "readable: '/tmp' is the sandbox's own"),
        ({"readable": ["/proc/1"]}, "readable: '/proc/1' is the sandbox's own or the kernel's"),
        ({"readable": ["/sys"]}, "readable: '/sys' is the sandbox's own or the kernel's"),
        ({"readable": ["/dev/shm"]}, "readable: '/dev/shm' is the sandbox's own or the kernel's"),
        ({"readable": [5]}, "readable must be a list of paths, and 5 is none"),
        ({"readable": [b"/usr"]}, "readable must be a list of paths, and b'/usr' is none"),
        ({"readable": 5}, "readable must be a list of paths, not 5"),
        ({"readable": Path("/usr")}, "readable must be a list of paths"),
        ({"readable": ["a\0b"]}, "readable: there is no 'a\\x00b'"),
        ({"readable": "/usr"}, "readable must be a list of paths"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: dict[str, object], error: str) -> None:
    with pytest.raises((InvalidValueError, InvalidTypeError)) as refused:
        PythonTool(**options)  # type: ignore[arg-type]
    assert str(refused.value).startswith(error)


@isolated
def test_it_pickles_and_is_made_anew_where_it_arrives() -> None:
    made = PythonTool(timeout=3.5, name="run", max_chars=99)
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, PythonTool)
    assert (again.name, again.max_chars, again.isolation, again.info()) == ("run", 99, made.isolation, made.info())
    assert ToolManager([again])("run", {"code": "2"}) == "2"
    assert "3.5 s" in made.description and signal.SIGKILL == 9
