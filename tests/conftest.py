"""Fixtures that more than one part of the tests uses."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import families
from tests.vllm_server import VLLMServer, tools_server

# The suite runs on every core at once; torch with more threads than it has cores to itself is many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts the suite in the background has it ignore Ctrl-C, and all that it starts with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _no_skips(report: Any) -> None:
    """On CI every part is there, so a test that skips has lost one: that is a failure."""
    if os.environ.get("CI") == "true" and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped on CI, where nothing may be: {report.longrepr}"


_NO_VLLM = "vLLM is not installed; `make test` installs its build for CPUs"


class _WithoutVLLM(pytest.Module):
    def collect(self) -> Any:
        pytest.skip(_NO_VLLM, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Modules that import vLLM are skipped whole where there is none."""
    if module_path.parent.name == "vllm" and find_spec("vllm") is None:
        return _WithoutVLLM.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Single tests that start a vLLM are skipped where there is none."""
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(pytest.mark.skip(reason=_NO_VLLM))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    _no_skips(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    _no_skips(report)
    return report


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


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """A real vLLM server with the embedded model (`tools_server`). Shared: what a test changes it puts back."""
    server = tools_server(tmp_path_factory.mktemp("vllm") / "server.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()
