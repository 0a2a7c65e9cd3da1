"""The bridge: what stands between a sampled turn and the next one, without looking at what was sampled.

A synthetic conversation whose only model turn is a sentinel is rendered with the new messages behind it; what follows
the sentinel is the tail of every conversation that goes on with these messages. Its cost is that of the new messages.
What was sampled is never rendered: only its last token is looked at, to find where in the tail to begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.template.encoding import Encoder
from unspool.template.jinja import Renderer
from unspool.template.messages import Prepared
from unspool.template.skeleton import Skeletons
from unspool.template.tools import ToolGuard
from unspool.template.traits import SENTINEL, Close, Traits, assistant, calls, dummy_user, tail
from unspool.types import MessageDict, TemplateError, ToolInfo


class Bridge:
    """Bridges of one template."""

    def __init__(self, renderer: Renderer, encoder: Encoder, traits: Traits, guard: ToolGuard) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._traits = traits
        self._guard = guard
        self._skeletons = Skeletons(renderer, encoder, self._tail_of)

    def __call__(
        self, last: int | None, new_messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolInfo] | None
    ) -> list[int]:
        """Ids to append behind a turn that ends in the token `last` (None: behind nothing).

        Raises:
            TemplateError: the template cannot render the new messages.
        """
        known = self._skeletons.tail(new_messages, tools) if new_messages else None
        if known is not None:
            by_call = self._traits.needs_calls and new_messages[0]["role"] == "tool"
            return self._encoder.encode_behind(known[self._begin(known, last, by_call) :], last)
        safe = self._guard(tools)
        prepared = Prepared(new_messages, self._encoder, self._traits.forms, safe.hits)
        behind, by_call = self._rendered(prepared, safe.tools)
        return prepared.encode(behind[self._begin(behind, last, by_call) :], last, behind=True)

    def _rendered(self, prepared: Prepared, tools: Sequence[ToolInfo] | None) -> tuple[str, bool]:
        """What the template writes behind a model's turn, and whether that turn was one of calls."""
        forms = self._traits.forms
        answers = self._answers(prepared.messages)
        by_call = bool(answers) and self._traits.needs_calls
        turn = calls(answers, SENTINEL, forms) if by_call else assistant(SENTINEL, forms)
        behind = tail(self._renderer.render([dummy_user(forms), turn, *prepared.messages], tools))
        if behind is None:
            raise TemplateError("the chat template does not render an assistant's turn, so no turn can follow one")
        return behind, by_call

    def _tail_of(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolInfo] | None) -> str:
        return self._rendered(Prepared(messages, self._encoder, self._traits.forms), tools)[0]

    def _begin(self, behind: str, last: int | None, by_call: bool) -> int:
        return self._begin_behind_calls(behind, last) if by_call else self._begin_behind_text(behind, last)

    def _answers(self, messages: Sequence[MessageDict]) -> list[tuple[str, str]]:
        """Name and id of each tool message that answers the turn before them all."""
        traits = self._traits
        answers: list[tuple[str, str]] = []
        leading = True
        for message in messages:
            if message["role"] != "tool":
                leading = False
                continue
            if not traits.tool_role:
                raise TemplateError(traits.no_tool_role())
            if not leading:
                continue
            name = message.get("name")
            if traits.looks_up_name and not isinstance(name, str):
                raise TemplateError(
                    "the chat template writes the tool's name into its answer: give the tool message a 'name' "
                    "(calls are not rendered again, so it cannot be looked up)"
                )
            answers.append((name if isinstance(name, str) else "tool", str(message.get("tool_call_id") or "")))
        return answers

    def _begin_behind_text(self, behind: str, last: int | None) -> int:
        """Where in the tail of a turn of text to begin behind the token `last`."""
        traits = self._traits
        close = traits.close
        if last is None:
            return 0
        if close.steps and behind.startswith(close.region):
            return self._step(close, last, otherwise=0)
        if last in traits.headers or last in traits.alternatives or last == close.token:
            first = self._encoder.first_token(behind)
            if first is not None:
                token, end = first
                if token == last or (token in traits.alternatives and last not in traits.headers):
                    return end
        return 0

    def _begin_behind_calls(self, behind: str, last: int | None) -> int:
        """Where in the tail of a turn of calls to begin: never in what belongs to the synthetic call."""
        close = self._traits.call_close
        if not close.steps or not behind.startswith(close.region):
            raise TemplateError("the chat template writes tool answers in a way that depends on what the model wrote")
        opened = close.steps[-1][1]
        return opened if last is None else self._step(close, last, otherwise=opened)

    def _step(self, close: Close, last: int, *, otherwise: int) -> int:
        """Behind `last` where the region has it, behind the close where another token closed the turn."""
        for token, _, end in reversed(close.steps):
            if token == last:
                return end
        if close.final and (last in self._traits.alternatives or last == self._traits.close.token):
            return close.steps[-1][2]
        return otherwise
