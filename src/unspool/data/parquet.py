"""Trajectories as a Parquet file: arrays and plain facts as native columns, everything else as JSON text, no loss.

Schema version 1 (file metadata `unspool.schema`, JSON: `version`, `keys`, `columns`). One row a trajectory, one column
for each key that occurs:

| columns | type |
|---|---|
| `input_ids`, `labels`, `loss_mask`, `versions` | list<int64> |
| `logprobs` | list<double>: exact for float32 and float64 |
| `id`, `stop_reason`, `error` | string |
| `turns`, `group`, `sample` | int64 |
| `truncated` | bool |
| `reward` | double (an int reward comes back as the equal float) |
| all others (`messages`, `spans`, `branches`, `tool_errors`, `timings`, `user_data`, ...) | string: JSON text |
| `_keys` | list<string>: the columns that the row has, in its order, so that None and absent are told apart |

`datasets` and pandas read the native columns at once; messages are not a struct column, since structs lose what is
absent and mix what differs. A native column in which some row holds a value of another kind (a list with a None in
it, an int beyond 64 bits, text with a lone surrogate) is JSON text in that file. `columns` in the metadata lists
each column's name, its key and its kind; the name differs from the key only where the key cannot be a column's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from unspool._atomic import replacing
from unspool.data import jsontext
from unspool.types import InvalidTypeError, InvalidValueError, MissingExtraError

SCHEMA_VERSION = 1
_SCHEMA = b"unspool.schema"
_ROWS_AT_ONCE = 512
_INT64 = range(-(2**63), 2**63)


# --------------------------------------------------------------------------- kinds of columns


def _is_text(value: object) -> bool:
    return type(value) is str and not _has_surrogate(value)


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _is_int(value: object) -> bool:
    return type(value) is int and value in _INT64


def _is_float(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= 2**53)


def _are_ints(value: object) -> bool:
    if type(value) is not list or set(map(type, value)) - {int}:
        return False
    return not value or (min(value) in _INT64 and max(value) in _INT64)


def _are_floats(value: object) -> bool:
    if type(value) is not list:
        return False
    kinds = set(map(type, value))
    return kinds <= {float} or (kinds <= {float, int} and all(map(_is_float, value)))


_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "text": (_is_text, "string"),
    "int": (_is_int, "int64"),
    "bool": (lambda value: type(value) is bool, "bool"),
    "float": (_is_float, "double"),
    "ints": (_are_ints, "list<int64>"),
    "floats": (_are_floats, "list<double>"),
    "json": (lambda value: True, "string"),
}
_KIND_OF_KEY: Mapping[str, str] = {
    **dict.fromkeys(("input_ids", "labels", "loss_mask", "versions"), "ints"),
    "logprobs": "floats",
    **dict.fromkeys(("id", "stop_reason", "error"), "text"),
    **dict.fromkeys(("turns", "group", "sample"), "int"),
    "truncated": "bool",
    "reward": "float",
}


@dataclass(frozen=True, slots=True)
class _Column:
    """One key of the trajectories: the name of its column, and the kind of what stands there."""

    name: str
    key: str
    kind: str


# --------------------------------------------------------------------------- writing


def write_parquet(
    trajectories: Iterable[Mapping[str, Any]], path: str | Path, *, metadata: Mapping[str, str] | None = None
) -> int:
    """Write trajectories to one Parquet file; returns how many.

    Args:
        metadata: texts for the file's own metadata (say `model`: the folder of the model), for `read_metadata`.

    Raises:
        InvalidValueError: naming the row and the key that JSON cannot hold; `path` is then as it was.
        MissingExtraError: where pyarrow is not installed.
    """
    pa, parquet = _pyarrow()
    rows = list(trajectories)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise InvalidTypeError(f"row {index} must be a dict with string keys, not {type(row).__name__} with others")
    columns = _columns(rows)
    keys = _free_name("_keys", {column.name for column in columns})
    types = {
        kind: {"string": pa.string(), "int64": pa.int64(), "bool": pa.bool_(), "double": pa.float64()}.get(name)
        or pa.list_(pa.int64() if name == "list<int64>" else pa.float64())
        for kind, (_, name) in _KINDS.items()
    }
    fields = [pa.field(column.name, types[column.kind]) for column in columns]
    schema = pa.schema(
        [*fields, pa.field(keys, pa.list_(pa.string()))], metadata=_file_metadata(columns, keys, metadata or {})
    )
    name_of = {column.key: column.name for column in columns}
    left = iter(enumerate(rows))
    with replacing(Path(path)) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while some := list(islice(left, _ROWS_AT_ONCE)):
            arrays = [[_cell(column, index, row) for index, row in some] for column in columns]
            arrays.append([[name_of[key] for key in row] for _, row in some])
            data = [pa.array(array, field.type) for array, field in zip(arrays, schema, strict=True)]
            writer.write_table(pa.Table.from_arrays(data, schema=schema))
    return len(rows)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[_Column]:
    """A column for each key, in the order of first appearance, native where all its values are of the key's kind."""
    columns: dict[str, _Column] = {}
    names: set[str] = set()
    for key in dict.fromkeys(key for row in rows for key in row):
        kind = _KIND_OF_KEY.get(key, "json")
        fits = _KINDS[kind][0]
        if not all(fits(row[key]) for row in rows if row.get(key) is not None):
            kind = "json"
        name = _free_name(json.dumps(key) if _has_surrogate(key) or "\0" in key else key, names)
        names.add(name)
        columns[key] = _Column(name, key, kind)
    return list(columns.values())


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _file_metadata(columns: Sequence[_Column], keys: str, metadata: Mapping[str, str]) -> dict[bytes, bytes]:
    for name, value in metadata.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidTypeError(f"metadata must map texts to texts, not {name!r} to {value!r}")
        if _is_reserved(name):
            raise InvalidValueError(f"metadata cannot have {name!r}: the file uses that name itself; choose another")
    layout = {
        "version": SCHEMA_VERSION,
        "keys": keys,
        "columns": [[column.name, column.key, column.kind] for column in columns],
    }
    own = {_to_bytes(name): _to_bytes(value) for name, value in metadata.items()}
    return {_SCHEMA: json.dumps(layout).encode("ascii"), **own}


def _is_reserved(name: str) -> bool:
    return name.startswith("unspool.") or name in ("ARROW:schema", "pandas", "huggingface")


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _cell(column: _Column, index: int, row: Mapping[str, Any]) -> Any:
    value = row.get(column.key)
    if value is None or column.kind != "json":
        return value
    return jsontext.encode(value, f"row {index}", column.key)


# --------------------------------------------------------------------------- reading


def read_parquet(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file: equal to what `write_parquet` was given, or, from another writer, as they are.

    Raises:
        InvalidValueError: where the file is no Parquet file, or was written by a newer unspool.
        MissingExtraError: where pyarrow is not installed.
    """
    with _opened(path) as file:
        layout = _layout(file, path)
        batches = file.iter_batches(_ROWS_AT_ONCE)
        if layout is None:
            return [row for batch in batches for row in batch.to_pylist()]
        return [row for batch in batches for row in _rows(batch, layout, Path(path))]


def read_metadata(path: str | Path) -> dict[str, str]:
    """The texts that `write_parquet` was given as `metadata`; what other writers put there is left out."""
    with _opened(path) as file:
        metadata: dict[bytes, bytes] = file.schema_arrow.metadata or {}
    texts = {name.decode("utf-8", "replace"): value for name, value in metadata.items()}
    return {name: value.decode("utf-8", "surrogatepass") for name, value in texts.items() if not _is_reserved(name)}


def is_plain(path: str | Path) -> bool:
    """Whether a Parquet file was written by something other than `write_parquet`."""
    with _opened(path) as file:
        return _layout(file, path) is None


@dataclass(frozen=True, slots=True)
class _Layout:
    keys: str
    columns: dict[str, _Column]


def _layout(file: Any, path: str | Path) -> _Layout | None:
    written = (file.schema_arrow.metadata or {}).get(_SCHEMA)
    if written is None:
        return None
    layout = jsontext.decode(written, f"{path}, metadata")
    if layout["version"] > SCHEMA_VERSION:
        raise InvalidValueError(
            f"{path} has schema version {layout['version']}; this unspool reads up to {SCHEMA_VERSION}: upgrade it"
        )
    return _Layout(layout["keys"], {name: _Column(name, key, kind) for name, key, kind in layout["columns"]})


def _rows(batch: Any, layout: _Layout, path: Path) -> Iterable[dict[str, Any]]:
    cells = {name: batch.column(name).to_pylist() for name in layout.columns}
    for index, names in enumerate(batch.column(layout.keys).to_pylist()):
        row: dict[str, Any] = {}
        for name in names:
            column, value = layout.columns[name], cells[name][index]
            if value is not None and column.kind == "json":
                value = jsontext.decode(value, f"{path}, column {name!r}")
            row[column.key] = value
        yield row


def _opened(path: str | Path) -> Any:
    pa, parquet = _pyarrow()
    try:
        return parquet.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise InvalidValueError(f"{path} is no Parquet file that can be read: {error}") from error
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(
            "Parquet needs pyarrow, which is not installed: run `pip install 'unspool[train]'`."
        ) from error
    return pa, parquet
