"""ChatTemplate: a tokenizer's conversation format as three functions on token ids.

`encode` writes the first prompt, `bridge` what stands between a sampled turn and the next one, `parse` reads a sampled
turn. Ids that were sampled are never decoded and encoded again: `input_ids + bridge(input_ids, ...)` begins with
`input_ids`, whatever they are.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, cast

from unspool.template.bridging import Bridge
from unspool.template.encoding import Encoder, Tokenizer, whole
from unspool.template.jinja import Renderer
from unspool.template.messages import Prepared, checked, sentinel
from unspool.template.parsers import (
    MarkedParser,
    ParsedCall,
    ParsedText,
    PlainFormat,
    ToolParser,
    TurnParser,
    choose_parser,
)
from unspool.template.parsers.forms import one_call
from unspool.template.prompts import before_user, says, with_system
from unspool.template.switches import check_switches, unread
from unspool.template.thinking import CLOSE, OPEN, split_thinking
from unspool.template.tools import ToolGuard
from unspool.template.traits import Traits, dummy_user, find_traits
from unspool.types import (
    InvalidTypeError,
    InvalidValueError,
    Message,
    MessageDict,
    MissingExtraError,
    TemplateError,
    ToolCall,
    ToolInfo,
)

log = logging.getLogger(__name__)

_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")
"""Ends of text of base models: not the template's, but what some models stop with all the same."""
_TAIL = 16  # more tokens than any generation prompt's thinking part has
_END = 200  # and more characters
_VARIANTS = 64


class ChatTemplate:
    """The chat template of one tokenizer.

    Args:
        tokenizer_or_name: a Hugging Face tokenizer, or the name or folder to load one from.
        chat_template: Jinja source to use instead of the tokenizer's own.
        parser: name of the tool-call parser; None: chosen from the template's source, then the tokenizer's name.
        thinking: what happens to earlier thinking at a new user turn: `"keep"` it as it was sampled, or follow the
            `"template"` on a new branch. Policies read it; nothing here depends on it.
        template_kwargs: switches of the template, such as `enable_thinking=False`; not `messages`, `tools` or
            `add_generation_prompt`, which are the conversation's.

    Attributes:
        tokenizer: the tokenizer.
        source: the template's Jinja source.
        template_kwargs: the switches.
        parser: the tool-call parser, or None where calls cannot be read.
        thinking: as given.

    Raises:
        TemplateError: no chat template, or one that is not Jinja.
        MissingExtraError: a name was given and transformers is not installed.

    Warns:
        UserWarning: once, where the template does not know tools, nothing can read its calls, it never reads a
            switch, or text gets lost.
    """

    def __init__(
        self,
        tokenizer_or_name: Any,
        *,
        chat_template: str | None = None,
        parser: str | None = None,
        thinking: Literal["keep", "template"] = "keep",
        **template_kwargs: Any,
    ) -> None:
        if thinking not in ("keep", "template"):
            raise InvalidValueError(f"thinking must be 'keep' or 'template', not {thinking!r}")
        check_switches(template_kwargs)
        name = tokenizer_or_name if isinstance(tokenizer_or_name, str) else None
        if name is None and not callable(getattr(tokenizer_or_name, "apply_chat_template", None)):
            raise InvalidTypeError(
                "template must be a ChatTemplate, a tokenizer, or the name of one, "
                f"not {type(tokenizer_or_name).__name__}"
            )
        self.tokenizer: Tokenizer = _load(name) if name is not None else cast(Tokenizer, tokenizer_or_name)
        self.source = _source(self.tokenizer, chat_template)
        self.template_kwargs: dict[str, Any] = dict(template_kwargs)
        self.thinking: Literal["keep", "template"] = thinking
        self._parser_name = parser
        self._encoder = Encoder(self.tokenizer)
        self._renderer = Renderer(self.source, {**self.tokenizer.special_tokens_map, **template_kwargs})
        self._variants: dict[Any, ChatTemplate] = {}
        self._warned: set[str] = set()
        self.parser: ToolParser | None = choose_parser(self.source, self._name, parser)
        self._warn_once()

    # ------------------------------------------------------------------ to ids

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolInfo] | None = None) -> list[int]:
        """The conversation as the first prompt, generation prompt included.

        Raises:
            TemplateError: there are no messages, or the template refuses them.
        """
        if not messages:
            raise TemplateError("a prompt needs at least one message, and messages is empty")
        safe = self._guard(tools)
        if isinstance(self.parser, PlainFormat):
            messages = self._told(self.parser, messages, tools, safe.tools)
            safe = safe._replace(tools=None)
        prepared = Prepared(messages, self._encoder, self._traits.forms, safe.hits)
        if not self._traits.tool_role and any(message["role"] == "tool" for message in prepared.messages):
            raise TemplateError(self._traits.no_tool_role())
        return prepared.encode(self._renderer.render(prepared.messages, safe.tools))

    def bridge(
        self,
        input_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolInfo] | None = None,
    ) -> list[int]:
        """Ids to append to `input_ids`, which end in a sampled turn, so that the model answers `new_messages`.

        Behind a stop token the bridge begins where the template's own render goes on behind it; a turn that was cut
        is closed first. Tool messages carry the `name` of the tool. The time it takes does not depend on `input_ids`.

        Raises:
            TemplateError: the template cannot render the new messages; it says what to do.
        """
        if isinstance(self.parser, PlainFormat):
            new_messages, tools = self.parser.written(checked(new_messages)), None
        return self._bridge(input_ids[-1] if input_ids else None, new_messages, tools or None)

    def _told(
        self,
        parser: PlainFormat,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolInfo] | None,
        safe: Sequence[ToolInfo] | None,
    ) -> list[MessageDict]:
        """The messages with calls and answers as text, and the format's instructions where nobody has put them in."""
        plain = parser.written(checked(messages))
        if not tools or not safe or any(says(message, parser.instructions(tools)) for message in plain[:2]):
            return plain
        return (with_system if self._has_system_role else before_user)(plain, parser.instructions(safe))

    def with_kwargs(self, /, **template_kwargs: Any) -> ChatTemplate:
        """This template with some switches changed. The same switches give the same object.

        Raises:
            InvalidValueError: a name is that of a part of the conversation.

        Warns:
            UserWarning: once a name, where the template never reads it.
        """
        if not template_kwargs:
            return self
        check_switches(template_kwargs)
        merged = {**self.template_kwargs, **template_kwargs}
        if merged == self.template_kwargs:
            return self
        key = repr(sorted(merged.items()))
        found = self._variants.get(key)
        if found is None:
            found = ChatTemplate.__new__(ChatTemplate)
            found.__dict__.update(self.__dict__)
            found.__dict__.pop("_traits", None)
            found.__dict__.pop("_bridge", None)
            found.__dict__.pop("_prompt_end", None)
            found.__dict__.pop("_has_system_role", None)
            found.template_kwargs = merged
            found._renderer = self._renderer.with_variables(template_kwargs)
            self._warn_of(self._unread(template_kwargs), stacklevel=3)
            if len(self._variants) >= _VARIANTS:
                self._variants.clear()
            self._variants[key] = found
        return found

    # ------------------------------------------------------------------ from ids

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: eos, what this template closes turns with, and headers that models stop on."""
        return self._traits.stops

    @property
    def vocab_size(self) -> int:
        """What every token id of the tokenizer is below."""
        return self._encoder.vocab_size

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens kept and spaces as they are; ids that the tokenizer lacks are skipped."""
        return self._encoder.decode(token_ids)

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[ToolInfo] | None = None,
    ) -> Message:
        """A sampled turn, read: thinking, content, calls. Never raises, whatever the model wrote.

        Args:
            token_ids: what was sampled; one final stop token is not part of the text.
            prompt_ids: what it was sampled behind: its end says whether it had opened the thinking. Without it, the
                template's generation prompt decides.
            tools: give types to arguments where the format has none.
        """
        ids = _whole(token_ids)
        if ids and (ids[-1] in self._traits.stops or ids[-1] in self._ends_of_text):
            ids.pop()
        text = self.decode(ids)
        if isinstance(self.parser, TurnParser):
            start, found = 0, self._read(self.parser, text, ids, prompt_ids, tools)
        else:
            thinking = split_thinking(text, self._thinking_is_open(prompt_ids))
            start = thinking.content_start
            found = self._find_calls(text, ids, start, tools)
            thoughts = [part for part in (thinking.reasoning, found.reasoning) if part is not None]
            found = replace(found, reasoning="\n".join(thoughts) if thoughts else None)
        calls = tuple(self._tool_call(call, ids, start, text) for call in found.calls)
        return Message(found.content, found.reasoning, calls)

    def one_call(self, tools: Sequence[ToolInfo], prompt_ids: Sequence[int] | None = None) -> str:
        """The form of a turn that is one call of one of these tools: see `unspool.template.parsers.forms.one_call`."""
        thinking = self._thinking_is_open(prompt_ids)
        return one_call(self.parser, self.source, tools, self._encoder.added.get, thinking=thinking)

    def _find_calls(self, text: str, ids: list[int], start: int, tools: Sequence[ToolInfo] | None) -> ParsedText:
        """The calls in `text` from `start` on; opening words that are tokens count where they stand as tokens."""
        content = text[start:] if start else text
        if self.parser is None:
            return ParsedText(content, [])
        try:
            if not isinstance(self.parser, MarkedParser):
                return self.parser.parse(content, tools)
            at = self._encoder.token_starts(ids, text, self.parser.openings)
            return self.parser.parse(content, tools, at=None if at is None else {place - start for place in at})
        except Exception:
            log.exception("the tool-call parser %r failed; the turn is taken as text", self.parser.name)
            return ParsedText(content, [])

    def _read(
        self,
        parser: TurnParser,
        text: str,
        ids: list[int],
        prompt_ids: Sequence[int] | None,
        tools: Sequence[ToolInfo] | None,
    ) -> ParsedText:
        """Thinking, content and calls in one reading; control words count where they are tokens."""
        behind = self._prompt_end if prompt_ids is None else self.decode(_whole(prompt_ids[-_TAIL:]))
        try:
            at = self._encoder.token_starts(ids, text, parser.control_words)
            return parser.parse(text, tools, behind=behind, at=at)
        except Exception:
            log.exception("the tool-call parser %r failed; the turn is taken as text", parser.name)
            return ParsedText(text, [])

    def _tool_call(self, call: ParsedCall, ids: list[int], offset: int, text: str) -> ToolCall:
        span = self._encoder.token_span(ids, offset + call.start, offset + call.end, text)
        return ToolCall(call.name, call.arguments, call.id, call.status, span, call.error)

    def _thinking_is_open(self, prompt_ids: Sequence[int] | None) -> bool:
        if prompt_ids is None:
            return _ends_in_thinking(self._prompt_end)
        tail = _whole(prompt_ids[-_TAIL:])
        return self._encoder.may_end_in(tail, OPEN[-1]) and _ends_in_thinking(self.decode(tail))

    @cached_property
    def _prompt_end(self) -> str:
        return (self._renderer.try_render([dummy_user(self._traits.forms)]) or "")[-_END:]

    @cached_property
    def _has_system_role(self) -> bool:
        system, user = {"role": "system", "content": sentinel()}, dummy_user(self._traits.forms)
        prepared = Prepared([system, user], self._encoder, self._traits.forms)
        return sentinel() in (self._renderer.try_render(prepared.messages) or "")

    # ------------------------------------------------------------------ what is worked out once

    @cached_property
    def _traits(self) -> Traits:
        return find_traits(self._renderer, self._encoder, self.tokenizer.eos_token_id)

    @cached_property
    def _bridge(self) -> Bridge:
        return Bridge(self._renderer, self._encoder, self._traits, self._guard)

    @cached_property
    def _guard(self) -> ToolGuard:
        return ToolGuard(self._encoder)

    @cached_property
    def _ends_of_text(self) -> frozenset[int]:
        added = self._encoder.added
        return frozenset(added[text] for text in _ENDS_OF_TEXT if text in added)

    @property
    def _name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "") or "")

    def _warn_once(self) -> None:
        traits, said = self._traits, []
        plain = isinstance(self.parser, PlainFormat)
        if not traits.takes_tools and not plain:
            said.append("it ignores tools, so the model is not told of any")
        if not traits.tool_role and not plain:
            said.append("it has no tool messages, so a turn with tool results cannot be rendered")
        if self.parser is None and (traits.takes_tools or traits.tool_role):
            said.append("no parser is known for its tool calls, so none are found (pass parser= to choose one)")
        if self.decode(self._encoder.encode("a b")) == "ab":
            said.append("its tokenizer loses spaces: it was loaded as a class that does not fit its files")
        self._warn_of([*said, *self._unread(self.template_kwargs)], stacklevel=4)

    def _warn_of(self, said: list[str], stacklevel: int) -> None:
        if said:
            what = f"the chat template of {self._name or 'this tokenizer'}: {'; '.join(said)}"
            warnings.warn(what, stacklevel=stacklevel)

    def _unread(self, switches: Mapping[str, Any]) -> list[str]:
        """What to say of switches that the template never reads, once of each."""
        fresh = [name for name in switches if name not in self._warned]
        self._warned.update(fresh)
        return unread(fresh, self._renderer.names(), self.tokenizer.special_tokens_map) if fresh else []

    # ------------------------------------------------------------------ as an object

    def __repr__(self) -> str:
        switches = "".join(f", {key}={value!r}" for key, value in self.template_kwargs.items())
        parser = self.parser.name if self.parser else None
        return f"ChatTemplate({self._name or type(self.tokenizer).__name__!r}, parser={parser!r}{switches})"

    def __getstate__(self) -> dict[str, Any]:
        names = ("tokenizer", "source", "template_kwargs", "thinking", "_parser_name", "_encoder", "_renderer")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._variants, self._warned = {}, set(self.template_kwargs)
        self.parser = choose_parser(self.source, self._name, self._parser_name)


def _whole(token_ids: Sequence[int]) -> list[int]:
    """The ids as a list; -1, which no tokenizer has, for what is no whole number."""
    ids = list(token_ids)
    return ids if set(map(type, ids)) <= {int} else list(map(whole, ids))


def _ends_in_thinking(text: str) -> bool:
    return text.rfind(OPEN) > text.rfind(CLOSE) and text.rstrip().endswith(OPEN)


def _load(name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            "loading a tokenizer by name needs transformers: run `pip install 'unspool[torch]'`"
        ) from error
    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise TemplateError(f"cannot load a tokenizer from {name!r}: {str(error).strip().splitlines()[0]}") from error


def _source(tokenizer: Any, given: str | None) -> str:
    """The Jinja source to use; of several named templates, the one for tools, else the default one."""
    if given is not None and not isinstance(given, str):
        raise InvalidTypeError(f"chat_template must be Jinja source text, not {type(given).__name__}")
    source = given if given is not None else getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        source = source.get("tool_use") or source.get("default")
    if not isinstance(source, str) or not source:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise TemplateError(f"the tokenizer {name!r} has no chat template: pass chat_template= with its Jinja source")
    return source
