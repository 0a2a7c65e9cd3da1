"""Rendered tails kept for reuse: what a template writes around texts that it passes through in one known way.

A skeleton is kept only for a kind of messages for which the template has been shown to write every text verbatim, or
contents stripped, or as JSON, and to do nothing else: with spaces, quotes, markup and other hard cases in them, and
with every string that stands in the template's own source, which is what a template could compare a text with. Where
one of these renders differs there is no skeleton, and such messages are rendered each time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

from unspool.template.encoding import Encoder
from unspool.template.jinja import Renderer
from unspool.template.messages import sentinel
from unspool.types import MessageDict, TemplateError, ToolInfo

TailOf: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Sequence[ToolInfo] | None], str]
Kind: TypeAlias = tuple[tuple[str, ...], ...]
"""Of each message its role, then the keys whose values are slots."""

_USES_BEFORE_LEARNING = 3
_MOST = 256
_MOST_TOOLS = 16
_ROLES = ("tool", "user")
_SLOT_KEYS = ("content", "name", "tool_call_id")
_PLAIN_KEYS = frozenset(("role", *_SLOT_KEYS))
_WAYS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
"""Ways in which templates write a content."""
_OTHER = ("x", "call_0", "functions.x:0", "123456789", "a.b-c d", "'\"\\")
_HARD = (
    "",
    " ",
    "  x  ",
    "\n\nx\n\n",
    "\t\r\nx\r\n",
    "'x' \"y\" `z` \\n \\",
    '{"a": [1, null, true], "b": "\\u00e9"}',
    "[1, 2]",
    "7",
    "true",
    "null",
    "<b>&amp;</b> {{ x }} {% if %} {# #}",
    "مرحبا 👩‍👩‍👧 é ß ﬁ",
    "\x00\x1f\x7f\u2028\ufeff",
    "X" * 70_000,
)


class Skeleton(NamedTuple):
    """A tail: text, and the numbers of the slots between; and how contents are written."""

    parts: tuple[str | int, ...]
    way: Callable[[str], str]

    def filled(self, kind: Kind, slots: Sequence[str]) -> str:
        """The tail with these texts in its slots."""
        if self.way is not str:
            keys = (key for _, *keys in kind for key in keys)
            slots = [self.way(text) if key == "content" else text for key, text in zip(keys, slots, strict=True)]
        return "".join([part if isinstance(part, str) else slots[part] for part in self.parts])


_SLOT = re.compile(re.escape(sentinel("slot")[:-1]) + r"(\d+)ez")


class Skeletons:
    """The tails of one template, by kind of messages."""

    def __init__(self, renderer: Renderer, encoder: Encoder, tail_of: TailOf) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._tail_of = tail_of
        self._uses: dict[Kind, int] = {}
        self._known: dict[Kind, Skeleton | None] = {}
        self._tools: list[tuple[Sequence[ToolInfo], dict[Kind, bool]]] = []
        self._texts: list[str] | None = None

    def tail(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolInfo] | None) -> str | None:
        """The tail that these messages render to; None where it has to be rendered."""
        kind: list[tuple[str, ...]] = []
        slots: list[str] = []
        for message in messages:
            if type(message) is not dict:
                return None
            role = message.get("role")
            if role not in _ROLES or "content" not in message or not _PLAIN_KEYS.issuperset(message):
                return None
            filled = [role]
            for key in _SLOT_KEYS:
                value = message.get(key)
                if value is not None:
                    if not self._passes(value) or not (value or key == "content"):
                        return None
                    filled.append(key)
                    slots.append(value)
            kind.append(tuple(filled))
        of_this_kind = tuple(kind)
        skeleton = self._skeleton(of_this_kind)
        if skeleton is None or (tools and not self._is_independent_of(tools, of_this_kind, skeleton)):
            return None
        return skeleton.filled(of_this_kind, slots)

    def _passes(self, text: Any) -> bool:
        """Whether it goes through `Prepared` as it is."""
        if type(text) is not str or self._encoder.has_control_text(text):
            return False
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                return False
        return True

    # ------------------------------------------------------------------ learning

    def _skeleton(self, kind: Kind) -> Skeleton | None:
        if kind in self._known:
            return self._known[kind]
        if len(self._uses) >= _MOST:  # names without end: forget, and begin again
            self._uses.clear()
            self._known.clear()
        self._uses[kind] = uses = self._uses.get(kind, 0) + 1
        if uses < _USES_BEFORE_LEARNING:
            return None
        self._known[kind] = skeleton = self._learned(kind)
        return skeleton

    def _learned(self, kind: Kind) -> Skeleton | None:
        words = _words(kind)
        try:
            split = _SLOT.split(self._tail_of(_messages(kind, words), None))
            parts = tuple(int(part) if at % 2 else part for at, part in enumerate(split))
            for skeleton in (Skeleton(parts, way) for way in _WAYS):
                if not any(self._differs(kind, skeleton, slots) for slots in self._trials(kind, words)):
                    return skeleton
        except TemplateError:
            pass
        return None

    def _trials(self, kind: Kind, words: list[str]) -> Iterator[list[str]]:
        """Fillings of the slots: every hard text in all slots of one key, then the hardest in each slot alone."""
        keys = [key for _, *keys in kind for key in keys]
        texts = self._hard_texts()
        for name in ("content", "name", "tool_call_id"):
            for text in texts if name == "content" else filter(None, texts) if name == "name" else _OTHER:
                yield [text if key == name else word for key, word in zip(keys, words, strict=True)]
        for at, key in enumerate(keys):
            for text in _HARD if key == "content" else _OTHER:
                if self._passes(text):
                    yield [*words[:at], text, *words[at + 1 :]]

    def _hard_texts(self) -> list[str]:
        if self._texts is None:
            found = list(_HARD)
            for literal in self._renderer.literals():
                found += (literal, f"{literal}x", f"x{literal}", f"x {literal} x")
            self._texts = [text for text in dict.fromkeys(found) if self._passes(text)]
        return self._texts

    def _differs(self, kind: Kind, skeleton: Skeleton, slots: list[str]) -> bool:
        return self._tail_of(_messages(kind, slots), None) != skeleton.filled(kind, slots)

    # ------------------------------------------------------------------ tools

    def _is_independent_of(self, tools: Sequence[ToolInfo], kind: Kind, skeleton: Skeleton) -> bool:
        """Whether the tail is the same with these tools as without any."""
        verdicts = next((verdicts for known, verdicts in self._tools if known == tools), None)
        if verdicts is None:
            verdicts = {}
            self._tools = [(deepcopy(tools), verdicts), *self._tools[: _MOST_TOOLS - 1]]
        verdict = verdicts.get(kind)
        if verdict is None:
            words = _words(kind)
            try:
                verdict = self._tail_of(_messages(kind, words), tools) == skeleton.filled(kind, words)
            except TemplateError:
                verdict = False
            verdicts[kind] = verdict
        return verdict


def _words(kind: Kind) -> list[str]:
    """A word of its own for each slot."""
    return [sentinel(f"slot{index}e") for index in range(sum(len(keys) for _, *keys in kind))]


def _messages(kind: Kind, slots: Sequence[str]) -> list[MessageDict]:
    values = iter(slots)
    return [{"role": role, **{key: next(values) for key in keys}} for role, *keys in kind]
