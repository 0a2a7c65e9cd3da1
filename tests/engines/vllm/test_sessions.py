"""Resumable sessions of a real vLLM give what requests of their own give, and are given up when they do not fit."""

from __future__ import annotations

import asyncio

import pytest

from tests.engines.vllm.asking import QUESTIONS, asked, request, until
from unspool import ChatTemplate, GenerateRequest
from unspool.engines import VLLMEngine
from unspool.engines.embedded import ensure_embedded_model

pytestmark = pytest.mark.vllm

TOOL_ANSWER = list(range(500, 520))


def open_sessions(engine: VLLMEngine) -> int:
    assert engine._sessions is not None
    return len(engine._sessions)


async def drained(engine: VLLMEngine) -> None:
    llm = engine._made.llm  # type: ignore[union-attr]
    await until(lambda: not open_sessions(engine) and not llm.get_num_unfinished_requests())


def turn(ids: list[int], session: str, tokens: int = 16, **params: object) -> GenerateRequest:
    return request(ids, session=session, max_tokens=tokens, **{"temperature": 0, **params})


async def test_three_turns_of_a_session_are_those_of_the_prefix_cache(
    engine: VLLMEngine, template: ChatTemplate
) -> None:
    """Greedy, over the same ids: a session may differ where bfloat16 rounds, so each turn is asked from one past."""
    ids = asked(template, QUESTIONS[1])
    for number in range(3):
        kept = await engine.generate(turn(ids, "three"))
        alone = await engine.generate(turn(ids, ""))
        assert kept.tokens == alone.tokens, number
        assert kept.logprobs == pytest.approx(alone.logprobs, abs=0.15)
        assert kept.versions == [engine.version] * len(kept.tokens)
        ids = ids + kept.tokens + TOOL_ANSWER
    assert open_sessions(engine) == 1
    engine.end_session("three")
    await drained(engine)


async def test_a_session_that_is_not_gone_on_with_begins_anew(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[0])
    first = await engine.generate(turn(ids, "other past"))
    rewritten = asked(template, QUESTIONS[1])
    answer = await engine.generate(turn(rewritten, "other past"))
    assert answer.tokens == (await engine.generate(turn(rewritten, ""))).tokens
    assert answer.tokens != first.tokens
    assert open_sessions(engine) == 1
    engine.end_session("other past")
    await drained(engine)


async def test_requests_that_a_session_cannot_serve_are_served_all_the_same(
    engine: VLLMEngine, template: ChatTemplate
) -> None:
    ids = asked(template, QUESTIONS[1])
    stopped = await engine.generate(turn(ids, "strings", 60, stop=" of France is"))
    assert template.tokenizer.decode(stopped.tokens).endswith(" of France is")
    formed = await engine.generate(turn(ids, "form", extra={"structured_outputs": {"regex": "[0-9]{2}"}}))
    assert template.tokenizer.decode(formed.tokens[:-1]).isdigit()
    assert open_sessions(engine) == 0


async def test_two_turns_of_one_session_at_once_are_both_answered(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[0])
    both = await asyncio.gather(*(engine.generate(turn(ids, "twice")) for _ in range(2)))
    assert both[0].tokens == both[1].tokens
    engine.end_session("twice")
    await drained(engine)


async def test_new_weights_end_the_sessions_that_wait(engine: VLLMEngine, template: ChatTemplate) -> None:
    ids = asked(template, QUESTIONS[1])
    answer = await engine.generate(turn(ids, "waits"))
    assert open_sessions(engine) == 1
    await engine.update_weights(ensure_embedded_model())
    assert open_sessions(engine) == 0
    later = ids + answer.tokens + TOOL_ANSWER
    again = await engine.generate(turn(later, "waits"))
    assert again.versions == [engine.version] * len(again.tokens)
    assert again.tokens == (await engine.generate(turn(later, ""))).tokens
    engine.end_session("waits")
    await drained(engine)


async def test_there_are_no_more_sessions_than_have_room(engine: VLLMEngine, template: ChatTemplate) -> None:
    assert engine._sessions is not None
    most, engine._sessions._most = engine._sessions._most, 2
    try:
        for number in range(4):
            await engine.generate(turn(asked(template, f"{number}?"), f"room {number}", 4))
            assert open_sessions(engine) <= 2
        many = [engine.generate(turn(asked(template, f"{number}!"), f"more {number}", 4)) for number in range(5)]
        assert [len(answer.tokens) for answer in await asyncio.gather(*many)] == [4] * 5
        assert open_sessions(engine) <= 2
    finally:
        engine._sessions._most = most
        for number in range(5):
            engine.end_session(f"room {number}")
            engine.end_session(f"more {number}")
    await drained(engine)


async def test_ending_a_session_that_is_not_there_or_runs_is_fine(engine: VLLMEngine, template: ChatTemplate) -> None:
    engine.end_session("nobody")
    running = asyncio.create_task(engine.generate(turn(asked(template, QUESTIONS[0]), "runs", 8)))
    await until(lambda: open_sessions(engine))
    engine.end_session("runs")
    assert (await running).tokens
    await drained(engine)
