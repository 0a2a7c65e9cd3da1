"""Recording a chat API's turns from the token ids that it returns (vLLM's `return_token_ids`).

A record holds what the server says it fed and sampled, and nothing else: prompt, answer and log-probabilities are
always those of one and the same answer. Where a prompt does not go on from the record, which is what the server's
template makes of the conversation, the record branches behind the last whole span that both share, with the best cause
that can be told.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from unspool.engines.meaning import LogprobMeaning
from unspool.policy.matching import branch_cause, common_prefix
from unspool.record import Cause, Record, token_ids
from unspool.types import EngineError, MessageDict, RecordError, SamplingParams, ToolInfo

logger = logging.getLogger("unspool")

ASKED: Final = "return_token_ids"
"""The key of a request that asks for ids."""

_SHAPING: Final = (
    "allowed_token_ids",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
)
_SAMPLING: Final = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in ("temperature", "top_k", "top_p", "repetition_penalty")
)


@dataclass(frozen=True, slots=True)
class Returned:
    """The tokens of one turn as the server returned them."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: list[float] | None


def returned(answer: Mapping[str, Any], choice: Mapping[str, Any], *, logprobs: bool) -> Returned:
    """The ids of an answer, and the log-probabilities where they were asked for.

    Raises:
        EngineError: the server returned none, or not as many of the one as of the other.
    """
    prompt, sampled = answer.get("prompt_token_ids"), choice.get("token_ids")
    if not isinstance(prompt, list) or not isinstance(sampled, list) or not prompt or not sampled:
        raise EngineError(
            f"{ASKED} was asked for, and the API returned no token ids; servers of vLLM (0.10.2 or newer) return them: "
            f"use one, or leave {ASKED} out of extra_body and get messages only"
        )
    try:
        read = Returned(token_ids(prompt, "prompt_token_ids"), token_ids(sampled, "token_ids"), None)
    except RecordError as error:
        raise EngineError(f"the API returned ids that are none: {error}") from error
    if not logprobs:
        return read
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list) or len(content) != len(sampled):
        count = len(content) if isinstance(content, list) else "no"
        raise EngineError(
            f"the API returned {count} log-probabilities for {len(sampled)} tokens; put 'logprobs': False into "
            "extra_body to record without them"
        )
    return Returned(read.prompt, read.sampled, [float(entry["logprob"]) for entry in content])


# --------------------------------------------------------------------------- into the record


async def recorded(
    record: Record,
    turn: Returned,
    messages: Sequence[MessageDict],
    tools: list[ToolInfo],
    text_of: Callable[[list[int]], Awaitable[str]],
) -> Record:
    """The record with the turn behind it: the one given, or a branch of it.

    Args:
        messages: that the turn answers.
        tools: that were on offer.
        text_of: the text of ids; used only to tell why a record branches, and may raise.
    """
    known, count = record.input_ids, len(record)
    same = common_prefix(record.messages, messages)
    if list(turn.prompt[:count]) == known:
        if not known:
            record.append_prompt(turn.prompt)
        elif len(turn.prompt) > count:
            record.append_bridge(turn.prompt[count:], message=same)
    else:
        at = _shared_spans(record, turn.prompt)
        cause = await _cause(record, turn.prompt, at, messages, tools, text_of)
        start = record.spans[at].message
        kept = record.prefix_length(at)
        record = record.fork(at, cause)
        record.append_prompt(turn.prompt[kept:], message=start)
    record.append_sampled(turn.sampled, logprobs=turn.logprobs, message=len(messages))
    return record


def _shared_spans(record: Record, prompt: tuple[int, ...]) -> int:
    """How many whole spans the prompt begins with; something of it is left behind them."""
    at, end = 0, 0
    for span in record.spans:
        if prompt[end : end + len(span.tokens)] != span.tokens or end + len(span.tokens) >= len(prompt):
            break
        at, end = at + 1, end + len(span.tokens)
    return at


async def _cause(
    record: Record,
    prompt: tuple[int, ...],
    at: int,
    messages: Sequence[MessageDict],
    tools: list[ToolInfo],
    text_of: Callable[[list[int]], Awaitable[str]],
) -> Cause:
    if record.tools is not None and tools != record.tools:
        return Cause.TOOLS_CHANGED
    same = common_prefix(record.messages, messages)
    if same < len(record.messages):
        return branch_cause(record.messages, messages, same)
    turn = next((span for span in record.spans[at:] if span.origin == "sampled"), None)
    if turn is not None and record.messages[turn.message].get("reasoning_content"):
        return Cause.THINKING_DROPPED  # it is never sent back
    start = record.prefix_length(at)
    try:
        before, now = await text_of(record.input_ids[start:]), await text_of(list(prompt[start:]))
    except Exception as error:
        logger.debug("the server gave no text of ids, so that a branch has no cause: %s", error)
        return Cause.UNKNOWN
    return Cause.BPE if now.startswith(before) else Cause.TEMPLATE


# --------------------------------------------------------------------------- what log-probabilities mean


def check_meaning(meaning: LogprobMeaning, body: Mapping[str, Any]) -> None:
    """Refuse a request whose parameters make the server's log-probabilities others than those sampled from.

    Raises:
        EngineError: naming the parameters.
    """
    wrong = meaning.missing(SamplingParams(**{name: body[name] for name in _SAMPLING if body.get(name) is not None}))
    if not (meaning.truncation and meaning.penalty):
        wrong += [f"{name}={body[name]}" for name in _SHAPING if body.get(name)]
    if wrong:
        raise EngineError(
            f"the server's log-probabilities are not those of the distribution sampled from with {', '.join(wrong)}; "
            "start it with `--logprobs-mode processed_logprobs`, leave them at their defaults, or put "
            "'logprobs': False into extra_body"
        )
