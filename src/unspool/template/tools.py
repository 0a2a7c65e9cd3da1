"""Tools made ready for a template: what their descriptions say becomes no control token, as they may come from outside.

Where any string in them (names and keys too) holds an added token's string, a placeholder goes through the template
instead, as in messages. Equal strings get equal placeholders, so what a template compares stays equal. A list of tools
is looked through once, and found again by what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from unspool.template.encoding import Encoder
from unspool.template.messages import placeholder
from unspool.types import TemplateError, ToolInfo

_MOST = 16


class SafeTools(NamedTuple):
    """Tools for a render, and the control text that was taken out of them, by number of the placeholder."""

    tools: list[ToolInfo] | None
    hits: tuple[str, ...] = ()


class ToolGuard:
    """Takes control text out of tools."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: tuple[tuple[list[ToolInfo], SafeTools], ...] = ()  # the latest first

    def __call__(self, tools: Sequence[ToolInfo] | None) -> SafeTools:
        """The tools as a template may have them; those without control text are the given ones.

        Raises:
            TemplateError: they are nested too deep.
        """
        if not tools:
            return SafeTools(None)
        given = list(tools)
        for known, safe in self._known:
            if known == given:
                return safe if safe.hits else SafeTools(given)
        try:
            own: list[ToolInfo] = _mapped(given, lambda text: text)
            hits: dict[str, int] = {}
            safe = SafeTools(_mapped(own, lambda text: self._text(text, hits)), tuple(hits))
        except RecursionError as error:
            raise TemplateError("the tools are nested too deep to be rendered; make their schemas flatter") from error
        self._known = ((own, safe), *self._known[: _MOST - 1])
        return safe if safe.hits else SafeTools(given)

    def _text(self, text: str, hits: dict[str, int]) -> str:
        if not self._encoder.has_control_text(text):
            return text
        parts: list[str] = []
        start = 0
        for match in self._encoder.control_text(text):
            parts += (text[start : match.start()], placeholder(hits.setdefault(match[0], len(hits))))
            start = match.end()
        return "".join((*parts, text[start:]))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with each string in it, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    return value
