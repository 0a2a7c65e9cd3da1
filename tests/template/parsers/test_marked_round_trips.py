"""What DeepSeek's and GLM's templates write is read back, as text and as ids, and as an independent parser reads it."""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

import pytest

from tests import families
from tests.template.parsers.test_round_trips import HARD, PLAIN, TOOLS, call
from unspool.template import ChatTemplate
from unspool.template.parsers import PARSERS
from unspool.types import Message

TEMPLATES = ("deepseekv3", "deepseekv3_training", "glm4moe", "glm4moe_training")
HEADERS = {"deepseekv3": "<｜Assistant｜>", "glm4moe": "<|assistant|>"}
CASES = [
    pytest.param(template, arguments, id=f"{template}-{kind}")
    for template in TEMPLATES
    for kind, arguments in (("none", {}), ("plain", PLAIN), ("hard", HARD))
]


@functools.cache
def chat(template: str) -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ChatTemplate(families.tokenizer_for(template), chat_template=families.trl_templates()[template])


def turn_text(template: str, calls: list[dict[str, Any]], content: str = "") -> str:
    """What the model is to write: the render of one turn behind its header."""
    made = calls
    if template == "deepseekv3":  # takes arguments as JSON text
        made = [call(one["function"]["name"], _json(one["function"]["arguments"])) for one in calls]  # type: ignore[arg-type]
    text: str = families.tokenizer_for(template).apply_chat_template(
        [{"role": "user", "content": "Go."}, {"role": "assistant", "content": content, "tool_calls": made}],
        tools=TOOLS,
        tokenize=False,
        chat_template=families.trl_templates()[template],
    )
    return text.rsplit(HEADERS[template.removesuffix("_training")], maxsplit=1)[-1]


def _json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def read(template: str, turn: str) -> Message:
    """The turn read from ids, behind a prompt that opened no thinking."""
    made = chat(template)
    ids = made.tokenizer.encode(turn, add_special_tokens=False)
    return made.parse(ids, prompt_ids=[], tools=TOOLS)


@pytest.mark.parametrize(("template", "arguments"), CASES)
def test_one_call_comes_back(template: str, arguments: dict[str, Any]) -> None:
    message = read(template, turn_text(template, [call("look_up", arguments)]))
    assert [made.error for made in message.tool_calls] == [None]
    calls = [(made.name, made.arguments) for made in message.tool_calls]
    assert json.dumps(calls) == json.dumps([("look_up", arguments)])  # tells True from 1, and 3.0 from 3
    assert isinstance(message.content, str) and message.content.strip() == ""


@pytest.mark.parametrize("template", TEMPLATES)
def test_several_calls_and_the_text_before_them_come_back(template: str) -> None:
    made = [call("look_up", PLAIN), call("get-weather", {"city": "Rome"}), call("look_up", {})]
    message = read(template, turn_text(template, made, "I look it up, `[TOOL_CALLS]f{}`."))
    assert [(found.name, found.arguments) for found in message.tool_calls] == [
        ("look_up", PLAIN),
        ("get-weather", {"city": "Rome"}),
        ("look_up", {}),
    ]
    assert isinstance(message.content, str) and message.content.strip() == "I look it up, `[TOOL_CALLS]f{}`."


@pytest.mark.parametrize("template", ["deepseekv3", "glm4moe"])
def test_a_turn_cut_behind_any_token_is_read_and_runs_no_shorter_call(template: str) -> None:
    made = chat(template)
    turn = turn_text(template, [call("look_up", {"city": "Rome", "days": 3}), call("look_up", {})], "Hm.")
    ids = made.tokenizer.encode(turn, add_special_tokens=False)
    whole = [("look_up", {"city": "Rome", "days": 3}), ("look_up", {})]
    run: list[tuple[str, Any]] = []
    for end in range(len(ids) + 1):
        message = made.parse(ids[:end], prompt_ids=[], tools=TOOLS)
        run = [(found.name, found.arguments) for found in message.tool_calls if found.status == "ok"]
        assert run == whole[: len(run)]
        assert all(found.error for found in message.tool_calls if found.status != "ok")
    assert run == whole


SPELLED = {
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "glm4moe": "<tool_call>rm\n</tool_call>",
}


@pytest.mark.parametrize("template", SPELLED)
def test_a_call_spelled_letter_by_letter_is_a_quotation(template: str) -> None:
    made = chat(template)
    quoted = [token for char in SPELLED[template] for token in made.tokenizer.encode(char, add_special_tokens=False)]
    assert made.decode(quoted) == SPELLED[template]
    message = made.parse(quoted, prompt_ids=[], tools=TOOLS)
    assert (message.content, message.tool_calls) == (SPELLED[template], ())
    called = made.tokenizer.encode(turn_text(template, [call("look_up", {})]), add_special_tokens=False)
    message = made.parse([*quoted, *called, *quoted], prompt_ids=[], tools=TOOLS)
    assert [found.name for found in message.tool_calls] == ["look_up"]
    assert isinstance(message.content, str) and message.content.count(SPELLED[template]) == 2
    [found] = message.tool_calls
    assert found.span is not None and len(quoted) <= found.span[0] < found.span[1] <= len(quoted) + len(called)


def test_calls_inside_thinking_are_not_run() -> None:
    quoted = turn_text("glm4moe", [call("look_up", {})]).replace("\n<think></think>", "")
    message = read("glm4moe", f"\n<think>I could {quoted}</think>\nNo.")
    assert (message.content, message.tool_calls) == ("No.", ())
    opened = read("glm4moe", f"\n<think>I could {quoted}")
    assert (opened.content, opened.tool_calls) == ("", ())


@pytest.mark.parametrize("stop", ["<|observation|>", "<|user|>"])
def test_the_header_that_glm_stops_on_is_sampled_and_no_content(stop: str) -> None:
    made = chat("glm4moe")
    turn = turn_text("glm4moe", [call("look_up", {"days": 3})], "Hm.")
    ids = made.tokenizer.encode(turn + stop, add_special_tokens=False)
    assert ids[-1] in made.stop_token_ids and made.decode(ids[-1:]) == stop
    message = made.parse(ids, tools=TOOLS)
    assert (message.content, [found.arguments for found in message.tool_calls]) == ("Hm.\n", [{"days": 3}])
    assert message.tool_calls[0].span is not None and message.tool_calls[0].span[1] == len(ids) - 1
    answer = {"role": "tool", "name": "look_up", "tool_call_id": "c", "content": "12"}
    bridge = made.decode(made.bridge(ids, [answer]))
    header = "" if stop == "<|observation|>" else "<|observation|>"
    assert bridge == f"{header}\n<tool_response>\n12\n</tool_response><|assistant|>"


class Characters:
    """A tokenizer of characters and marks, as much of one as the oracle's parsers need."""

    unk_token_id = None

    def __init__(self, *marks: str) -> None:
        self.marks = marks

    def ids(self) -> list[int]:
        return [-1 - number for number in range(len(self.marks))]

    def encode(self, text: str, **options: Any) -> list[int]:
        for number, mark in enumerate(self.marks):
            text = text.replace(mark, chr(0xE000 + number))
        return [0xE000 - 1 - ord(char) if 0xE000 <= ord(char) < 0xE020 else ord(char) for char in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        return "".join(self.marks[-1 - token] if token < 0 else chr(token) for token in ids)


UNTYPED = {"city": "東京", "deep": {"a": [1, None]}, "text": 'two\nlines and "quotes"', "days": 3}
TWO = [call("look_up", UNTYPED), call("get-weather", {"city": "Rome"})]


def assert_same(parser: str, text: str, theirs: Any) -> None:
    ours = PARSERS[parser].parse(text, TOOLS)
    assert len(ours.calls) == 2
    assert [(a.name, a.arguments) for a in ours.calls] == [(b.name, b.arguments) for b in theirs.tool_calls]
    assert ours.content.strip() == theirs.content.strip() == "Hi"


def test_an_independent_parser_reads_the_same_of_deepseek() -> None:
    parsing = pytest.importorskip("renderers.parsing", exc_type=ImportError)
    marks = Characters(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    names = ("tool_calls_begin_id", "tool_calls_end_id", "tool_call_begin_id", "tool_call_end_id", "tool_sep_id")
    turn = turn_text("deepseekv3", TWO, "Hi").removesuffix("<｜end▁of▁sentence｜>")
    found = dict(zip(names, marks.ids(), strict=True))
    assert_same("deepseek", turn, parsing.parse_deepseek_v3(marks, marks.encode(turn), stop_ids=set(), **found))


def test_an_independent_parser_reads_the_same_of_glm() -> None:
    parsing = pytest.importorskip("renderers.parsing", exc_type=ImportError)
    marks = Characters(
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    )
    names = ("think", "think_end", "tool_call", "tool_call_end", "arg_key", "arg_key_end", "arg_value", "arg_value_end")
    turn = turn_text("glm4moe", TWO, "Hi").removeprefix("\n<think></think>")
    found = dict(zip((f"{name}_id" for name in names), marks.ids(), strict=True))
    assert_same("glm", turn, parsing.parse_glm(marks, marks.encode(turn), stop_ids=set(), tools=TOOLS, **found))


def test_an_independent_parser_reads_the_same_of_kimi() -> None:
    parsing = pytest.importorskip("renderers.parsing", exc_type=ImportError)
    names = ("tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_argument_begin")
    names = (*names, "tool_call_end")
    marks = Characters(*(f"<|{name}|>" for name in names))
    first, last, begin, argument, end = marks.marks
    turn = (
        f"Hi{first}{begin}functions.look_up:0{argument}{json.dumps(UNTYPED)}{end}"
        f"{begin}functions.get-weather:1{argument}{{}}{end}{last}"
    )
    found = dict(zip((f"{name}_id" for name in names), marks.ids(), strict=True))
    theirs = parsing.parse_kimi_k2(marks, marks.encode(turn), stop_ids=set(), **found)
    assert_same("kimi_k2", turn, theirs)
    assert [made.id for made in theirs.tool_calls] == [made.id for made in PARSERS["kimi_k2"].parse(turn).calls]
