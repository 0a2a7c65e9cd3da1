"""Every key of a configuration as a table, read off `RunConfig`: what is printed is what is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unspool.cli.config import RunConfig


def show_keys(console: Console | None = None) -> None:
    """Print key, type, default and meaning of everything that a configuration may hold."""
    table = Table("key", "type", "default", "meaning", box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    for row in keys():
        table.add_row(*map(Text, row))
    (console or Console()).print(table)


def keys(model: type[BaseModel] = RunConfig, before: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default as YAML reads it, meaning) of each key, sections unfolded."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{before}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        shown = str(default) if isinstance(default, str | Path) else json.dumps(default)
        yield f"{before}{name}", _kind(kind), shown, field.description or ""


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (list, dict):
        return "list of texts" if get_origin(annotation) is list else "keys and values"
    choices = [kind for kind in get_args(annotation) if kind is not NoneType] or [annotation]
    names = {str: "text", Path: "path", int: "whole number", float: "number", bool: "true | false"}
    return " | ".join(names.get(kind, str(kind)) for kind in choices)
