"""TRL: the tool loop of `GRPOTrainer`, over a stand-in for the trainer with a scripted engine, and nothing to train.

It cannot bridge with Qwen3's own template, which is not prefix-preserving, so it bridges with its patched one
(`qwen3_training`), as its trainer does; prompts are rendered with the original.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response
from trl.trainer import grpo_trainer

from benchmarks.workload import TOOL_NAME, Conversation, Load, Run, qwen3_folder, tool_infos

GRPOTrainer: Any = grpo_trainer.GRPOTrainer  # called without an instance of it
VERSION = version("trl")
_LIMIT = 1_000_000


@cache
def _tokenizer() -> Any:
    """A copy of its own: TRL sets attributes on it, and its parser knows templates by their source."""
    from transformers import AutoTokenizer
    from trl import chat_template_utils

    tokenizer = AutoTokenizer.from_pretrained(qwen3_folder())
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    return add_response_schema(tokenizer)


def rollout(
    conversations: list[Conversation], lookup: Callable[..., str], sample: Callable[[int], None] = lambda turn: None
) -> list[tuple[int, list[int], list[int], list[float]]]:
    """Turns, ids, mask and log-probabilities of each; `sample(turn)` is called where an engine would work."""
    tokenizer = _tokenizer()
    turn = 0

    def generate(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]]]:
        nonlocal turn
        sample(turn)
        ids = [list(one.turns[turn]) for one in conversations]
        turn += 1
        return ids, [[-1.0] * len(one) for one in ids]

    trainer: Any = SimpleNamespace(
        _is_vlm=False,
        _sync_tool_dicts=[{TOOL_NAME: lookup}] * len(conversations),
        _async_tool_dicts=[{}] * len(conversations),
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        chat_template=get_training_chat_template(tokenizer),
        chat_template_kwargs={},
        environment_factories=None,
        max_completion_length=_LIMIT,
        max_tool_calling_iterations=_LIMIT,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=_LIMIT)),
        tools=tool_infos(),
        use_vllm=False,
        vllm_mode=None,
        _generate_single_turn=generate,
    )
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    prompts = [[dict(message) for message in one.messages] for one in conversations]
    prompt_ids = tokenizer.apply_chat_template(
        prompts, tools=trainer.tools, add_generation_prompt=True, return_dict=False
    )
    completion_ids, logprobs = generate(prompt_ids)
    completions = [
        [parse_response(tokenizer, ids, prefix=prompt, tools=trainer.tools)]
        for prompt, ids in zip(prompt_ids, completion_ids, strict=True)
    ]
    mask, _, completion_ids, logprobs, *_ = GRPOTrainer._tool_call_loop(
        trainer, prompts, prompt_ids, completion_ids, completions, logprobs, None, {}
    )
    return [
        (turn, [*prompt, *ids], one_mask, values)
        for prompt, ids, one_mask, values in zip(prompt_ids, completion_ids, mask, logprobs, strict=True)
    ]


def one_conversation(conversation: Conversation) -> Run:
    run = Run()
    ((_, run.ids, _, _),) = rollout([conversation], lambda topic: conversation.answers[topic], lambda turn: run.mark())
    return run


def suffix_alone(conversation: Conversation) -> Run:
    """Its function for a tool's answer alone: no parse, no loop."""
    run = Run()
    tokenizer = _tokenizer()
    trainer: Any = SimpleNamespace(
        _is_vlm=False,
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        chat_template=get_training_chat_template(tokenizer),
        chat_template_kwargs={},
    )
    run.mark()
    for topic in conversation.topics:
        answer = {"role": "tool", "name": TOOL_NAME, "content": conversation.answers[topic]}
        GRPOTrainer._get_tool_suffix_ids(trainer, [answer])
        run.mark()
    return run


def many(load: Load, latency: float) -> Any:
    answers = load.answers
    return rollout(load.conversations, lambda topic: answers[topic], lambda turn: time.sleep(latency))


def wall(load: Load, latency: float, seconds: dict[str, float]) -> float:
    answers = load.answers

    def lookup(topic: str) -> str:
        time.sleep(seconds[topic])
        return answers[topic]

    started = time.perf_counter()
    rollout(load.conversations, lookup, lambda turn: time.sleep(latency))
    return time.perf_counter() - started


OVERHEAD = {"tool suffix alone": (suffix_alone, 4), "GRPOTrainer's loop": (one_conversation, 8)}
SCALE = {"GRPOTrainer's loop": many}
SCHEDULE = {"GRPOTrainer's loop": wall}
