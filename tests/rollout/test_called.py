"""Tools as a function of a name and arguments: parsing, running, and what the model is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool import Message, Step, ToolCall, ToolManager
from unspool.rollout import called, execute_tool, parse_tool_calls
from unspool.rollout.called import MAX_CHARS, CalledByName, InStep
from unspool.types import InvalidTypeError, InvalidValueError

# ------------------------------------------------------------------ parse_tool_calls

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京"}}\n</tool_call>'


def test_calls_are_dicts_of_name_and_arguments_in_their_order() -> None:
    text = f'Two.\n{WEATHER}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
    assert parse_tool_calls(text) == [
        {"name": "get_weather", "arguments": {"city": "北京"}},
        {"name": "now", "arguments": {}},
    ]
    assert parse_tool_calls("Hello there.") == []


def test_arguments_that_are_json_text_are_decoded() -> None:
    assert parse_tool_calls('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>') == [
        {"name": "f", "arguments": {"a": 1}}
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>[1]</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "C:\\path"}}</tool_call>',
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f", "argum',
        "<tool_call>",
    ],
)
def test_calls_that_cannot_be_read_are_left_out(text: str) -> None:
    assert parse_tool_calls(text) == []
    assert parse_tool_calls(text + WEATHER)[-1:] in ([], [{"name": "get_weather", "arguments": {"city": "北京"}}])


def test_calls_inside_thinking_are_no_calls() -> None:
    assert parse_tool_calls(f"<think>maybe {WEATHER}</think>\nNo.") == []
    assert parse_tool_calls(f"the prompt opened it {WEATHER}</think>\nNo.") == []
    assert parse_tool_calls(f"<think>never closed {WEATHER}") == []
    assert len(parse_tool_calls(f"<think>yes</think>{WEATHER}")) == 1


def test_another_format_is_chosen_by_name() -> None:
    text = '[get_weather(city="Paris")]'
    assert parse_tool_calls(text, parser="pythonic") == [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    assert parse_tool_calls(text) == []
    with pytest.raises(InvalidValueError, match="no tool-call parser is called 'no'"):
        parse_tool_calls(text, parser="no")


@given(st.text(st.sampled_from('<>/{}[]":,\\ \n\x00etool_callnamearguments1é')) | st.text())
def test_no_text_raises(text: str) -> None:
    for found in (parse_tool_calls(text), parse_tool_calls("<tool_call>" + text)):
        assert all(set(one) == {"name", "arguments"} and isinstance(one["arguments"], dict) for one in found)


# ------------------------------------------------------------------ execute_tool

TOOLS: dict[str, Any] = {"double": lambda arguments: {"result": 2 * arguments["x"]}}


def test_a_tool_is_called_with_its_arguments_and_an_unknown_one_is_none() -> None:
    assert execute_tool("double", {"x": 4}, TOOLS) == {"result": 8}
    assert execute_tool("triple", {"x": 4}, TOOLS) is None
    assert execute_tool(7, {}, TOOLS) is None  # type: ignore[arg-type]


def test_arguments_may_be_json_text_and_what_is_no_object_is_an_error() -> None:
    assert execute_tool("double", '{"x": 4}', TOOLS) == {"result": 8}
    assert execute_tool("double", "[4]", TOOLS) == {"error": "arguments must be a JSON object, not list"}
    assert execute_tool("keys", None, {"keys": list}) == []


def test_a_tool_manager_is_no_mapping() -> None:
    with pytest.raises(InvalidTypeError, match=r"is a ToolManager; a ToolManager is called itself"):
        execute_tool("double", {}, ToolManager())  # type: ignore[arg-type]


def test_what_a_tool_raises_is_its_answer() -> None:
    def exits(arguments: dict[str, Any]) -> None:
        raise SystemExit(3)

    assert execute_tool("double", {}, TOOLS) == {"error": "double raised KeyError: 'x'"}
    assert execute_tool("exits", {}, {"exits": exits}) == {"error": "exits raised SystemExit: 3"}


def test_a_tool_that_hangs_is_left_behind_off_the_main_thread_too() -> None:
    leave = threading.Event()
    results: list[Any] = []

    def elsewhere() -> None:
        results.append(execute_tool("hangs", {}, {"hangs": lambda _: leave.wait(60)}, timeout=0.05))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert results == [{"error": "hangs gave no answer within 0.05 s"}]
    assert not leave.is_set()
    leave.set()


def test_an_async_tool_is_run_and_what_it_raises_is_its_answer() -> None:
    async def doubles(arguments: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return {"result": 2 * arguments["x"]}

    async def times_out(arguments: dict[str, Any]) -> Any:
        raise TimeoutError("its own")

    tools = {"doubles": doubles, "times_out": times_out}
    assert execute_tool("doubles", {"x": 4}, tools, timeout=20) == {"result": 8}
    assert execute_tool("doubles", {}, tools, timeout=None) == {"error": "doubles raised KeyError: 'x'"}
    assert execute_tool("times_out", {}, tools, timeout=20) == {"error": "times_out raised TimeoutError: its own"}

    async def within_a_loop() -> Any:
        return execute_tool("doubles", {"x": 5}, tools, timeout=20)

    assert asyncio.run(within_a_loop()) == {"result": 10}


def test_an_async_tool_that_hangs_is_stopped_at_the_limit() -> None:
    stopped = threading.Event()

    async def hangs(arguments: dict[str, Any]) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    assert execute_tool("hangs", {}, {"hangs": hangs}, timeout=0.05) == {"error": "hangs gave no answer within 0.05 s"}
    assert stopped.wait(20)


@pytest.mark.parametrize(
    ("timeout", "kind"),
    [(0, InvalidValueError), (-1, InvalidValueError), (float("nan"), InvalidValueError), ("x", InvalidTypeError)],
)
def test_a_limit_that_is_none_is_refused_before_the_tool_runs(timeout: Any, kind: type) -> None:
    ran: list[Any] = []
    with pytest.raises(kind, match="timeout must be above 0 seconds, or None, not"):
        execute_tool("runs", {}, {"runs": ran.append}, timeout=timeout)
    assert ran == []
    assert execute_tool("runs", {}, {"runs": len}, timeout=float("inf")) == 0


def test_a_tool_cannot_change_the_arguments_of_the_call() -> None:
    arguments = {"x": 1}
    execute_tool("clears", arguments, {"clears": lambda given: given.clear()})
    assert arguments == {"x": 1}


# ------------------------------------------------------------------ the world


def turn(*calls: ToolCall) -> Message:
    return Message("", None, calls)


def asked(name: str, /, id: str = "c0", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, id)


async def answers(world: Any, *calls: ToolCall) -> Step:
    step: Step = await world.step(turn(*calls))
    return step


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({"城市": "北京", "n": 1}, '{"城市": "北京", "n": 1}'),
        ("text", '"text"'),
        (0, "0"),
        ([], "[]"),
        (False, "false"),
        (None, '{"error": "tool not found"}'),
    ],
)
async def test_results_are_written_as_json_and_only_none_is_not_found(result: Any, content: str) -> None:
    step = await answers(CalledByName(lambda name, arguments: result), asked("f"))
    assert step.messages == [{"role": "tool", "tool_call_id": "c0", "name": "f", "content": content}]
    assert [failure.kind for failure in step.failures] == (["unknown_tool"] if result is None else [])


async def test_every_call_is_answered_in_order_with_its_id_and_name() -> None:
    world = CalledByName(lambda name, arguments: [name, arguments])
    calls = [asked(f"f{i}", id=f"c{i}", i=i) for i in range(5)]
    step = await answers(world, *calls)
    assert [(m["name"], m["tool_call_id"], json.loads(m["content"])) for m in step.messages] == [
        (f"f{i}", f"c{i}", [f"f{i}", {"i": i}]) for i in range(5)
    ]


async def test_an_answer_has_at_most_2048_characters() -> None:
    step = await answers(CalledByName(lambda name, arguments: 7**4000), asked("f"))
    assert len(step.messages[0]["content"]) <= MAX_CHARS == 2048
    assert step.failures[0].kind == "truncated"
    just = await answers(CalledByName(lambda name, arguments: "x" * 2046), asked("f"))
    assert just.messages[0]["content"] == '"' + "x" * 2046 + '"'


async def test_what_fails_is_told_to_the_model_and_listed_under_its_name() -> None:
    def fails(name: str, arguments: dict[str, Any]) -> Any:
        raise ValueError("no such city")

    bad = ToolCall("g", "{oops", "c1", "bad_json", error="invalid JSON: oops")
    step = await answers(CalledByName(fails), asked("f"), bad)
    assert [m["content"] for m in step.messages] == [
        "Error: execute_tool raised ValueError: no such city",
        "Error: invalid JSON: oops",
    ]
    assert [(f.name, f.call_id, f.kind) for f in step.failures] == [("f", "c0", "exception"), ("g", "c1", "bad_json")]


async def test_a_function_that_hangs_is_given_up() -> None:
    leave = threading.Event()
    step = await answers(CalledByName(lambda name, arguments: leave.wait(60), timeout=0.05), asked("f"))
    leave.set()
    assert [failure.kind for failure in step.failures] == ["timeout"]
    assert step.messages[0]["content"].startswith("Error: ")


async def test_an_async_function_is_awaited() -> None:
    async def execute(name: str, arguments: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return {"name": name}

    assert (await answers(CalledByName(execute), asked("f"))).messages[0]["content"] == '{"name": "f"}'


# ------------------------------------------------------------------ going on together


class Gated:
    """A world whose answers come when their gates are opened."""

    def __init__(self, count: int) -> None:
        self.gates = [asyncio.Event() for _ in range(count)]

    def tool_infos(self) -> list[Any]:
        return []

    def wants(self, message: Message) -> bool:
        return True

    async def step(self, message: Message) -> Step:
        await self.gates[int(message.content)].wait()
        return Step([{"role": "user", "content": message.content}])


async def steps(world: InStep, names: Sequence[str]) -> list[asyncio.Task[Step]]:
    tasks = [asyncio.create_task(world.step(Message(name))) for name in names]
    await asyncio.sleep(0)
    return tasks


async def test_those_that_began_together_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called, "GRACE", 30.0)
    gated = Gated(3)
    tasks = await steps(InStep(gated), "012")
    for gate in gated.gates[:2]:
        gate.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    gated.gates[2].set()
    assert [step.messages[0]["content"] for step in await asyncio.gather(*tasks)] == ["0", "1", "2"]


async def test_nobody_waits_for_longer_than_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called, "GRACE", 0.01)
    gated = Gated(2)
    slow, quick = await steps(InStep(gated), "01")
    gated.gates[1].set()
    await asyncio.wait_for(quick, 20)
    assert not slow.done()
    gated.gates[0].set()
    await slow


async def test_a_step_that_is_cancelled_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called, "GRACE", 30.0)
    gated = Gated(2)
    gone, kept = await steps(InStep(gated), "01")
    gated.gates[1].set()
    gone.cancel()
    await asyncio.wait_for(kept, 20)
