"""A simulated user: roles swapped, its tokens its own, and the ways in which it ends a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.small import CALC, rollout, say, script, small_template, user
from unspool import PolicyPlayer, TokenPolicy, ToolManager, UserSimulator, calculator
from unspool.types import InvalidTypeError, InvalidValueError


def roles(out: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in out["messages"]]


def test_a_policy_plays_the_user_until_it_says_stop() -> None:
    played = script("I need a boat.", "A red one.", "Thanks. ###STOP###")
    simulators: list[UserSimulator] = []

    def make(trajectory: dict[str, Any]) -> UserSimulator:
        simulators.append(UserSimulator(TokenPolicy(played, small_template()), system="You want a red boat."))
        return simulators[-1]

    [out] = rollout(script("What kind?", "Here it is."), make)([{"messages": [{"role": "system", "content": "Sell."}]}])
    assert roles(out) == [
        ("system", "Sell."),
        ("user", "I need a boat."),
        ("assistant", "What kind?"),
        ("user", "A red one."),
        ("assistant", "Here it is."),
        ("user", "Thanks."),
    ]
    assert (out["stop_reason"], out["turns"], out["error"]) == ("env_done", 2, None)
    [simulator] = simulators
    assert [(m["role"], m["content"]) for m in simulator.messages] == [
        ("system", "You want a red boat."),
        ("user", "Hello! How can I help you?"),
        ("assistant", "I need a boat."),
        ("user", "What kind?"),
        ("assistant", "A red one."),
        ("user", "Here it is."),
        ("assistant", "Thanks. ###STOP###"),
    ]


def test_nothing_that_the_user_sampled_is_in_the_assistants_record() -> None:
    [out] = rollout(
        script("Which?", "Done."),
        UserSimulator(TokenPolicy(script("The blue one.", "###STOP###"), small_template())),
    )([user("A boat, please.")])
    sampled = [token for token, mask in zip(out["input_ids"], out["loss_mask"], strict=True) if mask]
    assert sampled == say("Which?") + say("Done.")
    assert {span["origin"] for span in out["spans"]} == {"prompt", "sampled", "bridge"}
    assert "The blue one." in small_template().tokenizer.decode(out["input_ids"])
    assert "STOP" not in small_template().tokenizer.decode(out["input_ids"])


async def _async_user(seen: list[dict[str, Any]]) -> str:
    return f"heard {seen[-1]['content']}"


@pytest.mark.parametrize("function", [lambda seen: f"heard {seen[-1]['content']}", _async_user])
def test_a_function_plays_the_user_at_most_so_often(function: Any) -> None:
    [out] = rollout(script("one", "two"), lambda: UserSimulator(function, max_turns=2))([user("Begin.")])
    assert [text for role, text in roles(out) if role == "user"] == ["Begin.", "heard one", "heard two"]
    assert (out["stop_reason"], out["turns"]) == ("env_done", 2)


def test_calls_go_to_the_tools_and_the_user_sees_none_of_them() -> None:
    heard: list[list[dict[str, Any]]] = []

    def says(seen: list[dict[str, Any]]) -> str:
        heard.append(seen)
        return "bye ###STOP###"

    world = UserSimulator(says, "You are curious.", tools=ToolManager([calculator]))
    [out] = rollout(script(CALC, "It is 19."), world)([user("12 + 7?")])
    assert [role for role, _ in roles(out)] == ["user", "assistant", "tool", "assistant", "user"]
    assert [(m["role"], m["content"]) for m in heard[0]] == [
        ("system", "You are curious."),
        ("user", "Hello! How can I help you?"),
        ("assistant", "12 + 7?"),
        ("user", "It is 19."),
    ]


def test_calls_without_tools_are_answered_all_the_same() -> None:
    heard: list[str] = []

    def says(seen: list[dict[str, Any]]) -> str:
        heard.append(seen[-1]["content"])
        return "###STOP###"

    [out] = rollout(script(CALC + "\n" + CALC, "It is 19."), UserSimulator(says))([user("12 + 7?")])
    assert [role for role, _ in roles(out)] == ["user", "assistant", "tool", "tool", "assistant"]
    assert {text for role, text in roles(out) if role == "tool"} == {
        "Error: there is no tool named 'calculator'; no tools are available"
    }
    assert [failure["kind"] for failure in out["tool_errors"]] == ["unknown_tool"] * 2
    assert (heard, out["stop_reason"]) == (["It is 19."], "env_done")


@pytest.mark.parametrize(
    ("stop", "error"),
    [("", InvalidValueError), (3, InvalidTypeError), (b"x", InvalidTypeError), (["x"], InvalidTypeError)],
)
def test_a_stop_that_stops_nothing_or_everything_is_refused(stop: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"stop must be a text that is not empty.* give None for no stop"):
        UserSimulator(lambda seen: "x", stop=stop)


def test_without_a_stop_only_the_number_of_messages_ends_it() -> None:
    world = UserSimulator(lambda seen: "###STOP###", stop=None, max_turns=2)
    [out] = rollout(script("x"), world)([user("Hi")])
    assert (out["turns"], roles(out)[-1]) == (2, ("user", "###STOP###"))


def test_a_predicate_may_say_when_it_is_over() -> None:
    [out] = rollout(script("x"), UserSimulator(lambda seen: "bye", stop=lambda text: text == "bye"))([user("Hi")])
    assert (out["stop_reason"], roles(out)[-1]) == ("env_done", ("user", "bye"))


def test_a_user_that_fails_costs_its_own_episode() -> None:
    def fails(seen: list[dict[str, Any]]) -> str:
        raise OSError("gone")

    bad, good = rollout(script("x"), [UserSimulator(fails), UserSimulator(lambda seen: "###STOP###")])(
        [user("a"), user("b")]
    )
    assert (bad["stop_reason"], bad["error"], good["stop_reason"]) == ("api_error", "OSError: gone", "env_done")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidTypeError, match="user must be a policy"):
        UserSimulator(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="tools must be"):
        UserSimulator(lambda seen: "x", tools=[calculator])  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="max_turns must be at least 1"):
        UserSimulator(lambda seen: "x", max_turns=0)
    with pytest.raises(InvalidValueError, match="cannot serve several episodes"):
        rollout(script("x"), UserSimulator(lambda seen: "x"))([user("a"), user("b")])


async def test_a_player_keeps_its_conversation_and_its_record() -> None:
    player = PolicyPlayer(TokenPolicy(script("Hi.", "Fine."), small_template()), "Be brief.")
    assert [await player("Hello"), await player("How are you?")] == ["Hi.", "Fine."]
    assert [m["role"] for m in player.messages] == ["system", "user", "assistant", "user", "assistant"]
