"""Messages made ready for a template, without touching the caller's.

What comes from outside (user and tool messages here, tools in `tools`) can never become control tokens: where it holds
an added token's string, a placeholder that nobody can guess goes through the template instead, and `Prepared.encode`
writes the string as plain text in its place. Everything else passes as it is, but for what templates cannot take: JSON
text where arguments should be an object, lone surrogates, bytes, and content in the form (string or parts) that the
template does not read; a part that is no text is refused where the template reads no parts.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unspool.template.encoding import Encoder, replace_surrogates
from unspool.types import MessageDict, TemplateError

ContentForm = Literal["string", "parts", "both"]
ArgumentForm = Literal["object", "string"]
IdForm = Literal["any", "nine"]

_MARK = "u" + secrets.token_hex(9)
_PLACEHOLDER = re.compile(_MARK + r"(\d+)z")
_FROM_OUTSIDE = frozenset(("user", "tool", "ipython", "function", "observation"))


def sentinel(name: str = "") -> str:
    """A word that stands in no conversation."""
    return f"{_MARK}s{name}z"


@dataclass(frozen=True, slots=True)
class Forms:
    """How a template wants contents, call arguments and call ids (Mistral's: nine letters and digits)."""

    content: ContentForm = "string"
    arguments: ArgumentForm = "object"
    ids: IdForm = "any"


def placeholder(number: int) -> str:
    """What stands for a piece of control text until `Prepared.encode`."""
    return f"{_MARK}{number}z"


class Prepared:
    """Messages for one render, and the control text that was taken out of them, behind that of the tools."""

    __slots__ = ("_encoder", "_forms", "_hits", "messages")

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], encoder: Encoder, forms: Forms, hits: Sequence[str] = ()
    ) -> None:
        self._encoder = encoder
        self._forms = forms
        self._hits: list[str] = [*hits]
        self.messages: list[MessageDict] = [self._message(message) for message in checked(messages)]

    def encode(self, text: str, last: int | None = None, *, behind: bool = False) -> list[int]:
        """Ids of a rendered text; `behind`: it follows the token `last` (None: plain text), else it is the start."""
        if not self._hits:
            return self._encoder.encode_behind(text, last) if behind else self._encoder.encode(text)
        ids: list[int] = []
        parts = _PLACEHOLDER.split(text)  # text, number, text, number, ..., text
        for index, part in enumerate(parts):
            if index % 2:
                ids += self._encoder.encode_control_text(self._hits[int(part)])
            elif index or behind:
                ids += self._encoder.encode_behind(part, None if index else last)
            elif part:
                ids += self._encoder.encode(part)
        return ids

    # ------------------------------------------------------------------ one message

    def _message(self, message: Mapping[str, Any]) -> MessageDict:
        out = dict(message)
        from_outside = message["role"] in _FROM_OUTSIDE
        for key, value in message.items():
            if key == "tool_calls":
                if value:
                    out[key] = [self._call(call) for call in value]
            elif value is not None and key != "role":
                out[key] = self._value(value, from_outside)
        if self._forms.ids == "nine" and isinstance(out.get("tool_call_id"), str):
            out["tool_call_id"] = _nine(out["tool_call_id"])
        content = out.get("content")
        if isinstance(content, str):
            if self._forms.content == "parts":
                out["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and self._forms.content == "string":
            out["content"] = _joined(content)
        return out

    def _value(self, value: Any, from_outside: bool) -> Any:
        if isinstance(value, str):
            return self._text(value, from_outside)
        if isinstance(value, bytes):
            return self._text(value.decode("utf-8", "replace"), from_outside)
        if isinstance(value, Mapping):
            return {key: self._value(inner, from_outside) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(inner, from_outside) for inner in value]
        return value

    def _text(self, text: str, from_outside: bool) -> str:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                text = replace_surrogates(text)
        if from_outside and self._encoder.has_control_text(text):
            return self._without_control_text(text)
        return text

    def _without_control_text(self, text: str) -> str:
        parts: list[str] = []
        start = 0
        for match in self._encoder.control_text(text):
            parts += (text[start : match.start()], placeholder(len(self._hits)))
            self._hits.append(match[0])
            start = match.end()
        return "".join((*parts, text[start:]))

    def _call(self, call: Any) -> Any:
        """A call with its arguments in the form that the template takes."""
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            out = {**self._value(call, False), "function": self._call(call["function"])}
            if self._forms.ids == "nine" and isinstance(out.get("id"), str):
                out["id"] = _nine(out["id"])
            return out
        if "arguments" not in call:
            return call
        arguments = call["arguments"]
        if self._forms.arguments == "string":
            if isinstance(arguments, Mapping):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = _decoded(arguments)
        return {**call, "arguments": self._value(arguments, False)}


def _nine(call_id: str) -> str:
    """The id, or a hash of it where it is not nine letters and digits."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _decoded(text: str) -> Any:
    """The object that JSON text holds, or the text where it holds none."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _joined(parts: list[Any]) -> str:
    """Text parts as one string, for a template that would write a list as Python does."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = _kind(part)
            article = "an" if kind[0] in "aeiou" else "a"
            raise TemplateError(
                f"content holds {article} {kind} part, and this chat template renders text only; leave such parts out"
            )
    return "".join(texts)


def _kind(part: Any) -> str:
    """What to call a part that is no text."""
    if not isinstance(part, Mapping):
        return type(part).__name__
    kind = part.get("type") or next(iter(part), None)
    return "textless" if kind == "text" else str(kind or "empty")


def checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages, each of which is a dict with a role.

    Raises:
        TemplateError: one of them is not.
    """
    for message in messages:
        if not isinstance(message, Mapping):
            raise TemplateError(f"a message must be a dict with a role, not {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"a message must have a role that is a string, not {message.get('role')!r}")
    return messages
