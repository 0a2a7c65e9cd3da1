"""What a tool-call parser returns, and the promises that every parser keeps.

A parser reads one model turn, as text, and finds the calls in it. Whatever the text:

- it never raises, and its time grows in proportion to the text;
- every attempt at a call is reported, in order, once; what cannot be executed has a status other than `"ok"`,
  a sentence for the model in `error`, and its raw text as `arguments`; it never turns into a shorter call;
- the calls' spans lie within the text, in order and disjoint, and `content` is the text without them, kept exactly.

Two kinds of formats promise a little else, and are parsers of their own kind: where thinking is written like calls
(`TurnParser`), `content` is the text of the messages without their headers; where a format needs no template's help
(`PlainFormat`), the parser also says how tools, calls and answers are written as plain text. Where such a format has
thinking of its own, that stands in `reasoning`, and no part of it in `content`.

A turn that was cut may hold calls that are whole: those are `"ok"`, for nothing that could have followed would
change them. Whether a cut turn's calls are run is not a parser's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from unspool.types import CallStatus, MessageDict, ToolInfo


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
    """A turn's text, read: what stands outside its calls, the calls, and the thinking where the format has its own."""

    content: str
    calls: list[ParsedCall]
    reasoning: str | None = None


@runtime_checkable
class ToolParser(Protocol):
    """One way of writing calls. Parsers keep no state: one instance serves every thread."""

    @property
    def name(self) -> str:
        """The name by which users choose the parser."""

    def parse(self, text: str, tools: Sequence[ToolInfo] | None = None) -> ParsedText:
        """Find the calls in `text`; `tools` gives types where the format itself has none."""


@runtime_checkable
class TurnParser(ToolParser, Protocol):
    """A parser of a format in which thinking, answer and calls are parts of one grammar: one reading splits them."""

    @property
    def control_words(self) -> tuple[str, ...]:
        """The format's control words, as their tokens' texts."""

    def parse(
        self,
        text: str,
        tools: Sequence[ToolInfo] | None = None,
        *,
        behind: str | None = None,
        at: Collection[int] | None = None,
    ) -> ParsedText:
        """Read a turn.

        Args:
            text: the turn.
            tools: as in `ToolParser.parse`.
            behind: how the prompt ends that the turn was written behind; None: as the template's prompts do.
            at: the positions in `text` at which `control_words` stand as tokens; None: wherever they stand.
        """


@runtime_checkable
class MarkedParser(ToolParser, Protocol):
    """A parser of a format whose calls open with words that are tokens in the family's own tokenizer."""

    @property
    def openings(self) -> tuple[str, ...]:
        """These words."""

    def parse(
        self, text: str, tools: Sequence[ToolInfo] | None = None, *, at: Collection[int] | None = None
    ) -> ParsedText:
        """As `ToolParser.parse`; `at`: the positions in `text` at which `openings` count; None: wherever they stand."""


@runtime_checkable
class PlainFormat(ToolParser, Protocol):
    """A format that is plain text throughout, so it works with any template: tools stand in the system message,
    calls in the model's own text, answers in user messages."""

    def instructions(self, tools: Sequence[ToolInfo]) -> str:
        """What to tell the model of these tools and of how to call them."""

    def written(self, messages: Sequence[Mapping[str, Any]]) -> list[MessageDict]:
        """The messages with calls and answers as text: no `tool_calls`, no tool messages, anything else as it is."""


def parsed(text: str, calls: Iterable[ParsedCall]) -> ParsedText:
    """The calls found in `text`, with the text that is left without them."""
    found = list(calls)
    kept, at = [], 0
    for call in found:
        kept.append(text[at : call.start])
        at = call.end
    kept.append(text[at:])
    return ParsedText("".join(kept), found)
