"""Run code under a supervisor, both inside the sandbox.

Promises: the supervisor says on its status pipe, which the code never holds, `began`, and then how the code ended:
`exit N`, `signal N`, `timeout`, `memory`, `files` or `processes`, with the code's own report behind it; or `failed`
and why nothing ran. It ends, and with it everything that the code started, when the code ends, breaks a limit, or the
caller's end of standard input closes. The code is not filtered or rewritten: the kernel contains it.
"""

from __future__ import annotations

import _ast
import _signal as signal  # type: ignore[import-not-found]  # without the enums, which are slow to make
import errno
import io
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False  # typing's own would cost the import of typing
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_POLL_MS = 25
_POLL_HOST_MS = 200  # without a process namespace, every process of the host has to be looked at
_MOST_REPORT = 4_000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ONLY_AST = 0x400
_REPORT = 3  # the descriptor on which the code's process reports
_NAME = "<code>"
_MB = 1 << 20


class _Unless:
    """`contextlib.suppress`, without what it imports."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


def main(enter: Any, config: dict[str, Any], source: bytes) -> None:
    """Run the code, say how it ended."""
    status = os.dup(2)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _Unless(OSError), io.open("/proc/self/oom_score_adj", "w") as file:  # noqa: UP020
            file.write("1000")  # where the whole machine is short of memory, this goes first
        code = source.decode()
        proc = enter.enter(config) if config["means"] == "kernel" else _own_proc()
        if config["means"] != "none":
            enter.drop(config)
        elif sys.platform == "linux":
            enter.adopt_orphans()  # and not killed with its parent: it has them to end first
    except Exception as error:
        _say(status, f"failed {type(error).__name__}: {error}")
        os._exit(1)
    report, reported = os.pipe()
    _say(status, "began")
    child = os.fork()
    if child == 0:
        _run(enter, config, code, reported)
        return
    os.close(reported)
    os.set_blocking(report, False)
    for standard in (1, 2):
        os.close(standard)
    ended = _supervise(config, child, proc)
    if config["means"] == "none":
        _kill_all(child, proc)
        if ended == "left":  # nobody is there to clear the folder away
            import shutil

            shutil.rmtree(config["cwd"], ignore_errors=True)
    said = b""
    with _Unless(BlockingIOError):
        said = os.read(report, _MOST_REPORT)
    _say(status, ended, said)
    os._exit(0)


def _say(status: int, line: str, rest: bytes = b"") -> None:
    with _Unless(OSError):
        os.write(status, line.encode("utf-8", "replace")[:_MOST_REPORT] + b"\n" + rest)


def _own_proc() -> int | None:
    with _Unless(OSError):
        return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    return None


# ------------------------------------------------------------------ the supervisor


def _supervise(config: dict[str, Any], child: int, proc: int | None) -> str:
    """Wait for the child's end or for a broken limit."""
    deadline = time.monotonic() + config["timeout"]
    caller = select.poll()
    caller.register(0, select.POLLHUP)
    with _Unless(AttributeError, OSError):  # not everywhere; then its end is seen a little later
        caller.register(os.pidfd_open(child), select.POLLIN)
    wait, most = 1, _POLL_HOST_MS if config["means"] == "none" else _POLL_MS
    while True:
        events = caller.poll(min(wait, max(0, int(1000 * (deadline - time.monotonic())) + 1)))
        wait = min(most, 2 * wait)
        if any(event & (select.POLLHUP | select.POLLERR) for descriptor, event in events if descriptor == 0):
            return "left"
        ended = _reap(child)
        if ended is not None:
            return f"signal {-ended}" if ended < 0 else f"exit {ended}"
        if time.monotonic() >= deadline:
            return "timeout"
        broken = None if proc is None else _broken(config, proc)
        if broken is not None:
            return broken


def _reap(child: int) -> int | None:
    """Bury all that has ended; how the child did, where it is among them."""
    ended = None
    with _Unless(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                ended = os.waitstatus_to_exitcode(status)
            if pid == 0:
                break
    return ended


def _broken(config: dict[str, Any], proc: int) -> str | None:
    """Which limit on all processes together is broken."""
    members = list(_members(proc, config["means"] != "none"))
    if len(members) > config["processes"]:
        return "processes"
    if config["means"] == "bubblewrap":  # which cannot limit their number, and each takes memory
        files = os.statvfs(config["cwd"])
        if files.f_files - files.f_ffree > config["inodes"]:
            return "files"
    most = config["memory_mb"] * _MB
    if config["means"] != "none":  # a namespace's sockets are the code's, those on their way between processes too
        most -= _sockets(proc) * config["socket_bytes"]
    if sum(_resident(proc, pid) for pid in members) <= most:
        return None
    # Pages that processes share were counted for each of them: count again, by the share of each.
    return "memory" if sum(_proportional(proc, pid) for pid in members) > most else None


def _sockets(proc: int) -> int:
    """How many sockets there are in this network namespace, or hold what nobody has read yet."""
    with _Unless(OSError, ValueError, IndexError):
        return int(_file(proc, "self/net/sockstat").split()[2])
    return 0


def _members(proc: int, all_of_them: bool) -> Iterator[int]:
    """The processes that the code consists of."""
    pids = [int(name) for name in os.listdir(proc) if name.isdecimal()]
    if all_of_them:
        yield from (pid for pid in pids if pid != os.getpid())
        return
    parents = {}
    for pid in pids:
        with _Unless(OSError, ValueError, IndexError):
            parents[pid] = int(_file(proc, f"{pid}/stat").rpartition(b")")[2].split()[1])
    family = {os.getpid()}
    grown = True
    while grown:
        new = {pid for pid, parent in parents.items() if parent in family} - family
        family |= new
        grown = bool(new)
    yield from family - {os.getpid()}


def _file(proc: int, path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=proc)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _resident(proc: int, pid: int) -> int:
    with _Unless(OSError, ValueError, IndexError):
        return int(_file(proc, f"{pid}/statm").split()[1]) * _PAGE
    return 0


def _proportional(proc: int, pid: int) -> int:
    try:
        for line in _file(proc, f"{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _resident(proc, pid)


def _kill_all(child: int, proc: int | None) -> None:
    """Without a namespace to end, end each descendant; orphans come to this process, so none is lost."""
    for _ in range(2000):
        with _Unless(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        for pid in [] if proc is None else list(_members(proc, False)):
            with _Unless(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


# ------------------------------------------------------------------ the code


def _run(enter: Any, config: dict[str, Any], code: str, report: int) -> None:
    """In the code's process: take the limits on, run the code, report what it raised, end as Python ends."""
    try:
        _become(enter, config, report)
    except Exception as error:
        _write(report, f"could not be started ({type(error).__name__}: {error})")
        os._exit(1)
    pid = os.getpid()
    try:
        _execute(code)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            _write(2, f"{error.code}\n")
            sys.exit(1)
        raise
    except BaseException as error:
        _flush()
        _write(2, _traceback(error, code))
        if os.getpid() == pid:
            _write(_REPORT, _sentence(error, config))
        sys.exit(1)
    finally:
        _flush()


def _become(enter: Any, config: dict[str, Any], report: int) -> None:
    """Take on the limits; standard output and the report are the only ways out that stay open."""
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.dup2(1, 2)
    os.dup2(report, _REPORT, inheritable=False)
    os.closerange(_REPORT + 1, 1 << 16)
    os.setsid()
    os.chdir(config["cwd"])
    os.environ.clear()
    os.environ.update(config["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, most in config["limits"].items():
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(number, (least, least))
    if config["filter"]:
        enter.confine(config["filter"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = io.open(  # noqa: SIM115, UP020 - the name `open` is the code's to change
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv[:] = [""]
    sys.path[:] = [*(one for one in sys.path if one), *config["path"], config["cwd"]]


def _execute(code: str) -> None:
    """As a notebook's cell: the value of an expression at the end is shown."""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    tree: Any = compile(code, _NAME, "exec", _ONLY_AST, True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, _NAME, "exec", 0, True), main.__dict__)  # noqa: S102 - what the sandbox is for
    if last is not None:
        exec(compile(_ast.Interactive(body=[last]), _NAME, "single", 0, True), main.__dict__)  # noqa: S102


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with _Unless(BaseException):  # the code may have put anything there
            stream.flush()


def _write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    with _Unless(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def _traceback(error: BaseException, code: str) -> str:
    """As Python prints it, from the code's own first line on."""
    try:
        import linecache
        import traceback

        linecache.cache[_NAME] = (len(code), None, [f"{line}\n" for line in code.split("\n")], _NAME)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != _NAME:
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(error), error, frames))
    except BaseException:  # no memory left for it, or the exception's own methods raise
        return f"{type(error).__name__}\n"


def _sentence(error: BaseException, config: dict[str, Any]) -> str:
    """What was raised, in at most some hundred characters, and the limit behind it where there is one."""
    name = type(error).__name__
    try:
        words = str(error)[:500]
    except BaseException:
        words = ""
    return f"raised {name}{': ' if words else ''}{words}{_limit(error, name, words, config)}"


def _limit(error: BaseException, name: str, words: str, config: dict[str, Any]) -> str:
    if isinstance(error, MemoryError):
        return f" (it used more than {config['memory_mb']} MB of memory)"
    if isinstance(error, BlockingIOError) or words == "can't start new thread":
        return f" (the code may have at most {config['processes']} processes and threads at once)"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
        return f" (its files may take at most {config['files_mb']} MB)"
    if config["means"] == "none":
        return ""
    if name == "gaierror" or number in (errno.EAFNOSUPPORT, errno.ENETUNREACH, errno.ENETDOWN):
        return " (there is no network in the sandbox)"
    if number == errno.EROFS:
        return f" (only {config['cwd']} can be written to)"
    if number in (errno.ENOENT, errno.EACCES) and isinstance(error, OSError) and error.filename:
        return f" (the code sees {config['cwd']} and Python's library, no other files)"
    if number == errno.EPERM:
        return " (the sandbox does not allow it)"
    return ""
