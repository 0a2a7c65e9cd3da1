"""Prompts for models whose template tells them nothing of tools, and conversations with more in front.

Messages are never changed in place: what comes back is a new list, with the messages it was given in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unspool.template.parsers import PARSERS, PlainFormat
from unspool.template.parsers.plain_text import described
from unspool.types import InvalidTypeError, InvalidValueError, MessageDict, ToolInfo

_HERMES = """\
You can call functions to help with the user's request. These are the functions, as JSON within <tools></tools>:

<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments within <tool_call></tool_call>, one such block for
each call, and then stop; the answers come back in the next message:

<tool_call>
{{"name": "the function's name", "arguments": {{"the parameter's name": "its value"}}}}
</tool_call>"""

_SYSTEM = ("system", "developer")


def tool_prompt(tools: Sequence[ToolInfo], format: str = "hermes") -> str:
    """What to tell a model of these tools, and of how to call them.

    Args:
        tools: the tools, in OpenAI's form or without its envelope.
        format: `"hermes"`, `"react"` or `"cline"`, the name of the parser that reads such calls.

    Raises:
        InvalidValueError: no prompt is known for the format, or a tool has no name.
    """
    parser = PARSERS.get(format)
    if isinstance(parser, PlainFormat):
        return parser.instructions(tools)
    if format != "hermes":
        known = ["hermes", *(name for name, other in PARSERS.items() if isinstance(other, PlainFormat))]
        raise InvalidValueError(
            f"there is no tool prompt for the format {format!r}: choose one of {', '.join(known)}, "
            "or a chat template that renders tools"
        )
    lines = []
    for name, description, schema in described(tools):
        function = {"name": name, "description": description, "parameters": dict(schema)}
        lines.append(json.dumps({"type": "function", "function": function}, ensure_ascii=False, default=str))
    return _HERMES.format(tools="\n".join(lines))


def with_system(messages: Sequence[Mapping[str, Any]], text: str) -> list[MessageDict]:
    """The messages with `text` in the system message: behind what it says already, or as a new one in front.

    A system message that holds the text stays as it is, so doing it twice changes nothing.
    """
    _text(text)
    rest = list(_copied(messages))
    if not rest or rest[0].get("role") not in _SYSTEM:
        return [{"role": "system", "content": text}, *rest]
    if not says(rest[0], text):
        rest[0]["content"] = _joined(rest[0].get("content"), text)
    return rest


def with_examples(
    messages: Sequence[Mapping[str, Any]], examples: Sequence[Sequence[Mapping[str, Any]]]
) -> list[MessageDict]:
    """The messages with example conversations (few-shot prompting) behind the system message, in their order.

    Examples are lists of messages, of any length: calls and tool answers may be among them. They are context, as all
    messages of a prompt are, so nothing in them is trained.

    Raises:
        InvalidTypeError: `examples` is one conversation rather than a list of them, or no list.
    """
    if not isinstance(examples, Iterable):
        raise InvalidTypeError(
            f"examples must be a list of conversations, not {type(examples).__name__}; an empty list for none"
        )
    shots: list[MessageDict] = []
    for example in examples:
        if isinstance(example, (str, bytes, Mapping)) or not isinstance(example, Iterable):
            raise InvalidTypeError(
                "examples must be a list of conversations, each a list of messages: put it into a list"
            )
        shots += _copied(example)
    rest = _copied(messages)
    head = 1 if rest and rest[0].get("role") in _SYSTEM else 0
    return [*rest[:head], *shots, *rest[head:]]


def before_user(messages: Sequence[Mapping[str, Any]], text: str) -> list[MessageDict]:
    """The messages with `text` in front of the first user message, for templates without a system message."""
    rest = _copied(messages)
    for message in rest:
        if message.get("role") == "user":
            content = message.get("content")
            message["content"] = _joined(text, content) if isinstance(content, str) else [_part(text), *(content or ())]
            return rest
    return [{"role": "user", "content": text}, *rest]


def says(message: Mapping[str, Any], text: str) -> bool:
    """Whether the text stands in the message's content."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return any(isinstance(part, Mapping) and text in str(part.get("text", "")) for part in content)
    return isinstance(content, str) and text in content


def _joined(first: Any, text: Any) -> Any:
    if isinstance(first, (list, tuple)):
        return [*first, _part(text)]
    return f"{first}\n\n{text}" if first else text


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidTypeError(f"the text of a system message must be a string, not {type(text).__name__}")


def _copied(messages: Sequence[Mapping[str, Any]]) -> list[MessageDict]:
    if not isinstance(messages, Iterable):
        raise InvalidTypeError(f"messages must be a list of messages, not {type(messages).__name__}")
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidTypeError(f"a message must be a dict with a role, not {type(message).__name__}")
        found.append(dict(message))
    return found
