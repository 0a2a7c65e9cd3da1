"""The template under examination: its renders, its messages in the forms that it takes, and what is known of it.

Probing is not done twice: forms, closes and stops are those that `ChatTemplate` itself works with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from unspool.template.chat import ChatTemplate
from unspool.template.encoding import Encoder
from unspool.template.jinja import Renderer
from unspool.template.messages import sentinel
from unspool.template.parsers import PlainFormat
from unspool.template.traits import SENTINEL, Traits, assistant, tail
from unspool.types import MessageDict, TemplateError, ToolInfo

WORD = sentinel("doctor")
"""A word that stands in no template."""

TOOLS: list[ToolInfo] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "A text."},
                    "whole": {"type": "integer", "description": "A number."},
                    "flag": {"type": "boolean", "description": "Yes or no."},
                    "items": {"type": "array", "items": {"type": "string"}, "description": "Some texts."},
                    "more": {
                        "type": "object",
                        "description": "More.",
                        "properties": {"x": {"type": "number", "description": "A number."}},
                    },
                },
                "required": ["text"],
            },
        },
    }
    for name in ("weather", "clock")
]
IDS = ("call00001", "call00002")  # nine letters and digits: Mistral's templates take no others


class Patient:
    """One chat template, and how to talk to it.

    Attributes:
        template: the template itself.
        renderer: renders without any of unspool's own handling of messages.
        encoder: text to ids.
        traits: what the template was found to be like.
        plain: the parser where it writes tools and calls as text, so that the template needs none.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.renderer: Renderer = template._renderer
        self.encoder: Encoder = template._encoder
        self.traits: Traits = template._traits
        self.plain: PlainFormat | None = template.parser if isinstance(template.parser, PlainFormat) else None

    # ------------------------------------------------------------------ messages

    def user(self, text: str = "Hello.") -> MessageDict:
        return {"role": "user", "content": self._content(text)}

    def said(self, text: str = SENTINEL) -> MessageDict:
        """A turn of text."""
        return assistant(text, self.traits.forms)

    def asked(
        self, mark: str = SENTINEL, names: Sequence[str] = ("weather",), text: str = "", **more: Any
    ) -> MessageDict:
        """A turn of calls with the mark as an argument of each."""
        return {
            "role": "assistant",
            "content": self._content(text),
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": self._arguments(mark, more)},
                }
                for name, call_id in zip(names, IDS, strict=False)
            ],
        }

    def answer(self, text: str = "12 degrees", which: int = 0) -> MessageDict:
        name = TOOLS[which]["function"]["name"]
        return {"role": "tool", "name": name, "tool_call_id": IDS[which], "content": self._content(text)}

    def _content(self, text: str) -> Any:
        return self.said(text)["content"]

    def _arguments(self, mark: str, more: Mapping[str, Any]) -> Any:
        if self.traits.forms.arguments == "object":
            return {"text": mark, **more}
        return json.dumps({"text": mark, **more}, ensure_ascii=False)

    # ------------------------------------------------------------------ renders

    def render(self, messages: Sequence[MessageDict], prompt: bool = True, tools: bool = True) -> str:
        """The conversation as text, with two tools and, unless `prompt` is false, the generation prompt.

        Raises:
            TemplateError: the template refuses it.
        """
        given: list[ToolInfo] | None = TOOLS if tools else None
        if self.plain is not None:
            messages, given = self.plain.written(messages), None
        return self.renderer.render(messages, given, prompt)

    def try_render(self, messages: Sequence[MessageDict], prompt: bool = True, tools: bool = True) -> str | None:
        """The same; None where the template refuses it."""
        try:
            return self.render(messages, prompt, tools)
        except TemplateError:
            return None

    def shows(self, messages: Sequence[MessageDict], *words: str, prompt: bool = False) -> bool:
        """Whether all the words stand in the render."""
        rendered = self.try_render(messages, prompt)
        return rendered is not None and all(word in rendered for word in words)

    def refusal(self, messages: Sequence[MessageDict]) -> str | None:
        """What the template says where it refuses the conversation, shortened."""
        try:
            self.render(messages)
        except TemplateError as error:
            return short(str(error).rpartition("these messages: ")[2])
        return None

    # ------------------------------------------------------------------ what is known

    @cached_property
    def renders_calls(self) -> bool:
        return self.shows([self.user(), self.asked()], SENTINEL, "weather")

    @cached_property
    def end(self) -> str:
        """What the template writes behind a last turn of text."""
        return tail(self.try_render([self.user(), self.said()], prompt=False)) or ""

    @cached_property
    def closes(self) -> frozenset[int]:
        """Tokens that end a sampled turn."""
        closes = (self.traits.close.token, self.traits.call_close.token)
        return frozenset((*self.traits.stops, *(token for token in closes if token is not None)))

    def text_of(self, token: int) -> str:
        return self.encoder.text_of.get(token) or self.template.decode([token])


def short(text: str, most: int = 120) -> str:
    """One line, of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def common_beginning(first: str, second: str) -> str:
    """What two texts begin with."""
    ends = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(ends, min(len(first), len(second)))]
