"""What a chat API is sent of a conversation, and what is read of its answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_api import ChatAPI, a_call, completion
from unspool import APIMultiTurnRollout, Limits, ToolManager, tool
from unspool.policy.wire import messages_to_send


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ASK = {"role": "user", "content": "1 + 2?"}


def run(*replies: Any, messages: Any = (ASK,), **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The finished trajectory, and what was sent for each turn."""
    with (
        ChatAPI(replies) as server,
        APIMultiTurnRollout(server.api(), ToolManager([add]), progress=False, **options) as rollout,
    ):
        [out] = rollout([{"messages": list(messages)}])
    return out, server.bodies


def kept_call(id: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


# ------------------------------------------------------------------ what is sent


def test_a_conversation_with_tools_is_sent_in_the_apis_form() -> None:
    call = a_call("add", {"a": 1, "b": 2}, "call_xyz")
    out, bodies = run(completion(None, tool_calls=[call]), completion("It is 3."), sampling_params={"temperature": 0.7})
    tools = ToolManager([add]).tool_infos()
    assert bodies[0] == {"model": "tiny", "messages": [ASK], "tools": tools, "temperature": 0.7}
    assert bodies[1] == {
        "model": "tiny",
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [kept_call("call_xyz", '{"a": 1, "b": 2}')]},
            {"role": "tool", "tool_call_id": "call_xyz", "name": "add", "content": "3"},
        ],
        "tools": tools,
        "temperature": 0.7,
    }
    assert out["messages"] == [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [kept_call("call_xyz", {"a": 1, "b": 2})]},
        {"role": "tool", "tool_call_id": "call_xyz", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_kept_and_neither_it_nor_what_only_answers_have_is_sent_back(name: str) -> None:
    more: dict[str, Any] = {name: "1 and 2...", "annotations": [], "audio": None, "finish_reason": "tool_calls"}
    first = completion("Let me see.", tool_calls=[a_call("add", {"a": 1, "b": 2})], **more)
    out, bodies = run(first, completion("3"))
    assert out["messages"][1]["reasoning_content"] == "1 and 2..."
    sent = bodies[1]["messages"][1]
    assert sent == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [kept_call("call_a", '{"a": 1, "b": 2}')],
    }


def test_a_refusal_is_kept() -> None:
    out, _ = run(completion(None, refusal="I cannot help with that."))
    assert out["messages"][-1] == {"role": "assistant", "content": "", "refusal": "I cannot help with that."}
    assert messages_to_send(out["messages"])[-1] == {
        "role": "assistant",
        "content": None,
        "refusal": "I cannot help with that.",
    }


def test_history_that_was_given_is_put_into_the_apis_form() -> None:
    history = [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        ASK,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "finish_reason": "tool_calls",
            "tool_calls": [
                {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
                {"id": None, "function": {"name": "add", "arguments": '{"a": 3}'}},
            ],
        },
        {"role": "tool", "content": "3", "timing": 0.1},
        {"role": "tool", "content": "Error"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    _, bodies = run(completion("ok"), messages=history)
    assert bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [kept_call("call_m2_0", '{"a": 1, "b": 2}'), kept_call("call_m2_1", '{"a": 3}')],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call_m2_0"},
        {"role": "tool", "content": "Error", "tool_call_id": "call_m2_1"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]


def test_a_lone_surrogate_is_sent_as_the_replacement_character() -> None:
    out, bodies = run(
        completion("half \ud83d", tool_calls=[a_call("add", '{"a": "\\ud83d"}')]),
        completion("ok"),
        messages=[{"role": "user", "content": [{"type": "text", "text": "a \ud800 b, \U0001f600"}]}],
    )
    assert out["error"] is None
    assert bodies[0]["messages"][0]["content"][0]["text"] == "a \ufffd b, \U0001f600"
    assert bodies[1]["messages"][1]["content"] == "half \ufffd"
    assert bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": "\ufffd"}'
    assert out["messages"][1]["content"] == "half \ud83d"


# ------------------------------------------------------------------ ids of calls


@pytest.mark.parametrize("bad", [None, "", 7])
def test_a_call_without_a_usable_id_gets_one_and_its_answer_refers_to_it(bad: Any) -> None:
    calls = [a_call("add", {"a": 1, "b": 2}, bad), a_call("add", {"a": 3, "b": 4}, bad)]
    out, bodies = run(completion(None, tool_calls=calls), completion("done"))
    assert [call["id"] for call in out["messages"][1]["tool_calls"]] == ["call_0_0", "call_0_1"]
    assert [(m["tool_call_id"], m["content"]) for m in out["messages"][2:4]] == [("call_0_0", "3"), ("call_0_1", "7")]
    assert bodies[1]["messages"][2:4] == out["messages"][2:4]


def test_an_id_that_is_used_twice_is_the_first_ones_alone() -> None:
    twice = [a_call("add", {"a": 1, "b": 2}, "same"), a_call("add", {"a": 3, "b": 4}, "same")]
    out, _ = run(completion(None, tool_calls=twice), completion(None, tool_calls=twice[:1]), completion("done"))
    ids = [call["id"] for message in out["messages"] for call in message.get("tool_calls") or ()]
    assert ids == ["same", "call_0_1", "call_1_0"]
    assert [m["tool_call_id"] for m in out["messages"] if m["role"] == "tool"] == ids


def test_an_id_that_is_made_is_not_one_that_the_conversation_has() -> None:
    history = [ASK, {"role": "assistant", "content": "", "tool_calls": [kept_call("call_0_0", {"a": 1, "b": 1})]}]
    history += [{"role": "tool", "tool_call_id": "call_0_0", "content": "2"}]
    out, _ = run(
        completion(None, tool_calls=[a_call("add", {"a": 1, "b": 2}, None)]), completion("3"), messages=history
    )
    assert out["messages"][3]["tool_calls"][0]["id"] == "call_0_0_1"


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("raw", ['{"a": 1, "b": 2}', {"a": 1, "b": 2}, ' {"a":1,"b":2}\n'])
def test_arguments_may_be_text_or_an_object(raw: Any) -> None:
    call = {"type": "function", "id": "x", "function": {"name": "add", "arguments": raw}}
    out, _ = run(completion(None, tool_calls=[call]), completion("3"))
    assert out["messages"][1]["tool_calls"] == [kept_call("x", {"a": 1, "b": 2})]
    assert out["messages"][2]["content"] == "3"


@pytest.mark.parametrize(
    ("raw", "kept", "said"),
    [
        ('{"a": 1, "b"', '{"a": 1, "b"', "invalid JSON"),
        ("[1, 2]", "[1, 2]", "must be a JSON object, not list"),
        (42, "42", "must be a JSON string or object, not int"),
        ('{"p": "C:\\path"}', '{"p": "C:\\path"}', "invalid JSON"),
    ],
)
def test_arguments_that_are_no_object_are_answered_with_what_is_wrong(raw: Any, kept: str, said: str) -> None:
    out, bodies = run(completion(None, tool_calls=[a_call("add", raw)]), completion("sorry"))
    assert out["messages"][1]["tool_calls"] == [kept_call("call_a", kept)]
    assert out["messages"][2]["content"].startswith("Error: ")
    assert said in out["messages"][2]["content"]
    assert [(e["turn"], e["call_id"], e["kind"]) for e in out["tool_errors"]] == [(0, "call_a", "bad_json")]
    assert bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == kept


def test_malformed_arguments_end_the_episode_where_the_limits_say_so() -> None:
    out, bodies = run(completion(None, tool_calls=[a_call("add", "{no")]), limits=Limits(malformed_calls="end"))
    assert (out["stop_reason"], len(bodies)) == ("parse_error", 1)
    assert out["error"].startswith("the call add is bad_json: invalid JSON in arguments")


@pytest.mark.parametrize("nothing", [None, "", "  "])
def test_no_arguments_are_an_empty_object(nothing: Any) -> None:
    out, _ = run(completion(None, tool_calls=[a_call("add", nothing)]), completion("sorry"))
    assert out["messages"][1]["tool_calls"] == [kept_call("call_a", {})]
    assert out["tool_errors"][0]["kind"] == "bad_arguments"


def test_a_call_that_is_broken_beyond_that_is_an_unknown_tool() -> None:
    out, _ = run(
        completion(None, tool_calls=["add", {"function": None}, {"function": {"name": 5}}]), completion("sorry")
    )
    assert [error["kind"] for error in out["tool_errors"]] == ["unknown_tool"] * 3
    assert out["stop_reason"] == "stop"


def test_the_old_form_of_a_call_is_one() -> None:
    out, bodies = run(completion(None, function_call={"name": "add", "arguments": '{"a": 1, "b": 2}'}), completion("3"))
    assert out["messages"][1]["tool_calls"] == [kept_call("call_0_0", {"a": 1, "b": 2})]
    assert bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": "3"}
