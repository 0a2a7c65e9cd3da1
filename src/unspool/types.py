"""Plain data that every other module speaks: messages, calls, sampling parameters, stop reasons, errors.

Nothing here does any work beyond checking its own values; nothing here imports anything of unspool.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

# --------------------------------------------------------------------------- errors


class UnspoolError(Exception):
    """The base of every error that unspool raises."""


class InvalidValueError(UnspoolError, ValueError):
    """An argument or a piece of data has a value that cannot be used."""


class InvalidTypeError(UnspoolError, TypeError):
    """An argument has a type that cannot be used."""


class TemplateError(InvalidValueError):
    """A chat template cannot render what was asked of it."""


class RecordError(InvalidValueError):
    """Something was about to enter a record that would break its invariants."""


class EngineError(UnspoolError, RuntimeError):
    """An engine failed, or answered in a form that cannot be used."""


class BlockingCallError(UnspoolError, RuntimeError):
    """A call that blocks was made where it would never return."""


class SandboxError(UnspoolError, RuntimeError):
    """Code in a sandbox did not end well, or no sandbox can be made here."""


class MissingExtraError(UnspoolError, ImportError):
    """An optional part is not installed; the message names the command that installs it."""


class RolloutInterrupted(KeyboardInterrupt):
    """Ctrl-C during a rollout. `results` holds one trajectory for each input, unfinished ones `cancelled`."""

    def __init__(self, results: list[dict[str, Any]]) -> None:
        super().__init__("rollout interrupted; .results holds what was done")
        self.results = results


# --------------------------------------------------------------------------- messages

MessageDict: TypeAlias = dict[str, Any]
"""A chat message as the field writes it: `role`, `content`, and by role `tool_calls`, `tool_call_id`, `name`."""

ToolInfo: TypeAlias = dict[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

Trajectory: TypeAlias = dict[str, Any]
"""A conversation to run or that was run: a plain dict, of which `messages` alone is required."""

StopReason = Literal[
    "stop",  # the model ended its turn and asked for nothing more
    "length",  # max_tokens, or the trajectory cap, cut it
    "max_turns",  # the last allowed turn still asked for tools
    "env_done",  # the environment said that the episode is over
    "parse_error",  # a malformed call, where the limits say that it ends the episode
    "timeout",  # the wall-clock limit of the episode
    "api_error",  # the policy or the tool manager raised; `error` says what
    "cancelled",  # interrupted from outside
]

CallStatus = Literal["ok", "bad_json", "unknown_tool", "bad_arguments", "unclosed", "limit"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model wrote.

    `arguments` is the decoded object, or the raw text where that could not be decoded. `span` is the
    half-open range of positions in the sampled turn whose tokens wrote the call. `error` says what is wrong
    wherever `status` is not `"ok"`.
    """

    name: str
    arguments: dict[str, Any] | str
    id: str = ""
    status: CallStatus = "ok"
    span: tuple[int, int] = (0, 0)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The call in OpenAI's form, with `arguments` as an object (chat templates want that) where it is one."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def called(self, id: str) -> ToolCall:
        """The same call with an id."""
        return ToolCall(self.name, self.arguments, id, self.status, self.span, self.error)

    def failed(self, status: CallStatus, error: str) -> ToolCall:
        """The same call, found wanting."""
        return replace(self, status=status, error=error)


@dataclass(frozen=True, slots=True)
class Message:
    """A sampled turn, read: the text outside calls and thinking, the thinking, and the calls in their order."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    role: str = "assistant"

    def to_dict(self) -> MessageDict:
        """The message as a plain dict; keys that say nothing are left out."""
        message: MessageDict = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


def decode_arguments(raw: object) -> dict[str, Any]:
    """Tool arguments as an object, from an object, from JSON text, or from nothing (None and blank mean `{}`).

    Raw control characters inside strings are accepted, as models write them.

    Raises:
        InvalidValueError: with a sentence that a model can act on.
    """
    if raw is None:
        return {}
    if isinstance(raw, Mapping):
        return dict(raw)
    if not isinstance(raw, str):
        raise InvalidValueError(f"arguments must be a JSON string or object, not {type(raw).__name__}")
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise InvalidValueError(f"invalid JSON in arguments: {error}") from error
    if not isinstance(value, dict):
        raise InvalidValueError(f"arguments must be a JSON object, not {type(value).__name__}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


# --------------------------------------------------------------------------- sampling


def check_value(name: str, value: Any, good: Callable[[Any], bool], wanted: str) -> None:
    """Refuse a value with one sentence that names it and what is wanted.

    Raises:
        InvalidTypeError: it is of a type that cannot even be looked at.
        InvalidValueError: it is out of bounds.
    """
    try:
        fine = not isinstance(value, bool) and good(value)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{name} must be {wanted}, not {value!r}") from None
    if not fine:
        raise InvalidValueError(f"{name} must be {wanted}, not {value!r}")


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is a whole number, and not below `least`; raises TypeError for what is no number."""
    return bool(value >= least and value == operator.index(value))


_GOOD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (lambda value: value is None or is_count(value), "a whole number, at least 1, or None"),
    "temperature": (lambda value: 0 <= value < math.inf, "a number, 0 (greedy) or more"),
    "top_k": (lambda value: is_count(value, -1), "a whole number, at least 1, or -1 for all"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a number above 0"),
    "stop": (lambda value: all(isinstance(text, str) and text for text in value), "a string or strings, none empty"),
    "seed": (lambda value: value is None or value == operator.index(value), "a whole number, or None"),
    "logprobs": (lambda value: value is None or is_count(value, 0), "a whole number, at least 0, or None"),
    "prompt_logprobs": (lambda value: value is None or is_count(value, 0), "a whole number, at least 0, or None"),
    "num_samples": (is_count, "a whole number, at least 1"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_tokens: most tokens in one turn, the stop token included; None: as many as fit.
        temperature: >= 0; 0 is greedy.
        top_k: keep the k likeliest tokens; -1 or 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches it; in (0, 1].
        repetition_penalty: > 0; 1 is none.
        stop: a string or strings that end a turn, besides the template's own stop tokens.
        seed: the seed of the run, where the rollout is given none.
        logprobs: how many alternatives beside the sampled token's log-probability to ask for; None: none.
        prompt_logprobs: the same for prompt tokens, where the engine has them.
        num_samples: answers a request; rollouts need 1 (see `num_generations` for groups).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1

    def __post_init__(self) -> None:
        stop: object = self.stop
        if stop is None:
            object.__setattr__(self, "stop", ())
        elif isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        elif isinstance(stop, (list, tuple)):
            object.__setattr__(self, "stop", tuple(stop))
        for name, (good, wanted) in _GOOD.items():
            check_value(name, getattr(self, name), good, wanted)

    @classmethod
    def of(cls, value: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Parameters from parameters, from a mapping of their names, or the defaults from None."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidTypeError(f"sampling_params must be SamplingParams or a mapping, not {type(value).__name__}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise InvalidValueError(f"sampling_params has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
        return cls(**value)
