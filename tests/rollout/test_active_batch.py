"""rollout_single and rollout_batch: shapes, masks, order, and what one round of the dynamic active batch is."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.small import CALC, by_session, call, ids, say, script, small_template, small_tokenizer
from unspool import (
    ChatTemplate,
    Env,
    EnvTool,
    Generation,
    SampledSequence,
    SampleResponse,
    ScriptedEngine,
    StepResult,
    ToolManager,
    calculator,
)
from unspool.data import align_response
from unspool.rollout import BatchRollout, SingleRollout, called, rollout_batch, rollout_single
from unspool.types import EngineError, InvalidTypeError, InvalidValueError
from unspool.world import EnvWorld

ADD = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def add(name: str, arguments: dict[str, Any]) -> Any:
    return {"result": arguments["a"] + arguments["b"]} if name == "add" else None


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def single(engine: Any, text: str = "1 + 2?", tools: Any = ADD, **options: Any) -> SingleRollout:
    return rollout_single(engine, small_template(), user(text), tools, **{"execute_tool": add, **options})


def scripted(*turns: str | Generation | Exception) -> ScriptedEngine:
    return script(*turns, logprobs=True)


class TextModel:
    """MiniMind's `rollout` over a function of the prompt's text; counts its calls, and pads with the end token."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply = reply
        self.tokenizer = small_tokenizer()
        self.widths: list[int] = []
        self.prompts: list[list[int]] = []
        self.temperatures: set[float] = set()

    def rollout(
        self, prompt_ids: Any, attention_mask: Any, num_generations: int, max_new_tokens: int, temperature: float = 0.8
    ) -> Any:
        import torch

        self.widths.append(len(prompt_ids))
        self.temperatures.add(temperature)
        prompts = [row[mask.bool()].tolist() for row, mask in zip(prompt_ids, attention_mask, strict=True)]
        self.prompts += prompts
        rows = [say(self.reply(small_template().decode(prompt))) for prompt in prompts]
        width = max(map(len, rows))
        end = self.tokenizer.pad_token_id
        return SimpleNamespace(
            completion_ids=torch.tensor([row + [end] * (width - len(row)) for row in rows]),
            per_token_logps=torch.tensor([[-0.5] * width for _ in rows]),
        )


# ------------------------------------------------------------------ one trajectory


def test_a_call_and_an_answer_give_the_eight_values() -> None:
    turn, answer = say(call("add", a=1, b=2)), say("It is 3.")
    out = single(scripted(call("add", a=1, b=2), "It is 3."), thinking_ratio=None)
    (
        final_output,
        final_context,
        prompt_ids,
        response_ids,
        response_mask,
        response_old_logps,
        turn_outputs,
        unfinished,
    ) = out
    observation = ids('\n<|im_start|>tool\n{"result": 3}<|im_end|>\n')
    observation += ids("<|im_start|>assistant\n")
    assert prompt_ids == small_template().encode(user("1 + 2?"), ADD)
    assert small_template().decode(response_ids) == small_template().decode(turn + observation + answer)
    bridge = len(response_ids) - len(turn) - len(answer)
    assert response_ids[: len(turn)] == turn
    assert response_ids[-len(answer) :] == answer
    assert response_mask == [1] * len(turn) + [0] * bridge + [1] * len(answer)
    assert response_old_logps == [-1.0] * len(turn) + [0.0] * bridge + [-1.0] * len(answer)
    assert len(response_ids) == len(response_mask) == len(response_old_logps)
    assert final_output == "It is 3."
    assert turn_outputs == [call("add", a=1, b=2), "It is 3."]
    assert final_context == small_template().decode(prompt_ids + response_ids)
    assert unfinished is False
    assert type(out) is SingleRollout and out.response_ids is response_ids


def test_the_stop_token_is_in_the_response_with_mask_1_and_its_log_probability() -> None:
    generation = Generation(say("Hi"), [-0.25] * (len(say("Hi")) - 1) + [-3.5])
    out = single(script(generation, logprobs=True))
    assert out.response_ids[-1] == small_tokenizer().eos_token_id
    assert (out.response_mask[-1], out.response_old_logps[-1]) == (1, -3.5)
    assert out.final_output == "Hi"


def test_the_next_turn_is_generated_from_the_very_tokens_recorded() -> None:
    """The first turn is one that no tokenizer would write: the same text, a token a character."""
    odd = [token for character in call("add", a=1, b=2) for token in ids(character)] + [small_tokenizer().eos_token_id]
    assert odd != say(call("add", a=1, b=2))
    engine = script(Generation(odd, [-1.0] * len(odd)), "It is 3.", logprobs=True)
    out = single(engine)
    first, second = engine.requests
    assert first.input_ids == out.prompt_ids
    answer = len(say("It is 3."))
    assert second.input_ids == out.prompt_ids + out.response_ids[:-answer]
    assert out.response_ids[: len(odd)] == odd


def test_the_messages_and_tools_given_are_not_changed() -> None:
    messages, tools = user("1 + 2?"), deepcopy(ADD)
    rollout_single(scripted(call("add", a=1, b=2), "3"), small_template(), messages, tools, execute_tool=add)
    assert (messages, tools) == (user("1 + 2?"), ADD)


@pytest.mark.parametrize(
    ("turns", "unfinished"),
    [
        (["Hi"], False),
        ([call("add", a=1, b=2), "3"], False),
        ([call("add", a=1, b=2)] * 2 + ["3"], False),  # a natural end exactly on the last turn
        ([call("add", a=1, b=2)] * 3, True),
    ],
)
def test_unfinished_says_that_the_last_allowed_turn_still_asked_for_tools(turns: list[str], unfinished: bool) -> None:
    assert single(scripted(*turns), max_turns=3).unfinished is unfinished


def test_no_tool_of_the_last_turn_is_run_and_the_response_ends_with_what_was_sampled() -> None:
    ran: list[str] = []

    def count(name: str, arguments: dict[str, Any]) -> Any:
        ran.append(name)
        return {"result": 0}

    out = single(scripted(call("add", a=1, b=2)), max_turns=3, execute_tool=count)
    assert (len(ran), len(out.turn_outputs), out.unfinished) == (2, 3, True)
    assert out.response_mask[-1] == 1


def test_a_turn_cut_by_its_length_ends_the_trajectory_and_is_unfinished_where_it_asked_for_tools() -> None:
    whole = say(call("add", a=1, b=2))
    asked = single(scripted(call("add", a=1, b=2) + " and"), max_new_tokens=len(whole))
    assert (asked.trajectory["stop_reason"], asked.unfinished) == ("length", True)
    spoke = single(scripted("a long answer to a short question"), max_new_tokens=3)
    assert (spoke.trajectory["stop_reason"], spoke.unfinished, len(spoke.response_ids)) == ("length", False, 3)
    assert spoke.final_output == small_template().decode(spoke.response_ids)


def test_prompt_and_response_align_as_one_row() -> None:
    out = single(scripted(call("add", a=1, b=2), "It is 3."))
    row = align_response(out.prompt_ids, out.response_ids, out.response_mask, out.response_old_logps)
    assert len(row.input_ids) == len(row.mask) == len(row.shifted_mask) + 1 == len(row.old_logps) + 1
    assert row.old_logps[: len(out.prompt_ids) - 1] == [0.0] * (len(out.prompt_ids) - 1)
    assert row.shifted_mask[len(out.prompt_ids) - 1 :] == out.response_mask


_SPOKEN = st.text(st.sampled_from("ab <>|é\n{}"), max_size=12)
_TURN = st.tuples(_SPOKEN, st.lists(st.integers(0, 9), max_size=2)).map(
    lambda turn: turn[0] + "".join(call("add", a=n, b=1) for n in turn[1])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(_TURN, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 60))
def test_whatever_is_said_the_lists_agree_and_every_request_is_what_was_recorded(
    turns: list[str], max_turns: int, max_new_tokens: int
) -> None:
    engine = scripted(*turns)
    out = single(engine, max_turns=max_turns, max_new_tokens=max_new_tokens)
    assert len(out.response_ids) == len(out.response_mask) == len(out.response_old_logps)
    whole, end = out.prompt_ids + out.response_ids, len(out.prompt_ids)
    said: list[int] = []
    for request, text in zip(engine.requests, turns + turns[-1:] * max_turns, strict=False):
        assert request.input_ids == whole[: len(request.input_ids)]
        sampled = say(text)[:max_new_tokens]
        assert whole[len(request.input_ids) :][: len(sampled)] == sampled
        assert out.response_mask[end - len(out.prompt_ids) : len(request.input_ids) - len(out.prompt_ids)] == [0] * (
            len(request.input_ids) - end
        )
        end = len(request.input_ids) + len(sampled)
        said += sampled
    assert end == len(whole)
    assert [t for t, own in zip(out.response_ids, out.response_mask, strict=True) if own] == said
    assert out.response_old_logps == [-1.0 * own for own in out.response_mask]
    assert len(out.turn_outputs) == len(engine.requests) <= max_turns


# ------------------------------------------------------------------ the batch


def test_eight_parallel_lists_sample_major() -> None:
    def lines(request: Any) -> Sequence[str]:
        return [small_template().decode(request.input_ids).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]]

    out = rollout_batch(
        by_session(lines, logprobs=True), small_template(), [user("one"), user("two")], [None, None], num_gen=3
    )
    assert len(out) == 8 and all(len(column) == 2 * 3 for column in out)
    assert out[0] == ["one", "one", "one", "two", "two", "two"]
    assert [(t["group"], t["sample"]) for t in out.trajectories] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert type(out) is BatchRollout


def rounds(text: str) -> str:
    """Asks for as many tools as the user's number says, one a turn."""
    wanted = int(text.split("<|im_start|>user\n")[1][0])
    done = text.count("<|im_start|>tool")
    return call("add", a=done, b=1) if done < wanted else "done" * (1 + wanted)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
def test_a_round_is_one_call_with_only_those_that_are_still_alive(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called, "GRACE", 30.0)  # a busy machine is not what this is about

    async def later(name: str, arguments: dict[str, Any]) -> Any:
        return add(name, arguments)

    model = TextModel(rounds)
    batch = [user(f"{wanted}") for wanted in (0, 1, 3)]
    out = rollout_batch(model, small_template(), batch, [ADD] * 3, 2, max_turns=4, execute_tool=add if plain else later)
    assert model.widths == [6, 4, 2, 2]  # 0 has ended, then 1; 3 goes on
    assert [len(turns) for turns in out.turn_outputs] == [1, 1, 2, 2, 4, 4]
    assert model.temperatures == {0.8}


def test_padding_never_reaches_a_record() -> None:
    """Prompts of very different lengths in one call, answers of different lengths, pad token == end token."""
    model = TextModel(rounds)
    texts = ["0", "1" + " please" * 40, "2?"]
    out = rollout_batch(model, small_template(), [user(text) for text in texts], [ADD] * 3, 1, execute_tool=add)
    end = small_tokenizer().pad_token_id
    for text, prompt, response, mask, turns in zip(texts, out[2], out[3], out[4], out[6], strict=True):
        assert prompt == small_template().encode(user(text), ADD)
        sampled = [token for token, own in zip(response, mask, strict=True) if own]
        assert sampled == [token for turn in turns for token in say(turn)]
        assert sampled.count(end) == len(turns)
        assert prompt in model.prompts
    assert out.response_old_logps[0] == [-0.5] * len(say("done"))


def test_a_slow_tool_holds_nobody_up() -> None:
    others_done, entered = threading.Event(), threading.Event()

    def tool(name: str, arguments: dict[str, Any]) -> Any:
        if arguments["a"] == 100:  # the slow one waits until all the others have had their last turn
            entered.set()
            return {"result": others_done.wait(30)}
        return {"result": entered.wait(30)}

    left = {"0", "1", "2"}

    def reply(text: str) -> str:
        name = text.split("<|im_start|>user\n")[1][0]
        if "<|im_start|>tool" not in text:
            return call("add", a=100 if name == "3" else 0, b=0)
        if name != "3":
            left.discard(name)
            if not left:
                others_done.set()
        return "ok"

    model = TextModel(reply)
    out = rollout_batch(model, small_template(), [user(str(i)) for i in range(4)], [ADD] * 4, 1, execute_tool=tool)
    assert '{"result": true}' in out.final_contexts[3]
    assert out.final_outputs == ["ok"] * 4
    assert model.widths[0] == 4 and model.widths[-1] == 1


def test_a_hugging_face_tokenizer_serves_as_the_template() -> None:
    tokenizer = deepcopy(small_tokenizer())
    tokenizer.chat_template = small_template().source
    out = rollout_single(scripted("Hi"), tokenizer, user("Hello"), None)
    assert out.prompt_ids == small_template().encode(user("Hello"))


def test_a_tool_manager_serves_as_execute_tool() -> None:
    out = rollout_single(
        scripted(CALC, "19"), small_template(), user("12 + 7?"), None, execute_tool=ToolManager([calculator])
    )
    assert out.trajectory["messages"][2]["content"] == "19"
    assert out.prompt_ids == small_template().encode(user("12 + 7?"), ToolManager([calculator]).tool_infos())


class Counting(Env):
    """Counts its calls, and says in a list what becomes of it."""

    def __init__(self, lived: list[str], first: int = 0) -> None:
        self.lived, self.count = lived, first

    def reset(self, trajectory: Any) -> StepResult:
        self.lived.append("reset")
        return StepResult("Count.")

    def tools(self) -> list[Any]:
        return ADD

    def step(self, name: str, arguments: dict[str, Any]) -> StepResult:
        self.count += 1
        return StepResult(f"count {self.count}", 1.0)

    def evaluate(self, trajectories: Sequence[Any]) -> list[float]:
        return [5.0]

    def close(self) -> None:
        self.lived.append("close")


def add_once(text: str) -> str:
    return "done" if "<|im_start|>tool" in text else call("add", a=1, b=2)


ENGINES = [lambda: TextModel(add_once), lambda: scripted(call("add", a=1, b=2), "done")]


@pytest.mark.parametrize("engine", ENGINES, ids=["rollout", "engine"])
@pytest.mark.parametrize(
    "make",
    [Counting, lambda lived: EnvWorld(Counting(lived)), lambda lived: partial(Counting, lived)],
    ids=["Env", "EnvWorld", "partial"],
)
def test_an_environment_is_opened_evaluated_and_closed_whatever_the_engine(make: Any, engine: Any) -> None:
    lived: list[str] = []
    out = rollout_single(engine(), small_template(), user("Go."), execute_tool=make(lived))
    assert lived == ["reset", "close"]
    assert [m["content"] for m in out.trajectory["messages"] if m["role"] in ("user", "tool")][1:] == [
        "Count.",
        "count 1",
    ]
    assert (out.trajectory["reward"], out.final_output) == (5.0, "done")


@pytest.mark.parametrize("engine", ENGINES, ids=["rollout", "engine"])
def test_each_trajectory_has_an_environment_of_its_own_from_a_class_or_a_list(engine: Any) -> None:
    lived: list[str] = []

    class Own(Counting):
        def __init__(self) -> None:
            super().__init__(lived)

    every = [partial(Counting, lived, 10 * i) for i in range(4)]
    for tools, counts in ((Own, [1] * 4), (every, [1, 11, 21, 31])):
        out = rollout_batch(engine(), small_template(), [user("a"), user("b")], [None] * 2, 2, execute_tool=tools)
        answers = [m["content"] for t in out.trajectories for m in t["messages"] if m["role"] == "tool"]
        assert answers == [f"count {count}" for count in counts]
    assert sorted(lived) == ["close"] * 8 + ["reset"] * 8


@pytest.mark.parametrize("engine", ENGINES, ids=["rollout", "engine"])
@pytest.mark.parametrize(
    "make",
    [Counting, lambda lived: EnvWorld(Counting(lived)), lambda lived: ToolManager(EnvTool.from_env(Counting([])))],
)
def test_what_has_the_state_of_one_episode_is_refused_for_several(make: Any, engine: Any) -> None:
    lived: list[str] = []
    with pytest.raises(InvalidValueError, match="has the state of one episode, and there are 3; give the class"):
        rollout_batch(engine(), small_template(), [user("a")], [None], 3, execute_tool=make(lived))
    assert lived == []


def test_tools_may_be_json_text_and_none_is_no_tools() -> None:
    import json

    out = single(scripted("Hi"), tools=json.dumps(ADD))
    assert out.prompt_ids == small_template().encode(user("1 + 2?"), ADD)
    assert single(scripted("Hi"), tools=None).prompt_ids == small_template().encode(user("1 + 2?"))


# ------------------------------------------------------------------ thinking, seeds, parameters

THINKS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if open_thinking %}THINK{% else %}SAY{% endif %}{{ '!' if enable_thinking is defined }}
{% endif -%}"""


def test_thinking_ratio_is_drawn_from_the_seed_for_each_trajectory() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this template knows no tools
        template = ChatTemplate(small_tokenizer(), chat_template=THINKS, parser="hermes")

    def thinks(ratio: float | None, seed: int = 1) -> list[bool]:
        out = rollout_batch(scripted("Hi"), template, [user("a")] * 4, [None] * 4, 10, thinking_ratio=ratio, seed=seed)
        return ["THINK!" in context for context in out.final_contexts]

    half = thinks(0.5)
    assert half == thinks(0.5) != thinks(0.5, seed=2)
    assert 8 < sum(half) < 32
    assert all(thinks(1.0)) and not any(thinks(0.0))
    once = rollout_single(scripted("Hi"), template, user("a"), None, thinking_ratio=None).final_context
    assert "SAY\n" in once  # neither switch was given
    fixed = template.with_kwargs(open_thinking=True)
    out = rollout_batch(scripted("Hi"), fixed, [user("a")], [None], 10, thinking_ratio=0.0)
    assert all("THINK" in context for context in out.final_contexts)
    with pytest.raises(InvalidValueError, match="thinking_ratio must be a number from 0 to 1"):
        thinks(1.5)


def test_the_seed_decides_the_seeds_of_all_turns_and_random_draws_it_where_none_is_given() -> None:
    def seeds(seed: int | None) -> list[int]:
        engine = scripted(call("add", a=1, b=2), "3")
        rollout_batch(engine, small_template(), [user("a"), user("b")], [ADD] * 2, 2, execute_tool=add, seed=seed)
        return sorted(request.seed for request in engine.requests)

    assert seeds(3) == seeds(3) != seeds(4)
    assert len(set(seeds(3))) == 2 * 2 * 2
    random.seed(8)
    first = seeds(None)
    assert seeds(None) != first
    random.seed(8)
    assert seeds(None) == first


def test_what_is_given_reaches_the_engine() -> None:
    engine = scripted("Hi")
    single(engine, max_new_tokens=17, temperature=0.3, extra={"raw_logprobs": True})
    [request] = engine.requests
    assert (request.params.max_tokens, request.params.temperature) == (17, 0.3)
    assert request.extra == {"raw_logprobs": True}
    single(engine)
    assert (engine.requests[1].params.max_tokens, engine.requests[1].params.temperature) == (256, 0.8)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"num_gen": 0}, InvalidValueError, "num_gen must be a whole number, at least 1, not 0"),
        ({"tools_batch": []}, InvalidValueError, "messages_batch has 1 samples and tools_batch 0"),
        ({"max_turns": 0}, InvalidValueError, "max_turns must be at least 1"),
        ({"execute_tool": {"add": add}}, InvalidTypeError, "execute_tool must be a function"),
        ({"execute_tool": ToolManager}, InvalidTypeError, "execute_tool must be a function"),
        ({"execute_tool": calculator}, InvalidTypeError, "execute_tool must be a function"),
        ({"execute_tool": [add]}, InvalidTypeError, "execute_tool must be a function"),
        ({"tool_timeout": 0}, InvalidValueError, "tool_timeout must be above 0 seconds, or None, not 0"),
        ({"messages_batch": user("a")}, InvalidTypeError, r"messages_batch\[0\].* not {'role'.*give a list of lists"),
        ({"messages_batch": ["a"]}, InvalidTypeError, r"messages_batch\[0\] must be the messages of a sample, not 'a'"),
        ({"messages_batch": "a"}, InvalidTypeError, "messages_batch must be a list of lists of messages, not 'a'"),
        ({"tools_batch": "[]"}, InvalidTypeError, r"tools_batch must be a list with the tools of each.*not '\[\]'"),
        ({"tools_batch": ["{no"]}, InvalidValueError, r"tools_batch\[0\] is not valid JSON \(.*\): '{no'"),
        ({"tools_batch": ADD}, InvalidTypeError, r"tools_batch\[0\] must be a list of dicts in OpenAI's form.* not {"),
        ({"tools_batch": ["3"]}, InvalidTypeError, r"tools_batch\[0\] must be a list of dicts.* not '3'"),
        ({"rollout_engine": SimpleNamespace(rollout=5)}, InvalidTypeError, "which SimpleNamespace has not"),
        ({"rollout_engine": "sglang"}, InvalidTypeError, "something that returns text only"),
        ({"tokenizer": None}, InvalidTypeError, "template must be a ChatTemplate"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options: dict[str, Any], kind: type, said: str) -> None:
    given = {
        "rollout_engine": scripted("Hi"),
        "tokenizer": small_template(),
        "messages_batch": [user("a")],
        "tools_batch": [None],
        "num_gen": 1,
        **options,
    }
    with pytest.raises(kind, match=said):
        rollout_batch(**given)


def test_no_tools_batch_is_no_tools_for_all_or_those_of_the_manager() -> None:
    batch = [user("a"), user("b")]
    out = rollout_batch(scripted("Hi"), small_template(), batch, None, 2)
    assert out.prompt_ids == [small_template().encode(messages) for messages in batch for _ in range(2)]
    manager = ToolManager([calculator])
    out = rollout_batch(scripted("Hi"), small_template(), batch, None, 1, execute_tool=manager)
    assert out.prompt_ids[1] == small_template().encode(batch[1], manager.tool_infos())


def test_one_samples_messages_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match="messages must be a list of messages, dicts with a 'role', not 'a'"):
        rollout_single(scripted("Hi"), small_template(), "a")  # type: ignore[arg-type]


def test_an_empty_batch_is_eight_empty_lists() -> None:
    assert rollout_batch(scripted("Hi"), small_template(), [], [], 4) == ([],) * 8


# ------------------------------------------------------------------ failures


def test_one_trajectory_that_fails_is_said_and_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    def lines(request: Any) -> Sequence[str | Exception]:
        bad = "broken" in small_template().decode(request.input_ids)
        return [call("add", a=1, b=2), RuntimeError("no memory") if bad else "3"]

    batch = [user("fine"), user("broken")]
    with caplog.at_level(logging.WARNING, "unspool"):
        out = rollout_batch(by_session(lines, logprobs=True), small_template(), batch, [ADD] * 2, 1, execute_tool=add)
    assert [t["error"] for t in out.trajectories] == [None, "RuntimeError: no memory"]
    assert "sample 1, trajectory 0 failed after 1 turns: RuntimeError: no memory" in caplog.text
    assert out.final_outputs == ["3", call("add", a=1, b=2)]
    assert sum(out.response_masks[1]) == len(say(call("add", a=1, b=2)))
    assert out.unfinished == [False, False]


def test_where_every_trajectory_fails_the_first_cause_is_raised() -> None:
    with pytest.raises(EngineError, match="all 2 trajectories failed; the first one with: RuntimeError: no memory"):
        rollout_batch(scripted(RuntimeError("no memory")), small_template(), [user("a")], [None], 2)


def test_an_engine_without_log_probabilities_is_refused_before_it_is_asked() -> None:
    engine = script("Hi")
    with pytest.raises(EngineError, match="ScriptedEngine gives no log-probabilities"):
        single(engine)
    assert engine.requests == []

    class Sampler:
        def sample(self, batch: list[Any], sampling_params: Any) -> list[SampleResponse]:
            return [SampleResponse([SampledSequence("stop", say("Hi"))]) for _ in batch]

    with pytest.raises(EngineError, match="Batching gives no log-probabilities"):
        single(Sampler())


def test_a_device_that_is_not_the_engines_is_refused() -> None:
    engine = scripted("Hi")
    engine.device = "cpu"  # type: ignore[attr-defined]
    assert single(engine, device="cpu:0").final_output == "Hi"
    with pytest.raises(InvalidValueError, match="device is 'cuda' and the engine's model is on 'cpu'"):
        single(engine, device="cuda")


def test_the_device_is_where_prompts_go_and_not_looked_at_where_an_engine_does_not_say_its_own() -> None:
    import torch

    class Placed(TextModel):
        device = "cpu"

        def rollout(self, prompt_ids: Any, attention_mask: Any, *args: Any, **more: Any) -> Any:
            assert prompt_ids.device == attention_mask.device == torch.device("meta")
            prompt = torch.tensor([small_template().encode(user("1 + 2?"), ADD)])
            return super().rollout(prompt, torch.ones_like(prompt), *args, **more)

    assert single(Placed(lambda text: "Hi"), device="meta").final_output == "Hi"
    assert single(scripted("Hi"), device="cuda:9").final_output == "Hi"
