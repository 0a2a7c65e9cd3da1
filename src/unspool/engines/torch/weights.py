"""Weights in: loading a model, and new weights into one that is running.

What this module promises: an update is checked whole before anything is written (names and shapes), is written in
place, and an adapter is merged in float32 with the weights below it, never on top of another adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unspool.types import EngineError, MissingExtraError

Base = dict[str, Tensor]
"""Weights as they are without the adapter, for those that an adapter has changed."""

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load(
    path: str | Path, *, adapter: str | Path | None, dtype: str, trust_remote_code: bool
) -> tuple[nn.Module, Any, Base]:
    """A model, its tokenizer (None where the folder has none), and what its adapter covers."""
    from transformers import AutoTokenizer

    if dtype not in _DTYPES:
        raise EngineError(f"dtype {dtype!r} is not known; use one of {', '.join(_DTYPES)}")
    # With an adapter the folder's own dtype comes first: merge, then cast.
    model = _read_model(path, dtype if adapter is None else "auto", trust_remote_code)
    base: Base = {}
    if adapter is not None:
        merged = _merge(model, {}, adapter)
        base = _replace(model, merged, keep_base=True)
        if dtype != "auto":
            # The cast of the merged float32 values, not of values rounded to the folder's dtype before.
            model = model.to(getattr(torch, dtype))
            _write(model, merged)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        tokenizer = None
    return model.eval(), tokenizer, base


class Weights:
    """The weights of a running model, and what lies below its adapter."""

    def __init__(self, model: nn.Module) -> None:
        self.base: Base = {}
        self._model = model

    def update(self, source: Any) -> None:
        """Take new weights; see `TorchEngine.update_weights`."""
        if source is self._model:
            return
        if isinstance(source, str | Path) and (Path(source) / "adapter_config.json").is_file():
            merged = _merge(self._model, self.base, source)
            changed = {**self.base, **merged}
            fresh = _replace(self._model, changed, keep_base=True)
            # What the adapter before this one had changed keeps its own base.
            self.base = {**fresh, **self.base}
            return
        _replace(self._model, _state(source), keep_base=False)
        self.base = {}


def _state(source: Any) -> Mapping[str, Tensor]:
    """The full state dict of a source that is not an adapter."""
    if isinstance(source, nn.Module):
        return merge_adapters(source).state_dict()
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str | Path):
        return _read_model(source, "auto", False).state_dict()
    raise EngineError(
        f"weights come from a module, a state dict or a folder, not from {type(source).__name__}; give one of these"
    )


def merge_adapters(module: nn.Module) -> nn.Module:
    """The module itself; of a PEFT module a copy with its adapters merged in float32."""
    if not hasattr(module, "merge_and_unload"):
        return module
    plain: Any = copy.deepcopy(module).float()
    with torch.no_grad():
        whole: nn.Module = plain.merge_and_unload()
    return whole


def _read_model(path: str | Path, dtype: str, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise EngineError(f"no model can be read from {str(path)!r} ({error}); check the path") from error
    return model


def _merge(model: nn.Module, base: Base, adapter: str | Path) -> dict[str, Tensor]:
    """The float32 weights that the adapter changes, merged with what lies below them."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtraError(
            f"a LoRA adapter needs the package {error.name}, which is not installed: "
            "run `pip install 'unspool[torch]'`."
        ) from error

    if hasattr(model, "peft_config"):
        raise EngineError(
            "the engine serves a PEFT module as it is, with its own adapters; load the new adapter into that module "
            "and call update_weights(module), or serve the model below it"
        )
    plain = copy.deepcopy(model)
    with torch.no_grad():
        _write(plain, base)
        plain = plain.float()
        _write(plain, base)  # a base of more precision than the model's
        before = {name: tensor.clone() for name, tensor in _tensors(plain).items()}
        try:
            merged = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload(safe_merge=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise EngineError(f"the adapter {str(adapter)!r} does not fit the model ({error}); check both") from error
    return {
        name: tensor
        for name, tensor in _tensors(merged).items()
        if name in before and not torch.equal(tensor, before[name])
    }


def _replace(model: nn.Module, state: Mapping[str, Tensor], *, keep_base: bool) -> Base:
    """Write a state dict into the model after checking it; what was there before, where that is asked for."""
    mine = _tensors(model)
    state = {plain_name(name): tensor for name, tensor in state.items()}
    unknown = sorted(set(state) - set(mine))
    if unknown:
        raise EngineError(
            f"the model has no weight {unknown[0]!r} ({len(unknown)} unknown); give weights of this model"
        )
    for name, tensor in state.items():
        if tensor.shape != mine[name].shape:
            raise EngineError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, the model's has {tuple(mine[name].shape)}; "
                "give weights of this model"
            )
    if keep_base:
        before = {name: mine[name].clone() for name in state}
        _write(model, state)
        return before
    given = {mine[name].data_ptr() for name in state}
    missing = [name for name, tensor in mine.items() if name not in state and tensor.data_ptr() not in given]
    if missing:
        raise EngineError(f"weight {missing[0]!r} is missing ({len(missing)} in all); give a whole state dict")
    _write(model, state)
    return {}


def _write(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's own, casting as they go."""
    mine = _tensors(model)
    with torch.no_grad():
        for name, tensor in state.items():
            mine[name].copy_(tensor)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors (not copies) by their plain names."""
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}


def plain_name(name: str) -> str:
    """The name without what torch.compile and data parallel wrappers put before it."""
    while name.startswith(("_orig_mod.", "module.")):
        name = name.partition(".")[2]
    return name
