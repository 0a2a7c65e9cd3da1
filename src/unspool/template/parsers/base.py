"""What a tool-call parser returns, and the promises that every parser keeps.

A parser reads one model turn, as text, and finds the calls in it. Whatever the text:

- it never raises, and its time grows in proportion to the text;
- every attempt at a call is reported, in order, once; what cannot be executed has a status other than `"ok"`,
  a sentence for the model in `error`, and its raw text as `arguments`; it never turns into a shorter call;
- the calls' spans lie within the text, in order and disjoint, and `content` is the text without them, kept exactly.

A turn that was cut may hold calls that are whole: those are `"ok"`, for nothing that could have followed would
change them. Whether a cut turn's calls are run is not a parser's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from unspool.types import CallStatus, ToolInfo


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One attempt at a call: characters `start` to `end` (half-open) of the text wrote it, its tags included.

    `name` is `""` where it is not known. `arguments` is the decoded object, or raw text where `status` is not `"ok"`.
    `id` is the one the model wrote, if any.
    """

    name: str
    arguments: dict[str, Any] | str
    start: int
    end: int
    status: CallStatus = "ok"
    error: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A turn's text, read: what stands outside its calls, and the calls."""

    content: str
    calls: list[ParsedCall]


@runtime_checkable
class ToolParser(Protocol):
    """One way of writing calls. Parsers keep no state: one instance serves every thread."""

    @property
    def name(self) -> str:
        """The name by which users choose the parser."""

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls in `text`; `tools` gives types where the format itself has none."""


def parsed(text: str, calls: Iterable[ParsedCall]) -> ParsedText:
    """The calls found in `text`, with the text that is left without them."""
    found = list(calls)
    kept, at = [], 0
    for call in found:
        kept.append(text[at : call.start])
        at = call.end
    kept.append(text[at:])
    return ParsedText("".join(kept), found)
