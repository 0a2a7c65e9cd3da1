"""How a vLLM is made: its arguments with defaults that fit rollouts, its adapters, and its silence.

What this module promises: what the user gave stands. Otherwise log-probabilities are those of the sampling
distribution, the prefix cache is on, and on a CPU its blocks are the smallest that work: short turns find their past.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from unspool.types import EngineError, InvalidValueError

_LEVEL: Final = "VLLM_LOGGING_LEVEL"
_CPU_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
_CPU_CACHE_BYTES: Final = 4 * 2**30
_CPU_BLOCK: Final = 32
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest LoRA ranks that vLLM can be made for."""


@contextmanager
def quiet_vllm() -> Iterator[None]:
    """vLLM, and the processes that it starts, say errors only while the block runs, unless the user set a level."""
    if os.environ.get(_LEVEL):
        yield
        return
    os.environ[_LEVEL] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop(_LEVEL, None)


def engine_arguments(path: str, adapters: Mapping[str, Path], dtype: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `AsyncEngineArgs` and `LLM`.

    Raises:
        EngineError: a folder is missing.
    """
    from vllm.platforms import current_platform

    check_folder_exists(path)
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if adapters:
        arguments |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": largest_rank(adapters)}
    if current_platform.is_cpu():
        arguments |= {"block_size": _CPU_BLOCK, "enforce_eager": True}
        if not os.environ.get(_CPU_SPACE) and "gpu_memory_utilization" not in given:
            arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    return arguments | dict(given)


def check_folder_exists(path: str) -> None:
    """Refuse what is written as a path and is no folder; anything else may be a name of the hub.

    Raises:
        EngineError: with the path.
    """
    if (path.startswith(("/", ".", "~")) or "\\" in path) and not Path(path).is_dir():
        raise EngineError(f"there is no model folder {path!r}; check the path")


def largest_rank(adapters: Mapping[str, Path]) -> int:
    """The smallest rank that vLLM knows and that holds every adapter's own."""
    ranks = [1]
    for name, folder in adapters.items():
        config = folder / "adapter_config.json"
        if not config.is_file():
            raise EngineError(f"the adapter {name!r} has no {config}; give the folder of a PEFT LoRA adapter")
        values = json.loads(config.read_text(encoding="utf-8"))
        ranks += [int(values.get("r", 1)), *(int(rank) for rank in (values.get("rank_pattern") or {}).values())]
    return next((rank for rank in _RANKS if rank >= max(ranks)), max(ranks))


class Adapters:
    """LoRA adapters by name.

    Args:
        folders: of PEFT adapters, by the names that requests will use.
    """

    def __init__(self, folders: Mapping[str, str | Path] | None) -> None:
        self.folders = {name: Path(folder) for name, folder in (folders or {}).items()}
        for name in self.folders:
            if not name:
                raise InvalidValueError("an adapter's name is empty; give it one")
        self._requests: dict[str, Any] = {}

    def request(self, name: str | None) -> Any:
        """vLLM's `LoRARequest` of an adapter; None for none.

        Raises:
            EngineError: no adapter has that name.
        """
        if name is None:
            return None
        if name not in self.folders:
            known = ", ".join(map(repr, self.folders)) or "none"
            raise EngineError(
                f"there is no adapter {name!r}; the engine was made with {known} (adapters={{name: folder}})"
            )
        if name not in self._requests:
            from vllm.lora.request import LoRARequest

            number = list(self.folders).index(name) + 1
            self._requests[name] = LoRARequest(name, number, str(self.folders[name]))
        return self._requests[name]

    def check(self, config: Any) -> None:
        """Refuse adapters for a vLLM that was made without LoRA."""
        if self.folders and getattr(config, "lora_config", None) is None:
            raise EngineError("this vLLM was made without LoRA; make it with enable_lora=True to give it adapters")
