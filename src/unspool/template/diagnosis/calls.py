"""Tools and calls: whether the model is told of tools, how its calls are read, and what the template makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unspool.template.diagnosis.findings import Finding
from unspool.template.diagnosis.patient import TOOLS, WORD, Patient, common_beginning, short
from unspool.template.parsers import FORMATS, NAMES, choose_parser
from unspool.template.traits import SENTINEL

_ANOTHER = "pass chat_template= with a template of another family that renders them"
_PLAIN = "parser='react' or 'cline', which write tools and calls as plain text"

_HARD: dict[str, Any] = {
    "text": "Zürich \"x\" 'y' \\ <b>\n",
    "whole": -7,
    "flag": True,
    "items": ['a "b"', "ü"],
    "more": {"x": 1.5},
}
_KINDS = {
    "text": "texts with quotes, backslashes or newlines",
    "whole": "numbers",
    "flag": "booleans",
    "items": "lists",
    "more": "objects",
}


def check_tools(patient: Patient) -> Iterator[Finding]:
    """Whether the model is told of tools, and of what they answer."""
    if patient.plain is not None:
        text = f"{patient.plain.name} writes tools and answers as text, whatever the template does"
        yield Finding("tools", "ok", "tools", text)
        return
    traits = patient.traits
    if traits.takes_tools:
        yield Finding("tools", "ok", "tools", "the model is told of tools")
    else:
        yield Finding(
            "tools", "broken", "no_tools", "it ignores tools, so the model is not told of any",
            f"{_ANOTHER}, or {_PLAIN}",
        )  # fmt: skip
    if traits.tool_role:
        where = " behind calls only" if traits.needs_calls else ""
        yield Finding("answers", "ok", "tool_role", f"it renders tool messages{where}")
    else:
        said = f": {short(traits.refusal.rpartition('these messages: ')[2])}" if traits.refusal else ""
        yield Finding(
            "answers", "broken", "no_tool_role", f"it has no tool messages{said}",
            f"{_ANOTHER}, give tool results to the model as user messages, or {_PLAIN}",
        )  # fmt: skip


def check_parser(patient: Patient) -> Iterator[Finding]:
    """Which parser reads the calls, and why that one."""
    template = patient.template
    if template.parser is None:
        yield Finding(
            "parser", "broken", "unknown_format", f"no parser reads its calls: {_no_parser(patient)}",
            "choose one with parser=, or pass chat_template= with a format that has one",
        )  # fmt: skip
        return
    if template._parser_name is not None:
        why = "as was asked for"
    elif choose_parser(template.source) is not None:
        marks = next(form.marks for form in FORMATS if all(mark in template.source for mark in form.marks))
        why = f"the template has {' and '.join(repr(mark) for mark in marks)}"
    else:
        why = f"by the name {short(template._name, 60)!r}"
    yield Finding("parser", "ok", "parser", f"{template.parser.name}: {why}")


def _no_parser(patient: Patient) -> str:
    source, name = patient.template.source, patient.template._name.lower()
    for form in FORMATS:
        if all(mark in source for mark in form.marks):
            return f"the format with {' and '.join(repr(mark) for mark in form.marks)} is known and not supported"
    if any(pattern.search(name) for pattern, _ in NAMES):
        return "neither the template nor the family of its tokenizer has a supported format"
    return "neither the template nor the tokenizer's name says how calls are written"


def check_calls(patient: Patient) -> Iterator[Finding]:
    """What becomes of calls in messages: in a prompt, or on a branch. Sampled calls stay in the record as they are."""
    if patient.plain is not None:
        return
    if not patient.renders_calls:
        alone = {**patient.asked(), "content": None}
        only = " unless their content is None" if patient.shows([patient.user(), alone], SENTINEL) else ""
        said = patient.refusal([patient.user(), patient.asked()])
        what = f"refuses messages with calls ({said})" if said else f"drops the calls of messages, silently{only}"
        yield Finding(
            "calls", "note", "drops_calls", f"it {what}",
            "sampled calls stay in the record; for prompts that hold calls, pass chat_template= with one that "
            "writes them",
        )  # fmt: skip
        return
    if not patient.shows([patient.user(), patient.asked(text=WORD), patient.answer()], SENTINEL, WORD):
        yield Finding(
            "calls", "note", "drops_call_text", "it drops the text of messages with calls",
            "sampled turns keep theirs; for prompts, put the text into a message of its own",
        )  # fmt: skip
    two = patient.asked(SENTINEL, ("weather", "clock"))
    both = patient.try_render([patient.user(), two], prompt=False)
    if both is not None and both.count(SENTINEL) < 2:
        yield Finding(
            "calls", "note", "drops_second_call", "of two calls in a message it writes one",
            "sampled calls stay in the record; in prompts, give each call a message of its own",
        )  # fmt: skip
    if patient.template.parser is not None:
        yield _round_trip(patient)


def _round_trip(patient: Patient) -> Finding:
    """A call that the template writes, read by the parser: a plain one, then one with arguments of every kind."""
    name = patient.template.parser.name if patient.template.parser else ""
    if _read_back(patient, {"text": "Paris"}) != {"text": "Paris"}:
        return Finding(
            "calls", "broken", "unread_calls", f"{name} does not read the call that the template writes",
            "choose another parser=, or pass chat_template= with the template that this parser is for",
        )  # fmt: skip
    other = [key for key, value in _HARD.items() if _read_back(patient, {"text": "x", key: value}).get(key) != value]
    if not other:
        return Finding("calls", "ok", "calls", f"{name} reads what the template writes")
    return Finding(
        "calls", "note", "rewrites_arguments",
        f"arguments in messages do not all come back as they were: {', '.join(_KINDS[key] for key in other)}",
        "sampled calls stay in the record; in prompts, leave such arguments out",
    )  # fmt: skip


def _read_back(patient: Patient, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that went through the template and the parser; none where it did not come through."""
    template = patient.template
    prompt = patient.try_render([patient.user()]) or ""
    mark, more = arguments["text"], {key: value for key, value in arguments.items() if key != "text"}
    whole = patient.try_render([patient.user(), patient.asked(mark, **more)], prompt=False) or ""
    head = common_beginning(prompt, whole)
    ids = patient.encoder.encode(whole[len(head) :])
    stop = next((at for at, token in enumerate(ids) if token in patient.closes), len(ids))
    read = template.parse(ids[: stop + 1], patient.encoder.encode(head), TOOLS).tool_calls
    if len(read) != 1 or read[0].name != "weather" or not isinstance(read[0].arguments, dict):
        return {}
    return read[0].arguments
