"""The one place where tokens are made.

`TokenPolicy.extend` brings the messages that a record does not cover yet into it (the first prompt by encoding, later
ones by a bridge), samples, and appends exactly what the engine returned. Where the messages are not the recorded
ones gone on, the record branches at the last turn that still stands, with a cause; nothing sampled is ever rendered
again, and nothing recorded is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unspool.engines.adapt import as_engine
from unspool.engines.protocol import GenerateRequest, Generation
from unspool.policy.extra import Extra, check_extra, extra_of, merged
from unspool.policy.forcing import with_form
from unspool.policy.matching import branch_cause, common_prefix
from unspool.policy.protocol import Turn
from unspool.record import Cause, Origin, Record, token_ids
from unspool.template import ChatTemplate
from unspool.types import EngineError, InvalidValueError, Message, MessageDict, RecordError, SamplingParams, ToolInfo


def _holders(ids: list[int]) -> int:
    """CPython's count of the references to a list, as seen from a function that has it in one variable."""
    return sys.getrefcount(ids)


def _alone() -> int:
    ids = [0]
    return _holders(ids)


_ALONE = _alone()
"""What `_holders` says of a list that nobody else holds, in this interpreter."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Tokens to feed behind the first `at` spans, for the messages from `start` on; with a cause, on a branch."""

    origin: Origin
    tokens: list[int]
    start: int
    at: int
    cause: Cause | None = None


class TokenPolicy:
    """A model behind an engine and a template.

    Args:
        engine: an Engine, or a Sampler (it is put behind `Batching`).
        template: a ChatTemplate, or what makes one (a tokenizer or its name).
        params: defaults of `extend`.
        extra: goes with every request of the engine (`GenerateRequest.extra`), or a function of the turn (from 0) that
            returns what goes with it. `tool_choice` in it is carried out here: see `unspool.policy.forcing`.
    """

    records = True

    def __init__(
        self,
        engine: object,
        template: ChatTemplate | Any,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        extra: Extra | None = None,
    ) -> None:
        check_extra(extra)
        self.engine = as_engine(engine)
        self.template = template if isinstance(template, ChatTemplate) else ChatTemplate(template)
        self.params = SamplingParams.of(params)
        self.extra = extra

    async def start(self) -> None:
        """Make the engine ready."""
        await self.engine.start()

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Give the engine new weights."""
        await self.engine.update_weights(source, version)

    def with_template_kwargs(self, **kwargs: Any) -> TokenPolicy:
        """The same policy with switches of the template changed."""
        return TokenPolicy(self.engine, self.template.with_kwargs(**kwargs), self.params, extra=self.extra)

    def with_extra(self, extra: Extra) -> TokenPolicy:
        """The same policy with this going with its requests, on top of what goes with them already."""
        check_extra(extra)
        return TokenPolicy(self.engine, self.template, self.params, extra=merged(self.extra, extra))

    def end(self, session: str) -> None:
        """Tell the engine that the session is over, where it wants to know."""
        ended = getattr(self.engine, "end_session", None)
        if ended is not None:
            ended(session)

    async def extend(
        self,
        record: Record,
        messages: Sequence[MessageDict],
        tools: Sequence[ToolInfo] | None = None,
        *,
        params: SamplingParams | None = None,
        session: str = "",
        seed: int = 0,
        max_total: int | None = None,
    ) -> Turn:
        """See `Policy.extend`. Raises what the template or the engine raise; the record then ends in fed tokens.

        Raises:
            TemplateError: a message cannot be rendered.
            EngineError: the engine failed, or its answer breaks its contract.
        """
        params = params or self.params
        known = record.tools
        offered = known if known is not None and known == tools else list(tools or ())
        fed = self._feed(record, messages, offered, max_total)
        if isinstance(fed, Turn):
            return fed
        record, room = fed
        if room is not None:
            params = replace(params, max_tokens=min(params.max_tokens or room, room))
        version, context = self.engine.version, record.lend_ids()
        extra = with_form(extra_of(self.extra, record.turns), self.template, offered, context)
        request = GenerateRequest(context, params, session, seed, self.template.stop_token_ids, extra)
        generation = await self.engine.generate(request)
        self._check(generation, params.max_tokens)
        message = _with_ids(self.template.parse(generation.tokens, context, offered), record.turns)
        del request
        if _holders(context) == _ALONE:  # an engine that keeps what it was given keeps it as it was given
            record.take_back(context)
        record.append_sampled(
            generation.tokens,
            logprobs=generation.logprobs,
            versions=version if generation.versions is None else generation.versions,
            message=len(messages),
            metadata=generation.extra,
        )
        record.messages = [*messages, message.to_dict()]
        return Turn(record, message, generation.stop_reason, sampled=len(generation.tokens))

    def _feed(
        self, record: Record, messages: Sequence[MessageDict], tools: list[ToolInfo], max_total: int | None
    ) -> Turn | tuple[Record, int | None]:
        """Bring the messages into the record: the record to go on with, and how many tokens there is room for.

        Where there is no room for one, the `Turn` that says so; nothing is changed then.
        """
        plan = self._plan(record, messages, tools)
        needed = record.prefix_length(plan.at) + len(plan.tokens)
        cap = min((limit for limit in (max_total, self._context_length) if limit is not None), default=None)
        if cap is not None and needed >= cap:
            return Turn(record, None, "length", needed=needed, cap=cap)
        return self._apply(plan, record, messages, tools), None if cap is None else cap - needed

    @property
    def _context_length(self) -> int | None:
        length: int | None = getattr(self.engine, "context_length", None)
        return length

    def _plan(self, record: Record, messages: Sequence[MessageDict], tools: list[ToolInfo]) -> _Plan:
        """How to bring `messages` into the record. Nothing is changed yet."""
        if not messages:
            raise InvalidValueError("messages is empty; a conversation needs at least one message to answer")
        if not record.messages:
            if messages[-1].get("role") == "assistant":
                raise InvalidValueError(
                    "the conversation ends with an assistant message; drop it, or add a message for the model to answer"
                )
            return _Plan("prompt", self.template.encode(messages, tools), 0, 0)
        same = common_prefix(record.messages, messages)
        if record.tools is not None and tools != record.tools:
            return self._branch(record, messages, tools, 0, Cause.TOOLS_CHANGED)
        if same < len(record.messages):
            return self._branch(record, messages, tools, same, branch_cause(record.messages, messages, same))
        new = messages[same:]
        if self._drops_thinking(record, new):
            return self._branch_from_render(record, messages, tools, same)
        at = len(record.spans)
        if new:
            last = next((span.tokens for span in reversed(record.spans) if span.tokens), ())  # enough for a bridge
            return _Plan("bridge", self.template.bridge(last, new, tools), same, at)
        if record.last is not None and record.last.origin == "sampled":
            raise InvalidValueError("the conversation ends with the model's own turn; add a message for it to answer")
        return _Plan("bridge", [], same, at)  # an earlier try failed in the engine: everything was fed already

    def _branch(
        self, record: Record, messages: Sequence[MessageDict], tools: list[ToolInfo], same: int, cause: Cause
    ) -> _Plan:
        """A branch at the last span whose messages all stand, and the tokens of what comes behind it."""
        spans = record.spans
        ends = [0, *(span.message for span in spans[1:]), len(record.messages)]  # messages that the first n spans cover
        at = max(count for count, end in enumerate(ends) if end <= same)
        if ends[at] < len(messages):  # more is to come: it must stand behind a sampled turn, not behind a header
            while at and spans[at - 1].origin != "sampled":
                at -= 1
        if not at:
            return _Plan("prompt", self.template.encode(messages, tools), 0, 0, cause)
        new = messages[ends[at] :]
        if not new and spans[at - 1].origin == "sampled":
            raise InvalidValueError("the conversation ends with an assistant message; add a message for it to answer")
        tokens = self.template.bridge(record.prefix_ids(at), new, tools) if new else []
        return _Plan("prompt", tokens, ends[at], at, cause)

    def _drops_thinking(self, record: Record, new: Sequence[MessageDict]) -> bool:
        return (
            self.template.thinking == "template"
            and any(message.get("role") == "user" for message in new)
            and any(message.get("reasoning_content") for message in record.messages)
        )

    def _branch_from_render(
        self, record: Record, messages: Sequence[MessageDict], tools: list[ToolInfo], same: int
    ) -> _Plan:
        """What `thinking="template"` asks for: the template's own render, and a branch where it leaves the record."""
        render = self.template.encode(messages, tools)
        kept, at = 0, 0
        for span in record.spans:
            if tuple(render[kept : kept + len(span.tokens)]) != span.tokens:
                break
            kept, at = kept + len(span.tokens), at + 1
        if at == len(record.spans):
            return _Plan("bridge", render[kept:], same, at)
        return _Plan("prompt", render[kept:], record.spans[at].message, at, Cause.THINKING_DROPPED)

    def _apply(self, plan: _Plan, record: Record, messages: Sequence[MessageDict], tools: list[ToolInfo]) -> Record:
        """Feed what was planned, on a branch where there is a cause for one."""
        if plan.cause is not None:
            record = record.fork(plan.at, plan.cause)
        if plan.origin == "prompt" and plan.tokens:
            record.append_prompt(plan.tokens, message=plan.start)
        elif plan.tokens:
            record.append_bridge(plan.tokens, message=plan.start)
        record.messages, record.tools = list(messages), tools
        return record

    def _check(self, generation: Generation, limit: int | None) -> None:
        """Refuse an answer that breaks the engine's contract, before any of it reaches the record."""
        name, count = type(self.engine).__name__, len(generation.tokens)
        if not count:
            raise EngineError(f"{name} returned no tokens; a turn has at least one")
        try:
            token_ids(
                generation.tokens, "sampled tokens"
            )  # an id that the tokenizer lacks is one that a model can sample
        except RecordError as error:
            raise EngineError(f"{name}: {error}") from error
        if limit is not None and count > limit:
            raise EngineError(f"{name} returned {count} tokens where max_tokens was {limit}")
        if generation.logprobs is None:
            if self.engine.logprobs:
                raise EngineError(f"{name} declares log-probabilities but returned none with {count} tokens")
        elif len(generation.logprobs) != count:
            raise EngineError(f"{name} returned {len(generation.logprobs)} log-probabilities for {count} tokens")
        if generation.stop_reason not in ("stop", "length"):
            raise EngineError(f"{name} returned stop_reason {generation.stop_reason!r}; it must be 'stop' or 'length'")


def _with_ids(message: Message, turn: int) -> Message:
    """The message with an id on every call: the model's own where its format has them, else by turn and place."""
    if not message.tool_calls:
        return message
    calls = (call if call.id else call.called(f"call_{turn}_{place}") for place, call in enumerate(message.tool_calls))
    return Message(message.content, message.reasoning_content, tuple(calls), message.role)
