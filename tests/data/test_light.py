"""Importing the readers of records costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "pyarrow", "numpy", "transformers")


@pytest.mark.parametrize("module", ["unspool.data", "unspool.trace"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
