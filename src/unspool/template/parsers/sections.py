"""Calls as a name and a JSON object between marks, in a section of them: what DeepSeek and Kimi K2 have in common.

    <section> <call> head {arguments} <end of call> <call> ... <end of section>

A format gives its marks, and reads the head of a call. An object ends where its JSON ends; marks inside its strings are
text, in broken objects as well. Missing marks behind a whole object are no fault, nor is a missing `<section>`. The
first call's span begins with its section's mark, and the last one's ends with it, so that content holds neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unspool.template.parsers.base import ParsedCall, ParsedText, parsed
from unspool.template.parsers.json_calls import STRING, decode_at, read_arguments, skip_blank
from unspool.template.parsers.marks import next_opening
from unspool.types import CallStatus, InvalidValueError, ToolInfo

FENCE = "```"


@dataclass(frozen=True)
class Marks:
    """The strings (single tokens in the family's tokenizer) that a format puts around its calls."""

    section: str
    end_section: str
    call: str
    end_call: str

    @cached_property
    def openings(self) -> re.Pattern[str]:
        return re.compile(f"{re.escape(self.section)}|{re.escape(self.call)}")

    @cached_property
    def any(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, (self.section, self.end_section, self.call, self.end_call))))

    @cached_property
    def any_or_string(self) -> re.Pattern[str]:
        return re.compile(f"{STRING}|{self.any.pattern}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before a call's arguments, which begin at `at`; `error` where it cannot be read."""

    name: str
    at: int
    id: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SectionParser:
    """The parser of such a format; `read_head(text, at)` reads the head of a call that begins at `at`."""

    name: str
    marks: Marks
    read_head: Callable[[str, int], Head]

    @property
    def openings(self) -> tuple[str, ...]:
        """The words that open calls."""
        return self.marks.section, self.marks.call

    def parse(
        self, text: str, tools: Sequence[ToolInfo] | None = None, *, at: Collection[int] | None = None
    ) -> ParsedText:
        """Find the calls in `text`; the format carries its own types, so `tools` is not needed."""
        return parsed(text, section_calls(text, self.marks, self.read_head, at))


def section_calls(
    text: str, marks: Marks, read_head: Callable[[str, int], Head], counted: Collection[int] | None
) -> Iterator[ParsedCall]:
    """The calls of a text in order; `read_head(text, at)` reads a head that begins at `at`.

    `counted`: the positions at which opening marks count; None: all.
    """
    at, inside = 0, False
    while (opening := next_opening(marks.openings, text, at, counted)) is not None:
        start, opened = opening.span()
        if opening.group() == marks.section:
            first = skip_blank(text, opened)
            if not text.startswith(marks.call, first):
                call = _no_call(text, start, opened, marks)
                yield call
                at, inside = call.end, False
                continue
            opened = first + len(marks.call)
        elif inside and skip_blank(text, at) == start:
            start = at  # the layout between two calls of one section belongs to the second
        call = _call(text, start, opened, marks, read_head(text, opened))
        after = skip_blank(text, call.end)
        inside = not text.startswith(marks.end_section, after)
        yield call if inside else replace(call, end=after + len(marks.end_section))
        at = call.end if inside else after + len(marks.end_section)


def _no_call(text: str, start: int, opened: int, marks: Marks) -> ParsedCall:
    """A section that does not begin with a call."""
    mark = marks.any.search(text, opened)
    stop = len(text) if mark is None else mark.start()
    end = stop if mark is None or marks.openings.match(text, stop) else mark.end()
    return ParsedCall(
        "", text[opened:stop], start, end, "unclosed" if mark is None else "bad_json", f"expected {marks.call}"
    )


def _call(text: str, start: int, opened: int, marks: Marks, head: Head) -> ParsedCall:
    if head.error is not None:
        stop, end = _resume(text, head.at, marks, marks.any)
        cut = stop == end == len(text)
        return ParsedCall("", text[opened:stop], start, end, "unclosed" if cut else "bad_json", head.error, head.id)
    decoded = decode_at(text, head.at)
    if decoded.error is not None:
        stop, end = _resume(text, max(decoded.end, head.at), marks, marks.any_or_string)
        status: CallStatus = "unclosed" if decoded.cut else "bad_json"
        return ParsedCall(head.name, text[head.at : stop], start, end, status, decoded.error, head.id)
    raw, end = text[head.at : decoded.end], decoded.end
    after = skip_blank(text, end)
    if text.startswith(FENCE, after):
        end = after + len(FENCE)
        after = skip_blank(text, end)
    if text.startswith(marks.end_call, after):
        end = after + len(marks.end_call)
    else:
        stop, behind = _resume(text, end, marks, marks.any)
        if behind > stop:
            error = f"invalid JSON: extra text behind the object: {text[end:stop].strip()[:40]}"
            return ParsedCall(head.name, text[head.at : stop], start, behind, "bad_json", error, head.id)
    try:
        arguments = read_arguments(decoded.value)
    except InvalidValueError as fault:
        return ParsedCall(head.name, raw, start, end, "bad_json", str(fault), head.id)
    return ParsedCall(head.name, arguments, start, end, id=head.id)


def _resume(text: str, at: int, marks: Marks, pattern: re.Pattern[str]) -> tuple[int, int]:
    """Where a call ends, before and behind the mark that ends it; the same place where another mark or nothing does."""
    for match in pattern.finditer(text, at):
        if not match.group().startswith('"'):
            stop = match.start()
            return stop, match.end() if match.group() == marks.end_call else stop
    return len(text), len(text)
