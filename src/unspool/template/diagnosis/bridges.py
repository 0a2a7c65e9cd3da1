"""Bridges against the template's own renders, ids against ids, in the ways in which conversations go on.

A whole conversation is rendered and encoded; it is cut behind the token that ends the turn in question, and the bridge
behind what stands before the cut must be what stands behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from unspool.template.diagnosis.findings import Finding
from unspool.template.diagnosis.patient import TOOLS, WORD, Patient, common_beginning, short
from unspool.template.traits import SENTINEL
from unspool.types import MessageDict, TemplateError

Outcome: TypeAlias = Literal["exact", "differs", "refused", "no render", "not compared"]

OF_TOOLS = ("tool", "text and tool", "two tools", "thinking", "multi-turn")
"""Scenarios in which tools answer."""
OF_HISTORY = ("text and tool", "thinking", "multi-turn")
"""Scenarios whose render depends on more than the turn's end: here a template may contradict itself."""


class Case(NamedTuple):
    """A conversation up to a turn that ends in the sentinel, and the messages that follow it."""

    before: Sequence[MessageDict]
    new: Sequence[MessageDict]
    cut: bool = False  # by length: without a stop token


class Result(NamedTuple):
    outcome: Outcome
    why: str = ""


def examine(patient: Patient) -> dict[str, Result]:
    """The result of each scenario; of several turns the first that is not exact."""
    found: dict[str, Result] = {}
    for name, case in _cases(patient):
        result = _compare(patient, case)
        if name not in found or found[name].outcome == "exact":
            found[name] = result
    return found


def findings(results: dict[str, Result], tool_role: bool) -> Iterator[Finding]:
    """What there is to say of the results."""
    counted = {
        name: result for name, result in results.items() if result.outcome != "refused" or tool_role or not _tools(name)
    }
    exact = [name for name, result in counted.items() if result.outcome == "exact"]
    if exact:
        text = f"{len(exact)} of {len(results)} scenarios equal the template's own render: {', '.join(exact)}"
        yield Finding("bridge", "ok", "bridge_exact", text)
    for name, result in counted.items():
        if result.outcome == "refused":
            yield Finding(
                "bridge", "broken", "no_bridge", f"{name}: there is no bridge ({result.why})",
                "pass chat_template= with one that renders such turns",
            )  # fmt: skip
        elif result.outcome == "differs":
            level: Literal["note", "broken"] = "note" if name in OF_HISTORY else "broken"
            yield Finding(
                "bridge", level, "bridge_differs", f"{name}: the render goes on with {result.why}",
                "nothing to do where the template itself writes such turns in two ways; "
                "else pass chat_template= with one that does not"
                if level == "note"
                else "pass chat_template= with the template that the model was trained on",
            )  # fmt: skip
        elif result.outcome == "no render":
            alone = name == "two tools" and results["tool"].outcome != "no render"
            code = "one_call_only" if alone else "no_render"
            yield Finding(
                "bridge", "note", code, f"{name}: the template refuses the whole conversation ({result.why})",
                "nothing to do in a rollout, which bridges and renders no earlier turn; as a prompt it is refused",
            )  # fmt: skip
        elif result.outcome == "not compared":
            yield Finding(
                "bridge", "note", "not_compared", f"{name}: the bridge cannot be compared: {result.why}",
                "pass chat_template= with one that writes the model's turns and ends them in a token",
            )  # fmt: skip


def _tools(name: str) -> bool:
    return name in OF_TOOLS


def _cases(patient: Patient) -> Iterator[tuple[str, Case]]:
    user, said, answer = patient.user, patient.said, patient.answer
    asked = patient.asked if patient.renders_calls else lambda mark=SENTINEL, *_, **__: said(mark)
    yield "tool", Case([user(), asked()], [answer()])
    yield "text and tool", Case([user(), asked(text="Let me see.")], [answer()])
    yield "two tools", Case([user(), asked(SENTINEL, ("weather", "clock"))], [answer(), answer("noon", 1)])
    yield "follow-up", Case([user(), said()], [user("And tomorrow?")])
    yield "cut by length", Case([user(), said()], [user("Go on.")], cut=True)
    thinking = {"reasoning_content": f"Hm, {WORD}.", "thinking": f"Hm, {WORD}."}
    yield "thinking", Case([user(), {**asked(), **thinking}], [answer()])
    turns: list[tuple[MessageDict, list[MessageDict]]] = [
        (asked(f"a{SENTINEL}"), [answer()]),
        (said(f"b{SENTINEL}"), [user("And tomorrow?")]),
        (asked(f"c{SENTINEL}"), [answer("13 degrees")]),
        (said(f"d{SENTINEL}"), [user("Thanks.")]),
    ]
    conversation = [user()]
    for turn, new in turns:
        yield "multi-turn", Case([*conversation, turn], new)
        conversation += [turn, *new]


def _compare(patient: Patient, case: Case) -> Result:
    try:
        text = patient.render([*case.before, *case.new])
    except TemplateError as error:
        said = short(str(error).rpartition("these messages: ")[2])
        return _without_render(patient, case, "no render", said)
    at = text.rfind(SENTINEL)
    if at < 0:
        return _without_render(patient, case, "not compared", "the template leaves the model's turn out")
    at += len(SENTINEL)
    ids = patient.encoder.encode(text)
    length = _up_to_cut(patient, text, at, ids) if case.cut else _up_to_stop(patient, text, at, ids)
    if length is None:
        return _without_render(patient, case, "not compared", "no token ends the model's turn")
    try:
        made = patient.template.bridge(ids[:length], case.new, TOOLS)
    except TemplateError as error:
        return Result("refused", short(str(error)))
    if made == ids[length:]:
        return Result("exact")
    expected, got = patient.template.decode(ids[length:]), patient.template.decode(made)
    same = len(common_beginning(expected, got))
    shown = (short(repr(text[same:]), 50) if text[same:] else "nothing" for text in (expected, got))
    return Result("differs", ", the bridge with ".join(shown))


def _without_render(patient: Patient, case: Case, outcome: Outcome, why: str) -> Result:
    last = patient.traits.close.token
    try:
        patient.template.bridge([] if last is None else [last], case.new, TOOLS)
    except TemplateError as error:
        return Result("refused", short(str(error)))
    return Result(outcome, why)


def _up_to_stop(patient: Patient, text: str, at: int, ids: list[int]) -> int | None:
    """How many ids there are up to the first token behind position `at` that ends a turn, with it."""
    here, seen = 0, dict.fromkeys(patient.closes, 0)
    for piece, token in patient.encoder.pieces(text):
        here += len(piece)
        if token in seen:
            seen[token] += 1
            if here > at:
                return [index for index, found in enumerate(ids) if found == token][seen[token] - 1] + 1
    return None


def _up_to_cut(patient: Patient, text: str, at: int, ids: list[int]) -> int | None:
    """How many ids there are up to position `at`; None where no token ends there."""
    before = patient.encoder.encode(text[:at])
    return len(before) if ids[: len(before)] == before else None
