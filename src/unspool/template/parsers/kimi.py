"""Kimi K2: an id that holds the name, and a JSON object, between marks.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

(One line, without the break.) The number counts the calls of a conversation. The whole word `functions.name:0` is the
call's id: the template writes it above the tool's answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from unspool.template.parsers.base import ParsedText, parsed
from unspool.template.parsers.sections import Head, Marks, section_calls
from unspool.types import ToolInfo

ARGUMENTS = "<|tool_call_argument_begin|>"
MARKS = Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")

_HEAD = re.compile(rf"\s*+([^<>\s]++)\s*+{re.escape(ARGUMENTS)}")
_NUMBER = re.compile(r":[0-9]++\Z")


class KimiParser:
    """JSON objects between Kimi K2's marks."""

    name = "kimi_k2"

    openings = (MARKS.section, MARKS.call)

    def parse(
        self, text: str, tools: Sequence[ToolInfo] | None = None, *, at: Collection[int] | None = None
    ) -> ParsedText:
        """Find the calls in `text`; the format carries its own types, so `tools` is not needed."""
        return parsed(text, section_calls(text, MARKS, _head, at))


def _head(text: str, at: int) -> Head:
    match = _HEAD.match(text, at)
    if match is None:
        return Head("", at, error=f"expected an id like functions.name:0 and {ARGUMENTS} behind {MARKS.call}")
    word = match.group(1)
    name = _NUMBER.sub("", word).removeprefix("functions.")
    error = None if name else f"the name of the call is missing in its id {word[:40]}"
    return Head(name, match.end(), word, error)
