"""The means by which code is isolated on this machine: how each is started, and whether it works.

Promises: a means is taken for working only after a trial run in which code tried to get out and could not, once
per process. What Python itself needs is all of the host's files that code can see, unless more is asked for.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

from unspool.types import InvalidValueError, SandboxError
from unspool.world.sandbox import filter as seccomp

MEANS = ("bubblewrap", "kernel", "none")
MB = 1 << 20
_BOOT = """
import marshal, os, sys
def read(count):
    got = b""
    while len(got) < count:
        more = os.read(0, count - len(got))
        if not more:
            os._exit(1)
        got += more
    return got
parts = marshal.loads(read(int.from_bytes(read(4), "little")))
enter, inside = type(sys)("enter"), type(sys)("inside")
exec(parts[0], enter.__dict__)
exec(parts[1], inside.__dict__)
inside.main(enter, parts[2], read(parts[2]["length"]))
"""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INODES_A_MB = 64
_NOBODYS = 0x70000000  # the first of the user ids that are taken as root; they have no more than 24 bits on top
_OPEN_FILES = 256
_ROOM = 1024 * MB  # of addresses, for libraries and reservations that take no memory
_TRIAL_SECONDS = 20.0
_TRIAL = """
import os, socket, time
forked = 0
try:
    for _ in range(8):
        if os.fork() == 0:
            time.sleep(60)
        forked += 1
except BlockingIOError:
    pass
try:
    socket.socket()
    sockets = "a socket"
except OSError:
    sockets = "no socket"
seen = [path for path in HIDDEN if os.path.exists(path)]
print(forked, sockets, seen, os.getuid() == 0, os.getppid())
"""
_HIDDEN = ("/etc/passwd", "/etc/hostname", "/sys/kernel", "/var/log")
_TRIAL_SHOWS = "3 no socket [] False 1\n"


@dataclass(frozen=True)
class Bounds:
    """What a run may take.

    Attributes:
        timeout: seconds of wall clock.
        memory_mb: memory, of each process and of all together.
        processes: processes and threads at once.
        files_mb: of all files together, memory on top of `memory_mb`.
        output_mb: of output before the run is stopped.
        readable: files and folders of the host, resolved, that the code sees and cannot change.
        packages: whether the packages installed for this interpreter can be imported.
    """

    timeout: float = 10.0
    memory_mb: int = 512
    processes: int = 32
    files_mb: int = 64
    output_mb: int = 1
    readable: tuple[str, ...] = ()
    packages: bool = False


def launch(means: str, bounds: Bounds, code: bytes, folder: str = "/tmp") -> tuple[list[str], bytes]:
    """The command that runs code by a means, and what it reads first on standard input.

    `folder` is where the code finds itself; a sandbox has a /tmp of its own.
    """
    isolated = means != "none"
    root = isolated and _rules_all_users()
    limits = {
        "RLIMIT_CORE": 1,  # not even to a program that collects them, which 0 would allow; core(5)
        "RLIMIT_FSIZE": bounds.files_mb * MB,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_DATA": bounds.memory_mb * MB,
        "RLIMIT_AS": bounds.memory_mb * MB + _ROOM,
    }
    if isolated:  # elsewhere it counts everything that the user runs; the supervisor is one more
        limits["RLIMIT_NPROC"] = bounds.processes + (2 if means == "kernel" and not root else 1)
    visible = _visible(bounds)
    machine = seccomp.architecture()
    config: dict[str, Any] = {
        "means": means,
        "root": root,
        # Nobody's, and another one each time: as root, limits and access go by the user id.
        "uid": _NOBODYS + int.from_bytes(os.urandom(3), "little"),
        "base": next((one for one in ("/tmp", "/mnt", "/srv") if Path(one).is_dir()), "/usr"),
        "readable": visible,
        "links": _links(),
        "cwd": folder,
        "timeout": bounds.timeout,
        "memory_mb": bounds.memory_mb,
        "files_mb": bounds.files_mb,
        "inodes": bounds.files_mb * _INODES_A_MB + 256,
        "processes": bounds.processes,
        "socket_bytes": _socket_bytes(),
        "limits": limits,
        "filter": seccomp.program(machine) if isolated and machine else b"",
        "environment": _environment(folder, isolated),
        "path": _packages() if bounds.packages else [],
        "length": len(code),
    }
    header = marshal.dumps((*_child(), config))
    python = [_python(), "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT]
    command = [*_bubblewrap(visible, config), *python] if means == "bubblewrap" else python
    return command, len(header).to_bytes(4, "little") + header + code


@lru_cache(maxsize=1)
def _socket_bytes() -> int:
    """The kernel's memory that a socket can hold: what lies in its buffer, and the one message that overfills it."""
    try:
        with socket.socket(socket.AF_UNIX) as one:
            return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    except OSError:
        return 1 << 20


@lru_cache(maxsize=1)
def _child() -> tuple[CodeType, CodeType]:
    """What runs in the sandbox's process, compiled once: it has the same interpreter, and finds no files of ours."""
    folder = Path(__file__).parent / "child"
    enter, inside = (
        compile((folder / name).read_text(encoding="utf-8"), f"<unspool's {name}>", "exec")
        for name in ("enter.py", "inside.py")
    )
    return enter, inside


def environment() -> dict[str, str]:
    """What a launched process is given; the code itself gets less."""
    kept = os.environ.get("LD_LIBRARY_PATH")
    return {} if kept is None else {"LD_LIBRARY_PATH": kept}


def _environment(folder: str, isolated: bool) -> dict[str, str]:
    path = str(Path(_python()).parent) if isolated else os.environ.get("PATH", os.defpath)
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
    return {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PATH": path, "PYTHONUTF8": "1", **threads}


@lru_cache(maxsize=1)
def _rules_all_users() -> bool:
    """Whether this is root, and not only what a container calls so: then it is a user like others."""
    if os.geteuid() != 0:
        return False
    try:
        rows = [[int(one) for one in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return True
    return any(first <= _NOBODYS and first + count >= _NOBODYS + (1 << 24) for first, _, count in rows)


@lru_cache(maxsize=1)
def _python() -> str:
    """The interpreter behind a virtual environment's: it needs no configuration file."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@lru_cache(maxsize=8)
def _visible(bounds: Bounds) -> list[str]:
    """Files and folders of the host that are shown, none inside another."""
    base = os.path.realpath(sys.base_prefix)
    compiled = sysconfig.get_config_var("DESTSHARED")
    wanted = [
        _python(),
        f"{base}/lib",
        f"{base}/lib64",
        sysconfig.get_path("stdlib"),
        *([compiled] if compiled else []),
    ]
    wanted += ["/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    wanted += _packages() if bounds.packages else []
    real = {os.path.realpath(one) for one in [*wanted, *bounds.readable] if Path(one).exists()}
    return sorted(one for one in real if not any(str(parent) in real for parent in Path(one).parents))


@lru_cache(maxsize=1)
def _links() -> list[tuple[str, str]]:
    """Where the loader and its libraries are reached through links of the root folder."""
    names = ("/lib", "/lib32", "/lib64", "/usr/lib64")
    return [(str(Path(name).readlink()), name) for name in names if Path(name).is_symlink()]


def _packages() -> list[str]:
    return [
        os.path.realpath(one)
        for one in sys.path
        if one.endswith(("site-packages", "dist-packages")) and Path(one).is_dir()
    ]


def _bubblewrap(visible: Sequence[str], config: dict[str, Any]) -> list[str]:
    spaces = ["ipc", "pid", "net", "uts", "cgroup-try", *([] if config["root"] else ["user"])]
    command = [shutil.which("bwrap") or "bwrap", *(f"--unshare-{one}" for one in spaces)]
    if config["root"]:  # to give up root for another user id
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN"):
            command += ["--cap-add", capability]
    else:
        command += ["--uid", "1000", "--gid", "1000"]
    command += ["--die-with-parent", "--as-pid-1", "--clearenv", "--hostname", "sandbox", "--chdir", "/"]
    command += [
        "--perms",
        "1777" if config["root"] else "0700",
        "--size",
        str(config["files_mb"] * MB),
        "--tmpfs",
        "/tmp",
    ]
    # Parents that bubblewrap makes by itself are closed to other users.
    for folder in dict.fromkeys(parent for one in ["/dev/null", *visible] for parent in _parents(one)):
        command += ["--dir", folder]
    for device in _DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for path in visible:
        command += ["--ro-bind", path, path]
    for target, link in [*config["links"], ("/tmp", "/dev/shm")]:
        command += ["--symlink", target, link]
    return [*command, "--proc", "/proc", "--remount-ro", "/", "--"]


def _parents(path: str) -> list[str]:
    """The folders above, from the top, without the root."""
    return [str(one) for one in reversed(Path(path).parents)][1:]


# ------------------------------------------------------------------ which works


def choose(isolation: str, readable: tuple[str, ...] = ()) -> str:
    """The means that `isolation` asks for, tried out.

    Raises:
        InvalidValueError: `isolation` is none that there is, or a path of `readable` is why it does not work.
        SandboxError: it does not work here.
    """
    if isolation not in ("auto", *MEANS):
        raise InvalidValueError(f"isolation must be 'auto', 'bubblewrap', 'kernel' or 'none', not {isolation!r}")
    if isolation == "none":
        return isolation
    reasons = []
    for means in ("bubblewrap", "kernel") if isolation == "auto" else (isolation,):
        reason = problem(means, readable)
        if reason is None:
            return means
        reasons.append(f"{means}: {reason}")
        if readable and problem(means) is None:
            path = next((one for one in readable if problem(means, (one,)) is not None), ", ".join(readable))
            raise InvalidValueError(f"readable: {path!r} cannot be shown in the sandbox ({reason}); give other folders")
    raise SandboxError(
        f"code cannot be isolated here ({'; '.join(reasons)}); install bubblewrap, allow this user to make user "
        "namespaces, or give isolation='none' where the code is to be trusted"
    )


def problem(means: str, readable: tuple[str, ...] = ()) -> str | None:
    """Why a means does not work on this machine; None where it does: a trial run was contained."""
    if sys.platform != "linux":
        return f"needs Linux, and this is {sys.platform}"
    if seccomp.architecture() is None:
        return "needs a 64-bit x86 or ARM processor"
    if means == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        _try(means, readable)
    except (SandboxError, OSError) as error:
        return str(error)
    return None


@lru_cache(maxsize=32)  # of what worked; what did not may work later
def _try(means: str, readable: tuple[str, ...]) -> None:
    """Run code that tries to get out.

    Raises:
        SandboxError, OSError: it could not run, or was not contained.
    """
    hidden = [
        one for one in _HIDDEN if not any(Path(os.path.realpath(one)).is_relative_to(shown) for shown in readable)
    ]
    trial = f"HIDDEN = {hidden}\n{_TRIAL}".encode()
    command, begin = launch(means, Bounds(processes=4, readable=readable, timeout=_TRIAL_SECONDS), trial)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd="/",
        start_new_session=True,
    ) as process:
        late = threading.Timer(2 * _TRIAL_SECONDS, process.kill)
        late.start()
        try:
            reason = _tried(process, begin)
        finally:
            late.cancel()
    if reason is not None:
        raise SandboxError(reason)


def _tried(process: subprocess.Popen[bytes], begin: bytes) -> str | None:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    # A process that cannot even start takes nothing; why stands in what it wrote.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(begin)
        process.stdin.flush()
    # The input stays open meanwhile: its end is the caller's.
    status = process.stderr.read(4096).decode("utf-8", "replace").removeprefix("began\n")
    output = process.stdout.read(4096).decode("utf-8", "replace")
    if output == _TRIAL_SHOWS and status.startswith("exit 0\n"):
        return None
    if status.startswith(("exit", "signal", "processes", "memory", "timeout")):
        return f"a trial was not contained: {(output.strip() or status).splitlines()[-1]}"
    said = status.removeprefix("failed ").strip().splitlines()
    return said[0] if said else "a trial ended without a word"
