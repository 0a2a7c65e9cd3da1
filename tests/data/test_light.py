"""Importing the readers of records costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["unspool.data", "unspool.trace"])
def test_importing_loads_neither_torch_nor_pyarrow_nor_numpy(module: str) -> None:
    code = (
        "import sys, types, pathlib; import importlib.util as u; root = pathlib.Path(u.find_spec('unspool').origin).parent;"
        "package = types.ModuleType('unspool'); package.__path__ = [str(root)]; sys.modules['unspool'] = package;"
        f"import {module}; print([name for name in ('torch', 'pyarrow', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
