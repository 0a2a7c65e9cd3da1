"""unspool: token-exact, multi-turn agent rollouts for reinforcement learning of language models.

Everything public is reachable from here and loads when it is first asked for; importing unspool loads neither torch
nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unspool.engines import (
        Batching,
        Engine,
        GenerateRequest,
        Generation,
        SampledSequence,
        SampleResponse,
        ScriptedEngine,
        ServerEngine,
        TorchEngine,
    )
    from unspool.episode import Episode, Limits, run_episode
    from unspool.policy import ChatPolicy, OpenAI, TokenPolicy
    from unspool.record import Cause, Record, Span
    from unspool.rollout import APIMultiTurnRollout, MultiTurnRollout, Rollout, RolloutStats
    from unspool.template import ChatTemplate, Diagnosis, doctor
    from unspool.types import Message, RolloutInterrupted, SamplingParams, ToolCall, UnspoolError
    from unspool.world import (
        Env,
        EnvTool,
        EnvWorld,
        PolicyPlayer,
        PythonTool,
        Step,
        StepResult,
        TextEnv,
        Tool,
        ToolManager,
        UserSimulator,
        World,
        calculator,
        tool,
    )

__version__ = "0.1.0"

_HOMES = {
    "unspool.engines": "Batching Engine GenerateRequest Generation SampledSequence SampleResponse ScriptedEngine"
    " ServerEngine TorchEngine",
    "unspool.episode": "Episode Limits run_episode",
    "unspool.policy": "ChatPolicy OpenAI TokenPolicy",
    "unspool.record": "Cause Record Span",
    "unspool.rollout": "APIMultiTurnRollout MultiTurnRollout Rollout RolloutStats",
    "unspool.template": "ChatTemplate Diagnosis doctor",
    "unspool.types": "Message RolloutInterrupted SamplingParams ToolCall UnspoolError",
    "unspool.world": "Env EnvTool EnvWorld PolicyPlayer PythonTool Step StepResult TextEnv Tool ToolManager"
    " UserSimulator World calculator tool",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "APIMultiTurnRollout",
    "Batching",
    "Cause",
    "ChatPolicy",
    "ChatTemplate",
    "Diagnosis",
    "Engine",
    "Env",
    "EnvTool",
    "EnvWorld",
    "Episode",
    "GenerateRequest",
    "Generation",
    "Limits",
    "Message",
    "MultiTurnRollout",
    "OpenAI",
    "PolicyPlayer",
    "PythonTool",
    "Record",
    "Rollout",
    "RolloutInterrupted",
    "RolloutStats",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "ScriptedEngine",
    "ServerEngine",
    "Span",
    "Step",
    "StepResult",
    "TextEnv",
    "TokenPolicy",
    "Tool",
    "ToolCall",
    "ToolManager",
    "TorchEngine",
    "UnspoolError",
    "UserSimulator",
    "World",
    "calculator",
    "doctor",
    "run_episode",
    "tool",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
