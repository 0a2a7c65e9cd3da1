"""Files that are whole or not there: whoever looks at a name sees all of a file or none of it.

`replacing` writes under another name and takes the place of the old file at the end; `create_new` never takes the
place of anything. Both leave nothing behind when they fail. Nothing here imports anything of unspool.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


def _temporary(folder: Path) -> Path:
    return folder / f".unspool-{uuid4().hex}.tmp"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, which becomes `path` when the block ends well; missing parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path.parent)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def create_new(folder: Path, names: Iterable[str], content: bytes) -> Path:
    """A new file in `folder` under the first of `names` that is free, also among threads and processes.

    Raises:
        OSError: where the folder cannot be written.
        FileExistsError: where no name is free.
    """
    temporary = _temporary(folder)
    name = ""
    try:
        with temporary.open("xb") as file:
            file.write(content)
        for name in names:
            try:
                _claim(temporary, folder / name)
            except FileExistsError:
                continue
            return folder / name
        raise FileExistsError(f"no name is free in {folder}, the last that was tried is {name!r}")
    finally:
        temporary.unlink(missing_ok=True)


def _claim(temporary: Path, target: Path) -> None:
    """Give a finished file its name, or raise FileExistsError."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system: reserve the name, then fill it
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.replace(target)
