"""One real vLLM (its build for CPUs) for all tests of this folder; each start costs most of a minute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from tests.engines.vllm.asking import ADAPTER
from unspool import ChatTemplate
from unspool.engines.embedded import embedded_adapter, ensure_embedded_model
from unspool.loop import run_sync

if TYPE_CHECKING:  # where there is no vLLM, the modules of this folder are skipped
    from unspool.engines import VLLMEngine, VLLMSampler

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

Scores = Callable[[Sequence[int]], "list[list[float]]"]


@pytest.fixture(scope="session")
def engine() -> Iterator[VLLMEngine]:
    """The embedded model in bfloat16 with its adapter by name; requests that name a session get a resumable one.

    Shared: what a test changes it puts back, but for the version.
    """
    from unspool.engines import VLLMEngine

    engine = VLLMEngine.from_pretrained(
        ensure_embedded_model(),
        adapters={ADAPTER: embedded_adapter()},
        dtype="bfloat16",
        sessions="resumable",
        # A small model would fill its turn with newlines where JSON allows them.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        max_model_len=2048,
        kv_cache_memory_bytes=2**30,
    )
    run_sync(engine.start())
    yield engine
    run_sync(engine.close())


@pytest.fixture(scope="session")
def sampler() -> Iterator[VLLMSampler]:
    """The same model in float32, behind vLLM's blocking interface."""
    from unspool.engines import VLLMSampler

    sampler = VLLMSampler.from_pretrained(
        ensure_embedded_model(),
        adapters={ADAPTER: embedded_adapter()},
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=2**29,
    )
    yield sampler
    sampler.close()


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate(str(ensure_embedded_model()))
