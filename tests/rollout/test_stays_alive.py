"""What a world, an engine or a callback must not do, and does: it costs its own trajectory, and nothing after it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.small import by_session, call, say, script, small_template, user
from unspool import Limits, MultiTurnRollout, Record, ScriptedEngine, Step, ToolManager, UnspoolError, calculator, tool
from unspool.loop import private_loop

CALC = call("calculator", expression="12 + 7")


def rollout(engine: Any, tools: Any = None, **options: Any) -> MultiTurnRollout:
    return MultiTurnRollout(engine, small_template(), tools, progress=False, **options)


class Acts:
    """A world that answers every turn by `act()`."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def tool_infos(self) -> list[dict[str, Any]]:
        return []

    def wants(self, message: Any) -> bool:
        return True

    async def step(self, message: Any) -> Any:
        result = self.act()
        return await result if asyncio.iscoroutine(result) else result


def throw(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    "error", [SystemExit(2), KeyboardInterrupt(), asyncio.CancelledError(), MemoryError(), RecursionError()]
)
def test_whatever_a_world_or_an_engine_raises_is_that_trajectorys_error(error: BaseException) -> None:
    outs = rollout(script("x"))([user("a"), user("b")], tool_manager=[Acts(lambda: throw(error)), None])
    assert [out["stop_reason"] for out in outs] == ["api_error", "stop"]
    assert outs[0]["error"].startswith(type(error).__name__)
    assert outs[0]["turns"] == 1
    outs = rollout(by_session(lambda r: [error if r.session.endswith("-0") else "x"]))([user("a"), user("b")])  # type: ignore[list-item]
    assert [out["stop_reason"] for out in outs] == ["api_error", "stop"]


def test_a_private_loop_that_died_is_replaced() -> None:
    loop = private_loop()
    loop.call_soon_threadsafe(loop.stop)
    from unspool import loop as module

    assert module._thread is not None
    module._thread.join(20)
    assert [out["turns"] for out in rollout(script("x"))([user("a")])] == [1]


def test_a_blocking_rollout_inside_an_async_tool_is_refused_and_not_a_deadlock() -> None:
    inner = rollout(script("inner"))

    @tool
    async def ask(question: str) -> str:
        """Ask another model.

        Args:
            question: what to ask.
        """
        return str(inner([user(question)])[0]["messages"][-1]["content"])

    [out] = rollout(script(call("ask", question="why?"), "done"), ToolManager([ask]))([user("go")])
    assert "await the async form instead, such as acall" in out["messages"][2]["content"]
    assert out["stop_reason"] == "stop"


def test_a_rollout_inside_a_sync_tool_or_awaited_in_an_async_one_works() -> None:
    inner = rollout(script("inner"))

    @tool
    def ask(question: str) -> str:
        """Ask another model.

        Args:
            question: what to ask.
        """
        return str(inner([user(question)])[0]["messages"][-1]["content"])

    @tool
    async def aask(question: str) -> str:
        """Ask another model.

        Args:
            question: what to ask.
        """
        [out] = await inner.acall([user(question)])
        return str(out["messages"][-1]["content"])

    both = call("ask", question="why?") + "\n" + call("aask", question="why?")
    [out] = rollout(script(both, "done"), ToolManager([ask, aask]))([user("go")])
    assert [m["content"] for m in out["messages"] if m["role"] == "tool"] == ["inner", "inner"]


@pytest.mark.parametrize("error", [SystemExit("bye"), RuntimeError("no")])
def test_a_callback_that_raises_costs_nothing_but_its_answer(tmp_path: Path, error: BaseException) -> None:
    def success(trajectory: dict[str, Any]) -> bool:
        return trajectory["id"] != "1" or throw(error)

    run = rollout(script("x"), trace_dir=tmp_path, success_callback=success)
    outs = run([user("a"), user("b"), user("c")])
    assert [out["stop_reason"] for out in outs] == ["stop"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fail-1.json", "ok-0.json", "ok-2.json"]


async def stubborn() -> Step:
    """Ignores its cancellation, for a while."""
    for _ in range(40):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue
    return Step([{"role": "user", "content": "late"}])


async def test_the_time_out_is_wall_clock_even_where_cancellation_is_swallowed() -> None:
    run = rollout(script("x"), Acts(stubborn), limits=Limits(timeout=0.3))
    [out] = await run.acall([user("a")])
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("timeout", True, 1)
    assert out["error"] == "the episode took longer than its 0.3 s (in tools)"
    assert out["timings"]["total"] < 3

    async def reply(request: Any) -> list[int]:
        await stubborn()
        return say("late")

    [out] = await rollout(ScriptedEngine(reply), limits=Limits(timeout=0.3)).acall([user("a")])
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("timeout", True, 0)


async def test_what_ends_within_the_limit_is_untouched_by_it() -> None:
    run = rollout(script(CALC, "19", latency=0.01), ToolManager([calculator]), limits=Limits(timeout=60))
    [out] = await run.acall([user("12 + 7?")])
    assert (out["stop_reason"], out["turns"], out["messages"][2]["content"]) == ("stop", 2, "19")


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: None, "InvalidTypeError: Acts.step must return a Step, not NoneType"),
        (lambda: "text", "InvalidTypeError: Acts.step must return a Step, not str"),
    ],
)
def test_a_world_that_returns_no_step_is_told_so(act: Any, sentence: str) -> None:
    [out] = rollout(script("x"), Acts(act))([user("a")])
    assert out["error"] == sentence


def test_a_world_whose_step_is_not_async_is_told_so() -> None:
    class Sync(Acts):
        def step(self, message: Any) -> Any:  # type: ignore[override]
            return Step()

    [out] = rollout(script("x"), Sync(None))([user("a")])
    assert out["error"] == "InvalidTypeError: Sync.step must be an async function"


# ------------------------------------------------------------------ outputs that come in again


def test_an_output_that_is_run_again_speaks_of_the_new_run_alone() -> None:
    first = {**user("q"), "note": "kept"}
    [out] = rollout(script("one"), Acts(lambda: Step([{"role": "user", "content": "more"}], reward=5.0, done=True)))(
        [first]
    )
    assert out["reward"] == 5.0
    branched = Record.from_trajectory(out)
    branched.fork(1, "edited").append_prompt([1])
    again = {**out, **branched.to_trajectory(), "messages": [{"role": "user", "content": "anew"}], "group": 3}
    [second] = rollout(script("fresh"))([again])
    assert {"branches", "branch", "reward", "group"} & set(second) == set()
    assert second["note"] == "kept"
    assert Record.from_trajectory(second).input_ids == second["input_ids"]
    assert [m["content"] for m in second["messages"]] == ["anew", "fresh"]


def test_keys_of_the_users_own_pass_through_whatever_their_names() -> None:
    [out] = rollout(script("x"))([user("a", group="mine", reward=0.25, branch="main")])
    assert (out["group"], out["reward"], out["branch"]) == ("mine", 0.25, "main")


def test_a_record_keeps_the_tools_that_were_offered() -> None:
    record = Record()
    record.append_prompt([1])
    record.tools = [calculator.info()]
    assert Record.from_trajectory(record.to_trajectory()).tools == [calculator.info()]


# ------------------------------------------------------------------ what a trajectory brings


def test_tools_as_json_text_are_read_and_other_shapes_are_refused() -> None:
    engine = script("ok")
    text = '[{"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}]'
    outs = rollout(engine)([user("a", tools=text), user("b", tools="many"), user("c", tools=[1]), user("d", tools={})])
    assert '{"name": "mine"' in small_template().decode(engine.requests[0].input_ids)
    assert [out["stop_reason"] for out in outs] == ["stop", "api_error", "api_error", "api_error"]
    assert "a trajectory's 'tools' must be a list of dicts" in outs[1]["error"]


def test_a_prompt_that_ends_in_an_assistant_message_is_refused() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}]
    [out] = rollout(script("x"))([{"messages": messages}])
    assert out["stop_reason"] == "api_error"
    assert "ends with an assistant message; drop it, or add a message" in out["error"]
    assert out["messages"] == messages


def test_what_was_given_as_messages_stays_in_the_output_of_a_bad_trajectory() -> None:
    [out] = rollout(script("x"))([{"messages": "hello"}])
    assert (out["messages"], out["stop_reason"]) == ("hello", "api_error")


def test_a_calls_own_seed_goes_before_the_runs() -> None:
    def seeds(run: MultiTurnRollout, seed: int) -> list[int]:
        run([user("a")], sampling_params={"seed": seed}, global_step=1)
        return [request.seed for request in run.policy.engine.requests]  # type: ignore[attr-defined]

    one, two, other = (rollout(script("x"), seed=s) for s in (1, 2, 1))
    assert seeds(one, 5) == seeds(two, 5) != seeds(other, 6)


def test_members_of_a_group_may_each_have_a_world_of_their_own() -> None:
    def world() -> Acts:
        left = iter((False, True))
        return Acts(lambda: Step([{"role": "user", "content": "more"}], reward=1.0, done=next(left)))

    outs = rollout(script("x"), num_generations=3)([user("a")], tool_manager=[world() for _ in range(3)])
    assert [(out["turns"], out["reward"], out["stop_reason"]) for out in outs] == [(2, 2.0, "env_done")] * 3
    with pytest.raises(ValueError, match="a list of 2 for 1 trajectories"):
        rollout(script("x"), num_generations=3)([user("a")], tool_manager=[world(), world()])


def test_unreadable_calls_do_not_use_up_the_calls_that_may_run() -> None:
    broken = '<tool_call>\n{"name": "calculator", "arguments": \n</tool_call>'
    run = rollout(
        script(broken + "\n" + CALC + "\n" + CALC, "19"), ToolManager([calculator]), limits=Limits(max_tool_calls=1)
    )
    [out] = run([user("go")])
    answers = [(m["tool_call_id"], m["content"]) for m in out["messages"] if m["role"] == "tool"]
    assert [ident for ident, _ in answers] == ["call_0_0", "call_0_1", "call_0_2"]
    assert [text[:9] for _, text in answers] == ["Error: in", "19", "Error: no"]
    assert [(e["kind"], e["call_id"]) for e in out["tool_errors"]] == [("bad_json", "call_0_0"), ("limit", "call_0_2")]


@pytest.mark.parametrize("switches", [["x"], {1: 2}, {"messages": []}])
def test_switches_that_are_none_are_that_trajectorys_error(switches: Any) -> None:
    outs = rollout(script("x"))([user("a", chat_template_kwargs=switches), user("b")])
    assert [out["stop_reason"] for out in outs] == ["api_error", "stop"]
    assert outs[0]["error"].startswith(("InvalidTypeError: ", "InvalidValueError: "))
    assert "switch" in outs[0]["error"] or "chat_template_kwargs" in outs[0]["error"]


# ------------------------------------------------------------------ what is no engine


def test_an_engine_that_lacks_a_part_is_told_which() -> None:
    class Partly:
        version, logprobs = 0, False

        async def generate(self, request: Any) -> Any: ...

        async def start(self) -> None: ...

        async def close(self) -> None: ...

    with pytest.raises(TypeError, match="the engine Partly lacks pause, resume, update_weights; see EngineBase"):
        rollout(Partly())


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, "EngineError: Odd.sample must return a list of SampleResponse, not NoneType"),
        (["text"], "EngineError: the sampler answered a str; it must be a SampleResponse"),
    ],
)
def test_a_sampler_that_answers_oddly_is_told_so(answer: Any, sentence: str) -> None:
    class Odd:
        def sample(self, batch: Any, sampling_params: Any) -> Any:
            return answer

    [out] = rollout(Odd())([user("a")])
    assert out["error"] == sentence


@pytest.mark.parametrize("token", [1.5, -1, True])
def test_ids_that_are_none_are_refused_before_they_are_read(token: Any) -> None:
    [out] = rollout(ScriptedEngine(lambda request: [token]))([user("a")])
    assert out["error"].startswith("EngineError: ScriptedEngine: sampled tokens hold")


def test_limits_that_are_none_are_refused() -> None:
    with pytest.raises(UnspoolError, match=r"limits must be Limits\(...\), not {'max_turns': 3}"):
        rollout(script("x"), limits={"max_turns": 3})
