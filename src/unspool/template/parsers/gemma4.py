"""Gemma 4: `<|tool_call>call:name{key:value,...}<tool_call|>`, and thinking in `<|channel>thought\\n...\\n<channel|>`.

Strings stand between two `<|"|>` and have no escapes; keys stand bare, or between these as well; numbers, `true`,
`false`, `null`, lists and objects are as in JSON (the first templates of the family wrote `None` for null). Control
words inside a string are text. Thinking may stand at the head of a turn and between its calls, for tool answers are
folded into the model's own turn. A tool answer that the model writes itself ends the reading: it and all behind it is
content, for a call behind it rests on an answer that nobody gave.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from unspool.template.parsers.base import ParsedCall, ParsedText
from unspool.template.parsers.json_calls import MAX_DEPTH, MAX_DIGITS
from unspool.template.parsers.marks import Mark, find_marks, first_from
from unspool.types import ToolInfo

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
THINK, END_THINK = "<|channel>", "<channel|>"
ANSWER, END_ANSWER = "<|tool_response>", "<tool_response|>"
QUOTE = '<|"|>'

_THINKING_OPEN = re.compile(rf"{re.escape(THINK)}(?:thought)?\s*$")
_CHANNEL = re.compile(r"thought(?:\n|$)")
_BLANK = re.compile(r"[ \t\n\r]*+")
_CALL = re.compile(r"\s*+call:([^\s{}\[\]<>:,()\"']++)\s*+\{")
_CALL_BEGUN = re.compile(r"\s*+(?:c|ca|cal|call|call:[^\s{}\[\]<>:,()\"']*+\s*+)?$")
_KEY = re.compile(r"[^:{}\[\],<>\s\"'][^:{}\[\],<>\n\"']*+")
_NUMBER = re.compile(r"-?[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_WORD = re.compile(r"[A-Za-z0-9_.+-]++")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "None": None}


class Gemma4Parser:
    """Calls and thinking of Gemma 4."""

    name = "gemma4"
    control_words = (OPEN, CLOSE, THINK, END_THINK, ANSWER, END_ANSWER, QUOTE)

    def parse(
        self,
        text: str,
        tools: Sequence[ToolInfo] | None = None,
        *,
        behind: str | None = None,
        at: Collection[int] | None = None,
    ) -> ParsedText:
        """Read a turn; thinking that the prompt has opened goes on in it. The format carries its own types."""
        marks = find_marks(text, self.control_words, at)
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        if behind is not None and _THINKING_OPEN.search(behind):
            position = _thinking(text, marks, 0, reasoning)
        while (index := _next(marks, position, (OPEN, THINK, ANSWER))) < len(marks):
            mark = marks[index]
            content.append(text[position : mark.start])
            if mark.word == ANSWER:
                position = mark.end if mark.end == len(text) else mark.start
                break
            if mark.word == THINK:
                position = _thinking(text, marks, mark.end, reasoning)
                continue
            calls.append(_Call(text, marks, mark).read())
            position = calls[-1].end
        content.append(text[position:])
        return ParsedText("".join(content), calls, "\n".join(reasoning) if reasoning else None)


def _next(marks: Sequence[Mark], position: int, words: Collection[str]) -> int:
    index = first_from(marks, position)
    while index < len(marks) and marks[index].word not in words:
        index += 1
    return index


def _thinking(text: str, marks: Sequence[Mark], start: int, reasoning: list[str]) -> int:
    """Read thinking that begins at `start`; returns where it ends, which is the text's end where nothing closes it."""
    index = _next(marks, start, (END_THINK,))
    closed = index < len(marks)
    named = _CHANNEL.match(text, start)
    part = text[named.end() if named else start : marks[index].start if closed else len(text)]
    reasoning.append(part.removesuffix("\n") if closed else part)
    return marks[index].end if closed else len(text)


class _UnreadableError(Exception):
    """A call that cannot be read, from `at` on; `cut`: because the text ends there."""

    def __init__(self, error: str, at: int, cut: bool = False) -> None:
        super().__init__(error)
        self.at, self.cut = at, cut


class _Call:
    """The call that opens with the mark `opened`."""

    def __init__(self, text: str, marks: Sequence[Mark], opened: Mark) -> None:
        self._text, self._marks, self._opened = text, marks, opened

    def read(self) -> ParsedCall:
        start, body = self._opened.start, self._opened.end
        head = _CALL.match(self._text, body)
        name = head.group(1) if head else ""
        try:
            if head is None:
                raise _UnreadableError(
                    f"expected call:name{{...}} behind {OPEN}", body, bool(_CALL_BEGUN.match(self._text, body))
                )
            arguments, end = self._object(head.end(), 1)
        except _UnreadableError as fault:
            end = self._resume(fault.at)
            raw = self._text[body:end].removesuffix(CLOSE)
            return ParsedCall(name, raw, start, end, "unclosed" if fault.cut else "bad_json", str(fault))
        index = first_from(self._marks, end)
        follows = self._marks[index] if index < len(self._marks) else None
        if follows is None or follows.word != CLOSE:
            return ParsedCall(name, arguments, start, end)  # nothing closes it; what follows is not part of it
        junk = self._text[end : follows.start].strip()
        if junk:
            error = f"extra text behind the arguments: {junk[:40]}"
            return ParsedCall(name, self._text[body : follows.start], start, follows.end, "bad_json", error)
        return ParsedCall(name, arguments, start, follows.end)

    def _resume(self, at: int) -> int:
        """Behind the close of a broken call, or at the next call; neither counts inside a string."""
        inside = False
        for index in range(first_from(self._marks, at), len(self._marks)):
            mark = self._marks[index]
            if mark.word == QUOTE:
                inside = not inside
            elif not inside and mark.word == CLOSE:
                return mark.end
            elif not inside and mark.word in (OPEN, ANSWER, THINK):
                return mark.start
        return len(self._text)

    # ------------------------------------------------------------------ values

    def _skip(self, at: int) -> int:
        match = _BLANK.match(self._text, at)
        return match.end() if match else at

    def _expected(self, what: str, at: int) -> _UnreadableError:
        if QUOTE.startswith(self._text[at : at + len(QUOTE)]) and at + len(QUOTE) > len(self._text):
            return _UnreadableError("the call was cut off before its end", at, cut=True)
        return _UnreadableError(f"expected {what}, not {self._text[at : at + 20]!r}", at)

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        """The object whose brace stands before `at`."""
        if depth > MAX_DEPTH:
            raise _UnreadableError(f"arguments are nested more than {MAX_DEPTH} deep", at)
        value: dict[str, Any] = {}
        at = self._skip(at)
        if self._text.startswith("}", at):
            return value, at + 1
        while True:
            key, at = self._key(self._skip(at))
            if key in value:
                raise _UnreadableError(f"the key {key[:80]!r} stands twice in one object", at)
            if not self._text.startswith(":", at):
                raise self._expected("':' behind a key", at)
            value[key], at = self._value(self._skip(at + 1), depth)
            at = self._skip(at)
            if self._text.startswith("}", at):
                return value, at + 1
            if not self._text.startswith(",", at):
                raise self._expected("',' or '}'", at)
            at += 1

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        """The list whose bracket stands before `at`."""
        if depth > MAX_DEPTH:
            raise _UnreadableError(f"arguments are nested more than {MAX_DEPTH} deep", at)
        value: list[Any] = []
        at = self._skip(at)
        if self._text.startswith("]", at):
            return value, at + 1
        while True:
            item, at = self._value(self._skip(at), depth)
            value.append(item)
            at = self._skip(at)
            if self._text.startswith("]", at):
                return value, at + 1
            if not self._text.startswith(",", at):
                raise self._expected("',' or ']'", at)
            at += 1

    def _key(self, at: int) -> tuple[str, int]:
        if self._quoted(at):
            key, at = self._string(at)
            return key, self._skip(at)
        match = _KEY.match(self._text, at)
        if match is None:
            raise self._expected("a key", at)
        return match.group().rstrip(), match.end()

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        if self._quoted(at):
            return self._string(at)
        if self._text.startswith("{", at):
            return self._object(at + 1, depth + 1)
        if self._text.startswith("[", at):
            return self._list(at + 1, depth + 1)
        word = _WORD.match(self._text, at)
        if word is None:
            raise self._expected(f"a value (a string is written {QUOTE}text{QUOTE})", at)
        if word.end() == len(self._text):
            raise self._expected("", word.end())
        if word.group() in _WORDS:
            return _WORDS[word.group()], word.end()
        if not _NUMBER.fullmatch(word.group()):
            raise self._expected(f"a value (a string is written {QUOTE}text{QUOTE})", at)
        return _number(word.group(), at), word.end()

    def _quoted(self, at: int) -> bool:
        index = first_from(self._marks, at)
        return index < len(self._marks) and self._marks[index][:2] == (QUOTE, at)

    def _string(self, at: int) -> tuple[str, int]:
        start = at + len(QUOTE)
        index = _next(self._marks, start, (QUOTE,))
        if index == len(self._marks):
            raise _UnreadableError("the call was cut off inside a string", len(self._text), cut=True)
        return self._text[start : self._marks[index].start], self._marks[index].end


def _number(word: str, at: int) -> int | float:
    if word.lstrip("-").isdigit():
        if len(word) > MAX_DIGITS:
            raise _UnreadableError(f"a number of {len(word)} digits is too large", at)
        return int(word)
    value = float(word)
    if not math.isfinite(value):
        raise _UnreadableError(f"the number {word[:40]} is too large", at)
    return value
