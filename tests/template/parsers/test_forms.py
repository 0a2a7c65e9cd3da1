"""What a turn is held to that must call a tool: all that fits is read as one call by the format's own parser.

xgrammar, which vLLM and SGLang compile such forms with, is the judge of what fits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.small import small_template, small_tokenizer
from unspool.template import ChatTemplate
from unspool.template.parsers import PARSERS
from unspool.template.parsers.forms import FORMS, one_call
from unspool.types import InvalidValueError

xgrammar = pytest.importorskip("xgrammar")


def tool(name: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties or {}, "required": list(properties or {}), **more}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


SEARCH = tool("search", {"query": {"type": "string"}, "limit": {"type": "integer"}}, required=["query"])
PLACE = tool(
    "place",
    {
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
            "required": ["x", "unit"],
        },
        "names": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "exact": {"type": "boolean"},
    },
)
CHOOSE = tool("choose", {"colour": {"enum": ["red", "blue"]}})
NOW = tool("now")
WEIGH = tool("weigh", {"grams": {"type": "number"}})
TOOLS = [SEARCH, PLACE, CHOOSE, NOW]  # a model that draws at random writes floats that are too large
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
FENCED = "{# ```json #}"
DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
END_DEEP = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def form(parser: str, source: str = "", thinking: bool = False) -> str:
    return one_call(PARSERS[parser], source, [*TOOLS, WEIGH], lambda _: None, thinking=thinking)


def fits(written: str, text: str) -> bool:
    info = xgrammar.TokenizerInfo.from_huggingface(small_tokenizer())
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(written))
    return bool(matcher.accept_string(text)) and bool(matcher.is_completed())


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SEARCHED = {"query": 'say "19" </tool_call>', "limit": 3}
PLACED = {"at": {"x": -15, "unit": "km"}, "names": ["a", "ä"], "exact": True}


@pytest.mark.parametrize(
    ("parser", "source", "text", "name", "arguments"),
    [
        ("hermes", "", hermes("search", SEARCHED), "search", SEARCHED),
        ("hermes", "", hermes("search", {"query": ""}), "search", {"query": ""}),
        ("hermes", "", hermes("place", PLACED), "place", PLACED),
        ("hermes", "", hermes("choose", {"colour": "blue"}), "choose", {"colour": "blue"}),
        ("hermes", "", hermes("now", {}), "now", {}),
        ("hermes", "", hermes("weigh", {"grams": -1.5e-7}), "weigh", {"grams": -1.5e-7}),
        ("llama3_json", "", json.dumps({"name": "place", "parameters": PLACED}), "place", PLACED),
        ("llama3_json", "", '{"name": "now", "parameters": {}}', "now", {}),
        ("deepseek", "", f'{DEEP}search<｜tool▁sep｜>{{"query": "a"}}{END_DEEP}', "search", {"query": "a"}),
        (
            "deepseek",
            FENCED,
            f'{DEEP}function<｜tool▁sep｜>search\n```json\n{{"query": "a"}}\n```{END_DEEP}',
            "search",
            {"query": "a"},
        ),
    ],
)
def test_a_call_as_the_format_writes_it_fits(
    parser: str, source: str, text: str, name: str, arguments: dict[str, Any]
) -> None:
    [call] = PARSERS[parser].parse(text, TOOLS).calls
    assert (call.name, call.arguments, call.status) == (name, arguments, "ok")
    assert fits(form(parser, source), text)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 42.",
        hermes("forget", {}),
        hermes("search", {"limit": 3}),
        hermes("search", {"query": 3}),
        hermes("search", {"query": "a", "limit": 1.5}),
        hermes("search", {"query": "a", "more": 1}),
        hermes("choose", {"colour": "green"}),
        hermes("place", {**PLACED, "at": {"x": 1}}),
        hermes("now", {"zone": "UTC"}),
        hermes("now", {}) + "\n" + hermes("now", {}),
        "Well: " + hermes("now", {}),
        hermes("now", {})[:-1],
        hermes("now", {}) + " There.",
    ],
)
def test_what_is_no_call_of_an_offered_tool_or_breaks_its_schema_does_not_fit(text: str) -> None:
    assert not fits(form("hermes"), text)


def test_thinking_that_the_prompt_opened_comes_first() -> None:
    written = form("hermes", thinking=True)
    assert fits(written, "hm, <tool_call> or not?\n</think>\n\n" + hermes("now", {}))
    assert not fits(written, hermes("now", {}))


def walk(tokenizer: Any, template: ChatTemplate, written: str, seed: int) -> list[int]:
    """Tokens drawn at random among those that the form lets through, to the stop token; after 60, the way out."""
    torch = pytest.importorskip("torch")
    size = max(len(tokenizer), template.vocab_size)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    matcher = xgrammar.GrammarMatcher(
        xgrammar.GrammarCompiler(info).compile_structural_tag(written),
        override_stop_tokens=list(template.stop_token_ids),
    )
    draw, mask, ids = random.Random(seed), xgrammar.allocate_token_bitmask(1, size), list[int]()
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask, 0)
        bits = (mask[0].view(torch.int32).unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten()[:size].nonzero().flatten().tolist()
        assert allowed, template.decode(ids)
        if len(ids) > 60:
            last = [i for i in allowed if i in template.stop_token_ids or template.decode([i])[:1] in '"}]<']
            allowed = last or allowed
        ids.append(draw.choice(allowed))
        assert matcher.accept_token(ids[-1])
        assert len(ids) < 1000
    return ids


def assert_one_call(template: ChatTemplate, ids: list[int]) -> None:
    message = template.parse(ids, tools=TOOLS)
    assert ids[-1] in template.stop_token_ids
    [call] = message.tool_calls
    assert (call.status, message.content) == ("ok", ""), template.decode(ids)
    assert isinstance(call.arguments, dict)
    jsonschema.validate(call.arguments, SCHEMAS[call.name])


@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_model_draws_within_the_form_ends_as_one_call(seed: int) -> None:
    template = small_template()
    assert_one_call(template, walk(small_tokenizer(), template, template.one_call(TOOLS), seed))


@pytest.mark.parametrize("parser", sorted(set(FORMS) - {"hermes"}))
def test_the_same_in_other_formats(parser: str) -> None:
    template = ChatTemplate(small_tokenizer(), chat_template=small_template().source, parser=parser)
    for seed in range(6):
        assert_one_call(template, walk(small_tokenizer(), template, template.one_call(TOOLS), seed))


def test_marks_that_count_only_as_tokens_are_asked_for_as_tokens(deepseek_v3: Any) -> None:
    template = ChatTemplate(deepseek_v3, parser="deepseek")
    written = json.loads(template.one_call([NOW]))
    [call] = written["format"]["elements"]
    marks = [deepseek_v3.convert_tokens_to_ids(DEEP[: DEEP.index(">") + 1])]
    marks.append(deepseek_v3.convert_tokens_to_ids(DEEP[DEEP.index(">") + 1 :]))
    assert [part["token"] for part in call["elements"][:2]] == marks


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: form("qwen3_coder"), "the parser 'qwen3_coder', which has no form"),
        (lambda: one_call(None, "", TOOLS, lambda _: None, thinking=False), "the template has no tool-call parser"),
        (
            lambda: one_call(PARSERS["deepseek"], "", [tool("a b")], lambda _: None, thinking=False),
            "the format deepseek cannot write a call of 'a b'",
        ),
    ],
)
def test_a_format_without_form_and_a_name_that_cannot_be_written_are_refused(
    make: Callable[[], str], said: str
) -> None:
    with pytest.raises(InvalidValueError, match=said):
        make()
