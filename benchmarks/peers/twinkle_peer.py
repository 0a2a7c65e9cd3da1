"""Twinkle: its `MultiTurnRollout` and `Template`, over a scripted sampler that does what its vLLM sampler does.

It refuses Qwen3's own template, which is not prefix-preserving, at the first tool answer; it is given TRL's patched
one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
from twinkle.data_format.sampling import SampledSequence, SampleResponse
from twinkle.template.base import Template
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout
from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.tool_manager import ToolManager

from benchmarks.workload import Conversation, Load, Run, qwen3_folder, tool_infos
from tests import families

VERSION = version("twinkle-kit")


@cache
def _template() -> Template:
    """Of a folder with the tokenizer and the model's configuration, which it wants to see."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(qwen3_folder(), folder, dirs_exist_ok=True)
        Path(folder, "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        transformers.logging.set_verbosity_error()  # it warns of a folder that names a model and holds none
        template = Template(folder, max_length=1_000_000)
        template.tokenizer.chat_template = families.trl_templates()["qwen3_training"]
        return template


class _Sampler:
    def __init__(self, conversations: list[Conversation], sample: Callable[[], None]) -> None:
        self.conversations, self.sample_now, self.turn = conversations, sample, 0

    def sample(self, features: list[Any], sampling_params: Any = None) -> list[Any]:
        """All conversations are of one length, so all are in every batch, in their order."""
        self.sample_now()
        responses = []
        for feature, conversation in zip(features, self.conversations, strict=True):
            tokens = list(conversation.turns[self.turn])
            sequence = SampledSequence(
                "stop",
                tokens,
                logprobs=[[(token, -1.0)] for token in tokens],
                decoded=_template().decode(tokens, skip_special_tokens=True),
                new_input_feature=_template().concat_input_feature(feature, tokens),
            )
            responses.append(SampleResponse([sequence]))
        self.turn += 1
        return responses


class _Lookup(Tool):  # type: ignore[misc]  # the peer is not typed for us
    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        return self.answer(arguments["topic"])

    def tool_info(self) -> Any:
        return tool_infos()[0]


def rollout(conversations: list[Conversation], answer: Callable[[str], str], sample: Callable[[], None]) -> Any:
    trajectories = [{"messages": [dict(m) for m in one.messages], "tools": tool_infos()} for one in conversations]
    sampler = _Sampler(conversations, sample)
    manager = ToolManager([_Lookup(answer)])
    return MultiTurnRollout(sampler, _template(), manager, max_turns=1_000)(trajectories)


def one_conversation(conversation: Conversation) -> Run:
    run = Run()
    (result,) = rollout([conversation], lambda topic: conversation.answers[topic], run.mark)
    run.ids = list(result["input_ids"])
    return run


def many(load: Load, latency: float) -> Any:
    answers = load.answers
    return rollout(load.conversations, lambda topic: answers[topic], lambda: time.sleep(latency))


def wall(load: Load, latency: float, seconds: dict[str, float]) -> float:
    answers = load.answers

    def answer(topic: str) -> str:
        time.sleep(seconds[topic])
        return answers[topic]

    started = time.perf_counter()
    rollout(load.conversations, answer, lambda: time.sleep(latency))
    return time.perf_counter() - started


OVERHEAD = {"MultiTurnRollout": (one_conversation, 10)}
SCALE = {"MultiTurnRollout": many}
SCHEDULE = {"MultiTurnRollout": wall}
