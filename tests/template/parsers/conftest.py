"""Real chat templates, and the text that they render for one assistant turn."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

USER = {"role": "user", "content": "Go."}
HEADER = re.compile(r"<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n")
END = re.compile(r"<\|im_end\|>|<\|eo[tm]_id\|>")


def template_folder() -> Path | None:
    spec = importlib.util.find_spec("trl")
    folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates" if spec else None  # type: ignore[arg-type]
    return folder if folder and folder.is_dir() else None


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """The source of every template in trl's folder, by its name."""
    folder = template_folder()
    if folder is None:
        pytest.skip("trl, whose folder of chat templates is read here, is not installed")
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


@pytest.fixture(scope="session")
def turn_text(templates: dict[str, str]) -> Callable[..., str]:
    """`turn_text(template, assistant_message, tools)`: what the model is to write for that message."""
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")

    def render(name: str, message: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> str:
        rendered, _ = rendering.render_jinja_template(
            conversations=[[USER, message]],
            tools=tools,
            chat_template=templates[name],
            bos_token="",
            eos_token="<|im_end|>",
        )
        return END.split(HEADER.split(rendered[0])[-1])[0]

    return render
