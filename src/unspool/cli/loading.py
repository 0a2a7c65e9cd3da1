"""The model and the template that a configuration names, or one sentence that says why they cannot be had.

What can be checked without a model is checked by `check_model` and `template_source`, before any is loaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.config import ModelConfig, TemplateConfig
from unspool.engines.embedded import EMBEDDED, embedded_adapter, ensure_embedded_model
from unspool.engines.quiet import quiet_transformers
from unspool.template import ChatTemplate
from unspool.template.parsers import choose_parser
from unspool.types import InvalidValueError, MissingExtraError, TemplateError, UnspoolError

if TYPE_CHECKING:
    from unspool.engines import TorchEngine

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NO_TORCH = "running a model needs torch and transformers: run `pip install 'unspool[torch]'`"
_NEEDED = {"path": "config.json", "adapter": "adapter_config.json"}
_PATIENCE = 10.0  # seconds that the hub may take to say whether it has a model


def check_model(config: ModelConfig, *, device: bool = True) -> None:
    """Refuse a model, an adapter or (where asked for) a device that there is not; loads and makes nothing."""
    for key, name in (("path", config.path), ("adapter", config.adapter)):
        if name is None or name == EMBEDDED:
            continue
        if Path(name).is_dir():
            if not (Path(name) / _NEEDED[key]).is_file():
                raise InvalidValueError(f"model.{key}: {name} has no {_NEEDED[key]}; give the folder that has it")
        elif not _HUB_NAME.fullmatch(name):
            raise InvalidValueError(
                f"model.{key}: {name} is no folder; give the folder of one, {EMBEDDED!r}, or a name such as owner/model"
            )
    if device and config.device is not None:
        _check_device(config.device)


def _check_device(device: str) -> None:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(_NO_TORCH) from error
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise InvalidValueError(
            f"model.device: {device!r} cannot be used ({first_line(error)}); leave it out for what there is"
        ) from error


def model_folder(path: str) -> str:
    """The folder (or hub name) of a model, made first where the embedded one is asked for.

    Raises:
        InvalidValueError: a name that the hub does not have, or that is not here while the hub cannot be reached.
    """
    if path == EMBEDDED:
        return str(ensure_embedded_model())
    return _found("path", path)


def adapter_folder(adapter: str | None) -> str | None:
    """The folder (or hub name) of the adapter that a configuration names, if it names one."""
    if adapter is None:
        return None
    return str(embedded_adapter()) if adapter == EMBEDDED else _found("adapter", adapter)


def _found(key: str, name: str) -> str:
    """A folder, or a name that the hub has; else the folder of an earlier download.

    The hub is asked once: the libraries that load a model would ask for most of a minute where it cannot be reached.
    """
    if Path(name).is_dir():
        return name
    try:
        from huggingface_hub import HfApi, try_to_load_from_cache
    except ImportError as error:
        raise MissingExtraError(_NO_TORCH) from error
    try:
        HfApi().model_info(name, timeout=_PATIENCE)
    except Exception as error:  # of the hub, of its HTTP library (which changes with its version), or a bad name
        kept = try_to_load_from_cache(name, _NEEDED[key])
        if isinstance(kept, str):
            return str(Path(kept).parent)
        raise InvalidValueError(
            f"model.{key}: {name} is neither a folder nor a model that the hub gives ({first_line(error)}); "
            "check the name and the network, or give the folder of a model"
        ) from error
    return name


def load_torch(config: ModelConfig, folder: str) -> TorchEngine:
    """A `TorchEngine` of the model that the configuration describes.

    Raises:
        InvalidValueError: names the model, and what the libraries that load it say first.
    """
    try:
        from unspool.engines import TorchEngine
    except ImportError as error:
        raise MissingExtraError(_NO_TORCH) from error

    adapter = adapter_folder(config.adapter)
    options: dict[str, Any] = {} if config.max_batch_size is None else {"max_batch_size": config.max_batch_size}
    try:
        with quiet_transformers():
            return TorchEngine.from_pretrained(
                folder,
                adapter=adapter,
                dtype=config.dtype,
                device=config.device or _gpu(),
                threads=config.threads,
                **options,
            )
    except MissingExtraError:
        raise
    except Exception as error:  # of torch, transformers, safetensors and peft: each has its own
        first = error.__cause__ if isinstance(error, UnspoolError) and error.__cause__ else error
        raise InvalidValueError(
            f"model.path: {folder} cannot be loaded ({type(first).__name__}: {first_line(first)}); "
            "look at model.path, model.adapter and model.device"
        ) from error


def _gpu() -> str | None:
    import torch

    return "cuda" if torch.cuda.is_available() else None


def template_source(config: TemplateConfig) -> str | None:
    """The Jinja source that the configuration names, if it names one; refuses an unknown parser too."""
    if config.parser is not None:
        choose_parser("", "", config.parser)
    if config.file is None:
        return None
    try:
        return config.file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(f"template.file: cannot read {config.file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"template.file: {config.file} is no UTF-8 text ({error}); save it as such") from error


def load_template(config: TemplateConfig, folder: str) -> ChatTemplate:
    """The chat template that the configuration describes, with the tokenizer of the folder."""
    source = template_source(config)
    try:
        with quiet_transformers():
            return ChatTemplate(
                folder, chat_template=source, parser=config.parser, thinking=config.thinking, **config.kwargs
            )
    except TemplateError as error:
        if isinstance(error.__cause__, OSError | ValueError):
            raise _no_tokenizer(folder, error.__cause__) from error
        raise InvalidValueError(f"{error} (in a configuration that is template.file)") from error
    except UnspoolError:
        raise
    except Exception as error:  # of the tokenizers library, for files that are damaged
        raise _no_tokenizer(folder, error) from error


def _no_tokenizer(folder: str, reason: BaseException) -> InvalidValueError:
    return InvalidValueError(
        f"model.path: no tokenizer can be loaded from {folder} ({first_line(reason)}); "
        "it needs files such as tokenizer.json and tokenizer_config.json"
    )


def first_line(error: BaseException) -> str:
    """What an error of another library says, without the advice below."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".: ")
