"""`ChatPolicy`: an OpenAI-compatible chat-completions API as the side of an episode that speaks.

What this module promises: a request holds the conversation as `unspool.policy.wire` writes it and the parameters that
were asked for, nothing else; a turn that was cut is `length`, and its calls are never run. By itself a conversation is
messages only, since text cannot be made into the tokens that were sampled. Where `extra_body` asks for
`return_token_ids`, every turn is recorded, token by token, from what the server returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from unspool.engines.meaning import LogprobMeaning, probe_meaning
from unspool.policy.extra import Extra, check_extra, extra_of, merged
from unspool.policy.openai import OpenAI
from unspool.policy.protocol import Turn
from unspool.policy.returned import ASKED, check_meaning, recorded, returned
from unspool.policy.wire import first_choice, ids_of_calls, messages_to_send, read_message, tools_to_send
from unspool.record import Record
from unspool.types import EngineError, InvalidTypeError, InvalidValueError, MessageDict, SamplingParams, ToolInfo

_OF_THE_CONVERSATION: Final = ("messages", "stream")
_SEEDS: Final = 2**31
"""Servers take a seed below this one, whatever the width of theirs."""
_PROBES: Final = (
    "Pick any word of these: one two three four five six seven eight nine ten.",
    "Write something.",
    "3 5 7 3 5 7 3 5",
    "Name a colour, a number and a city.",
)
"""Prompts to find out by what a server's log-probabilities are of."""
_OPEN: Final = 0.1
"""A prompt serves where the likeliest first token is as far as this from certain, and from the second likeliest (of two
that are equal, top-k keeps both)."""


class ChatPolicy:
    """A model behind an OpenAI-compatible API.

    Args:
        api: an `OpenAI`.
        params: defaults of `extend`.
        extra_body: fields of every request, or a function of the turn (from 0) that returns those of that turn. They go
            on top of what is sent otherwise, whatever their name: `tool_choice`, `response_format`, `top_k`, ... With
            `return_token_ids` true, the turns are recorded; whether they are is decided by turn 0.
        send_seed: send each turn's seed, also where the parameters have none.
        chat_template_kwargs: switches of the server's template, in every request.
    """

    def __init__(
        self,
        api: OpenAI,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        extra_body: Extra | None = None,
        send_seed: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(api, OpenAI):
            raise InvalidTypeError(f"api must be an OpenAI(model, ...), not {type(api).__name__}")
        check_extra(extra_body, "extra_body")
        self.api = api
        self.params = _possible(SamplingParams.of(params))
        self.extra_body = extra_body
        self.send_seed = send_seed
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.records = bool(_checked(extra_of(extra_body, 0)).get(ASKED))

    async def start(self) -> None:
        """Make the client of this event loop, so that what is wrong with its settings is said at once."""
        self.api.client()

    async def close(self) -> None:
        """Close the API's connections."""
        await self.api.close()

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Raises InvalidTypeError: the weights behind an API are not ours."""
        raise InvalidTypeError(
            "an API's weights cannot be updated from here; for a server of your own use ServerEngine"
        )

    def with_template_kwargs(self, **kwargs: Any) -> ChatPolicy:
        """The same policy with these sent as `chat_template_kwargs`, on top of those that are already."""
        return self._with(self.extra_body, {**self.chat_template_kwargs, **kwargs})

    def with_extra(self, extra: Extra) -> ChatPolicy:
        """The same policy with this on top of its `extra_body`."""
        check_extra(extra, "extra_body")
        return self._with(merged(self.extra_body, extra), self.chat_template_kwargs)

    def _with(self, extra_body: Extra | None, switches: Mapping[str, Any]) -> ChatPolicy:
        return ChatPolicy(
            self.api, self.params, extra_body=extra_body, send_seed=self.send_seed, chat_template_kwargs=switches
        )

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
        """See `Policy.extend`; `session` is not sent.

        Raises:
            openai.OpenAIError: the API said no.
            EngineError: its answer cannot be used.
            InvalidValueError: `max_total` is given: nobody here can count tokens before they are sent.
        """
        if max_total is not None:
            raise InvalidValueError(NO_CAP)
        number = _turns_of(record)
        offered = list(tools or ())
        body = self.body(messages, offered, params or self.params, seed, number)
        logprobs = self.records and bool(body.get("logprobs"))
        if logprobs:
            await self._check_meaning(body)
        answer = await self.api.complete(body)
        choice = first_choice(answer)
        stop_reason = _stop_reason(choice)
        message, kept = read_message(choice["message"], number, ids_of_calls(messages))
        usage = answer.get("usage")
        usage = usage if isinstance(usage, Mapping) else {}
        if self.records:
            turn = returned(answer, choice, logprobs=logprobs)
            record = await recorded(record, turn, messages, offered, self.api.detokenize)
            sampled = len(turn.sampled)
        else:
            record.turns += 1
            counted = usage.get("completion_tokens")
            sampled = counted if isinstance(counted, int) else 0
        record.messages, record.tools = [*messages, kept], offered
        return Turn(record, message, stop_reason, sampled=sampled, usage=usage)

    # ------------------------------------------------------------------ a request

    def body(
        self, messages: Sequence[MessageDict], tools: Sequence[ToolInfo], params: SamplingParams, seed: int, turn: int
    ) -> dict[str, Any]:
        """What a turn's request says, besides the model: `extra_body` goes on top of everything else.

        Raises:
            InvalidValueError: `extra_body` holds what is no business of its, or asks for ids in some turns only.
        """
        extra = _checked(extra_of(self.extra_body, turn))
        if bool(extra.get(ASKED)) != self.records:
            raise InvalidValueError(
                f"extra_body must have the same {ASKED} in every turn, and has another in turn {turn}"
            )
        body: dict[str, Any] = {"messages": messages_to_send(messages)}
        if tools:
            body["tools"] = tools_to_send(tools)
        body |= _sampling(_possible(params), everything=self.records)
        if self.send_seed or params.seed is not None:
            body["seed"] = seed % _SEEDS
        if "max_completion_tokens" in extra:
            body.pop("max_tokens", None)
        body |= extra
        if not body.get("logprobs") and "top_logprobs" not in extra:
            body.pop("top_logprobs", None)
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = {**(body.get("chat_template_kwargs") or {}), **self.chat_template_kwargs}
        return body

    async def _check_meaning(self, body: Mapping[str, Any]) -> None:
        """Refuse parameters that the server's log-probabilities lack; what they are of is found out once."""
        if self.api.meaning is None:
            async with self.api.lock:
                if self.api.meaning is None:
                    self.api.meaning = await self._probe()
        check_meaning(self.api.meaning, body)

    async def _probe(self) -> LogprobMeaning:
        for prompt in _PROBES:
            first, second = (await self._likely(prompt, SamplingParams(max_tokens=1, temperature=0)))[:2]
            if first < -_OPEN and first - second > _OPEN:
                break

        async def likeliest(params: SamplingParams) -> float:
            return (await self._likely(prompt, params))[0]

        return await probe_meaning(likeliest)

    async def _likely(self, prompt: str, params: SamplingParams) -> list[float]:
        """Log-probabilities of first tokens behind a prompt, from the likeliest on; two where the sampled one is it."""
        body = {"messages": [{"role": "user", "content": prompt}], **_sampling(params, everything=True)}
        choice = first_choice(await self.api.complete({**body, "top_logprobs": 2}))
        try:
            [token] = choice["logprobs"]["content"]
            values = [float(entry["logprob"]) for entry in token["top_logprobs"]]
            first, *others = sorted(values, reverse=True)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                "the API returned no log-probabilities where some were asked for; put 'logprobs': False into "
                "extra_body to record without them"
            ) from error
        return [first, *others, -math.inf]


NO_CAP: Final = (
    "max_trajectory_tokens cannot be kept with an API, where tokens are counted on the other side only; bound "
    "max_tokens and max_turns instead"
)


def _checked(extra: dict[str, Any]) -> dict[str, Any]:
    for name in _OF_THE_CONVERSATION:
        if extra.get(name):
            raise InvalidValueError(f"extra_body cannot hold {name!r}, which is the rollout's own; leave it out")
    if extra.get("n", 1) != 1:
        raise InvalidValueError(f"n must be 1 in a rollout, not {extra['n']!r}; for groups use num_generations")
    return extra


def _possible(params: SamplingParams) -> SamplingParams:
    if params.prompt_logprobs is not None:
        raise InvalidValueError(
            f"prompt_logprobs is {params.prompt_logprobs}, and a chat API gives none for prompts; leave it None"
        )
    return params


def _sampling(params: SamplingParams, *, everything: bool) -> dict[str, Any]:
    """Sampling parameters as fields of a request.

    Args:
        everything: for a recording: send defaults too, so that none of the server's own takes their place, and ask for
            log-probabilities.
    """
    fields: dict[str, Any] = {"temperature": params.temperature}
    if params.max_tokens is not None:
        fields["max_tokens"] = params.max_tokens
    if everything or params.top_p != 1:
        fields["top_p"] = params.top_p
    if everything or params.top_k > 0:
        fields["top_k"] = params.top_k if params.top_k > 0 else -1
    if everything or params.repetition_penalty != 1:
        fields["repetition_penalty"] = params.repetition_penalty
    if params.stop:
        fields["stop"] = list(params.stop)
    if everything or params.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": max(1, params.logprobs or 0)}
    return fields


def _stop_reason(choice: Mapping[str, Any]) -> Literal["stop", "length"]:
    """How the turn ended.

    Raises:
        EngineError: it was broken off for a reason that is nobody's limit.
    """
    reason = choice.get("finish_reason")
    if reason == "length":
        return "length"
    if reason in ("content_filter", "error", "abort"):
        raise EngineError(f"the API broke the turn off ({reason}); what there is of it is not kept")
    return "stop"


def _turns_of(record: Record) -> int:
    """Turns that the policy has taken in this episode, on whatever branch."""
    if not record.spans:
        return record.turns
    return sum(span.origin == "sampled" for span in record.unique_spans())
