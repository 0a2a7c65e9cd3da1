"""The folder of results: results of one run only, and nothing there is touched that `unspool run` did not write.

A folder with results of an earlier run is refused, or cleared of them where `output.overwrite` asks for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml

from unspool.cli.config import OutputConfig, RunConfig
from unspool.data import write_jsonl, write_parquet
from unspool.types import InvalidValueError, MissingExtraError, Trajectory

TRACES = "traces"
PARQUET = "trajectories.parquet"
JSONL = "trajectories.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"


def check_output(config: OutputConfig) -> None:
    """Make the folder, and refuse one that cannot be written to or that holds results that may not be replaced."""
    if config.parquet:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                "output.parquet needs pyarrow: run `pip install 'unspool[train]'`, or set output.parquet=false"
            ) from error
    with _usable(config.dir):
        config.dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=config.dir):
            pass
        if not config.overwrite and next(_earlier(config.dir), None) is not None:
            raise InvalidValueError(
                f"output.dir: {config.dir} holds results of an earlier run; "
                "give another folder, or output.overwrite=true to replace them"
            )


def clear_output(folder: Path) -> None:
    """Remove what an earlier run wrote: traces, tables, summary and configuration, and no other file."""
    with _usable(folder):
        for path in list(_earlier(folder)):
            path.unlink(missing_ok=True)


def _earlier(folder: Path) -> Iterator[Path]:
    for name in (PARQUET, JSONL, SUMMARY, CONFIG):
        if (folder / name).is_file():
            yield folder / name
    for pattern in ("ok-*.json", "fail-*.json"):
        yield from (folder / TRACES).glob(pattern)


def write_output(
    config: RunConfig, results: list[Trajectory], summary: dict[str, Any], metadata: dict[str, str]
) -> None:
    """Everything but the traces, which were written as trajectories ended."""
    output = config.output
    with _usable(output.dir):
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        (output.dir / CONFIG).write_text(text, encoding="utf-8")
        (output.dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        if output.parquet:
            write_parquet(results, output.dir / PARQUET, metadata=metadata)
        if output.jsonl:
            write_jsonl(results, output.dir / JSONL)


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Errors of the file system as one sentence."""
    try:
        yield
    except OSError as error:
        raise InvalidValueError(
            f"output.dir: {folder} cannot be used ({error.strerror or error}); "
            "give a folder that can be made and written to"
        ) from error
