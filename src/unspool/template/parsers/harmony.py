"""Harmony, the format of gpt-oss: a turn is several messages, each with a header.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Analysis is the thinking; the text of all other channels (final answers, preambles in commentary) is the content,
several parts of either joined by a line break. A message with a recipient is a call, whatever its channel: gpt-oss
now and then calls from the analysis channel, and vLLM reads such calls as well. The recipient stands behind the
channel or behind the role. What a message without a recipient quotes is text: it ends at `<|end|>` or `<|return|>`
only. Arguments end where their JSON ends. A message of another role (an invented tool answer) ends the reading: it
and all behind it stays in the content, for what the model goes on to call rests on an answer that nobody gave.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from unspool.template.parsers.base import ParsedCall, ParsedText
from unspool.template.parsers.json_calls import decode_at, read_arguments, skip_blank
from unspool.template.parsers.marks import Mark, find_marks, first_from
from unspool.template.parsers.schema_values import functions
from unspool.types import InvalidValueError, ToolInfo

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"

_ENDS = frozenset((END, RETURN, CALL))
_HEADER = START + "assistant"
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_NOT_TOOLS = frozenset(("assistant", "user", "system", "developer", "all"))
_PREFIX = "functions."


class HarmonyParser:
    """Channels and calls of gpt-oss."""

    name = "harmony"
    control_words = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

    def parse(
        self,
        text: str,
        tools: Sequence[ToolInfo] | None = None,
        *,
        behind: str | None = None,
        at: Collection[int] | None = None,
    ) -> ParsedText:
        """Read a turn; a message that the prompt has opened goes on in it. The format carries its own types."""
        opened = _opened(behind)
        marks = [
            *find_marks(opened, self.control_words),
            *(
                Mark(mark.word, mark.start + len(opened), mark.end + len(opened))
                for mark in find_marks(text, self.control_words, at)
            ),
        ]
        reader = _Reader(opened + text, marks, len(opened), frozenset(functions(tools)), trusted=at is not None)
        reader.run()
        reasoning = "\n".join(reader.reasoning) if reader.reasoning else None
        return ParsedText("\n".join(part for part in reader.content if part), reader.calls, reasoning)


def _opened(behind: str | None) -> str:
    """The message that the prompt has opened: its header, and what it holds so far."""
    if behind is None:
        return _HEADER
    last = behind.rfind(START)
    if last < 0 or any(end in behind[last:] for end in _ENDS):
        return _HEADER
    return behind[last:]


class _Header(NamedTuple):
    role: str
    channel: str
    recipient: str | None
    said: tuple[int, int]  # what stands behind the role and before its recipient: nothing, as a rule


class _Reader:
    """One reading of the messages from left to right. `skip` characters at the start are the prompt's."""

    def __init__(self, text: str, marks: list[Mark], skip: int, names: frozenset[str], trusted: bool) -> None:
        self._text, self._marks, self._skip, self._names, self._trusted = text, marks, skip, names, trusted
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ParsedCall] = []

    def run(self) -> None:
        at = 0  # the end of the message before
        while at < len(self._text):
            index = first_from(self._marks, at)
            if index == len(self._marks):
                self._keep(at, len(self._text))
                return
            mark = self._marks[index]
            if mark.word in (START, CHANNEL):
                self._keep(at, mark.start)
                at = self._message(index)
            else:
                self._keep(at, mark.start if mark.word in _ENDS else mark.end)
                at = mark.end

    def _message(self, first: int) -> int:
        """Read the message whose header begins with the mark `first`; returns where it ends."""
        start = self._marks[first].start
        last = first + 1
        while last < len(self._marks) and self._marks[last].word in (CHANNEL, CONSTRAIN):
            last += 1
        follows = self._marks[last] if last < len(self._marks) else Mark("", len(self._text), len(self._text))
        header = self._header(first, last, follows.start)
        if not header.role.startswith("assistant"):
            self._keep(start, len(self._text))
            return len(self._text)
        name = self._tool_name(header.recipient)
        if follows.word != MESSAGE:
            if name is None:
                self._keep(start, follows.start)
            else:
                cut = follows.start == len(self._text)
                error = f"the call was cut off before {MESSAGE}" if cut else f"the header of the call lacks {MESSAGE}"
                self._broken(name, start, start, follows.start, error, cut)
            return follows.end if follows.word in _ENDS else follows.start
        if self._keep(*header.said):
            start = header.said[1]
        if name is not None:
            return self._call(name, start, follows.end)
        return self._body(header.channel, follows.end)

    def _header(self, first: int, last: int, end: int) -> _Header:
        role, channel, recipient, said = "assistant", "", None, (0, 0)
        for index in range(first, last):
            mark = self._marks[index]
            part = self._text[mark.end : end if index + 1 == last else self._marks[index + 1].start]
            found = _RECIPIENT.search(part)
            if found is not None:
                recipient = found.group(1)
            if mark.word == START:
                role = part.lstrip()
                behind = mark.end + len(part) - len(role.removeprefix("assistant"))
                said = (behind, mark.end + (found.start() if found else len(part)))
            elif mark.word == CHANNEL:
                channel = part.split(maxsplit=1)[0] if part.strip() else ""
        return _Header(role, channel, recipient, said)

    def _tool_name(self, recipient: str | None) -> str | None:
        """The tool that a recipient names: with or without its namespace; None for people and the model itself."""
        if recipient is None or (recipient in _NOT_TOOLS and recipient not in self._names):
            return None
        return recipient if recipient in self._names else recipient.removeprefix(_PREFIX)

    def _body(self, channel: str, start: int) -> int:
        index = first_from(self._marks, start)
        while index < len(self._marks) and self._marks[index].word not in (END, RETURN):
            index += 1
        closed = index < len(self._marks)
        stop = self._marks[index].start if closed else len(self._text)
        part = self._text[max(start, self._skip) : stop]
        (self.reasoning if channel == "analysis" else self.content).append(part)
        return self._marks[index].end if closed else len(self._text)

    def _call(self, name: str, start: int, body: int) -> int:
        """Read the arguments from `body` on; returns where the call ends."""
        decoded = decode_at(self._text, body)
        after = skip_blank(self._text, decoded.end if decoded.error is None else body)
        index = first_from(self._marks, after)
        follows = self._marks[index] if index < len(self._marks) else None
        closed = follows is not None and follows.start == after and follows.word in _ENDS
        end = follows.end if closed and follows is not None else after
        if decoded.error is not None:
            if closed:  # nothing at all between header and close
                return self._whole(name, {}, start, body, end)
            return self._broken(name, start, body, self._resume(max(decoded.end, body)), decoded.error, decoded.cut)
        opens = follows is not None and follows.start == after and follows.word in (START, CHANNEL)
        if closed or opens or after == len(self._text):
            return self._whole(name, decoded.value, start, body, end)
        junk = self._text[after : after + 40].strip()
        error = f"invalid JSON: extra text behind the object: {junk}"
        return self._broken(name, start, body, self._resume(after), error)

    def _resume(self, position: int) -> int:
        """Where to go on behind a call that could not be read.

        Only a token is known to be its close; a word in the text may stand inside a string of the broken JSON.
        """
        if self._trusted:
            for index in range(first_from(self._marks, position), len(self._marks)):
                if self._marks[index].word in _ENDS:
                    return self._marks[index].end
        return len(self._text)

    def _whole(self, name: str, value: object, start: int, body: int, end: int) -> int:
        try:
            arguments = read_arguments(value)
        except InvalidValueError as error:
            return self._broken(name, start, body, end, str(error))
        if not name:
            return self._broken(name, start, body, end, "the name of the call is missing behind to=functions.")
        self._add(ParsedCall(name, arguments, start, end))
        return end

    def _broken(self, name: str, start: int, body: int, end: int, error: str, cut: bool = False) -> int:
        raw = self._text[max(body, self._skip) : self._before_close(end)]
        self._add(ParsedCall(name, raw, start, end, "unclosed" if cut else "bad_json", error))
        return end

    def _before_close(self, end: int) -> int:
        """Where the mark begins that closes a message at `end`; `end` where none does."""
        for word in _ENDS:
            index = first_from(self._marks, end - len(word))
            if index < len(self._marks) and self._marks[index].word == word and self._marks[index].end == end:
                return self._marks[index].start
        return end

    def _add(self, call: ParsedCall) -> None:
        start, end = max(call.start - self._skip, 0), call.end - self._skip
        if end > start:
            self.calls.append(ParsedCall(call.name, call.arguments, start, end, call.status, call.error))

    def _keep(self, start: int, end: int) -> bool:
        """Keep text outside the messages, which nothing asked for, where it is not blank; says whether it is not."""
        part = self._text[max(start, self._skip) : end]
        if part.strip():
            self.content.append(part)
        return bool(part.strip())
