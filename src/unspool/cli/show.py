"""`unspool show FILE`: one trajectory out of a trace, a JSONL or a Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.cli.render import render_trajectory
from unspool.data import read_jsonl, read_metadata, read_parquet
from unspool.engines.embedded import EMBEDDED, ensure_embedded_model
from unspool.trace import read_document, read_trace
from unspool.types import InvalidValueError, MissingExtraError

__all__ = ["load_any", "render_trajectory", "show"]


def show(
    file: str | Path,
    index: int = 0,
    id: str | None = None,
    tokenizer: str | None = None,
    messages: bool = False,
    console: Console | None = None,
) -> None:
    """Print one trajectory of a file.

    Args:
        file: a trace (`.json`), or trajectories in `.jsonl` or `.parquet`.
        index: which of them, from 0 (negative: from the end).
        id: the first with this id instead.
        tokenizer: folder or name; None: what the file's metadata or the trajectory notes as `tokenizer` or `model`,
            where that is a folder that can be loaded.
        messages: show messages instead of tokens.

    Raises:
        InvalidValueError: where the file cannot be read, has no such trajectory, or the tokenizer cannot be loaded.
    """
    path, console = Path(file), console or Console()
    trajectory = _pick(load_any(path), path, index, id)
    loaded = None
    if not messages and trajectory.get("input_ids"):
        loaded = _load(tokenizer) if tokenizer is not None else _noted_tokenizer(path, trajectory)
        if loaded is None:
            console.print("No tokenizer is noted in the file; --tokenizer FOLDER shows the tokens.", style="dim")
    try:
        render_trajectory(trajectory, loaded, console, messages=messages)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"{path} does not hold a trajectory in the form of a rollout's ({error!r})") from error


def load_any(path: str | Path) -> list[dict[str, Any]]:
    """The trajectories of a file, by its suffix: `.json` (one trace), `.jsonl` or `.parquet`.

    Raises:
        InvalidValueError: naming the file, and the line where there is one.
    """
    path = Path(path)
    if path.suffix == ".json":
        return [read_trace(path)]
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    if path.suffix == ".parquet":
        return read_parquet(path)
    raise InvalidValueError(
        f"{path} has the suffix {path.suffix!r}; trajectories are read from .json, .jsonl and .parquet"
    )


def _pick(trajectories: list[dict[str, Any]], path: Path, index: int, id: str | None) -> dict[str, Any]:
    if id is not None:
        for trajectory in trajectories:
            if str(trajectory.get("id")) == id:
                return trajectory
        some = ", ".join(repr(trajectory.get("id")) for trajectory in trajectories[:5])
        raise InvalidValueError(f"{path} has no trajectory with the id {id!r}; it has {some or 'none at all'}, ...")
    if not -len(trajectories) <= index < len(trajectories):
        raise InvalidValueError(f"{path} has {len(trajectories)} trajectories; there is none at index {index}")
    return trajectories[index]


def _noted_tokenizer(path: Path, trajectory: dict[str, Any]) -> Any:
    """The tokenizer that a file or a trajectory names, or None: a note may have been written on another machine."""
    notes: dict[str, Any] = {}
    if path.suffix == ".parquet":
        notes = dict(read_metadata(path))
    elif path.suffix == ".json":
        notes = read_document(path).get("metadata") or {}
    for name in (source.get(key) for source in (notes, trajectory) for key in ("tokenizer", "model", "template_name")):
        if isinstance(name, str) and (Path(name).is_dir() or name == EMBEDDED):
            try:
                return _load(name)
            except (InvalidValueError, MissingExtraError):
                continue
    return None


def _load(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("A tokenizer needs transformers: run `pip install 'unspool[torch]'`.") from error
    folder = str(ensure_embedded_model()) if name == EMBEDDED else name
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # OSError, ValueError, KeyError, and errors of the tokenizers library
        reason = str(error).strip().split("\n")[0]
        raise InvalidValueError(
            f"the tokenizer {name!r} cannot be loaded ({reason}); give its folder or name"
        ) from error
