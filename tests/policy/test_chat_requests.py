"""Which parameters a chat API is sent: those that were asked for, and `extra_body` on top."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_api import ChatAPI, a_call, completion
from unspool import APIMultiTurnRollout, ChatPolicy, OpenAI, SamplingParams, ToolManager, run_episode, tool
from unspool.policy import Turn
from unspool.record import Record
from unspool.types import InvalidTypeError, InvalidValueError

HI = {"messages": [{"role": "user", "content": "Hi"}]}


@tool
def look() -> str:
    """Look around."""
    return "a field"


CALLS = completion(None, tool_calls=[a_call("look", {})])
OK = (completion("ok"),)


def parameters(*calls: dict[str, Any], replies: Any = OK, **options: Any) -> list[dict[str, Any]]:
    """What is sent beside model, messages and tools, of a rollout called with each of `calls`."""
    with (
        ChatAPI(replies) as server,
        APIMultiTurnRollout(server.api(), ToolManager([look]), progress=False, **options) as rollout,
    ):
        for call in calls or ({},):
            [out] = rollout([HI], **call)
            assert out["error"] is None
    return [{k: v for k, v in body.items() if k not in ("model", "messages", "tools")} for body in server.bodies]


def test_what_is_at_its_default_is_left_to_the_server_but_the_temperature() -> None:
    assert parameters() == [{"temperature": 1.0}]


def test_every_sampling_parameter_has_its_field() -> None:
    given = {"max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    assert parameters(sampling_params={**given, "stop": ["END", "###"], "logprobs": 3}) == [
        {**given, "stop": ["END", "###"], "logprobs": True, "top_logprobs": 3}
    ]
    assert parameters(sampling_params=SamplingParams(logprobs=0)) == [
        {"temperature": 1.0, "logprobs": True, "top_logprobs": 1}
    ]


def test_a_calls_own_parameters_take_the_place_of_the_rollouts() -> None:
    first, second = parameters({"sampling_params": {"temperature": 0.0}}, {}, sampling_params={"max_tokens": 9})
    assert first == {"temperature": 0.0}
    assert second == {"temperature": 1.0, "max_tokens": 9}


def test_seeds_are_sent_where_one_was_given_each_turn_its_own() -> None:
    two_turns = (CALLS, completion("ok"))
    first, second = (body["seed"] for body in parameters(replies=two_turns, seed=5))
    assert first != second
    assert all(0 <= seed < 2**31 for seed in (first, second))
    assert [body["seed"] for body in parameters(replies=two_turns, seed=5)] == [first, second]
    assert "seed" in parameters(sampling_params={"seed": 7})[0]
    of_a_call, without = parameters({"sampling_params": {"seed": 7}}, {})
    assert "seed" in of_a_call
    assert "seed" not in without


# ------------------------------------------------------------------ extra_body


def test_extra_body_goes_on_top_whatever_the_name_and_a_call_adds_to_it() -> None:
    form = {"type": "json_object"}
    first, second = parameters(
        {"extra_body": {"reasoning_effort": "low", "temperature": 0.1}},
        {},
        extra_body={"response_format": form, "min_p": 0.1, "reasoning_effort": "high"},
    )
    assert first == {"temperature": 0.1, "response_format": form, "min_p": 0.1, "reasoning_effort": "low"}
    assert second == {"temperature": 1.0, "response_format": form, "min_p": 0.1, "reasoning_effort": "high"}


def test_extra_body_may_be_told_by_the_turn() -> None:
    def held(turn: int) -> dict[str, Any]:
        return {"tool_choice": "required"} if turn == 0 else {}

    at_construction = parameters(replies=(CALLS, completion("ok")), extra_body=held)
    assert at_construction == [{"temperature": 1.0, "tool_choice": "required"}, {"temperature": 1.0}]
    assert parameters({"extra_body": held}, replies=(CALLS, completion("ok"))) == at_construction


def test_the_newer_name_for_max_tokens_takes_the_place_of_the_older() -> None:
    [body] = parameters(sampling_params={"max_tokens": 9}, extra_body={"max_completion_tokens": 90})
    assert body == {"temperature": 1.0, "max_completion_tokens": 90}


def test_template_switches_go_with_the_trajectory_that_has_them() -> None:
    with (
        ChatAPI([completion("ok")]) as server,
        APIMultiTurnRollout(
            server.api(), progress=False, concurrency=1, extra_body={"chat_template_kwargs": {"a": 1, "b": 1}}
        ) as rollout,
    ):
        rollout([{**HI, "chat_template_kwargs": {"b": 2}}, HI])
        with APIMultiTurnRollout(server.api(), progress=False, concurrency=1) as plain:
            plain([{**HI, "chat_template_kwargs": {"enable_thinking": False}}, HI])
    assert [body.get("chat_template_kwargs") for body in server.bodies] == [
        {"a": 1, "b": 2},
        {"a": 1, "b": 1},
        {"enable_thinking": False},
        None,
    ]


def test_what_is_no_business_of_extra_body_is_refused() -> None:
    api = OpenAI("tiny", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(InvalidTypeError, match="extra_body must be a mapping, or a function of the turn"):
        APIMultiTurnRollout(api, extra_body="required")  # type: ignore[arg-type]
    for extra, said in (
        ({"stream": True}, "extra_body cannot hold 'stream'"),
        ({"messages": [{}]}, "extra_body cannot hold 'messages'"),
        ({"n": 4}, "n must be 1 in a rollout, not 4; for groups use num_generations"),
    ):
        with pytest.raises(InvalidValueError, match=said):
            APIMultiTurnRollout(api, extra_body=extra)
    rollout = APIMultiTurnRollout(api, progress=False)
    with pytest.raises(InvalidValueError, match="cannot hold 'stream'"):
        rollout([HI], extra_body={"stream": True})
    with pytest.raises(InvalidTypeError, match="has no argument 'extra'; it has extra_body"):
        rollout([HI], extra={})


# ------------------------------------------------------------------ the policy by itself


async def test_a_chat_policy_serves_run_episode() -> None:
    with ChatAPI([CALLS, completion("A field.")]) as server:
        policy = ChatPolicy(server.api(), {"temperature": 0.2})
        episode = await run_episode(policy, ToolManager([look]), messages=HI["messages"])
        await policy.close()
    assert (episode.stop_reason, len(episode.turns)) == ("stop", 2)
    assert [turn.sampled for turn in episode.turns] == [4, 4]
    assert episode.turns[0].usage == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    assert {body["temperature"] for body in server.bodies} == {0.2}
    assert "seed" not in server.bodies[0]


def test_log_probabilities_of_prompts_are_refused() -> None:
    api = OpenAI("tiny", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(InvalidValueError, match="prompt_logprobs is 1, and a chat API gives none for prompts"):
        APIMultiTurnRollout(api, sampling_params={"prompt_logprobs": 1})


async def test_what_a_policy_of_texts_cannot_do_it_says() -> None:
    policy = ChatPolicy(OpenAI("tiny", base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(InvalidValueError, match="max_trajectory_tokens cannot be kept with an API"):
        await policy.extend(Record(), HI["messages"], max_total=100)
    with pytest.raises(InvalidTypeError, match="an API's weights cannot be updated"):
        await policy.update_weights("weights")


async def test_a_bare_function_as_a_tool_is_wrapped() -> None:
    with ChatAPI([completion("ok")]) as server:
        policy = ChatPolicy(server.api())
        turn = await policy.extend(Record(), HI["messages"], [{"name": "look", "parameters": {}}])
        await policy.close()
    assert isinstance(turn, Turn)
    assert server.bodies[0]["tools"] == [{"type": "function", "function": {"name": "look", "parameters": {}}}]
