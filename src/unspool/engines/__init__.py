"""Inference: the protocol, and the engines that come with unspool. Heavy ones load when they are first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unspool.engines.adapt import as_engine
from unspool.engines.batching import Batching
from unspool.engines.minimind import RolloutEngine
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
    from unspool.engines.server import ServerEngine
    from unspool.engines.torch import TorchEngine
    from unspool.engines.torch_rollout import (
        RolloutResult,
        TorchRolloutEngine,
        compute_per_token_logps,
        create_rollout_engine,
    )
    from unspool.engines.vllm import VLLMEngine, VLLMSampler

__all__ = [
    "Batching",
    "Engine",
    "EngineBase",
    "GenerateRequest",
    "Generation",
    "RolloutEngine",
    "RolloutResult",
    "SampleResponse",
    "SampledSequence",
    "Sampler",
    "ScriptedEngine",
    "ServerEngine",
    "TorchEngine",
    "TorchRolloutEngine",
    "VLLMEngine",
    "VLLMSampler",
    "as_engine",
    "compute_per_token_logps",
    "create_rollout_engine",
]

_HEAVY = {
    "ServerEngine": "unspool.engines.server",
    "TorchEngine": "unspool.engines.torch",
    "RolloutResult": "unspool.engines.torch_rollout",
    "TorchRolloutEngine": "unspool.engines.torch_rollout",
    "compute_per_token_logps": "unspool.engines.torch_rollout",
    "create_rollout_engine": "unspool.engines.torch_rollout",
    "VLLMEngine": "unspool.engines.vllm",
    "VLLMSampler": "unspool.engines.vllm",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HEAVY[name]), name)
