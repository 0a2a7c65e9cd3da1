"""The host's files and folders that code in a sandbox may read.

Promises: what is shown is data: a folder of the kernel's own, and a folder in which a socket, pipe or device lies, is
refused, for reading only does not stop code from speaking to what listens there. The look at a folder is bounded, and
is taken once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from unspool.types import InvalidTypeError, InvalidValueError

_MOST_LOOKED_AT = 50_000
_KINDS = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def resolved(readable: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The real paths.

    Raises:
        InvalidTypeError: not a list of paths.
        InvalidValueError: a path that does not exist, is the system's own, or holds a socket, pipe or device.
    """
    if isinstance(readable, str | bytes | os.PathLike) or not isinstance(readable, Iterable):
        raise InvalidTypeError(f"readable must be a list of paths, not {readable!r}; give [{readable!r}]")
    return tuple(_resolved(one) for one in readable)


def _resolved(one: str | os.PathLike[str]) -> str:
    if not isinstance(one, str | os.PathLike) or isinstance(os.fspath(one), bytes):
        raise InvalidTypeError(f"readable must be a list of paths, and {one!r} is none; give texts or Paths")
    try:
        real = os.path.realpath(Path(one).expanduser(), strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidValueError(f"readable: there is no {str(one)!r}; give files and folders that exist") from error
    if real in ("/", "/tmp") or real.split("/")[1] in ("proc", "dev", "sys"):
        raise InvalidValueError(f"readable: {real!r} is the sandbox's own or the kernel's; give folders of files")
    for path, kind in _listeners(real):
        raise InvalidValueError(
            f"readable: {path!r} is {kind}, by which code could reach out of the sandbox; give folders of files alone"
        )
    return real


def _listeners(path: str) -> Iterator[tuple[str, str]]:
    """What is no file among the first so many of a folder, nearest first, and what it is."""
    kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))  # noqa: PTH116 - resolved, a text
    if kind is not None:
        yield path, kind
    folders, looked_at = [path], 0
    for folder in folders:  # grows
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    looked_at += 1
                    if looked_at > _MOST_LOOKED_AT:
                        return
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                        mode = entry.stat(follow_symlinks=False).st_mode
                        yield entry.path, _KINDS.get(stat.S_IFMT(mode), "no file")
        except OSError:  # a file, or closed to this user, or gone: nothing in it can be shown
            continue
