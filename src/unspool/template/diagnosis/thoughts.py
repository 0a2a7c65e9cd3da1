"""What a template does with thinking: whether it writes it and keeps it in earlier turns, and what switches change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unspool.template.diagnosis.findings import Finding
from unspool.template.diagnosis.patient import WORD, Patient
from unspool.template.jinja import Renderer
from unspool.template.thinking import CLOSE, OPEN
from unspool.types import MessageDict

_KEYS = ("reasoning_content", "thinking", "reasoning")
_CONVERSATION = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class Thinking(NamedTuple):
    """What becomes of a turn's thinking.

    Attributes:
        key: of the message, that the template reads; `"content"`: none, and thinking in the content passes.
        behind_tool: it is still there behind a tool's answer; None: that cannot be rendered.
        behind_user: it is still there behind a new user message.
        prompt: whether the generation prompt `"opens"` or `"closes"` it, or neither.
    """

    key: str | None
    behind_tool: bool | None
    behind_user: bool
    prompt: str


def switches(patient: Patient) -> tuple[str, ...]:
    """Variables that the template reads, beside the conversation, the tokenizer's tokens and what Jinja has itself."""
    known = {*_CONVERSATION, *patient.template.tokenizer.special_tokens_map}
    return tuple(sorted(name for name in patient.renderer.switches() - known if not name.endswith("_token")))


def check_thinking(patient: Patient) -> Iterator[Finding]:
    """What becomes of thinking, and the switches that change it."""
    found = _look(patient, patient.renderer)
    changes = "; ".join(_changes(patient, found))
    way = f" (switches: {changes})" if changes else ""
    begins = f"the prompt {found.prompt} it; " if found.prompt else ""
    if found.key is None:
        text = f"{begins}thinking in a message is not rendered, sampled thinking stays{way}"
        yield Finding("thinking", "ok", "no_thinking", text)
        return
    if found.behind_user:
        yield Finding("thinking", "ok", "keeps_thinking", f"{begins}earlier turns keep theirs{way}")
        return
    behind = {True: "kept behind a tool's answer, ", False: "dropped behind a tool's answer, ", None: ""}
    yield Finding(
        "thinking", "note", "drops_thinking",
        f"{begins}{behind[found.behind_tool]}dropped from earlier turns at a new user message{way}",
        "thinking='keep' (the default) keeps what was sampled; thinking='template' branches as the template does",
    )  # fmt: skip


def _look(patient: Patient, renderer: Renderer) -> Thinking:
    def shown(messages: list[MessageDict]) -> bool | None:
        rendered = renderer.try_render(messages, None, generation_prompt=False)
        return None if rendered is None else WORD in rendered

    user, answer = patient.user(), patient.answer()
    call = patient.asked("x") if patient.renders_calls else patient.said("x")
    prompt = (renderer.try_render([user]) or "").rstrip()
    prompt = "opens" if prompt.endswith(OPEN) else "closes" if prompt.endswith(CLOSE) else ""
    for key in _KEYS:
        if shown([user, {**patient.said("x"), key: WORD}]):
            behind_tool = shown([user, {**call, key: WORD}, answer]) if patient.traits.tool_role else None
            behind_user = shown([user, {**patient.said("x"), key: WORD}, user, patient.said("y"), user])
            return Thinking(key, behind_tool, bool(behind_user), prompt)
    inside = patient.said(f"{OPEN}\n{WORD}\n{CLOSE}\n\nx")
    if shown([user, inside]) and shown([user, inside, user]) is False:
        return Thinking("content", None, False, prompt)
    return Thinking(None, None, False, prompt)


def _changes(patient: Patient, usual: Thinking) -> Iterator[str]:
    """What each switch, on or off, changes of it."""
    as_usual = patient.renderer.try_render([patient.user()])
    for name in switches(patient):
        for value in (True, False):
            renderer = patient.renderer.with_variables({name: value})
            prompt = renderer.try_render([patient.user()])
            if prompt is None:  # it wants no truth value
                continue
            other = _look(patient, renderer)
            if other == usual:
                if "think" in name and prompt != as_usual:
                    yield f"{name}={value} changes the prompt"
                continue
            if other.prompt != usual.prompt:
                does = f"{other.prompt or 'neither opens nor closes'} it in the prompt"
            elif other.behind_user != usual.behind_user:
                does = "keeps it" if other.behind_user else "drops it"
            elif other.behind_tool != usual.behind_tool:
                does = "keeps it behind tools" if other.behind_tool else "drops it behind tools"
            else:
                does = "renders it" if usual.key is None else "renders it otherwise" if other.key else "renders none"
            yield f"{name}={value} {does}"
