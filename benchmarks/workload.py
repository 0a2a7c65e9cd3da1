"""What every contestant is given: the same conversations, the same sampled tokens, the same tool answers.

Turns and answers are of an exact number of tokens of the Qwen3 tokenizer, with its own chat template. A sampled turn
is what a model would write: a call with arguments, closed with the stop token; the tool finds its answer by the
call's argument, so it needs no state.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from unspool import ChatTemplate, tool
from unspool.world import Tool, ToolManager

_WORDS = """
the of and to in is that for it as was with on be at by this from they we have an are which one you had not or
were all their there been has when who will more no if out so said what up its about into than them can only
other new some could time these two may then do first any my now such like our over man me even most made
after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life
being under never day same another know while last might us great old year off come since against go came
right used take three
""".split()  # noqa: SIM905

TOOL_NAME = "lookup"
TOOL_DESCRIPTION = "Look a topic up."


class UnavailableError(Exception):
    """A benchmark cannot run here; the message says what is missing."""


@cache
def qwen3() -> Any:
    """The Qwen3 tokenizer, fetched once into the cache that the tests use.

    Raises:
        UnavailableError: it is not in the cache and cannot be fetched.
    """
    return _families().load("qwen3")


@cache
def template() -> ChatTemplate:
    """Its template: one for all runs, as in a program, so that what is found out about it once is found out once."""
    return ChatTemplate(qwen3())


def qwen3_folder() -> str:
    """The folder it was loaded from."""
    return str(_families().folder("qwen3"))


def _families() -> Any:
    from _pytest.outcomes import Failed, Skipped

    from tests import families

    try:
        families.folder("qwen3")
    except (Failed, Skipped) as missing:
        raise UnavailableError(str(missing)) from None
    return families


def encode(text: str) -> list[int]:
    """Ids of a text, control tokens read as such."""
    ids: list[int] = qwen3().backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: Sequence[int]) -> str:
    text: str = qwen3().backend_tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


@dataclass(frozen=True)
class Conversation:
    """A user's message, what the model samples turn by turn, and what the tool answers to each turn but the last.

    Attributes:
        messages: what it begins with.
        turns: ids of each sampled turn, stop token included.
        answers: the tool's text by the topic that a turn asks for; `topics` has them in order.
    """

    messages: list[dict[str, Any]]
    turns: list[list[int]]
    topics: list[str]
    answers: dict[str, str]


def make_conversation(rng: random.Random, calls: int, sampled: int, answer: int, last: int) -> Conversation:
    """A conversation of `calls` turns that call the tool, and one that answers.

    Args:
        sampled: tokens of a turn that calls. answer: tokens of a tool's answer. last: tokens of the last turn.
    """
    turns: list[list[int]] = []
    answers: dict[str, str] = {}
    topics: list[str] = []
    while len(turns) < calls:
        topic, ids = _call_of(rng, sampled)
        if topic not in answers:
            topics.append(topic)
            turns.append(ids)
            answers[topic] = text_of(rng, answer)
    turns.append([*encode(text_of(rng, last - 1)), stop_token()])
    question = text_of(rng, 12)
    return Conversation([{"role": "user", "content": question}], turns, topics, answers)


def stop_token() -> int:
    (token,) = encode("<|im_end|>")
    return token


def text_of(rng: random.Random, tokens: int) -> str:
    """Lines of words, numbers and punctuation that encode to exactly so many tokens."""
    while True:
        lines = [
            f"{rng.randrange(1, 99)}. {' '.join(rng.choices(_WORDS, k=9))}, {' '.join(rng.choices(_WORDS, k=4))}: "
            f"{rng.random():.2f}"
            for _ in range(tokens // 16 + 1)
        ]
        ids = encode("\n".join(lines))[:tokens]
        text = decode(ids)
        if encode(text) == ids and text == text.strip():
            return text


def _call_of(rng: random.Random, tokens: int) -> tuple[str, list[int]]:
    """A call of exactly so many tokens, and its topic."""
    words = rng.choices(_WORDS, k=2)
    while True:
        topic = " ".join(words)
        body = f'{{"name": "{TOOL_NAME}", "arguments": {{"topic": "{topic}"}}}}'
        ids = encode(f"<tool_call>\n{body}\n</tool_call><|im_end|>")
        if len(ids) == tokens:
            return topic, ids
        words = [*words, rng.choice(_WORDS)] if len(ids) < tokens else rng.choices(_WORDS, k=2)


def lookup_tool(answers: dict[str, str]) -> Tool:
    """The tool, async, with answers that take no time."""

    async def lookup(topic: str) -> str:
        return answers[topic]

    return tool(name=TOOL_NAME, description=TOOL_DESCRIPTION)(lookup)


def tool_infos() -> list[dict[str, Any]]:
    """The tool as every contestant shows it to the model."""
    return ToolManager([lookup_tool({})]).tool_infos()


@dataclass
class Load:
    """Many conversations, as trajectories to roll out, and what the model will say in each."""

    conversations: list[Conversation]
    trajectories: list[dict[str, Any]]

    @classmethod
    def of(cls, episodes: int, calls: int, sampled: int, answer: int, last: int, *, variants: int = 64) -> Load:
        """So many episodes, made from a few conversations in turn."""
        rng = random.Random(0)
        few = [make_conversation(rng, calls, sampled, answer, last) for _ in range(min(variants, episodes))]
        conversations = [few[index % len(few)] for index in range(episodes)]
        trajectories = [{"messages": [dict(message) for message in one.messages]} for one in conversations]
        return cls(conversations, trajectories)

    @property
    def answers(self) -> dict[str, str]:
        return {topic: answer for one in self.conversations for topic, answer in one.answers.items()}


@dataclass
class Run:
    """CPU seconds at the start of each turn and at the end of the last; the final token ids, where there are any."""

    marks: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def mark(self) -> None:
        self.marks.append(time.process_time())

    @property
    def turns(self) -> list[float]:
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]

    @property
    def total(self) -> float:
        return self.marks[-1] - self.marks[0]
