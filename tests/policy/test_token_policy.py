"""The one place where tokens are made: what matches the record goes on with a bridge, what does not branches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.small import call, ids, say, script, small_template, small_tokenizer
from unspool import ChatTemplate, Generation, Record, ScriptedEngine, TokenPolicy, calculator

SYSTEM = {"role": "system", "content": "Be brief."}
U1, U2 = {"role": "user", "content": "12 + 7?"}, {"role": "user", "content": "And 2 * 3?"}
CALC = call("calculator", expression="12 + 7")
TOOLS = [calculator.info()]


async def talk(policy: TokenPolicy, *messages: dict[str, Any]) -> tuple[Record, list[dict[str, Any]]]:
    """A record in which the policy answered each message."""
    record, conversation = Record(), []
    for message in messages:
        conversation.append(message)
        turn = await policy.extend(record, conversation, TOOLS, session="s")
        record = turn.record
        conversation = list(record.messages)
    return record, conversation


def answer(content: str = "19") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_0_0", "name": "calculator", "content": content}


async def test_a_conversation_that_goes_on_gets_the_recorded_tokens_and_a_bridge() -> None:
    engine = script(CALC, "19", "6")
    record, conversation = await talk(TokenPolicy(engine, small_template()), U1, answer(), U2)
    assert [span.origin for span in record.spans] == ["prompt", "sampled", "bridge", "sampled", "bridge", "sampled"]
    assert len(record.branches) == 1
    assert record.input_ids == engine.requests[-1].input_ids + say("6")
    assert [m["role"] for m in conversation] == ["user", "assistant", "tool", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {**m, "content": m["content"] or None},
        lambda m: {**m, "refusal": None, "annotations": []},
        lambda m: {
            **m,
            "tool_calls": [
                {**c, "function": {"name": "calculator", "arguments": '{"expression":"12 + 7"}'}}
                for c in m["tool_calls"]
            ],
        },
    ],
    ids=["empty content as null", "keys that say nothing", "arguments as text with other spaces"],
)
async def test_a_benign_rewriting_does_not_branch(change: Any) -> None:
    policy = TokenPolicy(script(CALC, "19"), small_template())
    record, conversation = await talk(policy, U1)
    conversation[1] = change(conversation[1])
    turn = await policy.extend(record, [*conversation, answer()], TOOLS, session="s")
    assert turn.record is record
    assert len(record.branches) == 1


async def test_an_edited_answer_is_prompt_from_there_on_and_the_sampled_one_stays() -> None:
    policy = TokenPolicy(script(CALC, "19", "6"), small_template())
    record, conversation = await talk(policy, U1, answer())
    edited = [*conversation[:3], {"role": "assistant", "content": "It is nineteen."}, U2]
    turn = await policy.extend(record, edited, TOOLS, session="s")
    branch = turn.record
    assert (branch.cause, branch.forked_at, branch.parent) == ("edited", 2, record)
    assert [span.origin for span in branch.spans] == ["prompt", "sampled", "prompt", "sampled"]
    assert "It is nineteen." in small_template().decode(branch.spans[2].tokens)
    assert branch.spans[1] is record.spans[1]
    rows = record.to_rows()
    sampled = [tuple(t for t in row["labels"] if t != -100) for row in rows]
    assert sampled == [(*say(CALC), *say("19")), tuple(say("6"))]


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (lambda c: [SYSTEM, *c], "edited"),
        (lambda c: c[:1], "truncated"),
        (lambda c: [c[0], *c[3:]], "compacted"),
        (lambda c: [c[0], retyped(c[1]), *c[2:]], "argument_types"),
        (lambda c: [c[0], {**c[1], "content": "Hm."}, *c[2:]], "edited"),
        (lambda c: [*c[:2], answer("20"), *c[3:]], "edited"),
    ],
)
async def test_the_cause_of_a_branch_is_named(edit: Any, cause: str) -> None:
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 1", "exact": true}}\n</tool_call>'
    policy = TokenPolicy(script(text, "19", "again"), small_template())
    record, conversation = await talk(policy, U1, answer())
    messages = edit(conversation)
    if messages[-1]["role"] == "assistant":
        messages = [*messages, U2]
    turn = await policy.extend(record, messages, TOOLS, session="s")
    assert turn.record.cause == cause
    assert turn.record.messages[-1] == {"role": "assistant", "content": "again"}


def retyped(message: dict[str, Any]) -> dict[str, Any]:
    """The same call with `true` written as a string, as some agents' schemas do."""
    arguments = {"expression": "1 + 1", "exact": "True"}
    calls = [{**c, "function": {"name": "calculator", "arguments": arguments}} for c in message["tool_calls"]]
    return {**message, "tool_calls": calls}


async def test_a_dropped_thinking_is_named() -> None:
    source = small_template().source
    policy = TokenPolicy(script("<think>hm</think>\n\n19", "6"), ChatTemplate(small_tokenizer(), chat_template=source))
    record, conversation = await talk(policy, U1)
    assert conversation[1]["reasoning_content"] == "hm"
    bare = {key: value for key, value in conversation[1].items() if key != "reasoning_content"}
    turn = await policy.extend(record, [conversation[0], bare, U2], TOOLS, session="s")
    assert turn.record.cause == "thinking_dropped"


async def test_other_tools_branch_from_the_root() -> None:
    policy = TokenPolicy(script("19", "6"), small_template())
    record, conversation = await talk(policy, U1)
    turn = await policy.extend(record, [*conversation, U2], [], session="s")
    assert (turn.record.cause, turn.record.forked_at) == ("tools_changed", 0)
    assert [span.origin for span in turn.record.spans] == ["prompt", "sampled"]


async def test_a_turn_rolled_back_is_sampled_again_from_the_same_tokens() -> None:
    engine = script(CALC, "19", "nineteen")
    policy = TokenPolicy(engine, small_template())
    record, conversation = await talk(policy, U1, answer())
    turn = await policy.extend(record, conversation[:3], TOOLS, session="s")
    assert (turn.record.cause, turn.record.forked_at) == ("truncated", 3)
    assert engine.requests[2].input_ids == engine.requests[1].input_ids


async def test_a_failed_try_is_tried_again_without_feeding_twice() -> None:
    engine = script(CALC, RuntimeError("gone"), "19")
    policy = TokenPolicy(engine, small_template())
    record, conversation = await talk(policy, U1)
    messages = [*conversation, answer()]
    with pytest.raises(RuntimeError):
        await policy.extend(record, messages, TOOLS, session="s")
    turn = await policy.extend(record, messages, TOOLS, session="s")
    assert turn.record is record
    assert engine.requests[2].input_ids == engine.requests[1].input_ids
    assert record.input_ids == engine.requests[1].input_ids + say("19")


async def test_a_conversation_with_nothing_to_answer_is_refused() -> None:
    policy = TokenPolicy(script("19"), small_template())
    record, conversation = await talk(policy, U1)
    with pytest.raises(ValueError, match="add a message for it to answer"):
        await policy.extend(record, conversation, TOOLS)
    with pytest.raises(ValueError, match="messages is empty"):
        await policy.extend(Record(), [], TOOLS)


async def test_a_cut_turn_is_closed_in_the_bridge_as_context() -> None:
    cut = Generation(ids("I was about to"), stop_reason="length")
    record, _ = await talk(TokenPolicy(script(cut, "6"), small_template()), U1, U2)
    assert record.spans[1].tokens == tuple(ids("I was about to"))
    assert small_template().decode(record.spans[2].tokens).startswith("<|im_end|>\n<|im_start|>user\nAnd 2 * 3?")
    assert sum(record.loss_mask) == len(ids("I was about to")) + len(say("6"))


async def test_a_turn_that_is_not_the_canonical_encoding_stays_as_sampled() -> None:
    text = "Hello there."
    letters = [token for letter in text for token in ids(letter)]
    assert letters != ids(text)
    record, _ = await talk(TokenPolicy(script(Generation(letters + say("")), "6"), small_template()), U1, U2)
    assert record.spans[1].tokens == (*letters, *say(""))
    assert record.messages[1]["content"] == text


THINKING = """
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.reasoning_content and not messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list -%}
    {{- '<think>' + m.reasoning_content + '</think>\\n\\n' -}}
  {%- endif -%}
  {{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


async def test_thinking_as_the_template_has_it_is_a_branch_and_keeping_it_is_none() -> None:
    said = "<think>hm</think>\n\n19"
    kept = TokenPolicy(script(said, "6"), ChatTemplate(small_tokenizer(), chat_template=THINKING))
    record, _ = await talk(kept, U1, U2)
    assert len(record.branches) == 1
    template = ChatTemplate(small_tokenizer(), chat_template=THINKING, thinking="template")
    record, conversation = await talk(TokenPolicy(script(said, "6"), template), U1, U2)
    root, branch = record.branches
    assert record is branch
    assert (branch.cause, branch.forked_at) == ("thinking_dropped", 1)
    assert (
        template.decode(branch.spans[1].tokens)
        == "19<|im_end|>\n<|im_start|>user\nAnd 2 * 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert branch.input_ids[: -len(say("6"))] == template.encode(conversation[:-1])
    assert root.input_ids[-len(say(said)) :] == say(said)


async def test_a_context_that_an_engine_keeps_never_changes_under_it() -> None:
    kept: list[list[int]] = []
    copies: list[list[int]] = []

    def reply(request: Any) -> list[int]:
        kept.append(request.input_ids)
        copies.append(list(request.input_ids))
        return say("19")

    policy = TokenPolicy(ScriptedEngine(reply, keep_requests=False), small_template())
    record, _ = await talk(policy, U1, U2, U1, U2)
    assert kept == copies
    assert len({id(ids) for ids in kept}) == 4
    assert record.input_ids == kept[-1] + say("19")


async def test_a_context_that_nobody_keeps_is_not_joined_anew_each_turn() -> None:
    seen: list[int] = []

    def reply(request: Any) -> list[int]:
        seen.append(id(request.input_ids))
        return say("19")

    policy = TokenPolicy(ScriptedEngine(reply, keep_requests=False), small_template())
    record, _ = await talk(policy, U1, U2, U1)
    assert seen[1] == seen[2], "the same list went out again"
    joined = [token for span in record.spans for token in span.tokens]
    assert record.input_ids == joined
    record.input_ids.append(0)
    assert record.input_ids == joined, "a view is the caller's own"
