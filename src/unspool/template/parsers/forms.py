"""How a format's call is written, for engines that can hold a model to a form (structured outputs).

What this module promises: whatever fits `one_call` is read by the format's own parser as one call of one of the tools,
with arguments that obey its schema, and nothing beside it but thinking that the prompt had opened. It is written as a
"structural tag", the language of xgrammar that vLLM and SGLang take. A format that is not in `FORMS` has none: those
that write values as plain text have no form in that language whose every value the parser reads as the schema wants it.

Numbers that are too large to handle are the one thing that fits and is refused by parsers all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from unspool.template.parsers import deepseek, hermes
from unspool.template.parsers.base import MarkedParser, ToolParser
from unspool.template.parsers.schema_values import functions
from unspool.template.thinking import CLOSE
from unspool.types import InvalidValueError, ToolInfo

_BLANKS = 1
"""Most blanks in a row between the parts of an object: a model that is held to a form likes to write them for ever."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call is `begin`, with the tool's name where it says `NAME` (`quoted`: as a JSON string), the arguments as JSON,
    and `end`."""

    begin: str
    end: str
    quoted: bool = False


def _deepseek(source: str) -> CallForm:
    """V3 and R1 write the kind of call before the name, and fence the arguments; V3.1 does neither."""
    marks = deepseek.MARKS
    kind, name, fence = ("function", "NAME\n```json\n", "\n```") if "```json" in source else ("NAME", "", "")
    return CallForm(
        f"{marks.section}{marks.call}{kind}{deepseek.SEPARATOR}{name}", f"{fence}{marks.end_call}{marks.end_section}"
    )


FORMS: Mapping[str, Callable[[str], CallForm]] = MappingProxyType(
    {
        "hermes": lambda _: CallForm(
            f'{hermes.OPEN}\n{{"name": NAME, "arguments": ', f"}}\n{hermes.CLOSE}", quoted=True
        ),
        "llama3_json": lambda _: CallForm('{"name": NAME, "parameters": ', "}", quoted=True),
        "deepseek": _deepseek,
    }
)
"""By the parser's name, the form of a call in templates with this source."""


def one_call(
    parser: ToolParser | None,
    source: str,
    tools: Sequence[ToolInfo],
    token_of: Callable[[str], int | None],
    *,
    thinking: bool,
) -> str:
    """The structural tag, as JSON, of a turn that is one call of one of these tools.

    Args:
        parser: of the template.
        source: of the template.
        tools: at least one.
        token_of: the id of a word that is a token of its own; None where it is none.
        thinking: the prompt has opened the thinking: what is left of it, any text, comes first.

    Raises:
        InvalidValueError: the format has no form, or cannot write the name of one of the tools.
    """
    if parser is None or parser.name not in FORMS:
        what = "no tool-call parser" if parser is None else f"the parser {parser.name!r}, which has no form for that"
        raise InvalidValueError(
            f"tool_choice cannot hold a model to a call: the template has {what} (there are: {', '.join(FORMS)}); "
            "give extra={'structured_outputs': ...} of your own"
        )
    form = FORMS[parser.name](source)
    calls = []
    for name, schema in functions(tools).items():
        begin = form.begin.replace("NAME", json.dumps(name, ensure_ascii=False) if form.quoted else name)
        _check_name(parser, form, begin, name)
        content = {"type": "json_schema", "json_schema": _object(schema), "max_whitespace_cnt": _BLANKS}
        marks = parser.openings if isinstance(parser, MarkedParser) else ()
        calls.append(_sequence(*_begin(begin, marks, token_of), content, _text(form.end)))
    turn = {"type": "or", "elements": calls}
    if thinking:
        rest = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"{CLOSE}\n\n"}
        turn = _sequence(rest, turn)
    return json.dumps({"type": "structural_tag", "format": turn}, ensure_ascii=False)


def _begin(begin: str, marks: Sequence[str], token_of: Callable[[str], int | None]) -> list[dict[str, Any]]:
    """The beginning of a call; a mark that counts only where it is a token is asked for as that token."""
    for mark in marks:
        token = token_of(mark)
        if token is not None and mark in begin:
            before, _, behind = begin.partition(mark)
            parts = [*_begin(before, marks, token_of), {"type": "token", "token": token}]
            return [*parts, *_begin(behind, marks, token_of)]
    return [_text(begin)] if begin else []


def _check_name(parser: ToolParser, form: CallForm, begin: str, name: str) -> None:
    read = [(call.name, call.status) for call in parser.parse(f"{begin}{{}}{form.end}").calls]
    if read != [(name, "ok")]:
        raise InvalidValueError(
            f"tool_choice: the format {parser.name} cannot write a call of {name!r}; "
            "give the tool a name of letters, digits, '_' and '-'"
        )


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the arguments; a tool that says nothing of them takes none."""
    return {"type": "object", "properties": {}, **schema}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
