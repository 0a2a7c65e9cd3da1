"""Whatever a user calls an engine, as an `Engine`; what cannot be one is refused here, at construction."""

from __future__ import annotations

from unspool.engines.batching import Batching
from unspool.engines.minimind import RolloutSampler
from unspool.engines.protocol import Engine
from unspool.types import InvalidTypeError

_PARTS = ("generate", "start", "close", "pause", "resume", "update_weights", "version", "logprobs")


def as_engine(value: object, *, device: object = None) -> Engine:
    """An engine as it is; a sampler, or an object with MiniMind's `rollout(...)`, behind `Batching`.

    Args:
        value: what the user gave.
        device: where prompts go that are put into MiniMind's `rollout(...)`; None: the object's own. The others take
            token ids as lists, and are not asked.

    Raises:
        InvalidTypeError: for anything that does not take and give token ids.
    """
    if isinstance(value, type):
        raise InvalidTypeError(f"sampler is the class {value.__name__}; give an instance of it")
    if isinstance(value, Engine):
        return value
    if callable(getattr(value, "sample", None)):
        return Batching(value)  # type: ignore[arg-type]
    if callable(getattr(value, "rollout", None)):
        return Batching(RolloutSampler(value, device=device), logprobs=True)  # type: ignore[arg-type]
    missing = [name for name in _PARTS if not hasattr(value, name)]
    if "generate" not in missing and len(missing) < len(_PARTS) - 1:
        raise InvalidTypeError(
            f"the engine {type(value).__name__} lacks {', '.join(missing)}; see EngineBase for defaults"
        )
    raise InvalidTypeError(
        f"sampler must be an Engine (token ids in and out) or have sample(batch, sampling_params) or "
        f"MiniMind's rollout(...), "
        f"which {type(value).__name__} has not; something that returns text only cannot be recorded token by token "
        "(for an OpenAI-compatible API there is APIMultiTurnRollout)"
    )
