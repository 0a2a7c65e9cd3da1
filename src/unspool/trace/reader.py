"""Traces read back: the trajectory as it was, for every value that JSON holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unspool.types import InvalidValueError


def read_document(path: str | Path) -> dict[str, Any]:
    """The whole object of a trace file (see `writer` for its keys).

    Raises:
        InvalidValueError: where the file is no trace; the message names it.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{path} is no trace: not JSON ({error})") from error
    if not isinstance(document, dict) or not all(
        isinstance(document.get(key), dict) for key in ("trajectory", "tokens")
    ):
        raise InvalidValueError(f"{path} is no trace: it needs an object with 'trajectory' and 'tokens'")
    return document


def read_trace(path: str | Path) -> dict[str, Any]:
    """The trajectory of a trace file, its arrays included, as the rollout returned it.

    Raises:
        InvalidValueError: where the file is no trace; the message names it.
    """
    document = read_document(path)
    return {**document["trajectory"], **document["tokens"]}
