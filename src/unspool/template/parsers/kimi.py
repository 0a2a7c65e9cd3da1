"""Kimi K2: an id that holds the name, and a JSON object, between marks.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

(One line, without the break.) The number counts the calls of a conversation. The whole word `functions.name:0` is the
call's id: the template writes it above the tool's answer.
"""

from __future__ import annotations

import re

from unspool.template.parsers.sections import Head, Marks, SectionParser

ARGUMENTS = "<|tool_call_argument_begin|>"
MARKS = Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")

_HEAD = re.compile(rf"\s*+([^<>\s]++)\s*+{re.escape(ARGUMENTS)}")
_NUMBER = re.compile(r":[0-9]++\Z")


def _head(text: str, at: int) -> Head:
    match = _HEAD.match(text, at)
    if match is None:
        return Head("", at, error=f"expected an id like functions.name:0 and {ARGUMENTS} behind {MARKS.call}")
    word = match.group(1)
    name = _NUMBER.sub("", word).removeprefix("functions.")
    error = None if name else f"the name of the call is missing in its id {word[:40]}"
    return Head(name, match.end(), word, error)


KIMI_K2 = SectionParser("kimi_k2", MARKS, _head)
