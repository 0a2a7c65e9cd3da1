"""One run of code in a process of its own, attended from an event loop.

Promises: `run` returns how the code ended and at most so many bytes of its output; whatever happens, cancellation of
the caller included, its processes are dead, its pipes closed and its folder gone when it is left. Nothing blocks
the loop but the start of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from typing import NamedTuple, cast

from unspool.types import SandboxError
from unspool.world.sandbox.means import MB, Bounds, environment, launch

_GRACE = 30.0  # for starting on a busy machine; the supervisor inside keeps the time of the code itself
_LAST_OUTPUT = 1.0  # a stray process may hold the output open where there is no namespace to end
_MOST_STATUS = 16_384


class Outcome(NamedTuple):
    """How a run ended (`exit N`, `signal N`, `timeout`, `memory`, `files`, `processes`, `output`, or
    `lost`: its sandbox ended before it could tell), what the code's process reported of it, and what it printed."""

    ended: str
    report: str
    output: str


class _Attendant(asyncio.SubprocessProtocol):
    """Takes in what a run says, up to its bounds."""

    def __init__(self, most: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._open = {1, 2}
        self.output = bytearray()
        self.status = bytearray()
        self.flooded = False
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.exited: asyncio.Future[None] = self._loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.status += data[: _MOST_STATUS - len(self.status)]
            return
        self.output += data[: self._most - len(self.output)]
        if len(data) and len(self.output) >= self._most:
            self.flooded = True
            _settle(self.over)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            _settle(self.closed)
            _settle(self.over)
        elif fd == 2:
            self._loop.call_later(_LAST_OUTPUT, _settle, self.over)

    def process_exited(self) -> None:
        _settle(self.exited)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def run(means: str, bounds: Bounds, code: bytes) -> Outcome:
    """Run Python source (UTF-8) to its end, or to the end of its bounds.

    Raises:
        SandboxError: it could not be started.
    """
    if means != "none":
        return await _run(means, bounds, code, "/tmp")
    folder = tempfile.mkdtemp(prefix="unspool-python-")
    try:
        return await _run(means, bounds, code, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(means: str, bounds: Bounds, code: bytes, folder: str) -> Outcome:
    command, begin = launch(means, bounds, code, folder)
    transport, attendant = await _start(command, bounds.output_mb * MB)
    try:
        # Left open to the end: its end tells the supervisor that nobody waits any more.
        cast(asyncio.WriteTransport, transport.get_pipe_transport(0)).write(begin)
        async with asyncio.timeout(bounds.timeout + _GRACE):
            await attendant.over
    except TimeoutError:
        return Outcome("timeout", "", _decoded(attendant))
    finally:
        await _end(transport, attendant, means)
    if attendant.flooded:
        return Outcome("output", "", _decoded(attendant))
    begun, _, rest = attendant.status.decode("utf-8", "replace").partition("\n")
    if begun == "began" and not rest:
        return Outcome("lost", "", _decoded(attendant))
    ended, _, report = rest.partition("\n") if begun == "began" else (begun, "", "")
    if not ended or ended.startswith("failed") or ended.split(" ")[0] not in _ENDS:
        raise SandboxError(f"the sandbox could not be started: {ended.removeprefix('failed ') or 'it ended at once'}")
    return Outcome(ended, report, _decoded(attendant))


_ENDS = ("exit", "signal", "timeout", "memory", "files", "processes")


def _decoded(attendant: _Attendant) -> str:
    return attendant.output.decode("utf-8", "replace")


async def _start(command: list[str], most: int) -> tuple[asyncio.SubprocessTransport, _Attendant]:
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(
        loop.subprocess_exec(lambda: _Attendant(most), *command, env=environment(), cwd="/", start_new_session=True)
    )
    try:
        transport, attendant = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_unwanted)
        raise
    except OSError as error:
        raise SandboxError(f"the sandbox could not be started: {error}") from error
    return transport, attendant


_closing: set[asyncio.Task[None]] = set()


def _unwanted(starting: asyncio.Future[tuple[asyncio.SubprocessTransport, _Attendant]]) -> None:
    """Its caller was cancelled while it started: it has been given no code yet."""
    if not starting.cancelled() and starting.exception() is None:
        task = asyncio.ensure_future(_end(*starting.result(), "kernel"))
        _closing.add(task)
        task.add_done_callback(_closing.discard)


async def _end(transport: asyncio.SubprocessTransport, attendant: _Attendant, means: str) -> None:
    """End all that is left of a run: the outermost process, and by its end those within."""
    try:
        if means == "none" and not attendant.exited.done():
            # Only its supervisor knows all descendants; the end of its input tells it to end them.
            with contextlib.suppress(AttributeError):
                cast(asyncio.WriteTransport, transport.get_pipe_transport(0)).close()
            await asyncio.wait([attendant.exited], timeout=2.0)
        if not attendant.exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
            await attendant.exited
        # The last of those within closes the pipes.
        await asyncio.wait([attendant.closed], timeout=_LAST_OUTPUT)
    finally:
        transport.close()
