"""What stands outside a sandbox cannot be read, written, reached or signalled from within."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import pytest

from tests.world.sandbox.runs import answer, cause
from unspool import PythonTool, ToolManager
from unspool.types import InvalidValueError
from unspool.world.sandbox import filter as seccomp
from unspool.world.sandbox import readable


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
