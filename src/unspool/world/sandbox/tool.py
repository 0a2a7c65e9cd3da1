"""`PythonTool`: a tool that runs the Python code which a model wrote.

Promises: the code runs in a process of its own, contained by the kernel and never by a look at its text; each call
starts afresh; a run that does not end well raises, with its cause first, so that the model reads `Error: ...` and
what to change. Making the tool fails where nothing here can contain code, unless that is asked for.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable
from functools import partial
from typing import Any

from unspool.types import InvalidValueError, SandboxError, check_value, is_count
from unspool.world.gate import Gate
from unspool.world.output import shorten
from unspool.world.sandbox.means import Bounds, choose
from unspool.world.sandbox.readable import resolved
from unspool.world.sandbox.run import Outcome, run
from unspool.world.tool import Tool, check_limits

_MOST_CODE = 1_000_000
_SHOWN = 1_500  # characters of output behind an error; the manager shows 2,000 of the whole
_LEAST_MEMORY_MB = 32


class PythonTool(Tool):
    """Runs Python code in a sandbox and gives what it printed, and the value of an expression at its end.

    Args:
        timeout: seconds of wall clock that a run may take.
        memory_mb: memory of a run, of each of its processes and of all together.
        max_chars: most characters of output that the model sees; None: the manager's `max_tool_chars`.
        max_processes: processes and threads of a run at once.
        files_mb: size of all files in its folder together; kept in memory, gone when it ends.
        output_mb: output after which a run is stopped.
        packages: whether the code can import what is installed for this interpreter.
        readable: files and folders of the host that the code may read, at their real paths.
        isolation: `auto`: bubblewrap where it works, else the kernel's namespaces; `bubblewrap`; `kernel`; `none`: a
            plain process with limits, which can read, write and send whatever this one can.
        concurrency: most runs at once on one event loop; None: two for each processor.
        name, description: what the model sees.

    Raises:
        SandboxError: what `isolation` asks for does not work here; the message has the reason and the remedy.
        InvalidTypeError: `readable` is not a list of paths.
        InvalidValueError: an argument that limits nothing, or a readable path that does not exist, is the system's own,
            holds sockets, pipes or devices, or cannot be shown to the code.
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        memory_mb: int = 512,
        max_chars: int | None = None,
        max_processes: int = 32,
        files_mb: int = 64,
        output_mb: int = 1,
        packages: bool = False,
        readable: Iterable[str | os.PathLike[str]] = (),
        isolation: str = "auto",
        concurrency: int | None = None,
        name: str = "python",
        description: str | None = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        given["readable"] = shown = resolved(readable)
        check_limits("", timeout, "max_chars", max_chars)
        if timeout is None or math.isinf(timeout):
            raise InvalidValueError(f"timeout must be seconds above 0, not {timeout!r}; a run always has an end")
        check_value(
            "memory_mb", memory_mb, lambda value: is_count(value, _LEAST_MEMORY_MB), "a whole number, at least 32"
        )
        for key in ("max_processes", "files_mb", "output_mb"):
            check_value(key, given[key], is_count, "a whole number, at least 1")
        if concurrency is None:
            concurrency = 2 * (os.cpu_count() or 1)
        check_value("concurrency", concurrency, is_count, "a whole number, at least 1, or None")
        bounds = Bounds(
            float(timeout), int(memory_mb), int(max_processes), int(files_mb), int(output_mb), shown, bool(packages)
        )
        means = choose(isolation, shown)
        super().__init__(
            name=name,
            description=_description(bounds, means) if description is None else description,
            parameters={
                "type": "object",
                "properties": {"code": {"type": "string", "description": "Python source code."}},
                "required": ["code"],
            },
            function=_Runner(means, bounds, Gate(concurrency)),
            timeout=math.inf,  # a run keeps its own time, which begins when it runs
            max_chars=max_chars,
        )
        object.__setattr__(self, "_given", given)
        object.__setattr__(self, "isolation", means)

    isolation: str
    """The means that is used: `bubblewrap`, `kernel` or `none`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew where it arrives: another machine may have other means, or none."""
        return partial(PythonTool, **self.__dict__["_given"]), ()


class _Runner:
    """The function of the tool."""

    def __init__(self, means: str, bounds: Bounds, gate: Gate) -> None:
        self._means = means
        self._bounds = bounds
        self._gate = gate

    async def __call__(self, code: str) -> str:
        """The output of the code, without the newline at its end.

        Raises:
            SandboxError: it did not end well; the message begins with the cause.
        """
        if len(code) > _MOST_CODE:
            raise SandboxError(f"the code is {len(code)} characters long; at most {_MOST_CODE} are run")
        try:
            source = code.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(
                f"the code cannot be read: character {error.start} is U+{ord(code[error.start]):04X}, half of a pair"
            ) from error
        async with self._gate():
            outcome = await run(self._means, self._bounds, source)
        cause = _cause(outcome, self._bounds)
        if cause is None:
            return outcome.output.removesuffix("\n")
        output = shorten(outcome.output.rstrip("\n"), _SHOWN).text
        raise SandboxError(f"{cause}\n{output}" if output else cause)


def _cause(outcome: Outcome, bounds: Bounds) -> str | None:
    """Why a run did not end well, as a sentence; None: it did."""
    kind, _, number = outcome.ended.partition(" ")
    if outcome.report and kind == "exit" and number != "0":
        return f"the code {shorten(outcome.report, 700).text}"
    said = {
        "timeout": f"the code ran longer than {bounds.timeout:g} s and was stopped",
        "memory": f"the code used more than {bounds.memory_mb} MB of memory and was stopped",
        "files": f"the code made more files than fit into {bounds.files_mb} MB and was stopped",
        "processes": f"the code had more than {bounds.processes} processes at once and was stopped",
        "lost": "the code's sandbox was ended before the code: from within, or for want of memory on the whole machine",
        "output": f"the code printed more than {bounds.output_mb} MB and was stopped",
    }.get(kind)
    if said is not None:
        return said
    if kind == "signal":
        return f"the code's process was killed by {_signal(int(number))}"
    return None if number == "0" else f"the code ended with exit status {number}"


def _signal(number: int) -> str:
    hints = {
        signal.SIGSEGV: ", as by endless recursion or a bad memory access",
        signal.SIGKILL: ", as for want of memory",
    }
    try:
        found = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    return f"{found.name}{hints.get(found, '')}"


def _description(bounds: Bounds, means: str) -> str:
    network = "" if means == "none" else " There is no network."
    return (
        "Run Python code. The answer is what it prints, and the value of an expression at its end. Every call starts "
        f"afresh: variables and files are not kept. A call may take {bounds.timeout:g} s.{network}"
    )
