"""The multi-turn loop, seen from outside: what goes into a rollout and what comes out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.small import CALC, by_session, call, ids, rollout, say, script, small_template, user
from unspool import (
    Generation,
    Limits,
    MultiTurnRollout,
    Record,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    ScriptedEngine,
    ToolManager,
    UnspoolError,
    calculator,
)


def roles(trajectory: dict[str, Any]) -> list[str]:
    return [message["role"] for message in trajectory["messages"]]


def test_one_reply_without_calls_is_one_turn_and_a_natural_stop() -> None:
    engine = script("Hello there.")
    [out] = rollout(engine)([user("Hi")])
    assert (out["turns"], out["stop_reason"], out["truncated"], out["error"]) == (1, "stop", False, None)
    assert out["messages"][-1] == {"role": "assistant", "content": "Hello there."}
    assert len(engine.requests) == 1


def test_a_call_then_an_answer_gives_four_messages() -> None:
    [out] = rollout(script(CALC, "19"))([user("12 + 7?")])
    assert roles(out) == ["user", "assistant", "tool", "assistant"]
    assert out["messages"][2] == {
        "role": "tool",
        "tool_call_id": "call_0_0",
        "name": "calculator",
        "content": "19",
    }
    assert out["messages"][1]["tool_calls"] == [
        {
            "id": "call_0_0",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": "12 + 7"}},
        }
    ]
    assert (out["turns"], out["stop_reason"], out["tool_errors"]) == (2, "stop", [])


def test_two_calls_in_a_turn_give_two_answers_in_call_order() -> None:
    both = CALC + "\n" + call("calculator", expression="2 * 3")
    [out] = rollout(script(both, "done"))([user("both")])
    answers = [(m["tool_call_id"], m["content"]) for m in out["messages"] if m["role"] == "tool"]
    assert answers == [("call_0_0", "19"), ("call_0_1", "6")]


def test_a_turn_cut_by_length_runs_no_tool() -> None:
    engine = script(Generation(ids(CALC), stop_reason="length"))
    [out] = rollout(engine)([user("12 + 7?")])
    assert (out["turns"], out["stop_reason"], out["truncated"]) == (1, "length", True)
    assert roles(out) == ["user", "assistant"]
    assert len(engine.requests) == 1


def test_the_last_allowed_turn_runs_no_tool() -> None:
    [out] = rollout(script(CALC), max_turns=3)([user("again")])
    assert roles(out) == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert (out["turns"], out["stop_reason"], out["truncated"]) == (3, "max_turns", True)


def test_a_natural_stop_on_the_last_turn_is_not_truncated() -> None:
    [out] = rollout(script(CALC, "19"), max_turns=2)([user("12 + 7?")])
    assert (out["turns"], out["stop_reason"], out["truncated"]) == (2, "stop", False)


def test_every_sampled_token_is_trained_and_no_other() -> None:
    turns = [CALC, CALC, "19"]
    [out] = rollout(script(*turns, logprobs=True))([user("12 + 7?")])
    sampled = [token for turn in turns for token in say(turn)]
    trained = [token for token, mask in zip(out["input_ids"], out["loss_mask"], strict=True) if mask]
    assert trained == sampled
    assert [label for label in out["labels"] if label != -100] == sampled
    assert sum(value == -1.0 for value in out["logprobs"]) == len(sampled)
    assert {v for v, m in zip(out["versions"], out["loss_mask"], strict=True) if m} == {0}
    assert {v for v, m in zip(out["versions"], out["loss_mask"], strict=True) if not m} == {-1}


def test_the_next_turn_is_sampled_from_the_very_tokens_recorded() -> None:
    engine = script(CALC, "19")
    [out] = rollout(engine)([user("12 + 7?")])
    first, second = (request.input_ids for request in engine.requests)
    assert second[: len(first)] == first
    assert second[len(first) :][: len(say(CALC))] == say(CALC)
    assert out["input_ids"][: len(second)] == second
    assert out["input_ids"][len(second) :] == say("19")


def test_the_joined_record_is_the_templates_own_render_of_the_conversation() -> None:
    template = small_template()
    tools = ToolManager([calculator])
    [out] = rollout(script(CALC, "19"), tools)([user("12 + 7?")])
    text = template.tokenizer.apply_chat_template(
        out["messages"], tools=tools.tool_infos(), tokenize=False, chat_template=template.source
    )
    assert template.decode(out["input_ids"]) == text.removesuffix("\n")


def test_nothing_in_nothing_out() -> None:
    assert rollout(script("unused"))([]) == []


def test_arguments_of_the_wrong_shape_are_refused_before_anything_runs() -> None:
    run = rollout(script("unused"))
    with pytest.raises(TypeError, match="wrap a single one in a list"):
        run(user("Hi"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a list of 1 for 2 trajectories"):
        run([user("a"), user("b")], tool_manager=[None])
    with pytest.raises(ValueError, match="max_turns must be at least 1, or None for no limit, not 0"):
        rollout(script("unused"), max_turns=0)
    with pytest.raises(ValueError, match="num_samples must be 1 in a rollout, not 2"):
        rollout(script("unused"), sampling_params=SamplingParams(num_samples=2))
    with pytest.raises(ValueError, match="num_samples must be 1"):
        run([user("a")], sampling_params={"num_samples": 4})
    with pytest.raises(TypeError, match=r"put tools into ToolManager"):
        rollout(script("unused"), calculator)
    with pytest.raises(TypeError, match="sampler must be an Engine"):
        rollout(object())
    with pytest.raises(ValueError, match="sampling_params has no 'temprature'"):
        run([user("a")], sampling_params={"temprature": 1.0})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SamplingParams(temperature="hot"), "temperature must be a number, 0 .greedy. or more, not 'hot'"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature must be a number, 0 .greedy. or more, not nan"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens must be a whole number, at least 1, or None, not 0"),
        (lambda: SamplingParams(max_tokens=1.5), "max_tokens must be a whole number, at least 1, or None, not 1.5"),
        (lambda: SamplingParams(top_p=0), "top_p must be a number above 0 and at most 1, not 0"),
        (lambda: SamplingParams(stop=[""]), "stop must be a string or strings, none empty"),
        (lambda: SamplingParams(stop=7), "stop must be a string or strings, none empty, not 7"),
        (lambda: Limits(max_turns="6"), "max_turns must be at least 1, or None for no limit, not '6'"),
        (lambda: Limits(max_turns=True), "max_turns must be at least 1, or None for no limit, not True"),
        (lambda: Limits(timeout=0), "timeout must be above 0 seconds, or None for no limit, not 0"),
        (lambda: Limits(malformed_calls="drop"), "malformed_calls must be 'answer' or 'end', not 'drop'"),
        (lambda: rollout(script("x"), num_generations=0), "num_generations must be a whole number, at least 1, not 0"),
        (
            lambda: MultiTurnRollout(script("x"), None),
            "template must be a ChatTemplate, a tokenizer, or the name of one",
        ),
        (lambda: MultiTurnRollout(script("x"), "/nowhere"), "cannot load a tokenizer from '/nowhere'"),
    ],
)
def test_bad_values_are_one_sentence_with_the_value_and_the_remedy(make: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence) as raised:
        make()
    assert isinstance(raised.value, UnspoolError)


class Sampler:
    """A blocking batch sampler that answers `answers` sequences, whatever was asked."""

    def __init__(self, answers: int | None = None) -> None:
        self.answers = answers
        self.batches: list[int] = []

    def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> list[SampleResponse]:
        self.batches.append(len(batch))
        count = len(batch) if self.answers is None else self.answers
        return [SampleResponse([SampledSequence("stop", say("ok"), [-0.5] * len(say("ok")))])] * count


def test_a_sampler_that_returns_too_few_answers_is_named_with_both_counts() -> None:
    outs = rollout(Sampler(2))([user("a"), user("b"), user("c")])
    for out in outs:
        assert out["stop_reason"] == "api_error"
        assert out["error"] == "EngineError: Sampler.sample returned 2 answers to 3 requests"


def test_a_batch_sampler_gets_every_live_trajectory_in_one_call() -> None:
    sampler = Sampler()
    outs = rollout(sampler)([user(str(i)) for i in range(5)])
    assert sampler.batches == [5]
    assert [out["logprobs"][-1] for out in outs] == [-0.5] * 5


def test_inputs_are_never_changed_and_the_rest_passes_through() -> None:
    given = user("12 + 7?", id="q/1", user_data=[["k", 1]], anything={"deep": [1]})
    before = json.dumps(given)
    [out] = rollout(script(CALC, "19"))([given])
    assert json.dumps(given) == before
    assert (out["id"], out["user_data"], out["anything"]) == ("q/1", [["k", 1]], {"deep": [1]})
    out["messages"][0]["content"] = "changed"
    assert json.dumps(given) == before


def test_outputs_are_json_and_a_record_again() -> None:
    [out] = rollout(script(CALC, "19", logprobs=True))([user("12 + 7?")])
    again = Record.from_trajectory(json.loads(json.dumps(out)))
    assert again.to_arrays() == {name: out[name] for name in again.to_arrays()}
    assert [span.origin for span in again.spans] == ["prompt", "sampled", "bridge", "sampled"]
    assert [span.message for span in again.spans] == [0, 1, 2, 3]
    assert again.messages == out["messages"]


def test_results_keep_the_order_of_the_prompts_whatever_ends_first() -> None:
    def lines(request: Any) -> list[str]:
        return [CALC, "19"] if request.session.endswith("-0") else ["short"]

    outs = rollout(by_session(lines))([user("long"), user("a"), user("b")])
    assert [out["turns"] for out in outs] == [2, 1, 1]
    assert [out["id"] for out in outs] == ["0", "1", "2"]


def test_one_bad_trajectory_is_its_own_error() -> None:
    outs = rollout(script("fine"))(
        [user("a"), None, {"messages": []}, {"messages": [{"content": "no role"}]}, user("b")]
    )  # type: ignore[list-item]
    assert [out["stop_reason"] for out in outs] == ["stop", "api_error", "api_error", "api_error", "stop"]
    assert outs[1]["error"] == "InvalidTypeError: a trajectory must be a dict with 'messages', not NoneType"
    assert "at least one message" in outs[2]["error"]
    assert "every message is a dict with a 'role'" in outs[3]["error"]
    assert outs[1]["input_ids"] == []


def test_a_failing_engine_costs_its_own_trajectory_only() -> None:
    def lines(request: Any) -> list[Any]:
        return [CALC, RuntimeError("out of memory")] if request.session.endswith("-1") else [CALC, "19"]

    outs = rollout(by_session(lines))([user("a"), user("b"), user("c")])
    assert [out["stop_reason"] for out in outs] == ["stop", "api_error", "stop"]
    bad = outs[1]
    assert bad["error"] == "RuntimeError: out of memory"
    assert roles(bad) == ["user", "assistant", "tool"]
    assert (bad["turns"], bad["truncated"]) == (1, False)
    assert sum(bad["loss_mask"]) == len(say(CALC))


def test_a_tool_manager_that_raises_is_an_api_error() -> None:
    class Broken(ToolManager):
        async def step(self, message: Any) -> Any:
            raise RuntimeError("the manager broke")

    [out] = rollout(script(CALC), Broken([calculator]))([user("a")])
    assert (out["stop_reason"], out["error"]) == ("api_error", "RuntimeError: the manager broke")
    assert roles(out) == ["user", "assistant"]


def test_tool_managers_may_differ_by_trajectory_and_by_call() -> None:
    run = rollout(script(CALC, "done"), None)
    none, one = run([user("a"), user("b")], tool_manager=[None, ToolManager([calculator])])
    assert (none["turns"], none["stop_reason"]) == (1, "stop")
    assert (one["turns"], one["messages"][2]["content"]) == (2, "19")


def test_tools_of_the_trajectory_go_before_those_of_the_manager() -> None:
    engine = script("ok")
    info = {"type": "function", "function": {"name": "mine", "description": "", "parameters": {"type": "object"}}}
    rollout(engine)([user("a", tools=[info]), user("b")])
    prompts = [small_template().decode(request.input_ids) for request in engine.requests]
    assert ['"mine"' in prompts[0], '"calculator"' in prompts[0]] == [True, False]
    assert '"calculator"' in prompts[1]


def test_groups_stand_next_to_each_other_and_share_nothing() -> None:
    given = [user("a", id="q", notes=[]), user("b")]
    outs = rollout(script("ok"), num_generations=3)(given)
    assert [(out["id"], out["group"], out["sample"]) for out in outs] == [
        ("q", 0, 0), ("q", 0, 1), ("q", 0, 2), ("1", 1, 0), ("1", 1, 1), ("1", 1, 2),
    ]  # fmt: skip
    outs[0]["notes"].append("mine")
    assert outs[1]["notes"] == given[0]["notes"] == []


def test_seeds_follow_from_what_is_asked_and_not_from_the_schedule() -> None:
    def seeds(prompts: list[Any], latency: float, **options: Any) -> dict[str, list[int]]:
        engine = script(CALC, "19", latency=latency)
        rollout(engine, seed=5, **options)(prompts, global_step=3)
        found: dict[str, list[int]] = {}
        for request in engine.requests:
            found.setdefault(request.session.split("-")[-1], []).append(request.seed)
        return found

    twins = [user("a", id="x"), user("b", id="x"), user("c", id="y")]
    one = seeds(twins, 0.0)
    assert one == seeds(twins, 0.002, concurrency=1)
    assert len({seed for turns in one.values() for seed in turns}) == 6
    assert seeds([twins[2], twins[0]], 0.0)["0"] == one["2"]
    assert all(0 <= seed < 2**63 for turns in one.values() for seed in turns)


def test_sessions_are_unique_even_where_ids_are_not() -> None:
    engine = script("ok")
    run = rollout(engine)
    run([user("a", id="x"), user("b", id="x")])
    run([user("a", id="x")])
    assert len({request.session for request in engine.requests}) == 3


async def test_it_runs_on_the_callers_loop_and_streams_in_completion_order() -> None:
    gate = asyncio.Event()

    async def reply(request: Any) -> list[int]:
        if request.session.endswith("-0"):
            await gate.wait()
        return say("ok")

    run = rollout(ScriptedEngine(reply))
    order = []
    async for out in run.stream([user("slow"), user("fast")]):
        order.append(out["id"])
        gate.set()
    assert order == ["1", "0"]
    assert [out["id"] for out in await run.acall([user("a"), user("b")])] == ["0", "1"]


async def test_the_blocking_form_works_inside_a_running_loop() -> None:
    assert [out["turns"] for out in rollout(script("ok"))([user("as in a notebook")])] == [1]


async def test_leaving_a_stream_early_cancels_the_rest() -> None:
    engine = ScriptedEngine(lambda request: say("ok") if request.session.endswith("-0") else never())

    async def never() -> list[int]:
        await asyncio.Event().wait()
        return []

    stream = rollout(engine).stream([user("quick"), user("hangs")])
    async for out in stream:
        assert out["id"] == "0"
        break
    await stream.aclose()
    assert engine.running == 0


def test_limits_are_given_once() -> None:
    with pytest.raises(ValueError, match="inside limits, or no limits"):
        rollout(script("ok"), limits=Limits(), max_turns=3)


def test_traces_are_written_one_a_trajectory(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    run = rollout(script("ok"), trace_dir=folder, num_generations=4, success_callback=lambda t: t["sample"] == 0)
    assert folder.is_dir()
    run([user("a", id="hotpotqa/42")], global_step=7)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "step000007-fail-hotpotqa_42-1.json",
        "step000007-fail-hotpotqa_42-2.json",
        "step000007-fail-hotpotqa_42.json",
        "step000007-ok-hotpotqa_42.json",
    ]


def test_figures_of_the_last_call_are_kept() -> None:
    run = rollout(script(CALC, "19"))
    run([user("a"), user("b")])
    stats = run.stats
    assert (stats.total, stats.done, stats.failed, stats.active, stats.tools_running) == (2, 2, 0, 0, 0)
    assert stats.tokens == 2 * (len(say(CALC)) + len(say("19")))
    assert stats.stop_reasons == {"stop": 2}
    assert 0 < stats.busy_share <= 1
