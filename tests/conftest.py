"""Fixtures that more than one part of the tests uses."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import families

# The suite runs on every core at once; torch with more threads than it has cores to itself is many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def qwen3() -> Any:
    """Qwen3's tokenizer, with its own template. Shared: not to be changed."""
    return families.load("qwen3")


@pytest.fixture(scope="session")
def llama3_1() -> Any:
    """Llama 3.1's tokenizer."""
    return families.load("llama3_1")


@pytest.fixture(scope="session")
def deepseek_v3() -> Any:
    """DeepSeek V3's tokenizer."""
    return families.load("deepseek_v3")


@pytest.fixture(scope="session")
def gptoss() -> Any:
    """gpt-oss's tokenizer, which has no template of its own."""
    return families.load("gptoss")


@pytest.fixture(scope="session")
def gemma3() -> Any:
    """Gemma 3's tokenizer."""
    return families.load("gemma3")
