"""MiniMind's `rollout_single` and `rollout_batch`, over the one loop: the dynamic active batch.

Each sample of the batch becomes `num_gen` trajectories, which run side by side. With a batch engine every round is one
call with those that are still alive; where tools are slow nobody waits for them. What comes back are tokens as they
were sampled, never text encoded again: the next turn of a trajectory is generated from the very tokens returned here.
Every list has one entry a trajectory, those of one sample next to each other.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from unspool.engines.adapt import as_engine
from unspool.engines.batching import Batching
from unspool.engines.minimind import RolloutSampler
from unspool.engines.protocol import Engine
from unspool.rollout.called import ExecuteTool, as_worlds
from unspool.rollout.jobs import derive_seed
from unspool.rollout.multi_turn import MultiTurnRollout
from unspool.template import ChatTemplate
from unspool.template.jinja import Renderer
from unspool.types import (
    EngineError,
    InvalidTypeError,
    InvalidValueError,
    MessageDict,
    ToolInfo,
    Trajectory,
    check_value,
    is_count,
)
from unspool.world.making import Given

logger = logging.getLogger("unspool")

_THINKING = ("open_thinking", "enable_thinking")
"""Switches by which templates are told to think or not: MiniMind's, and Qwen3's and others'."""


class _Single(NamedTuple):
    final_output: str
    final_context: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_old_logps: list[float]
    turn_outputs: list[str]
    unfinished: bool


class SingleRollout(_Single):
    """The eight values of one trajectory, as a tuple.

    Attributes:
        final_output: the text of the last turn, without its stop token.
        final_context: the text of all tokens.
        prompt_ids: the first prompt.
        response_ids: all that came behind it, sampled turns and tool answers; R tokens.
        response_mask: R; 1 where sampled (the stop token too), 0 elsewhere.
        response_old_logps: R; natural log under the distribution sampled from, 0.0 where not sampled.
        turn_outputs: the text of each turn.
        unfinished: a limit ended it while it still asked for tools.
        trajectory: all of it, as `MultiTurnRollout` returns it. Not part of the tuple.
    """

    trajectory: Trajectory


class _Batch(NamedTuple):
    final_outputs: list[str]
    final_contexts: list[str]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    response_masks: list[list[int]]
    response_old_logps: list[list[float]]
    turn_outputs: list[list[str]]
    unfinished: list[bool]


class BatchRollout(_Batch):
    """The eight lists of `rollout_batch`, as a tuple; see `SingleRollout` for an entry of each.

    Attributes:
        trajectories: all of each, as `MultiTurnRollout` returns it: `error`, `versions`, `spans` and so on. Not part of
            the tuple.
    """

    trajectories: list[Trajectory]


def rollout_single(
    rollout_engine: object,
    tokenizer: object,
    messages: Sequence[MessageDict],
    tools: Sequence[ToolInfo] | str | None = None,
    max_turns: int | None = 3,
    max_new_tokens: int | None = 256,
    thinking_ratio: float | None = 0.5,
    device: object = None,
    execute_tool: ExecuteTool | Given | Sequence[Given | None] | None = None,
    *,
    temperature: float = 0.8,
    seed: int | None = None,
    tool_timeout: float | None = 30.0,
    extra: Mapping[str, Any] | None = None,
) -> SingleRollout:
    """One trajectory of one sample. Parameters and errors as in `rollout_batch`; `messages` is not changed."""
    if not _is_list_of_dicts(messages):
        raise InvalidTypeError(f"messages must be a list of messages, dicts with a 'role', not {messages!r:.80}")
    batch = rollout_batch(
        rollout_engine,
        tokenizer,
        [messages],
        [tools],
        1,
        max_turns,
        max_new_tokens,
        thinking_ratio,
        device,
        execute_tool,
        temperature=temperature,
        seed=seed,
        tool_timeout=tool_timeout,
        extra=extra,
    )
    single = SingleRollout._make(column[0] for column in batch)
    single.trajectory = batch.trajectories[0]
    return single


def rollout_batch(
    rollout_engine: object,
    tokenizer: object,
    messages_batch: Sequence[Sequence[MessageDict]],
    tools_batch: Sequence[Sequence[ToolInfo] | str | None] | None,
    num_gen: int,
    max_turns: int | None = 3,
    max_new_tokens: int | None = 256,
    thinking_ratio: float | None = 0.5,
    device: object = None,
    execute_tool: ExecuteTool | Given | Sequence[Given | None] | None = None,
    *,
    temperature: float = 0.8,
    seed: int | None = None,
    tool_timeout: float | None = 30.0,
    extra: Mapping[str, Any] | None = None,
) -> BatchRollout:
    """`num_gen` trajectories of each sample, all of them at once.

    Args:
        rollout_engine: any engine: `TorchRolloutEngine`, another `Engine`, a sampler, or an object with MiniMind's
            `rollout(...)`.
        tokenizer: a Hugging Face tokenizer with a chat template, or a `ChatTemplate`.
        messages_batch: the messages of each sample.
        tools_batch: the tools of each sample, dicts in OpenAI's form (or JSON text of them); None, of a sample or in
            place of the list: those of `execute_tool`, where that is a `ToolManager` or another world, else none.
        num_gen: trajectories a sample.
        max_turns: assistant turns; calls of the last one are not run.
        max_new_tokens: most tokens of a turn.
        thinking_ratio: how probably the template is told to think (`open_thinking`, `enable_thinking`), drawn from the
            seed for each trajectory; None: as the template has it, as where a ChatTemplate was given the switch.
        device: for an object with `rollout(...)` where the prompts go; any other engine gets lists, and puts them
            where its model is: this must be the same, where it says so, and is not looked at where it does not. None:
            the engine's own.
        execute_tool: a function of a call's name and arguments, plain or async; its result is written as JSON, at most
            2,048 characters; None: there is no such tool. Or a `ToolManager`, or another `World`. Or an `Env`: what has
            the state of one episode is given as its class (or `functools.partial` of it), which is made for each
            episode, or as a list of one for each trajectory.
        temperature: 0 is greedy.
        seed: None: drawn from `random`, so `random.seed` repeats a run.
        tool_timeout: seconds of a call, where `execute_tool` is a function.
        extra: passed through to every request of the engine.

    Raises:
        InvalidValueError, InvalidTypeError: arguments that cannot be used.
        EngineError: the engine gives no log-probabilities, or every trajectory failed; the message has the first cause.
            Where some failed, they are returned as far as they came, with a warning in the log, and `error` in theirs
            of `trajectories`.
    """
    check_value("num_gen", num_gen, is_count, "a whole number, at least 1")
    messages_batch, tools_batch = _samples(messages_batch, tools_batch)
    template = _template(tokenizer)
    engine = _engine(rollout_engine, device)
    seed = random.getrandbits(62) if seed is None else seed
    rollout = MultiTurnRollout(
        engine,
        template,
        as_worlds(execute_tool, tool_timeout, len(messages_batch) * num_gen, in_step=isinstance(engine, Batching)),
        {"max_tokens": max_new_tokens, "temperature": temperature},
        max_turns,
        seed=seed,
        progress=False,
        extra=extra,
    )
    switches = _Switches(template, thinking_ratio, seed)
    trajectories = rollout(
        [
            {
                "id": str(group),
                "messages": messages,
                "tools": tools,
                "group": group,
                "sample": sample,
                "chat_template_kwargs": switches.of(group, sample),
            }
            for group, (messages, tools) in enumerate(zip(messages_batch, tools_batch, strict=True))
            for sample in range(num_gen)
        ]
    )
    _check(trajectories, engine)
    rows = [_row(trajectory, template) for trajectory in trajectories]
    batch = BatchRollout._make([row[place] for row in rows] for place in range(len(_Batch._fields)))
    batch.trajectories = trajectories
    return batch


# ------------------------------------------------------------------ what goes in


def _is_list_of_dicts(given: object) -> bool:
    return isinstance(given, (list, tuple)) and all(isinstance(message, Mapping) for message in given)


def _samples(messages_batch: object, tools_batch: object) -> tuple[list[Any], list[Any]]:
    """The messages and the tools of each sample; refused here, where it can be said of which sample it is wrong."""
    if not isinstance(messages_batch, (list, tuple)):
        raise InvalidTypeError(f"messages_batch must be a list of lists of messages, not {messages_batch!r:.80}")
    for place, messages in enumerate(messages_batch):
        if not _is_list_of_dicts(messages):
            raise InvalidTypeError(
                f"messages_batch[{place}] must be the messages of a sample, not {messages!r:.80}; give a list of lists "
                "of messages, one list for each sample"
            )
    if tools_batch is None:
        tools_batch = [None] * len(messages_batch)
    if not isinstance(tools_batch, (list, tuple)):
        raise InvalidTypeError(
            f"tools_batch must be a list with the tools of each sample, or None for no tools, not {tools_batch!r:.80}"
        )
    if len(messages_batch) != len(tools_batch):
        raise InvalidValueError(
            f"messages_batch has {len(messages_batch)} samples and tools_batch {len(tools_batch)}; give one for each"
        )
    return list(messages_batch), [_tools(tools, f"tools_batch[{place}]") for place, tools in enumerate(tools_batch)]


def _tools(given: object, name: str) -> list[ToolInfo] | None:
    read: Any = given
    if isinstance(given, str):
        try:
            read = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"{name} is not valid JSON ({error}): {given!r:.80}") from None
    if read is not None and not _is_list_of_dicts(read):
        raise InvalidTypeError(
            f"{name} must be a list of dicts in OpenAI's form, JSON text of one, or None, not {given!r:.80}"
        )
    return None if read is None else list(read)


@lru_cache(maxsize=8)
def _template_of(tokenizer: Any, source: object, size: int) -> ChatTemplate:
    """The template of a tokenizer as it is now; working one out takes longer than a short rollout."""
    return ChatTemplate(tokenizer)


def _template(tokenizer: object) -> ChatTemplate:
    if isinstance(tokenizer, ChatTemplate):
        return tokenizer
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, str) and hasattr(tokenizer, "__len__"):
        return _template_of(tokenizer, source, len(tokenizer))
    return ChatTemplate(tokenizer)


def _engine(given: object, device: object) -> Engine:
    engine = as_engine(given, device=device)
    if isinstance(engine, Batching) and isinstance(engine.sampler, RolloutSampler):
        return engine  # the device is where its prompts go
    own = getattr(given, "device", None)
    if own is None and hasattr(getattr(given, "model", None), "parameters"):
        own = next((parameter.device for parameter in cast(Any, given).model.parameters()), None)
    if device is not None and own is not None and _kind(device) != _kind(own):
        raise InvalidValueError(
            f"device is {str(device)!r} and the engine's model is on {str(own)!r}; leave it out, or move the model"
        )
    if not engine.logprobs and not isinstance(engine, Batching):  # that one finds out with the first answer
        raise EngineError(_no_logprobs(engine))
    return engine


def _kind(device: object) -> str:
    return str(device).partition(":")[0]


class _Switches:
    """The thinking switches of each trajectory."""

    def __init__(self, template: ChatTemplate, ratio: float | None, seed: int) -> None:
        if ratio is not None:
            check_value("thinking_ratio", ratio, lambda value: 0 <= value <= 1, "a number from 0 to 1, or None")
        read = Renderer(template.source, {}).names() if ratio is not None else set()
        self._names = [name for name in _THINKING if name in read and name not in template.template_kwargs]
        self._ratio, self._seed = ratio or 0.0, seed

    def of(self, group: int, sample: int) -> dict[str, bool]:
        drawn = derive_seed(self._seed, "thinking", group, sample) / (1 << 63)
        return dict.fromkeys(self._names, drawn < self._ratio)


# ------------------------------------------------------------------ what comes out


def _check(trajectories: Sequence[Trajectory], engine: Engine) -> None:
    """Raise where nothing came of all of it; say so where something did not."""
    failed = [trajectory for trajectory in trajectories if trajectory["error"] is not None]
    if failed and len(failed) == len(trajectories):
        raise EngineError(f"all {len(failed)} trajectories failed; the first one with: {failed[0]['error']}")
    for trajectory in failed:
        place = f"sample {trajectory['group']}, trajectory {trajectory['sample']}"
        logger.warning("%s failed after %d turns: %s", place, trajectory["turns"], trajectory["error"])
    if any(trajectory["logprobs"] is None for trajectory in trajectories):
        raise EngineError(_no_logprobs(engine))


def _no_logprobs(engine: Engine) -> str:
    return (
        f"{type(engine).__name__} gives no log-probabilities, which response_old_logps are; use one that does, or "
        "MultiTurnRollout, which needs none"
    )


def _row(trajectory: Trajectory, template: ChatTemplate) -> _Single:
    """The eight values of a trajectory."""
    ids, spans = trajectory["input_ids"], trajectory["spans"]
    prompt = spans[0]["length"] if spans else 0
    texts, start = [], 0
    for span in spans:
        end = start + span["length"]
        if span["origin"] == "sampled":
            turn = ids[start:end]
            texts.append(template.decode(turn[:-1] if turn[-1] in template.stop_token_ids else turn))
        start = end
    last: MessageDict = next((m for m in reversed(trajectory["messages"]) if m.get("role") == "assistant"), {})
    return _Single(
        final_output=texts[-1] if texts else "",
        final_context=template.decode(ids),
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        response_mask=trajectory["loss_mask"][prompt:],
        response_old_logps=trajectory["logprobs"][prompt:],
        turn_outputs=texts,
        unfinished=bool(texts and trajectory["truncated"] and last.get("tool_calls")),
    )
