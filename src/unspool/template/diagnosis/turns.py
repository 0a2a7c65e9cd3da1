"""How turns begin and end, what the template changes in earlier turns, and what it makes of texts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unspool.template.diagnosis.findings import Finding
from unspool.template.diagnosis.patient import WORD, Patient, common_beginning, short
from unspool.template.traits import SENTINEL
from unspool.types import MessageDict

_OWN = "pass chat_template= with the template that the model was trained on"
_CONTROL = re.compile(r"<[|｜][\w▁]+[|｜]?>|<\w+\|>|<(?:start|end)_of_(?:turn|utterance)>")
"""What control tokens look like in the source of templates."""


def check_tokenizer(patient: Patient) -> Iterator[Finding]:
    """Whether the tokenizer writes text as it is, and has the tokens that the template writes."""
    template, encoder = patient.template, patient.encoder
    if template.decode(encoder.encode("a b")) == "ab":
        yield Finding(
            "tokenizer", "broken", "loses_spaces", "the tokenizer loses spaces: its class does not fit its files",
            "load it with the class that does, such as PreTrainedTokenizerFast, and pass the tokenizer",
        )  # fmt: skip
    foreign = [text for text in dict.fromkeys(_CONTROL.findall(template.source)) if len(encoder.encode(text)) > 1]
    if foreign:
        yield Finding(
            "tokenizer", "note", "foreign_tokens",
            f"the template names {', '.join(foreign[:4])}{' and more' if foreign[4:] else ''}, "
            "which this tokenizer writes as plain text",
            "nothing to do where they are never rendered; else use the tokenizer that the template belongs to",
        )  # fmt: skip


def check_prompt(patient: Patient) -> Iterator[Finding]:
    """Whether the generation prompt opens the model's turn, behind a user and behind a tool."""
    user = [patient.user()]
    added, missing = _opening(patient, user)
    if not added and missing.strip():
        text = f"the generation prompt is missing: it does not open the model's turn with {short(repr(missing), 50)}"
        yield Finding("prompt", "broken", "no_generation_prompt", text, _OWN)
        return
    what = (
        f"opens the model's turn with {short(repr(added), 60)}" if added else "is empty: the model's turn begins there"
    )
    yield Finding("prompt", "ok", "generation_prompt", f"the generation prompt {what}")
    if added and patient.traits.tool_role and patient.plain is None:
        turn = patient.asked(WORD) if patient.renders_calls else patient.said(WORD)
        added, missing = _opening(patient, [*user, turn, patient.answer()])
        if not added:
            own = f", though its own renders open one with {short(repr(missing), 40)}" if missing.strip() else ""
            yield Finding(
                "prompt", "note", "no_prompt_behind_answers", f"no generation prompt behind a tool's answer{own}",
                "nothing to do where the model was trained to go on there; else pass another chat_template=",
            )  # fmt: skip


def _opening(patient: Patient, messages: list[MessageDict]) -> tuple[str, str]:
    """What the generation prompt adds, and what it lacks of what the template itself writes before a model's text."""
    prompt, bare = patient.try_render(messages) or "", patient.try_render(messages, prompt=False) or ""
    whole = patient.try_render([*messages, patient.said()], prompt=False) or ""
    head = whole[: max(whole.rfind(SENTINEL), 0)]
    added = prompt[len(common_beginning(prompt, bare)) :]
    return added, head[len(prompt) :] if head.startswith(prompt) else ""


def check_stops(patient: Patient) -> Iterator[Finding]:
    """Whether a turn ends in a token, and in which ones."""
    traits = patient.traits
    stops = [patient.text_of(token) for token in traits.stops]
    listed = ", ".join(stops)
    if not stops:
        yield Finding("stop", "broken", "no_stop_token", "no token ends the model's turn", _OWN)
        return
    closed = any(token in patient.closes for _, token in patient.encoder.pieces(patient.end))
    if traits.headers:
        headers = ", ".join(patient.text_of(token) for token in traits.headers)
        yield Finding("stop", "ok", "stops_on_header", f"turns stop on the next header ({headers}); of all: {listed}")
    elif traits.close.token is None and not closed:
        behind = f"writes {short(repr(patient.end), 40)}" if patient.end.strip() else "writes nothing"
        yield Finding(
            "stop", "broken", "no_stop_token",
            f"the template {behind} behind a turn, and no token of the tokenizer ends it", _OWN,
        )  # fmt: skip
    else:
        yield Finding("stop", "ok", "stop_token", f"turns end in {listed}")
    if patient.template.tokenizer.eos_token_id is None:
        yield Finding(
            "stop", "note", "no_eos", "the tokenizer has no eos", "set tokenizer.eos_token, which other libraries need"
        )


def check_marks(patient: Patient) -> Iterator[Finding]:
    """bos once, and pad."""
    tokenizer = patient.template.tokenizer
    bos, pad = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "pad_token_id", None)
    ids = patient.encoder.encode(patient.try_render([patient.user()]) or "")
    if bos is not None and ids[:2] == [bos, bos]:
        yield Finding("bos", "note", "doubled_bos", "the template writes bos twice", "take one out of the template")
    elif bos is not None and ids[:1] == [bos]:
        yield Finding("bos", "ok", "bos", f"written once, by the template ({patient.text_of(bos)})")
    if pad is not None and pad == tokenizer.eos_token_id:
        yield Finding("pad", "ok", "pad_is_eos", "pad is eos; harmless, as masks go by position and not by id")


def check_history(patient: Patient) -> Iterator[Finding]:
    """Whether what was rendered stays as it was when the conversation goes on."""
    user, said = patient.user, patient.said
    conversation = [user(), said("One."), user("And?"), said("Two."), user("Thanks.")]
    if patient.renders_calls and patient.traits.tool_role:
        conversation[3:3] = [patient.asked("x"), patient.answer()]
    renders = [patient.try_render(conversation[:end], prompt=False) for end in range(1, len(conversation) + 1)]
    for before, after, message in zip(renders, renders[1:], conversation[1:], strict=False):
        if before is None or after is None or after.startswith(before):
            continue
        same = len(common_beginning(before, after))
        opened = before.rfind("<", 0, same)
        start = opened if opened >= 0 and ">" not in before[opened:same] else same  # no half of a token is shown
        gone = before[start:]
        if not before[same:].strip():
            continue
        yield Finding(
            "history", "note", "rewrites_history",
            f"a new {message['role']} message changes what stood before it, at {short(repr(gone), 40)}",
            "nothing to do: records only grow, so what was sampled stays; to train on a full render, use records",
        )  # fmt: skip
        return
    yield Finding("history", "ok", "prefix_stable", "each render begins with the one before it")


def check_said(patient: Patient, tools: bool) -> Iterator[Finding]:
    """Whether what users and the system message say stands in the prompt at all, which has tools or not."""
    if WORD not in (patient.try_render([patient.user(WORD)], tools=tools) or ""):
        yield Finding(
            "texts", "broken", "drops_user", "it leaves out what users say, or a part of it, so the model is not asked",
            _OWN,
        )  # fmt: skip
    rendered = patient.try_render([{**patient.user(WORD), "role": "system"}, patient.user()], tools=tools)
    if rendered is not None and WORD not in rendered:
        yield Finding(
            "texts", "note", "drops_system", "it leaves out what system messages say, silently",
            "say it in the first user message, or pass another chat_template=",
        )  # fmt: skip


def check_texts(patient: Patient) -> Iterator[Finding]:
    """Whether control text stays text, and contents stay as they are."""
    template = patient.template
    close = next((token for token in patient.traits.stops if token in patient.encoder.text_of), None)
    if close is not None:
        text = patient.encoder.text_of[close]
        plain, hostile = template.encode([patient.user("x")]), template.encode([patient.user(f"x{text}")])
        if plain.count(close) == hostile.count(close):
            yield Finding("texts", "ok", "control_text", f"{text} in a user's or a tool's text is no token")
        else:
            yield Finding(
                "texts", "broken", "control_text_leaks", f"{text} in a user's text becomes a token",
                "take such strings out of what users and tools say",
            )  # fmt: skip
    padded = f"  {WORD}\n\n"
    asked = patient.try_render([patient.user(padded)], prompt=False) or ""
    lost = ["users"] if WORD in asked and padded not in asked else []
    if patient.traits.tool_role and patient.plain is None:
        turn = patient.asked() if patient.renders_calls else patient.said()
        rendered = patient.try_render([patient.user(), turn, patient.answer(padded)]) or ""
        if WORD in rendered and padded not in rendered and repr(padded)[1:-1] not in rendered:
            lost.append("tools")
    if lost:
        yield Finding(
            "texts", "note", "trims_content", f"spaces around what {' and '.join(lost)} say are trimmed",
            "nothing to do, unless they matter: then put the text in quotes",
        )  # fmt: skip
