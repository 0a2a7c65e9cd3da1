"""New weights for a vLLM: always a checkpoint folder in the end, checked before any of it reaches the model.

What this module promises: a folder whose tensors are not those of the model, by name or shape, is refused with the
first that differs (only headers are read); what had to be written for the update is removed after it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unspool.types import EngineError

Shapes = dict[str, tuple[int, ...]]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_TIED = "lm_head.weight"
"""May be in one checkpoint of a model and not in another: where it is the embedding's own, it is not read."""


@contextmanager
def checkpoint(source: Any, reference: Shapes | None) -> Iterator[Path]:
    """The folder of a source, while the block runs.

    Args:
        source: a folder, a module, or a state dict (names and shapes as in the model's own checkpoint).
        reference: the tensors of the model's checkpoint; None: not known, nothing is compared.

    Raises:
        EngineError: the source cannot be weights of this model.
    """
    if isinstance(source, str | Path):
        folder = Path(source)
        _check(folder, reference)
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="unspool-weights-"))
    try:
        _write(source, folder)
        _check(folder, reference)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shapes_of(folder: Path) -> Shapes | None:
    """Names and shapes of a folder's safetensors, from their headers; None where it has none."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    shapes: Shapes = {}
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def _check(folder: Path, reference: Shapes | None) -> None:
    if not folder.is_dir():
        raise EngineError(f"there is no folder {str(folder)!r} to take weights from; check the path")
    if (folder / "adapter_config.json").is_file():
        raise EngineError(
            f"{str(folder)!r} is a LoRA adapter, which vLLM does not merge: make the engine with adapters={{name: "
            "folder}} and name it in a request's extra, or merge it (peft's merge_and_unload) and give the module"
        )
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        raise EngineError(f"{str(folder)!r} holds no weights ({', '.join(_WEIGHTS)}); give a checkpoint's folder")
    shapes = shapes_of(folder)
    if shapes is not None and reference is not None:
        _compare(shapes, reference)


def _compare(shapes: Shapes, reference: Shapes) -> None:
    unknown = sorted(set(shapes) - set(reference) - {_TIED})
    if unknown:
        raise EngineError(
            f"the model has no weight {unknown[0]!r} ({len(unknown)} unknown); give weights of this model"
        )
    missing = sorted(set(reference) - set(shapes) - {_TIED})
    if missing:
        raise EngineError(f"weight {missing[0]!r} is missing ({len(missing)} in all); give a whole checkpoint")
    for name, shape in shapes.items():
        if shape != reference.get(name, shape):
            raise EngineError(
                f"weight {name!r} has shape {shape}, the model's has {reference[name]}; give weights of this model"
            )


def _write(source: Any, folder: Path) -> None:
    """Write a module or a state dict as safetensors."""
    from torch import nn

    from unspool.engines.torch.weights import merge_adapters, plain_name

    module = merge_adapters(source) if isinstance(source, nn.Module) else None
    if module is not None and hasattr(module, "save_pretrained"):
        module.save_pretrained(folder)  # type: ignore[operator]
        return
    state = source if module is None else module.state_dict()
    if not isinstance(state, Mapping):
        raise EngineError(
            f"weights come from a module, a state dict or a folder, not from {type(source).__name__}; give one of these"
        )
    _save({plain_name(name): tensor for name, tensor in state.items()}, folder / "model.safetensors")


def _save(state: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    own: dict[str, Any] = {}
    for name, tensor in state.items():
        value = tensor.detach().cpu().contiguous()
        own[name] = value.clone() if value.data_ptr() in seen else value  # tied tensors share their memory
        seen.add(value.data_ptr())
    save_file(own, path, metadata={"format": "pt"})
