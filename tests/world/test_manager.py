import asyncio
import contextvars
import importlib
import json
import math
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator

from unspool.types import InvalidTypeError, InvalidValueError, Message, ToolCall
from unspool.world import Tool, ToolFailure, ToolManager, World, calculator, tool

sys.path.insert(0, str(Path(__file__).parent))
samples = importlib.import_module("tests.world.tools_for_tests")


@pytest.fixture
def release():
    """Set at the end, so that no hung tool outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def turn(*calls: tuple[str, Any]) -> Message:
    return Message("", tool_calls=tuple(ToolCall(name, args, id=f"c{i}") for i, (name, args) in enumerate(calls)))


async def only(manager: ToolManager, name: str, arguments: Any) -> tuple[str, str | None]:
    """The answer to one call, and the kind of its failure."""
    step = await manager.step(turn((name, arguments)))
    (message,) = step.messages
    assert set(message) == {"role", "content", "tool_call_id", "name"}
    kinds = [failure.kind for failure in step.failures]
    assert len(kinds) <= 1
    return message["content"], kinds[0] if kinds else None


# ------------------------------------------------------------------ the registry


def test_a_manager_is_a_world():
    assert isinstance(ToolManager(), World)


def test_tools_are_registered_listed_and_taken_away():
    manager = ToolManager([samples.add, samples.double])
    assert manager.register(calculator) is calculator
    assert manager.names == ["add", "double", "calculator"]
    assert [info["function"]["name"] for info in manager.tool_infos()] == manager.names
    assert manager.unregister("double").name == "double"
    assert manager.names == ["add", "calculator"]


def test_register_is_a_decorator():
    manager = ToolManager()

    @manager.register
    def one() -> int:
        return 1

    assert isinstance(one, Tool)
    assert manager("one") == "1"


def test_a_name_is_given_once():
    manager = ToolManager([samples.add])
    with pytest.raises(InvalidValueError, match="'add' is registered already"):
        manager.register(samples.add)
    with pytest.raises(InvalidValueError, match="no tool is named 'sub'; there are: add"):
        manager.unregister("sub")


def test_a_copy_has_its_own_registry():
    manager = ToolManager([samples.add], timeout=3, max_tool_chars=99, concurrency=4)
    other = manager.copy()
    other.register(calculator)
    assert (manager.names, other.names) == (["add"], ["add", "calculator"])
    assert (other.timeout, other.max_tool_chars, other.concurrency) == (3, 99, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": math.nan},
        {"timeout": True},
        {"max_tool_chars": 0},
        {"max_tool_chars": None},
        {"concurrency": 0},
        {"concurrency": 1.5},
        {"tools": samples.add},
        {"tools": "add"},
        {"tools": [3]},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises((InvalidTypeError, InvalidValueError)):
        ToolManager(**options)


# ------------------------------------------------------------------ answers


def test_a_turn_with_calls_wants_an_answer():
    manager = ToolManager([samples.add])
    assert not manager.wants(Message("hello"))
    assert manager.wants(turn(("add", {"a": 1})))
    assert manager.wants(Message("", tool_calls=(ToolCall("?", "{", status="bad_json", error="cut off"),)))


async def test_a_call_is_answered_with_its_id_and_name():
    step = await ToolManager([samples.add]).step(turn(("add", {"a": 1, "b": 4})))
    assert list(step.messages) == [{"role": "tool", "content": "5", "tool_call_id": "c0", "name": "add"}]
    assert list(step.failures) == []
    assert not step.done


async def test_two_calls_answer_in_call_order_though_the_first_is_slower():
    second_done = asyncio.Event()

    @tool
    async def slow() -> str:
        await second_done.wait()
        return "slow"

    @tool
    async def fast() -> str:
        second_done.set()
        return "fast"

    step = await ToolManager([slow, fast]).step(turn(("slow", {}), ("fast", {})))
    assert [(m["tool_call_id"], m["content"]) for m in step.messages] == [("c0", "slow"), ("c1", "fast")]


async def test_sync_calls_of_a_turn_run_at_once_too():
    meet = threading.Barrier(3, timeout=20)

    @tool
    def wait(n: int) -> int:
        meet.wait()
        return n

    step = await ToolManager([wait]).step(turn(*(("wait", {"n": n}) for n in range(3))))
    assert [m["content"] for m in step.messages] == ["0", "1", "2"]


async def test_a_failed_call_does_not_touch_its_neighbours():
    step = await ToolManager([samples.add]).step(turn(("add", {"a": 1}), ("nope", {}), ("add", {"a": 2})))
    assert [m["content"] for m in step.messages] == [
        "3",
        "Error: there is no tool named 'nope'; available tools: add",
        "4",
    ]
    assert list(step.failures) == [
        ToolFailure("nope", "c1", "unknown_tool", "Error: there is no tool named 'nope'; available tools: add")
    ]


async def test_arguments_arrive_as_objects_of_their_annotations():
    class Order(BaseModel):
        item: str
        count: int = 1

    seen: list[Any] = []

    @tool
    def buy(order: Order, at: samples.Point, speed: Literal["slow", "fast"] = "slow", ratio: float = 0.0) -> str:
        seen.extend([order, at, speed, ratio])
        return "ok"

    arguments = {"order": {"item": "tea"}, "at": {"x": 3}, "speed": "fast", "ratio": 2}
    assert await only(ToolManager([buy]), "buy", arguments) == ("ok", None)
    assert seen == [Order(item="tea"), samples.Point(3), "fast", 2.0]
    assert type(seen[3]) is float


async def test_a_structure_is_answered_as_json():
    assert await only(ToolManager([samples.move]), "where", {"point": {"x": 1, "y": 2}, "by": 5}) == (
        '{"x": 6, "y": 2}',
        None,
    )


async def test_arguments_may_be_json_text():
    manager = ToolManager([samples.add])
    assert await manager.call("add", '{"a": 1, "b": 1}') == "2"
    assert await only(manager, "add", '{"a": 40}') == ("42", None)
    assert await only(manager, "add", "not json") == (
        "Error: invalid JSON in arguments: Expecting value: line 1 column 1 (char 0)",
        "bad_json",
    )
    assert await only(manager, "add", "[1]") == ("Error: arguments must be a JSON object, not list", "bad_json")


@pytest.mark.parametrize("status", ["bad_json", "unclosed", "unknown_tool", "bad_arguments"])
async def test_what_the_parser_found_is_told_and_not_run(status):
    call = ToolCall("add", '{"a": 1', id="x", status=status, error="the call was cut off; write it again")
    step = await ToolManager([samples.add]).step(Message("", tool_calls=(call,)))
    assert step.messages[0]["content"] == "Error: the call was cut off; write it again"
    assert [failure.kind for failure in step.failures] == [status]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Error: add needs the argument 'a'"),
        ({"a": "1"}, 'Error: argument \'a\' of add: "1" is not of type "integer"'),
        ({"a": 1, "c": 1}, "Error: add has no argument 'c'; it takes: a, b"),
        ({"a": True}, "Error: argument 'a' of add: true is not of type \"integer\""),
        ({"a": None}, "Error: argument 'a' of add: null is not of type \"integer\""),
    ],
)
async def test_bad_arguments_are_told_with_the_parameter(arguments, words):
    assert await only(ToolManager([samples.add]), "add", arguments) == (words, "bad_arguments")


async def test_a_bad_nested_argument_is_told_with_its_path():
    content, kind = await only(ToolManager([samples.move]), "where", {"point": {"x": "one"}, "by": 1})
    assert kind == "bad_arguments"
    assert content == 'Error: argument "point[\'x\']" of where: "one" is not of type "integer"'


async def test_what_only_the_annotation_refuses_is_a_bad_argument_too():
    class Even(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def even(cls, n: int) -> int:
            if n % 2:
                raise ValueError("must be even")
            return n

    @tool
    def halve(of: Even, by: int = Field(default=2, ge=1)) -> int:
        return of.n // by

    manager = ToolManager([halve])
    assert await only(manager, "halve", {"of": {"n": 4}}) == ("2", None)
    assert await only(manager, "halve", {"of": {"n": 3}}) == (
        "Error: argument 'of.n' of halve: Value error, must be even, not 3",
        "bad_arguments",
    )


async def test_an_unknown_tool_is_answered_with_the_closest_one():
    content, kind = await only(ToolManager([samples.add, calculator]), "calculate", {})
    assert kind == "unknown_tool"
    assert content == (
        "Error: there is no tool named 'calculate'; did you mean 'calculator'? available tools: add, calculator"
    )
    assert (await only(ToolManager(), "x", {}))[0] == "Error: there is no tool named 'x'; no tools are available"


async def test_an_explicit_schema_serves_a_function_of_any_arguments():
    async def forward(**arguments: Any) -> Any:
        return arguments

    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    manager = ToolManager([Tool("remote", "Elsewhere.", schema, forward)])
    assert await only(manager, "remote", {"q": "x"}) == ('{"q": "x"}', None)
    assert (await only(manager, "remote", {"q": 1}))[1] == "bad_arguments"
    assert (await only(manager, "remote", {"q": "x", "z": 1}))[1] == "bad_arguments"


# ------------------------------------------------------------------ exceptions

RAISED = [ValueError, RuntimeError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError]
RAISED += [RecursionError, BaseException, asyncio.CancelledError, TimeoutError, asyncio.InvalidStateError, EOFError]


@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_a_tool_raises_is_its_answer(kind):
    @tool
    def blocking() -> str:
        raise kind("no luck")

    @tool
    async def awaited() -> str:
        await asyncio.sleep(0)
        raise kind("no luck")

    manager = ToolManager([blocking, awaited])
    step = await manager.step(turn(("blocking", {}), ("awaited", {})))
    assert step.messages[0]["content"] == f"Error: blocking raised {kind.__name__}: no luck"
    if kind is not StopIteration:  # Python itself makes a RuntimeError of it in a coroutine
        assert step.messages[1]["content"] == f"Error: awaited raised {kind.__name__}: no luck"
    assert [failure.kind for failure in step.failures] == ["exception", "exception"]


async def test_a_tool_that_cancels_its_own_task_fails_alone():
    @tool
    async def selfish() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return "never"

    assert await only(ToolManager([selfish]), "selfish", {}) == (
        "Error: selfish raised CancelledError",
        "exception",
    )


async def test_a_long_or_unreadable_exception_is_bounded():
    class Mute(Exception):  # noqa: N818 - its name is part of the answer
        def __str__(self) -> str:
            raise SystemExit

    @tool
    def loud() -> str:
        raise ValueError("x" * 10_000_000)

    @tool
    def mute() -> str:
        raise Mute

    manager = ToolManager([loud, mute])
    content, kind = await only(manager, "loud", {})
    assert kind == "exception"
    assert content.startswith("Error: loud raised ValueError: xxx")
    assert len(content) <= 2_000
    assert (await only(manager, "mute", {}))[0] == "Error: mute raised Mute (its message cannot be read)"


async def test_a_tool_cannot_reach_the_message_through_its_arguments():
    @tool
    def spoil(items: list[Any], options: dict[str, Any]) -> str:
        items[0].append("spoilt")
        options["inner"]["x"] = "spoilt"
        items.clear()
        return "done"

    message = turn(("spoil", {"items": [[1]], "options": {"inner": {}}}))
    assert (await ToolManager([spoil]).step(message)).messages[0]["content"] == "done"
    assert message.tool_calls[0].arguments == {"items": [[1]], "options": {"inner": {}}}


# ------------------------------------------------------------------ time


async def test_a_hung_sync_tool_costs_its_caller_one_time_out_and_nobody_else_anything(release):
    @tool(timeout=0.3)
    def hang() -> str:
        release.wait()
        return "late"

    manager = ToolManager([hang, samples.add])
    hung = asyncio.create_task(only(manager, "hang", {}))
    await asyncio.sleep(0)
    others = await asyncio.gather(*(only(manager, "add", {"a": n}) for n in range(50)))
    assert not hung.done()
    assert [content for content, _ in others] == [str(n + 2) for n in range(50)]
    assert await hung == ("Error: hang gave no answer within 0.3 s", "timeout")
    assert manager.abandoned == 1


async def test_many_hung_tools_starve_nobody(release):
    @tool
    def hang() -> str:
        release.wait()
        return "late"

    manager = ToolManager([hang, samples.add], timeout=0.2, concurrency=10)
    answers = await asyncio.gather(*(only(manager, "hang", {}) for _ in range(40)), only(manager, "add", {"a": 1}))
    assert answers[-1] == ("3", None)
    assert {kind for _, kind in answers[:-1]} == {"timeout"}
    assert manager.abandoned == 40


async def test_an_async_tool_that_hangs_or_ignores_its_cancellation_is_left_behind():
    ended = asyncio.Event()
    go_on = asyncio.Event()

    @tool
    async def hang() -> str:
        await asyncio.Event().wait()
        return "never"

    @tool
    async def stubborn() -> str:
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        return "late"

    manager = ToolManager([hang, stubborn], timeout=0.1)
    step = await manager.step(turn(("hang", {}), ("stubborn", {})))
    assert [failure.kind for failure in step.failures] == ["timeout", "timeout"]
    go_on.set()
    await ended.wait()


async def test_a_tool_may_have_no_time_out():
    @tool(timeout=math.inf)
    def quick() -> str:
        return "a"

    assert await only(ToolManager([quick], timeout=0.001), "quick", {}) in [("a", None)]
    assert await only(ToolManager([samples.add], timeout=None), "add", {"a": 1}) == ("3", None)


async def test_the_callers_cancellation_propagates_and_reaches_the_tool(release):
    began, cancelled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @tool
    async def awaited() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "never"

    @tool
    def blocking() -> str:
        loop.call_soon_threadsafe(began.set)
        release.wait()
        return "late"

    manager = ToolManager([awaited, blocking])
    task = asyncio.create_task(manager.step(turn(("awaited", {}), ("blocking", {}))))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await cancelled.wait()
    assert manager.abandoned == 1


async def test_concurrency_bounds_all_episodes_of_a_manager_and_its_copies():
    running = most = 0

    @tool
    async def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return "ok"

    manager = ToolManager([work], concurrency=3)
    await asyncio.gather(*(each.step(turn(("work", {}), ("work", {}))) for each in [manager, manager.copy()] * 10))
    assert most == 3


async def test_waiting_for_a_turn_does_not_count_against_the_time_out():
    first = asyncio.Event()

    @tool(timeout=0.3)
    async def quick() -> str:
        return "quick"

    @tool(timeout=5)
    async def slow() -> str:
        first.set()
        await asyncio.sleep(0.5)
        return "slow"

    manager = ToolManager([quick, slow], concurrency=1)
    task = asyncio.create_task(only(manager, "slow", {}))
    await first.wait()
    assert await only(manager, "quick", {}) == ("quick", None)
    assert await task == ("slow", None)


# ------------------------------------------------------------------ loops and threads


def test_one_manager_serves_several_loops_in_several_threads():
    manager = ToolManager([samples.add, samples.echo], concurrency=2)
    answers: dict[int, list[str]] = {}

    async def episode(n: int) -> list[str]:
        steps = await asyncio.gather(
            *(manager.step(turn(("add", {"a": n}), ("echo", {"text": str(n)}))) for _ in range(20))
        )
        return [message["content"] for step in steps for message in step.messages]

    def run(n: int) -> None:
        answers[n] = asyncio.run(episode(n))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [str(n + 2), str(n)] * 20 for n in range(6)}


async def test_the_blocking_form_works_inside_a_running_loop_and_from_a_tool():
    manager = ToolManager([samples.echo])

    @manager.register
    def twice(text: str) -> str:
        return manager("echo", {"text": text}) * 2

    assert manager("echo", {"text": "a"}) == "a"
    assert manager("twice", {"text": "a"}) == "aa"
    assert await manager.call("twice", {"text": "b"}) == "bb"


async def test_context_variables_reach_sync_and_async_tools():
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")

    @tool
    def blocking() -> str:
        return who.get()

    @tool
    async def awaited() -> str:
        return who.get()

    who.set("me")
    step = await ToolManager([blocking, awaited]).step(turn(("blocking", {}), ("awaited", {})))
    assert [m["content"] for m in step.messages] == ["me", "me"]


async def test_a_sync_function_that_gives_a_coroutine_is_awaited():
    @tool
    def sneaky(text: str) -> Any:
        return samples.echo(text)

    assert await only(ToolManager([sneaky]), "sneaky", {"text": "hi"}) == ("hi", None)


# ------------------------------------------------------------------ arguments of any kind

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.text() | st.dictionaries(st.sampled_from(["a", "b", "point", "by", "text"]) | st.text(), _json), st.data())
async def test_no_arguments_make_a_step_raise(arguments, data):
    manager = ToolManager([samples.add, samples.move, samples.echo, calculator])
    name = data.draw(st.sampled_from(manager.names) | st.text())
    content, kind = await only(manager, name, arguments)
    assert content.startswith("Error: ") == (kind not in (None, "truncated")) or name == "echo"
    content.encode()
    json.dumps(content)


async def test_arguments_nested_beyond_all_measure_are_refused():
    @tool
    def take(value: Any) -> str:
        return "ok"

    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    _, kind = await only(ToolManager([take]), "take", {"value": deep})
    assert kind is not None
    _, kind = await only(ToolManager([take]), "take", '{"value": ' + "[" * 100_000)
    assert kind == "bad_json"
