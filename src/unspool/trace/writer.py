"""One JSON file for each finished trajectory, written so that it can harm nothing else.

`TraceWriter.write` never raises and never changes a trajectory: what goes wrong is logged and counted. A file appears
whole, under a name of its own, whoever else (threads, processes, earlier runs) writes to the same folder. The name is
`[step%06d-]{ok|fail}-{id}.json`, with `-1`, `-2`, ... behind the id where a name is taken; an id is made safe first.

The file holds one object: `trajectory` (everything but arrays), `ground_truth`, `stop_reason`, `truncated`, `turns`,
`success`, `error`, the arrays under `tokens`, and `metadata` where the writer was given some. It is ASCII and strict
JSON; what JSON cannot hold stands there as its repr.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from unspool._atomic import create_new
from unspool.types import InvalidTypeError, InvalidValueError

logger = logging.getLogger(__name__)

ARRAYS = ("input_ids", "labels", "loss_mask", "logprobs", "versions", "spans", "branches", "branch")
"""The keys of a trajectory that stand under `tokens`."""

_LONGEST_ID = 96  # bytes; with prefix and suffix well below the 255 that file systems take
_DEEPEST = 100
_LARGEST_INT = 10**4000  # Python reads and writes decimal numbers up to some 4300 digits


class TraceWriter:
    """Writes traces to one folder, which is made at construction.

    Args:
        trace_dir: the folder.
        trace_callback: given the trajectory, says whether it is stored; None stores all. Where it raises, the
            trajectory is not stored.
        success_callback: given the trajectory, says whether it succeeded, which is `ok-` in the name and `success`
            in the file. Without one, and where it raises (whatever, `sys.exit()` too), it is `fail-`.
        metadata: texts for every file, say the `model` whose tokenizer reads the ids.

    Attributes:
        failures: how many trajectories should have been stored and were not.

    Raises:
        InvalidValueError: where the folder cannot be made or written to.
        InvalidTypeError: where a callback is no function.
    """

    def __init__(
        self,
        trace_dir: str | Path,
        *,
        trace_callback: Callable[[dict[str, Any]], object] | None = None,
        success_callback: Callable[[dict[str, Any]], object] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        for name, callback in (("trace_callback", trace_callback), ("success_callback", success_callback)):
            if callback is not None and not callable(callback):
                raise InvalidTypeError(f"{name} must be a function of the trajectory, or None, not {callback!r}")
        self.trace_dir = Path(trace_dir)
        self._trace_callback = trace_callback
        self._success_callback = success_callback
        self._metadata = dict(metadata or {})
        self._errors: list[str] = []  # appended to by many threads; a list, so that a writer pickles
        self._next: dict[str, int] = {}
        try:
            self.trace_dir.mkdir(parents=True, exist_ok=True)
            create_new(self.trace_dir, [".unspool-probe"], b"").unlink(missing_ok=True)
        except FileExistsError as error:
            if not self.trace_dir.is_dir():
                raise self._unusable(error) from error
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> InvalidValueError:
        return InvalidValueError(
            f"trace_dir {str(self.trace_dir)!r} cannot be used ({error.strerror or error}); "
            "give a folder that can be made and written to"
        )

    @property
    def failures(self) -> int:
        return len(self._errors)

    def write(self, trajectory: dict[str, Any], *, global_step: int | None = None) -> Path | None:
        """Store one finished trajectory; the file's path, or None where it was not stored. Never raises."""
        try:
            if not self._wanted(trajectory):
                return None
            success = self._succeeded(trajectory)
            step = "" if global_step is None else f"step{int(global_step):06d}-"
            base = f"{step}{'ok' if success else 'fail'}-{safe_id(trajectory.get('id'))}"
            text = json.dumps(self._document(trajectory, success), ensure_ascii=True, allow_nan=False)
            return create_new(self.trace_dir, self._names(base), text.encode("ascii") + b"\n")
        except Exception as error:
            self._errors.append(f"{type(error).__name__}: {error}")
            logger.warning("a trace was not written to %s (%d so far)", self.trace_dir, self.failures, exc_info=True)
            return None

    def _wanted(self, trajectory: dict[str, Any]) -> bool:
        says = self._trace_callback
        return says is None or _says(says, trajectory, "trace_callback raised; the trajectory is not stored")

    def _succeeded(self, trajectory: dict[str, Any]) -> bool:
        says = self._success_callback
        otherwise = "success_callback raised; the trajectory is stored as failed"
        return says is not None and _says(says, trajectory, otherwise)

    def _document(self, trajectory: Mapping[str, Any], success: bool) -> dict[str, Any]:
        document: dict[str, Any] = {
            "trajectory": {key: value for key, value in trajectory.items() if key not in ARRAYS},
            "ground_truth": ground_truth(trajectory),
            "stop_reason": trajectory.get("stop_reason"),
            "truncated": trajectory.get("truncated"),
            "turns": trajectory.get("turns"),
            "success": success,
            "error": trajectory.get("error"),
            "tokens": {key: trajectory[key] for key in ARRAYS if key in trajectory},
        }
        if self._metadata:
            document["metadata"] = self._metadata
        plain: dict[str, Any] = to_json(document)
        return plain

    def _names(self, base: str) -> Iterator[str]:
        """The names to try. Where the first was taken once, go on behind the last number that this writer gave."""
        if base not in self._next:
            yield f"{base}.json"
        for number in count(self._next.get(base, 1)):
            self._next[base] = number + 1
            yield f"{base}-{number}.json"


def _says(callback: Callable[[dict[str, Any]], object], trajectory: dict[str, Any], otherwise: str) -> bool:
    """What a callback says. Whatever it raises, `sys.exit()` too, is logged and a no; Ctrl-C alone passes."""
    try:
        return bool(callback(trajectory))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        logger.warning(otherwise, exc_info=True)
        return False


def safe_id(value: object) -> str:
    """A trajectory's id as part of a file name: letters, digits, `_`, `-` and inner dots; never empty, never long.

    `hotpotqa/42` becomes `hotpotqa_42`. An id that is cut gets a hash of the whole at its end.
    """
    text = "" if value is None else value if isinstance(value, str) else _repr(value)
    safe = re.sub(r"[^\w.-]", "_", text).strip(".")
    if len(safe.encode()) > _LONGEST_ID:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        safe = f"{safe.encode()[: _LONGEST_ID - 9].decode('utf-8', 'ignore')}-{digest}"
    return safe or "unnamed"


def ground_truth(trajectory: Mapping[str, Any]) -> Any:
    """The trajectory's own `ground_truth`, else that of its `user_data` (a dict, or a list of pairs), else None."""
    if "ground_truth" in trajectory:
        return trajectory["ground_truth"]
    data = trajectory.get("user_data")
    if isinstance(data, Mapping):
        return data.get("ground_truth")
    for pair in data if isinstance(data, (list, tuple)) else ():
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and pair[0] == "ground_truth":
            return pair[1]
    return None


# --------------------------------------------------------------------------- anything as JSON


def to_json(value: object, depth: int = 0) -> Any:
    """A value that strict JSON holds: the value itself where it can be, the repr of what cannot.

    Tuples become lists, keys that are no strings become their repr (with `_` behind it where that is taken).
    """
    if value is None or value is True or value is False or type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGEST_INT else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if depth >= _DEEPEST:
        return _repr(value)
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key, item in value.items():
            name = str.__str__(key) if isinstance(key, str) else _repr(key)
            while name in plain:
                name += "_"
            plain[name] = to_json(item, depth + 1)
        return plain
    if isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if kinds == {float} and all(map(math.isfinite, value)):
            return list(value)
        if kinds == {int} and max(value) < _LARGEST_INT and min(value) > -_LARGEST_INT:
            return list(value)
        return [to_json(item, depth + 1) for item in value]
    return _repr(value)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__} without a repr>"
