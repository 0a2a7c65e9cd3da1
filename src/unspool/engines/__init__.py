"""Inference: the protocol, and the engines that come with unspool. Heavy ones load when they are first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unspool.engines.adapt import as_engine
from unspool.engines.batching import Batching
from unspool.engines.protocol import (
    Engine,
    EngineBase,
    GenerateRequest,
    Generation,
    SampledSequence,
    Sampler,
    SampleResponse,
)
from unspool.engines.scripted import ScriptedEngine

if TYPE_CHECKING:
    from unspool.engines.torch import TorchEngine

__all__ = [
    "Batching",
    "Engine",
    "EngineBase",
    "GenerateRequest",
    "Generation",
    "SampleResponse",
    "SampledSequence",
    "Sampler",
    "ScriptedEngine",
    "TorchEngine",
    "as_engine",
]


def __getattr__(name: str) -> Any:
    if name == "TorchEngine":
        from unspool.engines.torch import TorchEngine

        return TorchEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
