"""One trajectory, printed: who wrote which token, and how likely the sampled ones were.

Origins are told apart by colour and, for terminals and files without any, by a letter in front of each line. Text
of models and tools is printed as text only: markup in it is not read, control characters are spelled out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from unspool.cli.pieces import Decode, Piece, decoder, pieces, visible

_ORIGINS = {"prompt": ("P", "cyan"), "bridge": ("B", "magenta"), "sampled": ("S", "green")}
_RAMP = (
    (0.9, "green", "90% or more"),
    (0.5, "chartreuse3", "50%"),
    (0.1, "yellow3", "10%"),
    (0.01, "dark_orange", "1%"),
    (0.0, "bold red", "less"),
)
_UNLIKELY = 0.1
_ROLES = {"system": "cyan", "user": "cyan", "assistant": "green", "tool": "magenta"}


def render_trajectory(
    trajectory: Mapping[str, Any],
    template_or_tokenizer: Any = None,
    console: Console | None = None,
    *,
    messages: bool = False,
) -> None:
    """Print one trajectory.

    Args:
        trajectory: as a rollout returned it, or as it was read from a file.
        template_or_tokenizer: a ChatTemplate or a Hugging Face tokenizer, to show tokens. Without one, and where
            the trajectory has no tokens, messages are shown, with token counts.
        console: where to; default: standard output.
        messages: show messages all the same.
    """
    page = _Page(console or Console())
    _header(page, trajectory)
    if messages or template_or_tokenizer is None or not trajectory.get("input_ids"):
        _messages(page, trajectory)
    else:
        _tokens(page, trajectory, decoder(template_or_tokenizer))


class _Page:
    """Lines on a console; nothing is wrapped, cropped, or read as markup, and all of it can be encoded."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.coloured = console.is_terminal and console.color_system is not None and not console.no_color

    def line(self, *parts: str | tuple[str, str]) -> None:
        """One line of styled parts, each already `visible`."""
        styled = [(part, "") if isinstance(part, str) else part for part in parts]
        text = Text(end="")
        for style, group in groupby(styled, key=lambda part: part[1]):
            text.append(self._encodable("".join(content for content, _ in group)), style)
        self._console.print(text, soft_wrap=True, highlight=False)

    def _encodable(self, text: str) -> str:
        encoding = self._console.encoding
        return text.encode(encoding, "backslashreplace").decode(encoding)


# --------------------------------------------------------------------------- header


def _header(page: _Page, trajectory: Mapping[str, Any]) -> None:
    facts = [f"stop_reason {trajectory.get('stop_reason')}", f"turns {trajectory.get('turns')}"]
    ids = trajectory.get("input_ids")
    if ids:
        sampled = sum(span.end - span.start for span in _spans(trajectory) if span.origin == "sampled")
        facts.append(f"{len(ids)} tokens, {sampled} sampled, {sum(trajectory.get('loss_mask') or ())} trained")
    facts += [
        f"{name} {trajectory[name]}" for name in ("reward", "group", "sample") if trajectory.get(name) is not None
    ]
    if trajectory.get("branches"):
        facts.append(_branch(trajectory))
    parts: list[str | tuple[str, str]] = [(_one_line(trajectory.get("id", "(no id)")), "bold")]
    parts += [f" · {_one_line(fact)}" for fact in facts]
    if trajectory.get("truncated"):
        parts += [" · ", ("truncated", "yellow")]
    page.line(*parts)
    if trajectory.get("error"):
        page.line(("error: ", "bold red"), (_one_line(trajectory["error"]), "red"))
    for entry in trajectory.get("tool_errors") or ():
        entry = entry if isinstance(entry, Mapping) else {"error": entry}  # noqa: PLW2901
        who = " ".join(_one_line(entry[key]) for key in ("name", "call_id", "kind") if entry.get(key))
        page.line(("tool error: ", "bold yellow"), f"{who}: " if who else "", _one_line(entry.get("error", "")))


def _branch(trajectory: Mapping[str, Any]) -> str:
    branches, at = trajectory["branches"], trajectory.get("branch", 0)
    cause = branches[at].get("cause")
    return f"branch {at + 1} of {len(branches)}" + (f" (cause {cause})" if cause else "")


def _one_line(value: object) -> str:
    return visible(str(value)).replace("\n", "\u240a")


# --------------------------------------------------------------------------- tokens


@dataclass(frozen=True, slots=True)
class _Run:
    """A span at its place: positions `start` to `end` of the arrays."""

    origin: str
    start: int
    end: int
    turn: int | None = None
    message: int | None = None
    trained: bool = True
    logprobs: Sequence[float] | None = None


def _spans(trajectory: Mapping[str, Any]) -> list[_Run]:
    """The spans with their positions; where there are none, or they do not add up, the runs of the loss mask."""
    ids, logprobs = trajectory["input_ids"], trajectory.get("logprobs")
    runs: list[_Run] = []
    start = 0
    for span in trajectory.get("spans") or ():
        end = start + span["length"]
        own = span.get("logprobs") or (logprobs[start:end] if logprobs and span["origin"] == "sampled" else None)
        about = span.get("turn"), span.get("message"), span.get("trained", True)
        runs.append(_Run(span["origin"], start, end, *about, own))
        start = end
    if start == len(ids):
        return runs
    runs, start = [], 0
    for mask, group in groupby(trajectory.get("loss_mask") or [0] * len(ids)):
        end = start + len(list(group))
        own = logprobs[start:end] if mask and logprobs else None
        runs.append(_Run("sampled" if mask else "prompt", start, end, logprobs=own))
        start = end
    return runs


def _tokens(page: _Page, trajectory: Mapping[str, Any], decode: Decode) -> None:
    ids, runs = trajectory["input_ids"], _spans(trajectory)
    _legend(page, any(run.logprobs for run in runs))
    for run in runs:
        letter, colour = _ORIGINS.get(run.origin, ("?", ""))
        page.line((f"-- {_about(run)} --", f"{colour} bold"))
        gutter = (f"{letter}| ", colour)
        parts: list[str | tuple[str, str]] = [gutter]
        for piece in pieces(decode, ids, run.start, run.end):
            text, style = _styled(page, piece, run, ids)
            for number, part in enumerate(text.split("\n")):
                if number:
                    page.line(*parts, ("\u23ce", "dim"))
                    parts = [gutter]
                parts.append((part, style))
        if len(parts) > 1 and any(part[0] for part in parts[1:]):
            page.line(*parts)


def _styled(page: _Page, piece: Piece, run: _Run, ids: Sequence[int]) -> tuple[str, str]:
    text = visible(piece.text)
    if not text:
        text = "".join(f"<id {token}>" for token in ids[piece.start : piece.end])
    style = _ORIGINS.get(run.origin, ("?", ""))[1]
    if run.logprobs:
        likely = math.exp(min(0.0, *run.logprobs[piece.start - run.start : piece.end - run.start]))
        style = next((style for least, style, _ in _RAMP if likely >= least), _RAMP[-1][1])
        if not page.coloured and likely < _UNLIKELY:
            text = f"\u2039{text}\u203a"
    return text, style if run.trained else f"{style} dim"


def _about(run: _Run) -> str:
    count = run.end - run.start
    facts = [run.origin, *([] if run.turn is None else [f"turn {run.turn}"]), f"{count} token{'s' * (count != 1)}"]
    if run.logprobs:
        mean, least = sum(run.logprobs) / len(run.logprobs), min(run.logprobs)
        facts.append(f"logprob mean {_logprob(mean)}, least {_logprob(least)}")
    if run.origin == "sampled" and not run.trained:
        facts.append("not trained")
    return " · ".join(map(_one_line, facts))


def _logprob(value: float) -> str:
    """Two decimals, more where those would say nothing, and never a negative zero."""
    if abs(value) < 1e-4:
        return "0.00"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def _legend(page: _Page, shaded: bool) -> None:
    parts: list[str | tuple[str, str]] = []
    for origin, (letter, colour) in _ORIGINS.items():
        parts += [(f"{letter}| {origin}", colour), "  "]
    if shaded and page.coloured:
        parts.append("probability: ")
        for _, style, name in _RAMP:
            parts += [(name, style), " "]
    elif shaded:
        parts.append("\u2039less than 10% likely\u203a")
    page.line(*parts)


# --------------------------------------------------------------------------- messages


def _messages(page: _Page, trajectory: Mapping[str, Any]) -> None:
    runs = _spans(trajectory) if trajectory.get("input_ids") else []
    for index, message in enumerate(trajectory.get("messages") or ()):
        about = [_about(run) for run in runs if run.message == index]
        role = _one_line(message.get("role", "?"))
        colour = _ROLES.get(role, "")
        names = [_one_line(message[key]) for key in ("name", "tool_call_id") if message.get(key)]
        page.line((f"-- {' '.join([role, *names])} --", f"{colour} bold"), *[(f"  {fact}", "dim") for fact in about])
        _block(page, message.get("reasoning_content"), "dim italic")
        _block(page, message.get("content"), colour)
        for call in message.get("tool_calls") or ():
            _block(page, _call(call), f"{colour} bold")


def _block(page: _Page, content: object, style: str) -> None:
    """A message's text, or its list of parts, line by line."""
    if content is None or content == "":
        return
    if isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            _block(page, text if isinstance(text, str) else f"[{_json(part)[:200]}]", style)
        return
    for line in visible(content if isinstance(content, str) else _json(content)).split("\n"):
        page.line("  ", (line, style))


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return f"-> {_json(call)}"
    arguments = function.get("arguments")
    return f"-> {function.get('name')}({arguments if isinstance(arguments, str) else _json(arguments)})"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)
