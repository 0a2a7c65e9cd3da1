"""Trajectories in files, without loss: what is read is equal to what was written, keys of the user's own included.

A file appears whole or not at all (a crash while writing leaves the old one). Values that a file cannot hold are
an error that names row and key before anything is replaced; see `jsontext` for what fits, `parquet` for the columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from unspool._atomic import replacing
from unspool.data import jsontext
from unspool.data.parquet import is_plain, read_metadata, read_parquet, write_parquet
from unspool.types import InvalidTypeError, InvalidValueError

__all__ = ["read_jsonl", "read_metadata", "read_parquet", "read_prompts", "write_jsonl", "write_parquet"]

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[InvalidValueError], object]


def write_jsonl(trajectories: Iterable[Mapping[str, Any]], path: str | Path) -> int:
    """Write one JSON object a line (ASCII); returns how many.

    Raises:
        InvalidValueError: naming the row and the key that JSON cannot hold; `path` is then as it was.
    """
    count = 0
    with replacing(Path(path)) as file:
        for row in trajectories:
            if not isinstance(row, Mapping):
                raise InvalidTypeError(f"row {count} is of type {type(row).__name__}; each row must be a dict")
            file.write(jsontext.encode_object(row, f"row {count}").encode("ascii") + b"\n")
            count += 1
    return count


def read_jsonl(path: str | Path, *, on_error: OnError = "raise") -> list[dict[str, Any]]:
    """The objects of a JSONL file (UTF-8), one a line; blank lines are passed over.

    Args:
        on_error: what a line that is no JSON object does: `"raise"`; `"skip"`, which leaves it out and logs a
            warning; or a function that is called with the error, after which the line is left out.

    Raises:
        InvalidValueError: naming the file and the line.
    """
    path = Path(path)
    rows: list[dict[str, Any]] = []
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901
            if not line.strip():
                continue
            try:
                rows.append(_parse_line(line, f"{path}, line {number}"))
            except InvalidValueError as error:
                if on_error == "raise":
                    raise
                if on_error == "skip":
                    logger.warning("%s; the line is skipped", error)
                else:
                    on_error(error)
    return rows


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    row = jsontext.decode(line.strip(), where)
    if not isinstance(row, dict):
        raise InvalidValueError(f"{where}: holds a JSON {type(row).__name__}, not an object")
    return row


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror or error}") from error


# --------------------------------------------------------------------------- prompts


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Trajectories to run, from a data set in `.jsonl`, `.json` (a list of objects) or `.parquet`.

    A row's `messages` are taken from its `messages` column (a list, or the JSON text of one), else from `prompt`,
    else from `question`: a text becomes one user message, a list is taken as messages. All columns are kept.
    From Parquet files that unspool did not write, absent fields of messages (null there) are dropped, dates become
    ISO text, decimals text and bytes base64, so that results can be written again.

    Raises:
        InvalidValueError: naming the file and the row (from 0).
    """
    path = Path(path)
    if path.suffix == ".jsonl":
        rows = read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = read_parquet(path)
        if is_plain(path):
            rows = [{key: _to_json(value) for key, value in row.items()} for row in rows]
    elif path.suffix == ".json":
        with _open(path) as file:
            rows = jsontext.decode(file.read().removeprefix(b"\xef\xbb\xbf"), str(path))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InvalidValueError(f"{path} must hold a JSON list of objects; one object a line is .jsonl")
    else:
        raise InvalidValueError(
            f"{path} has the suffix {path.suffix!r}; prompts are read from .jsonl, .json and .parquet"
        )
    return [{**row, "messages": _messages(row, f"{path}, row {index}")} for index, row in enumerate(rows)]


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    for column in ("messages", "prompt", "question"):
        value = row.get(column)
        if value is None:
            continue
        if isinstance(value, str) and column == "messages":
            value = jsontext.decode(value, f"{where}, {column}")
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if isinstance(value, list) and value and all(isinstance(part, dict) and "role" in part for part in value):
            return [_drop_absent(part) for part in value]
        raise InvalidValueError(
            f"{where}: {column!r} must be a list of messages, each with a role (or a text as prompt)"
        )
    raise InvalidValueError(
        f"{where}: no 'messages', 'prompt' or 'question' among its columns {sorted(map(str, row))}; rename one"
    )


def _drop_absent(message: dict[str, Any]) -> dict[str, Any]:
    """Parquet's structs have every field in every message; None in the others says that it was not there."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _to_json(value: Any) -> Any:
    """A value of a Parquet file as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode("ascii")
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
