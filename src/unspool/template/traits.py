"""What a template is like, found out by rendering small conversations with it: nothing here knows any family's name.

The tail of a render is what follows the last sentinel, a word put where a model's own text would stand. How tails
differ between continuations shows where a turn is closed, with which token, and whether tool answers need calls.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unspool.template.encoding import Encoder
from unspool.template.jinja import Renderer
from unspool.template.messages import ArgumentForm, ContentForm, Forms, sentinel
from unspool.types import MessageDict

SENTINEL = sentinel()
_PROBE = sentinel("probe")
_NAME = sentinel("name")
_OTHER = sentinel("other")
_ID = f"i{secrets.token_hex(4)}"  # nine letters and digits: Mistral's templates take no others

_CLOSE_NAME = re.compile(
    r"^<[|｜]?(?:eom|eot|im_end|end|endofturn|end[_▁]of[_▁](?:turn|message|utterance|sentence)|return|call)"
    r"(?:_id|_token)?[|｜]?>$|^</s>$|^<turn\|>$",
    re.IGNORECASE,
)
"""Added tokens that close a turn by their name; they count where the template's source names them."""


@dataclass(frozen=True, slots=True)
class Close:
    """How a template goes on behind a model's turn.

    Attributes:
        region: what it writes behind the turn before anything that depends on what comes next.
        steps: each added token in the region, where it begins and where it ends.
        final: whether the region's last token closes the turn (else it opens what follows, or there is none).
    """

    region: str = ""
    steps: tuple[tuple[int, int, int], ...] = ()
    final: bool = False

    @property
    def token(self) -> int | None:
        return self.steps[-1][0] if self.steps else None


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a template.

    Attributes:
        forms: how it wants contents and arguments.
        takes_tools: it tells the model about tools.
        tool_role: it renders tool messages, in one of the two forms.
        needs_calls: it renders them right only behind a message with calls.
        looks_up_name: it writes the tool's name, and looks it up in the calls where the message has none.
        refusal: what the template said to a tool message, where it refuses one.
        close: behind a turn of text. call_close: behind a turn of calls.
        alternatives: other tokens that close a turn.
        headers: tokens that open the next turn, where a turn has no close of its own and models stop on these.
        stops: tokens to stop sampling at.
    """

    forms: Forms = field(default_factory=Forms)
    takes_tools: bool = True
    tool_role: bool = True
    needs_calls: bool = False
    looks_up_name: bool = False
    refusal: str | None = None
    close: Close = Close()
    call_close: Close = Close()
    alternatives: frozenset[int] = frozenset()
    headers: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    def no_tool_role(self) -> str:
        """What to say where a tool message has to be rendered and cannot be."""
        said = f" ({self.refusal})" if self.refusal else ""
        return (
            f"the chat template cannot render tool messages{said}: pass chat_template= with one that can, "
            "or give tool results to the model as user messages"
        )


def assistant(text: str, forms: Forms) -> MessageDict:
    """A model's turn that consists of this text."""
    return {"role": "assistant", "content": _content(text, forms)}


def calls(names_and_ids: Sequence[tuple[str, str]], text: str, forms: Forms) -> MessageDict:
    """A model's turn that calls these tools, with this text as an argument of each."""
    arguments: Any = {"x": text} if forms.arguments == "object" else f'{{"x": "{text}"}}'
    return {
        "role": "assistant",
        "content": _content("", forms),
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, call_id in names_and_ids
        ],
    }


def dummy_user(forms: Forms) -> MessageDict:
    """What a synthetic conversation begins with."""
    return {"role": "user", "content": _content("hi", forms)}


def tail(rendered: str | None) -> str | None:
    """What follows the last sentinel; None where there is none."""
    if rendered is None:
        return None
    _, found, behind = rendered.rpartition(SENTINEL)
    return behind if found else None


def find_traits(renderer: Renderer, encoder: Encoder, eos: int | None) -> Traits:
    """Probe a template (some twenty small renders)."""
    probe = _Probe(renderer, encoder)
    traits = Traits(forms=probe.forms, takes_tools=probe.takes_tools())
    traits = probe.closes(traits)
    traits = probe.tool_messages(traits)
    return replace(traits, stops=probe.stops(traits, eos))


class _Probe:
    def __init__(self, renderer: Renderer, encoder: Encoder) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self.forms = Forms(content=self._content_form())
        if not self._shows([dummy_user(self.forms), calls([(_NAME, _ID)], SENTINEL, self.forms)], SENTINEL):
            text_arguments: ArgumentForm = "string"
            as_text = replace(self.forms, arguments=text_arguments)
            if self._shows([dummy_user(as_text), calls([(_NAME, _ID)], SENTINEL, as_text)], SENTINEL):
                self.forms = as_text
        self._user = dummy_user(self.forms)
        self._text = assistant(SENTINEL, self.forms)
        self._call = calls([(_NAME, _ID)], SENTINEL, self.forms)
        self._answer = {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": _content(_PROBE, self.forms)}

    # ------------------------------------------------------------------ forms

    def _content_form(self) -> ContentForm:
        as_string = self._shows([{"role": "user", "content": _PROBE}], _PROBE)
        parts = [{"type": "text", "text": _PROBE}]
        rendered = self._renderer.try_render([{"role": "user", "content": parts}]) or ""
        as_parts = _PROBE in rendered and not re.search(r"""['"]text['"]""", rendered)
        if as_string:
            return "both" if as_parts else "string"
        return "parts" if as_parts else "string"

    def _shows(self, messages: list[MessageDict], word: str, tools: list[Any] | None = None) -> bool:
        return word in (self._renderer.try_render(messages, tools) or "")

    def takes_tools(self) -> bool:
        schema = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
        function = {"name": _NAME, "description": "x", "parameters": schema}
        return self._shows([self._user], _NAME, [{"type": "function", "function": function}])

    # ------------------------------------------------------------------ tool messages

    def tool_messages(self, traits: Traits) -> Traits:
        behind_text = tail(self._renderer.try_render([self._user, self._text, self._answer]))
        behind_call = tail(self._renderer.try_render([self._user, self._call, self._answer]))
        by_text = behind_text is not None and _PROBE in behind_text
        by_call = behind_call is not None and _PROBE in behind_call
        if not by_text and not by_call:
            return replace(traits, tool_role=False, refusal=self._refusal())
        needs_calls = by_call
        if by_text and by_call and behind_text is not None and behind_call is not None:
            close, called = traits.close, traits.call_close
            other_stop = close.token is not None and called.token is not None and called.token != close.token
            needs_calls = other_stop or not behind_call.endswith(behind_text[len(close.region) :])
        forms = replace(traits.forms, ids="any" if self._takes_any_id(by_text, by_call) else "nine")
        nameless = {key: value for key, value in self._answer.items() if key != "name"}
        looked_up = tail(self._renderer.try_render([self._user, self._call, nameless]))
        return replace(
            traits,
            forms=forms,
            needs_calls=needs_calls,
            looks_up_name=by_call and looked_up is not None and _NAME in looked_up,
        )

    def _takes_any_id(self, by_text: bool, by_call: bool) -> bool:
        answer = {**self._answer, "tool_call_id": "call_0"}
        turns = ((by_text, self._text), (by_call, calls([(_NAME, "call_0")], SENTINEL, self.forms)))
        return all(self._shows([self._user, turn, answer], _PROBE) for shown, turn in turns if shown)

    def _refusal(self) -> str | None:
        try:
            self._renderer.render([self._user, self._text, self._answer], None)
        except Exception as error:
            return str(error)
        return None

    # ------------------------------------------------------------------ closes

    def closes(self, traits: Traits) -> Traits:
        end = self._ends(self._text)
        other = {"role": "user", "content": _content(_OTHER, self.forms)}
        following = [[other], [self._answer], []]
        behind = [tail(self._renderer.try_render([self._user, self._text, *more])) for more in following]
        continued = [text for text in behind if text is not None]
        if end is None or not continued:
            return traits
        named = self._named_closes()
        close = self._close(_common_head(self._encoder, [end, *continued]))
        alternatives: set[int] = set(named)
        headers: tuple[int, ...] = ()
        if close.token is None:
            at_end = _first_token(self._encoder, end)
            common = _first_token(self._encoder, _common_head(self._encoder, continued))
            if common is not None and at_end is not None:
                close = self._close(_up_to_first_token(self._encoder, continued[0]))
                alternatives.add(at_end)
            elif common is None:
                heads = (_leading_token(self._encoder, text) for text in behind[:2] if text is not None)
                headers = tuple(dict.fromkeys(head for head in heads if head is not None))
        close = replace(close, final=close.token is not None)
        called = self._call_close(close, named)
        return replace(
            traits,
            close=close,
            call_close=called,
            alternatives=frozenset(alternatives) - set(headers),
            headers=headers,
        )

    def _call_close(self, close: Close, named: set[int]) -> Close:
        end = self._ends(self._call)
        continued = tail(self._renderer.try_render([self._user, self._call, self._answer]))
        if end is None:
            return Close()
        called = self._close(end if continued is None else _common_head(self._encoder, [end, continued]))
        return replace(
            called, final=called.token is not None and (called.token == close.token or called.token in named)
        )

    def _ends(self, message: MessageDict) -> str | None:
        return tail(self._renderer.try_render([self._user, message], generation_prompt=False))

    def _close(self, region: str) -> Close:
        steps, at = [], 0
        for piece, token in self._encoder.pieces(region):
            at += len(piece)
            if token is not None:
                steps.append((token, at - len(piece), at))
        return Close(region, tuple(steps))

    def _named_closes(self) -> set[int]:
        source = self._renderer.source
        return {token for text, token in self._encoder.added.items() if text in source and _CLOSE_NAME.match(text)}

    def stops(self, traits: Traits, eos: int | None) -> tuple[int, ...]:
        """eos; what the template writes behind a last turn; what other turns end with; headers, where it has these."""
        found: list[int | None] = [eos]
        end = self._ends(self._text)
        if traits.close.token is not None and end is not None:
            region = traits.close.region
            closes_last = bool(region) and end.startswith(region)
            found.append(traits.close.token if closes_last else _first_token(self._encoder, end))
        if not traits.headers and (traits.call_close.final or traits.needs_calls):
            found.append(traits.call_close.token)
        inside = self._closes_inside_turns()
        if traits.tool_role or traits.takes_tools:
            found += [token for token in sorted(self._named_closes()) if token not in inside]
        found += traits.headers
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def _closes_inside_turns(self) -> set[int]:
        """Tokens that the template writes between a turn's thinking and the rest of it: no turn stops at them."""
        inside = set()
        for key in ("reasoning_content", "thinking"):
            for message in (self._text, self._call):
                rendered = self._renderer.try_render([self._user, {**message, key: _PROBE}], generation_prompt=False)
                start, end = (rendered or "").rfind(_PROBE), (rendered or "").rfind(SENTINEL)
                if rendered is not None and 0 <= start < end:
                    inside |= {token for _, token in self._encoder.pieces(rendered[start:end]) if token is not None}
        return inside


def _content(text: str, forms: Forms) -> Any:
    return [{"type": "text", "text": text}] if forms.content == "parts" else text


def _common_head(encoder: Encoder, texts: Iterable[str]) -> str:
    """The longest common beginning that splits no added token."""
    cut = [encoder.pieces(text) for text in texts]
    head = ""
    for pieces in zip(*cut, strict=False):
        first = pieces[0]
        if any(piece != first for piece in pieces):
            if first[1] is None:
                head += _common_prefix([piece for piece, token in pieces if token is None] or [""], len(pieces))
            break
        head += first[0]
    return head


def _common_prefix(texts: list[str], wanted: int) -> str:
    if len(texts) < wanted:
        return ""
    low, high = min(texts), max(texts)
    count = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:count]


def _first_token(encoder: Encoder, text: str) -> int | None:
    return next((token for _, token in encoder.pieces(text) if token is not None), None)


def _leading_token(encoder: Encoder, text: str) -> int | None:
    pieces = encoder.pieces(text.lstrip())
    return pieces[0][1] if pieces else None


def _up_to_first_token(encoder: Encoder, text: str) -> str:
    head = ""
    for piece, token in encoder.pieces(text):
        head += piece
        if token is not None:
            break
    return head
