"""Other projects' public code, doing the same work beside ours where it is installed.

None is needed. `renderers` and `trl` come with the development environment; `twinkle-kit`, and what `trl` needs to
import its trainer, are put into a folder of their own (`INSTALL`), so that the environment stays as it is. Each module
here offers `VERSION` and its contestants, or raises ImportError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.workload import Conversation, Load, Run

FOLDER = Path(__file__).parents[2] / ".cache" / "peers"
_EXTRAS = (
    "datasets dill multiprocess xxhash pandas httpx httpcore omegaconf antlr4-python3-runtime==4.9.3 pyzmq modelscope"
)
INSTALL = f"python -m pip install --no-deps --target .cache/peers twinkle-kit trl renderers {_EXTRAS}"
NAMES = ("twinkle", "trl", "renderers")


@cache
def _found() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The peers that import, and why others do not."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # at the end: what the environment has goes first
    found: dict[str, ModuleType] = {}
    missing: dict[str, str] = {}
    for name in NAMES:
        try:
            found[name] = import_module(f"benchmarks.peers.{name}_peer")
        except Exception as error:  # a peer may fail in any way: it is then not compared with
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def _contestants(kind: str) -> dict[str, Any]:
    found, _ = _found()
    return {
        f"{name} {module.VERSION}, {what}": contestant
        for name, module in found.items()
        for what, contestant in getattr(module, kind, {}).items()
    }


def overhead_contestants() -> dict[str, tuple[Callable[[Conversation], Run], int]]:
    """For (b): contestants by name, each with how seldom it runs."""
    return _contestants("OVERHEAD")


def scale_works() -> dict[str, Callable[[Load, float], Any]]:
    """For (c): given a load and the engine's latency in seconds, run it."""
    return _contestants("SCALE")


def schedule_runs() -> dict[str, Callable[[Load, float, dict[str, float]], float]]:
    """For (a): given a load, the engine's latency and each tool call's seconds by topic, the wall time."""
    return _contestants("SCHEDULE")


def notes() -> list[str]:
    """One line for each peer that is not there."""
    _, missing = _found()
    lines = [f"not compared with {name}: {why.splitlines()[0]}" for name, why in missing.items()]
    return [*lines, f"to install the peers: {INSTALL}"] if lines else []
