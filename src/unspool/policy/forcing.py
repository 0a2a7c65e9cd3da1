"""`tool_choice` at token level: a turn that must call a tool is held to the form that the template writes calls in.

What this module promises: an engine never sees `tool_choice`. `"required"` and a named function become
`structured_outputs`, which an engine obeys or refuses; `"auto"`, `"none"` and None hold the turn to nothing. The prompt
is the same whatever the choice: the tools stand in it, so that the record needs no branch where the choice changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.template import ChatTemplate
from unspool.types import InvalidValueError, ToolInfo

_NAME = "tool_choice"
_FREE = (None, "auto", "none")


def with_form(
    extra: dict[str, Any], template: ChatTemplate, tools: Sequence[ToolInfo], context: Sequence[int]
) -> dict[str, Any]:
    """What goes with a request, its `tool_choice` turned into `structured_outputs` where a call is asked for.

    Args:
        extra: what goes with the turn; it is not changed.
        template: whose format calls are written in.
        tools: on offer.
        context: the prompt that the turn is sampled behind.

    Raises:
        InvalidValueError: there is nothing to call, no such tool, no such choice, two forms, or a format without form.
    """
    if _NAME not in extra:
        return extra
    others = {name: value for name, value in extra.items() if name != _NAME}
    choice = extra[_NAME]
    if choice in _FREE:
        return others
    wanted = _wanted(choice)
    if others.get("structured_outputs") is not None:
        raise InvalidValueError("tool_choice and structured_outputs are two forms for one turn; give one of them")
    if not tools:
        raise InvalidValueError(f"tool_choice is {choice!r}, and no tools are on offer; give tools, or leave it out")
    if wanted is not None:
        names = [_name_of(tool) for tool in tools]
        if wanted not in names:
            raise InvalidValueError(f"tool_choice names {wanted!r}; on offer are: {', '.join(names)}")
        tools = [tool for tool in tools if _name_of(tool) == wanted]
    return {**others, "structured_outputs": {"structural_tag": template.one_call(tools, context)}}


def _wanted(choice: object) -> str | None:
    """The name of the tool that must be called; None: any of them."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return str(function["name"])
    raise InvalidValueError(
        "tool_choice must be 'auto', 'none', 'required' or "
        f"{{'type': 'function', 'function': {{'name': ...}}}}, not {choice!r:.80}"
    )


def _name_of(tool: ToolInfo) -> str:
    return str(tool.get("function", tool).get("name"))
