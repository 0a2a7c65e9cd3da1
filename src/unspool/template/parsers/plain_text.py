"""What formats of plain text share: descriptions of tools for a system message, and histories written as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unspool.types import InvalidValueError, MessageDict, ToolInfo, decode_arguments


def described(tools: Sequence[ToolInfo]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Name, description and parameters schema of each tool, from tools in OpenAI's form or without its envelope.

    Raises:
        InvalidValueError: one of them has no name.
    """
    found = []
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise InvalidValueError(
                f"a tool must be a dict with a name, or with one under 'function', not {tool!r:.80}"
            )
        schema = inner.get("parameters")
        found.append(
            (inner["name"], str(inner.get("description") or ""), schema if isinstance(schema, Mapping) else {})
        )
    return found


def properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of a parameters schema; empty where it has none."""
    found = schema.get("properties")
    return dict(found) if isinstance(found, Mapping) else {}


def required(schema: Mapping[str, Any]) -> list[str]:
    """The names of the required parameters."""
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, (list, tuple)) else []


def as_text(value: object) -> str:
    """A value as a tag or a line holds it: strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def written(
    messages: Sequence[Mapping[str, Any]],
    call: Callable[[str, dict[str, Any]], str],
    answer: Callable[[str, str], str],
) -> list[MessageDict]:
    """Messages with calls and answers as text.

    A call stands behind the content of its message; the answers to one turn become one user message, a line or block
    each, for many templates want the roles to alternate.

    Args:
        messages: the conversation, or a part of it.
        call: writes a call, given its name and arguments.
        answer: writes an answer, given the tool's name and the answer's text.
    """
    out: list[MessageDict] = []
    answering = False
    for message in messages:
        if message.get("role") == "tool":
            text = answer(str(message.get("name") or ""), _content(message.get("content")))
            if answering:
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text})
            answering = True
            continue
        answering = False
        calls = message.get("tool_calls")
        if not calls:
            out.append(dict(message))
            continue
        texts = [text for text in (_content(message.get("content")).rstrip(), *_calls(calls, call)) if text]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        out.append({**rest, "content": "\n".join(texts)})
    return out


def _calls(calls: Any, call: Callable[[str, dict[str, Any]], str]) -> list[str]:
    texts = []
    for item in calls if isinstance(calls, (list, tuple)) else ():
        inner = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(inner, Mapping):
            continue
        raw = inner.get("arguments")
        try:
            texts.append(call(str(inner.get("name") or ""), decode_arguments(raw)))
        except InvalidValueError:  # a call that could not be read was answered with an error: it stays as it was
            texts.append(as_text(raw))
    return texts


def _content(content: object) -> str:
    """Content as text; of a list of parts, its text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        parts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        return "".join(part for part in parts if isinstance(part, str))
    return as_text(content)
