"""`APIMultiTurnRollout`, seen from outside: what goes in, what comes out, and what ends an episode."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chat_api import ChatAPI, a_call, completion
from unspool import APIMultiTurnRollout, Limits, RolloutStats, SamplingParams, Step, ToolManager, calculator
from unspool.cli.show import show
from unspool.cli.summary import summarise
from unspool.data import read_jsonl, read_parquet, write_jsonl, write_parquet
from unspool.trace import read_trace

CALC = completion(None, tool_calls=[a_call("calculator", {"expression": "12 + 7"})])
ANSWER = completion("It is 19.")


def user(text: str = "12 + 7?", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def ran(
    script: Any, trajectories: Any = None, tools: Any = None, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], RolloutStats]:
    """The finished trajectories, the bodies of all requests, and the rollout's figures."""
    call = {name: options.pop(name) for name in ("global_step",) if name in options}
    manager = ToolManager([calculator]) if tools is None else tools
    with (
        ChatAPI(script) as server,
        APIMultiTurnRollout(server.api(), manager, progress=False, **options) as rollout,
    ):
        outs = rollout([user()] if trajectories is None else trajectories, **call)
    return outs, server.bodies, rollout.stats


def run(script: Any, trajectories: Any = None, tools: Any = None, **options: Any) -> list[dict[str, Any]]:
    return ran(script, trajectories, tools, **options)[0]


def roles(trajectory: dict[str, Any]) -> list[str]:
    return [message["role"] for message in trajectory["messages"]]


def how(trajectory: dict[str, Any]) -> tuple[int, str, bool]:
    return trajectory["turns"], trajectory["stop_reason"], trajectory["truncated"]


# ------------------------------------------------------------------ what ends an episode


def test_one_reply_without_calls_is_one_turn_one_request_and_a_natural_stop() -> None:
    [out], bodies, _ = ran([completion("Hello there.")], [user("Hi", user_data={"a": 1}, ground_truth="x")])
    assert how(out) == (1, "stop", False)
    assert out["messages"] == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    assert (out["error"], out["tool_errors"], out["id"]) == (None, [], "0")
    assert (out["user_data"], out["ground_truth"]) == ({"a": 1}, "x")
    assert len(bodies) == 1


def test_only_messages_come_back() -> None:
    [out] = run([CALC, ANSWER])
    assert roles(out) == ["user", "assistant", "tool", "assistant"]
    expected = {"messages", "turns", "stop_reason", "truncated", "error", "tool_errors", "timings", "id", "usage"}
    assert set(out) == expected


def test_two_calls_in_a_turn_give_two_answers_in_call_order() -> None:
    calls = [a_call("calculator", {"expression": e}, i) for e, i in (("1 + 1", "one"), ("2 * 3", "two"))]
    [out] = run([completion(None, tool_calls=calls), ANSWER])
    answers = [(m["tool_call_id"], m["content"]) for m in out["messages"] if m["role"] == "tool"]
    assert answers == [("one", "2"), ("two", "6")]


def test_a_turn_that_the_api_cut_runs_no_tool() -> None:
    cut = completion(None, tool_calls=[a_call("calculator", '{"expression": "12')], finish="length")
    for reply in (cut, {**CALC, "choices": [{**CALC["choices"][0], "finish_reason": "length"}]}):
        [out] = run([reply])
        assert how(out) == (1, "length", True)
        assert roles(out) == ["user", "assistant"]


def test_the_last_allowed_turn_runs_no_tool() -> None:
    [out] = run([CALC], max_turns=3)
    assert roles(out) == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert how(out) == (3, "max_turns", True)


def test_a_natural_stop_on_the_last_turn_is_not_truncated() -> None:
    assert how(run([CALC, ANSWER], max_turns=2)[0]) == (2, "stop", False)


def test_a_tool_manager_that_raises_is_an_api_error_and_a_tool_that_raises_is_none() -> None:
    class Broken(ToolManager):
        async def step(self, message: Any) -> Step:
            raise RuntimeError("no tools today")

    [out] = run([CALC], tools=Broken([calculator]))
    assert (how(out), out["error"]) == ((1, "api_error", False), "RuntimeError: no tools today")
    wrong = completion(None, tool_calls=[a_call("calculator", {"expression": "1 / 0"})])
    [out] = run([wrong, ANSWER])
    assert (out["stop_reason"], out["tool_errors"][0]["kind"]) == ("stop", "exception")


def test_a_world_may_end_the_episode_and_reward_it() -> None:
    class Over(ToolManager):
        async def step(self, message: Any) -> Step:
            return Step(done=True, reward=1.0)

    [out] = run([CALC], tools=Over([calculator]))
    assert (out["stop_reason"], out["reward"]) == ("env_done", 1.0)


def test_one_bad_trajectory_is_its_own_error() -> None:
    def script(body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": []} if "bad" in body["messages"][0]["content"] else ANSWER

    outs = run(script, [user("a"), user("bad"), {"messages": []}, user("b")])
    assert [out["stop_reason"] for out in outs] == ["stop", "api_error", "api_error", "stop"]
    assert "without a choice" in outs[1]["error"]


# ------------------------------------------------------------------ arguments


def test_nothing_in_nothing_out_and_wrong_shapes_are_refused() -> None:
    assert run([ANSWER], []) == []
    with pytest.raises(TypeError, match="wrap a single one in a list"):
        run([ANSWER], user())
    with pytest.raises(ValueError, match="a list of 1 for 2 trajectories"):
        run([ANSWER], [user(), user()], tools=[ToolManager()])
    for options, said in (
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"sampling_params": SamplingParams(num_samples=2)}, "num_samples must be 1 in a rollout, not 2"),
        ({"limits": Limits(max_trajectory_tokens=9)}, "max_trajectory_tokens cannot be kept with an API"),
        ({"limits": Limits(max_turns=2), "max_turns": 3}, "give max_turns inside limits"),
    ):
        with pytest.raises(ValueError, match=said):
            run([ANSWER], **options)


def test_tools_may_be_none_or_one_manager_for_each_trajectory() -> None:
    managers = [ToolManager(), ToolManager([calculator])]
    _, bodies, _ = ran([ANSWER], [user("a"), user("b")], tools=managers, concurrency=1)
    assert ["tools" in body for body in bodies] == [False, True]
    with ChatAPI([ANSWER]) as server, APIMultiTurnRollout(server.api(), progress=False) as rollout:
        assert rollout([user()])[0]["stop_reason"] == "stop"
        rollout([user(tools=json.dumps(ToolManager([calculator]).tool_infos()))])
        rollout([user()], tool_manager=ToolManager([calculator]))
    assert ["tools" in body for body in server.bodies] == [False, True, True]


def test_groups_have_their_number_and_place() -> None:
    outs = run([ANSWER], [user("a"), user("b")], num_generations=2)
    assert [(out["group"], out["sample"]) for out in outs] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_inputs_are_not_changed() -> None:
    given = user("a", user_data={"deep": [1]})
    before = json.dumps(given)
    run([CALC, ANSWER], [given])
    assert json.dumps(given) == before


# ------------------------------------------------------------------ the other entries


async def test_stream_gives_what_is_ready_and_acall_keeps_the_order() -> None:
    release = threading.Event()  # the server has a loop of its own

    async def script(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][0]["content"] == "slow":
            await asyncio.to_thread(release.wait, 30)
        return ANSWER

    trajectories = [user("slow", id="slow"), user("quick", id="quick")]
    with ChatAPI(script) as server:
        rollout = APIMultiTurnRollout(server.api(), progress=False)
        ended = []
        async for out in rollout.stream(trajectories):
            ended.append(out["id"])
            release.set()
        assert ended == ["quick", "slow"]
        assert [out["id"] for out in await rollout.acall(trajectories)] == ["slow", "quick"]
        await rollout.policy.close()


async def test_cancelling_hangs_up_every_request_and_so_does_a_time_out() -> None:
    begun = threading.Semaphore(0)

    async def hangs(body: dict[str, Any]) -> dict[str, Any]:
        begun.release()
        await asyncio.sleep(30)
        return ANSWER

    with ChatAPI(hangs) as server:
        rollout = APIMultiTurnRollout(server.api(), progress=False)
        task = asyncio.ensure_future(rollout.acall([user("a"), user("b")]))
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(2):
            assert await asyncio.to_thread(server.hung_up.acquire, timeout=10)
        short = APIMultiTurnRollout(server.api(), progress=False, limits=Limits(timeout=0.1))
        [out] = await short.acall([user()])
        assert how(out) == (0, "timeout", True)
        assert await asyncio.to_thread(server.hung_up.acquire, timeout=10)
        await rollout.policy.close()
        await short.policy.close()


# ------------------------------------------------------------------ counters


def test_usage_is_summed_over_the_turns_nested_counters_too() -> None:
    first = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}, "note": "x"}
    second = {"prompt_tokens": 20, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 8, "audio": None}}
    [out], _, stats = ran([{**CALC, "usage": first}, {**ANSWER, "usage": second}])
    assert out["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 11},
    }
    assert (stats.tokens, stats.done, stats.stop_reasons) == (12, 1, {"stop": 1})


def test_a_summary_counts_the_tokens_that_the_api_counted() -> None:
    outs, _, stats = ran([CALC, ANSWER])
    summary = summarise(outs, stats)
    assert (summary["trajectories"], summary["sampled_tokens"]) == (1, 8)


def test_an_api_that_counts_nothing_gives_no_usage() -> None:
    for none in ({}, None):
        [out] = run([{**CALC, "usage": none}, {k: v for k, v in ANSWER.items() if k != "usage"}])
        assert out["stop_reason"] == "stop"
        assert "usage" not in out


def test_progress_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with ChatAPI([ANSWER]) as server, APIMultiTurnRollout(server.api(), progress=True) as rollout:
        rollout([user(), user()])
    assert "2/2" in capsys.readouterr().err


# ------------------------------------------------------------------ files


def test_traces_without_tokens_are_written_read_and_shown(tmp_path: Path) -> None:
    outs = run(
        [CALC, ANSWER],
        [user(id="hotpotqa/42", ground_truth="19")],
        trace_dir=tmp_path,
        success_callback=lambda out: out["ground_truth"] in out["messages"][-1]["content"],
        global_step=7,
    )
    [path] = tmp_path.iterdir()
    assert path.name == "step000007-ok-hotpotqa_42.json"
    document = json.loads(path.read_text())
    assert (document["tokens"], document["turns"], document["success"]) == ({}, 2, True)
    assert read_trace(path) == outs[0]
    console = Console(record=True, width=100)
    for messages in (True, False):
        show(path, messages=messages, console=console)
        shown = console.export_text()
        assert "It is 19." in shown
        assert "calculator" in shown


def test_results_without_tokens_go_into_files_and_come_back(tmp_path: Path) -> None:
    outs = run([CALC, ANSWER], [user("a"), user("b")])
    write_jsonl(outs, tmp_path / "out.jsonl")
    assert read_jsonl(tmp_path / "out.jsonl") == outs
    pytest.importorskip("pyarrow")
    write_parquet(outs, tmp_path / "out.parquet")
    assert read_parquet(tmp_path / "out.parquet") == outs
