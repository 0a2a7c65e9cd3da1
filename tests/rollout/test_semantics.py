"""Each decided row of the semantics: limits, errors as values, calls that go wrong, interruption."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.small import CALC, by_session, call, ids, rollout, say, script, small_template, user
from unspool import (
    Generation,
    Limits,
    MultiTurnRollout,
    ScriptedEngine,
    Step,
    TokenPolicy,
    ToolManager,
    calculator,
    run_episode,
    tool,
)


def prompt_length(text: str, tools: bool = True) -> int:
    infos = ToolManager([calculator]).tool_infos() if tools else None
    return len(small_template().encode([{"role": "user", "content": text}], infos))


# ------------------------------------------------------------------ the trajectory cap


def test_a_prompt_at_the_cap_is_an_error_with_both_numbers_and_no_engine_call() -> None:
    engine = script("unused")
    length = prompt_length("Hi")
    for cap in (length, length - 1):
        [out] = rollout(engine, max_trajectory_tokens=cap)([user("Hi")])
        assert (out["stop_reason"], out["truncated"], out["turns"], out["input_ids"]) == ("length", True, 0, [])
        assert f"the prompt has {length} tokens" in out["error"]
        assert f"limit of {cap} " in out["error"]
    assert engine.requests == []


def test_the_cap_shrinks_the_next_turns_max_tokens() -> None:
    engine = script("a rather long answer that does not fit any more")
    length = prompt_length("Hi")
    [out] = rollout(engine, max_trajectory_tokens=length + 3, sampling_params={"max_tokens": 50})([user("Hi")])
    assert engine.requests[0].params.max_tokens == 3
    assert len(out["input_ids"]) == length + 3
    assert (out["stop_reason"], out["truncated"], out["turns"], out["error"]) == ("length", True, 1, None)


def test_a_bridge_that_would_reach_the_cap_ends_the_episode_before_it_is_appended() -> None:
    length = prompt_length("Hi") + len(say(CALC))
    engine = script(CALC, "19")
    [whole] = rollout(engine)([user("Hi")])
    bridge = len(engine.requests[1].input_ids) - length
    [out] = rollout(script(CALC, "19"), max_trajectory_tokens=length + bridge)([user("Hi")])
    assert (out["stop_reason"], out["truncated"], out["turns"], out["error"]) == ("length", True, 1, None)
    assert out["input_ids"] == whole["input_ids"][:length]
    assert [message["role"] for message in out["messages"]] == ["user", "assistant", "tool"]
    assert out["messages"][2]["content"] == "19"
    [one_more] = rollout(script(CALC, "19"), max_trajectory_tokens=length + bridge + 1)([user("Hi")])
    assert len(one_more["input_ids"]) == length + bridge + 1


@pytest.mark.parametrize("cap", range(1, 260, 7))
def test_no_cap_is_ever_exceeded_by_one_token(cap: int) -> None:
    [out] = rollout(script(CALC, CALC, "19"), max_trajectory_tokens=cap)([user("12 + 7?")])
    assert len(out["input_ids"]) <= cap
    assert out["truncated"] == (out["stop_reason"] in ("length", "max_turns", "timeout"))


def test_the_engines_own_context_is_a_cap_too() -> None:
    length = prompt_length("Hi")
    [out] = rollout(script("a rather long answer indeed", context_length=length + 2))([user("Hi")])
    assert (len(out["input_ids"]), out["stop_reason"]) == (length + 2, "length")


# ------------------------------------------------------------------ tools that fail


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (call("calculatr", expression="1 + 1"), "unknown_tool", "calculator"),
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 +', "unclosed", "Error: "),
        (
            r'<tool_call>{"name": "calculator", "arguments": {"expression": "C:\path"}}</tool_call>',
            "bad_json",
            "Error: ",
        ),
        (call("calculator", expression=12), "bad_arguments", "expression"),
        (call("calculator"), "bad_arguments", "expression"),
        (call("calculator", expression="1 + 2 + 3"), "exception", "one"),
    ],
)
def test_a_call_that_fails_is_an_answer_that_the_model_can_act_on(text: str, kind: str, said: str) -> None:
    [out] = rollout(script(text, "I see"))([user("go")])
    answer = out["messages"][2]
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "call_0_0")
    assert answer["content"].startswith("Error: ")
    assert said in answer["content"]
    [failure] = out["tool_errors"]
    assert (failure["turn"], failure["kind"], failure["call_id"]) == (0, kind, "call_0_0")
    assert failure["error"] in answer["content"]
    assert (out["stop_reason"], out["turns"]) == ("stop", 2)


def test_malformed_calls_may_end_the_episode() -> None:
    bad = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 +'
    run = rollout(script(bad, "unused"), limits=Limits(malformed_calls="end"))
    [out] = run([user("go")])
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("parse_error", False, 1)
    assert "calculator is unclosed" in out["error"]
    [fine] = rollout(script(CALC, "19"), limits=Limits(malformed_calls="end"))([user("go")])
    assert fine["stop_reason"] == "stop"


def test_calls_over_the_limit_are_answered_but_not_run() -> None:
    ran: list[str] = []

    @tool
    async def note(text: str) -> str:
        """Note a text.

        Args:
            text: what to note.
        """
        ran.append(text)
        return "noted"

    both = call("note", text="a") + "\n" + call("note", text="b")
    run = rollout(script(both, both, "done"), ToolManager([note]), limits=Limits(max_tool_calls=1))
    [out] = run([user("go")])
    answers = [m["content"] for m in out["messages"] if m["role"] == "tool"]
    assert answers[0] == "noted"
    assert all(answer.startswith("Error: no more tool calls are allowed") for answer in answers[1:])
    assert (len(answers), ran) == (4, ["a"])
    assert [(e["turn"], e["kind"]) for e in out["tool_errors"]] == [(0, "limit"), (1, "limit"), (1, "limit")]
    assert (out["stop_reason"], out["turns"]) == ("stop", 3)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_a_hung_tool_costs_its_own_episode_one_time_out(gate: threading.Event) -> None:
    @tool(timeout=2)
    def hang() -> str:
        """Never answers."""
        gate.wait()
        return "late"

    def lines(request: Any) -> list[str]:
        return [call("hang"), "gave up"] if request.session.endswith("-0") else [CALC, "19"]

    run = rollout(by_session(lines), ToolManager([hang, calculator]))
    *others, hung = [out async for out in run.stream([user("hang"), *[user("fine")] * 20])]
    assert hung["id"] == "0", "the others did not wait for it"
    assert hung["messages"][2]["content"] == "Error: hang gave no answer within 2 s"
    assert (hung["tool_errors"][0]["kind"], hung["stop_reason"], hung["turns"]) == ("timeout", "stop", 2)
    assert {out["messages"][2]["content"] for out in others} == {"19"}


# ------------------------------------------------------------------ time, environments, thinking


async def test_the_time_out_is_wall_clock_over_the_whole_episode() -> None:
    engine = ScriptedEngine(lambda request: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    outs = await rollout(engine, limits=Limits(timeout=0.2)).acall([user("a"), user("b")])
    for out in outs:
        assert (out["stop_reason"], out["truncated"], out["turns"]) == ("timeout", True, 0)
        assert out["error"] == "the episode took longer than its 0.2 s (in generate)"
        assert len(out["input_ids"]) == prompt_length("a")
    assert engine.running == 0


async def test_a_time_out_of_the_engine_is_not_the_episodes() -> None:
    [out] = await rollout(script(TimeoutError("no answer from the server")), limits=Limits(timeout=30)).acall(
        [user("a")]
    )
    assert (out["stop_reason"], out["error"]) == ("api_error", "TimeoutError: no answer from the server")


class Countdown:
    """A world that is over after two answers, and rewards each."""

    def __init__(self) -> None:
        self.left = 2

    def tool_infos(self) -> list[dict[str, Any]]:
        return []

    def wants(self, message: Any) -> bool:
        return True

    async def step(self, message: Any) -> Step:
        self.left -= 1
        return Step([{"role": "user", "content": f"{self.left} left"}], reward=0.5, done=self.left == 0)


async def test_a_world_may_answer_without_calls_reward_and_end_the_episode() -> None:
    policy = TokenPolicy(script("move"), small_template())
    episode = await run_episode(policy, Countdown(), messages=[{"role": "user", "content": "play"}])
    assert (episode.stop_reason, episode.truncated, episode.reward, len(episode.turns)) == ("env_done", False, 1.0, 2)
    assert episode.messages[-1] == {"role": "user", "content": "0 left"}
    assert len(episode.record.spans) == 4
    [out] = await rollout(script("move"), Countdown()).acall([user("play")])
    assert (out["stop_reason"], out["reward"]) == ("env_done", 1.0)


async def test_calls_carry_their_token_span_and_status() -> None:
    policy = TokenPolicy(script("First. " + CALC, "19"), small_template())
    episode = await run_episode(
        policy, ToolManager([calculator]), messages=[{"role": "user", "content": "go"}], session="s"
    )
    said = episode.turns[0].message
    assert said is not None
    [one] = said.tool_calls
    assert (one.status, one.error, one.arguments) == ("ok", None, {"expression": "12 + 7"})
    start, end = one.span
    assert small_template().decode(say("First. " + CALC)[start:end]).strip() == CALC


def test_assistant_messages_in_the_prompt_are_context() -> None:
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "12 + 7?"},
    ]
    [out] = rollout(script("19"))([{"messages": history}])
    assert out["turns"] == 1
    assert [span["origin"] for span in out["spans"]] == ["prompt", "sampled"]
    assert sum(out["loss_mask"]) == len(say("19"))


def test_template_switches_come_per_rollout_and_per_trajectory() -> None:
    from unspool import ChatTemplate

    source = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if open_thinking %}THINK{% endif %}"
    template = ChatTemplate(small_template().tokenizer, chat_template=source)
    engine = script("ok")
    given = [user("a"), user("b", chat_template_kwargs={"open_thinking": True})]
    MultiTurnRollout(engine, template)(given)
    MultiTurnRollout(engine, template, chat_template_kwargs={"open_thinking": True})([user("c")])
    assert [template.decode(r.input_ids) for r in engine.requests] == [
        "a<|im_end|>",
        "b<|im_end|>THINK",
        "c<|im_end|>THINK",
    ]


# ------------------------------------------------------------------ an engine that breaks its contract


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        (Generation([]), "returned no tokens"),
        (Generation(ids("too long an answer")), "tokens where max_tokens was 2"),
        (Generation(ids("ok")[:1]), "declares log-probabilities but returned none"),
        (Generation([5, 6], [-1.0]), "returned 1 log-probabilities for 2 tokens"),
        (Generation([5, 6], [-1.0, float("nan")]), "nan is no log-probability"),
        (Generation([5], [-1.0], versions=[1, 2]), "1 tokens were sampled but 2 versions given"),
        (Generation([5], [-1.0], stop_reason="abort"), "stop_reason 'abort'"),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_breaks_the_contract_is_an_error_and_not_a_guess(generation: Generation, said: str) -> None:
    run = rollout(script(generation, logprobs=True), sampling_params={"max_tokens": 2})
    [out] = run([user("go")])
    assert out["stop_reason"] == "api_error"
    assert said in out["error"]
    assert sum(out["loss_mask"]) == 0


def test_versions_change_inside_a_span_where_the_engine_says_so() -> None:
    tokens = say("four five")
    versions = [3] * 2 + [4] * (len(tokens) - 2)
    [out] = rollout(script(Generation(tokens, versions=versions)))([user("go")])
    assert out["versions"][-len(tokens) :] == versions
    assert set(out["versions"][: -len(tokens)]) == {-1}


def test_per_token_extras_of_an_engine_are_carried_along() -> None:
    tokens = say("ok")
    experts = [[1, 2]] * len(tokens)
    [out] = rollout(script(Generation(tokens, extra={"routed_experts": experts})))([user("go")])
    assert out["spans"][-1]["metadata"] == {"routed_experts": experts}


# ------------------------------------------------------------------ interruption

INTERRUPTED = """
import os, signal, sys, threading, asyncio, json
sys.path.insert(0, {root!r})
from tests.small import say, small_template, user
from unspool import MultiTurnRollout, RolloutInterrupted, ScriptedEngine

async def reply(request):
    if request.session.endswith("-0"):
        return say("done")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    await asyncio.Event().wait()

engine = ScriptedEngine(reply)
try:
    MultiTurnRollout(engine, small_template())([user("quick"), user("hangs")])
except RolloutInterrupted as stop:
    print(json.dumps([[t["stop_reason"], t["turns"], len(t["input_ids"]) > 0] for t in stop.results]), engine.running)
"""


def test_ctrl_c_hands_back_what_was_done() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED.format(root=root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.stdout.strip() == '[["stop", 1, true], ["cancelled", 0, true]] 0', done.stderr
    assert signal.SIGINT.name not in done.stderr


async def test_cancelling_acall_propagates_and_ends_every_request() -> None:
    started = asyncio.Event()

    async def reply(request: Any) -> list[int]:
        started.set()
        await asyncio.Event().wait()
        return []

    engine = ScriptedEngine(reply)
    task = asyncio.create_task(rollout(engine).acall([user("a"), user("b")]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running == 0
