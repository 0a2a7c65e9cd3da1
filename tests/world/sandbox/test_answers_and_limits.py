"""What a run answers, and the limits on what it may use."""

from __future__ import annotations

import time

import pytest

from tests.world.sandbox.runs import answer, cause
from unspool import PythonTool, ToolManager

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
