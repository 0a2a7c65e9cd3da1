"""Chat messages as an OpenAI-compatible API takes them and gives them.

What is sent holds only what was said: of an assistant's message its content, its calls (arguments as JSON text) and
its refusal; never its thinking, nor what an answer has beside it (`finish_reason`, ...). What comes back is read into
unspool's form, whatever the server leaves out: every call has an id that no other call of the conversation has, and
arguments that are no JSON object are a call that is `bad_json`, for the world to answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from unspool.template.encoding import replace_surrogates
from unspool.types import EngineError, InvalidValueError, Message, MessageDict, ToolCall, ToolInfo, decode_arguments

_SENT: Final = {
    "assistant": ("role", "content", "name", "refusal"),
    "tool": ("role", "content", "tool_call_id", "name"),
}


# --------------------------------------------------------------------------- what is sent


def messages_to_send(messages: Sequence[MessageDict]) -> list[dict[str, Any]]:
    """The conversation in the API's form. Calls without an id get one, and the answers behind them refer to it."""
    sent: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for index, message in enumerate(messages):
        keys = _SENT.get(message["role"])
        out = dict(message) if keys is None else {key: message[key] for key in keys if key in message}
        if message["role"] == "assistant":
            calls = [
                _call_to_send(call, f"call_m{index}_{n}") for n, call in enumerate(message.get("tool_calls") or ())
            ]
            open_ids = [call["id"] for call in calls]
            if calls:
                out["tool_calls"] = calls
            if not out.get("content"):
                out["content"] = None if calls or out.get("refusal") else ""
        elif message["role"] == "tool":
            given = out.get("tool_call_id")
            if not given and open_ids:
                out["tool_call_id"] = open_ids.pop(0)
            elif given in open_ids:
                open_ids.remove(given)
        sent.append({key: _encodable(value) for key, value in out.items()})
    return sent


def _encodable(value: Any) -> Any:
    """A value whose texts can be written as UTF-8: a lone surrogate in them becomes U+FFFD."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return replace_surrogates(value)
    elif isinstance(value, Mapping):
        return {key: _encodable(inner) for key, inner in value.items()}
    elif isinstance(value, (list, tuple)):
        return [_encodable(inner) for inner in value]
    return value


def _call_to_send(call: Mapping[str, Any], new_id: str) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or new_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def tools_to_send(tools: Sequence[ToolInfo]) -> list[dict[str, Any]]:
    """The tools, each within `{"type": "function", "function": ...}`."""
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]


# --------------------------------------------------------------------------- what comes back


def first_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one choice of a completion, which has a message.

    Raises:
        EngineError: it has none.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        said = answer.get("error") or answer
        raise EngineError(f"the API answered without a choice: {said!r:.300}")
    if not isinstance(choices[0].get("message"), Mapping):
        raise EngineError(f"the API answered with a choice that has no message: {choices[0]!r:.300}")
    choice: Mapping[str, Any] = choices[0]
    return choice


def read_message(message: Mapping[str, Any], turn: int, taken: set[str]) -> tuple[Message, MessageDict]:
    """An answer's message, read: as a `Message`, and as the dict that the conversation keeps.

    Args:
        turn: its number (from 0), for the ids of calls that have none of their own.
        taken: ids of the calls before it; those of this one are added.
    """
    thinking = message.get("reasoning_content") or message.get("reasoning")
    calls = message.get("tool_calls") or ()
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = ({"function": message["function_call"]},)
    read = Message(
        _text(message.get("content")),
        thinking if isinstance(thinking, str) else None,
        tuple(_call(call, f"call_{turn}_{place}", taken) for place, call in enumerate(calls)),
    )
    kept = read.to_dict()
    if message.get("refusal"):
        kept["refusal"] = message["refusal"]
    return read, kept


def ids_of_calls(messages: Sequence[MessageDict]) -> set[str]:
    """The ids of all calls of a conversation."""
    calls = (call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping))
    return {call["id"] for call in calls if isinstance(call.get("id"), str)}


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "".join(text for text in texts if isinstance(text, str))
    raise EngineError(f"the API answered with content that is no text: {content!r:.80}")


def _call(call: object, fallback: str, taken: set[str]) -> ToolCall:
    """One call; what is wrong with its arguments is its status, and they stay as they were written."""
    said = call if isinstance(call, Mapping) else {}
    function = said.get("function") if isinstance(said.get("function"), Mapping) else said
    assert isinstance(function, Mapping)
    ident = _free_id(said.get("id"), fallback, taken)
    name, raw = function.get("name"), function.get("arguments")
    name = name if isinstance(name, str) else "" if name is None else str(name)
    try:
        return ToolCall(name, decode_arguments(raw), ident)
    except InvalidValueError as error:
        written = raw if isinstance(raw, str) else json.dumps(raw)
        return ToolCall(name, written, ident, status="bad_json", error=str(error))


def _free_id(given: object, fallback: str, taken: set[str]) -> str:
    """The id that the server gave, where it is one and nobody has it; else one like it that nobody has."""
    ident = given if isinstance(given, str) and given and given not in taken else fallback
    number = 1
    while ident in taken:
        ident, number = f"{fallback}_{number}", number + 1
    taken.add(ident)
    return ident
