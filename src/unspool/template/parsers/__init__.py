"""Tool-call parsers, and the choice of one for a chat template.

A parser is chosen from what the template *is*, never from what a model wrote: a turn that quotes some other format is
text. `FORMATS` is the table of that choice; a new format is one row of it and one entry of `PARSERS`.
"""

from __future__ import annotations

from unspool.template.parsers.base import MarkedParser, ParsedCall, ParsedText, PlainFormat, ToolParser, TurnParser
from unspool.template.parsers.choice import FORMATS, NAMES, PARSERS, choose_parser

__all__ = [
    "FORMATS",
    "NAMES",
    "PARSERS",
    "MarkedParser",
    "ParsedCall",
    "ParsedText",
    "PlainFormat",
    "ToolParser",
    "TurnParser",
    "choose_parser",
]
