"""ReAct: actions as lines of text; what is an input, and what the model only makes up."""

from __future__ import annotations

from typing import Any

import pytest

from unspool.template.parsers import PARSERS, ParsedCall, ParsedText, PlainFormat


def function(name: str, required: list[str] | None = None, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": required or []}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}


TOOLS = [
    function("search", query="string"),
    function("take", count="integer"),
    function("weather", ["city"], city="string", days="integer"),
    function("add", ["a", "b"], a="integer", b="integer"),
    function("now"),
]


def parse(text: str, tools: list[dict[str, Any]] | None = TOOLS) -> ParsedText:
    return PARSERS["react"].parse(text, tools)


def only(text: str) -> ParsedCall:
    (call,) = parse(text).calls
    return call


def test_the_thought_stays_and_the_action_is_the_call() -> None:
    text = "Thought: I need the elevation range.\nAction: search[Colorado orogeny]"  # the paper's first example
    assert parse(text) == ParsedText(
        "Thought: I need the elevation range.\n", [ParsedCall("search", {"query": "Colorado orogeny"}, 37, 69)]
    )


def test_numbered_steps_are_steps() -> None:
    read = parse("Thought 1: hm\nAction 1: search[x]\n")
    assert (read.content, read.calls[0].arguments) == ("Thought 1: hm\n\n", {"query": "x"})


def test_an_input_on_its_own_line() -> None:
    text = 'Thought: hm\nAction: weather\nAction Input: {"city": "Rome",\n "days": 3}\nThought: so'
    read = parse(text)
    assert [(call.name, call.arguments) for call in read.calls] == [("weather", {"city": "Rome", "days": 3})]
    assert read.content == "Thought: hm\n\nThought: so"


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("search[what does [1] mean]", {"query": "what does [1] mean"}),
        ("search [x]", {"query": "x"}),
        ("search[two\nlines]", {"query": "two\nlines"}),
        ('search[{"query": "]"}]', {"query": "]"}),
        ("search\nAction Input: two\nlines\n", {"query": "two\nlines"}),
        ("search\n\nAction Input: x\nThought: y", {"query": "x"}),
        ("take[3]", {"count": 3}),
        ("take\nAction Input: 3", {"count": 3}),
        ("search[3]", {"query": "3"}),
        ("weather[Rome]", {"city": "Rome"}),
        ("now[]", {}),
        ("now\nAction Input: {}", {}),
        ("unknown[x]", {"input": "x"}),
        ('search\nAction Input: ```json\n{"query": "x"}\n```\nObservation: y', {"query": "x"}),
        ('search\nAction Input:\n```\n{"query": "```"}\n```', {"query": "```"}),
        ('search\nAction Input: {"query": "a\nb"}', {"query": "a\nb"}),
        ('search\nAction Input: "Rome"\nThought: y', {"query": "Rome"}),
        ('search\nAction Input: "a \\"b\\" \\u00fc"', {"query": 'a "b" \u00fc'}),
        ('search\nAction Input: "a" or "b"', {"query": '"a" or "b"'}),
        ('search\nAction Input: "a", "x": "b"', {"query": '"a", "x": "b"'}),
        ('search\nAction Input: "a", "y": "b"', {"query": '"a", "y": "b"'}),
        ('search\nAction Input: "C:\\path"', {"query": '"C:\\path"'}),
        ('search\nAction Input: "', {"query": '"'}),
        ('search["an exact phrase"]', {"query": '"an exact phrase"'}),
        ('take\nAction Input: "3"', {"count": 3}),
    ],
)
def test_inputs(action: str, arguments: dict[str, Any]) -> None:
    call = only(f"Action: {action}")
    assert (call.arguments, call.status) == (arguments, "ok")


def test_without_tools_a_plain_input_is_called_input() -> None:
    (call,) = parse("Action: search[x]", None).calls
    assert call.arguments == {"input": "x"}


@pytest.mark.parametrize(
    ("action", "status", "sentence"),
    [
        ("search for something", "bad_json", "an action is written name[input]"),
        ("search(x)", "bad_json", "an action is written name[input]"),
        ("", "unclosed", "cut off before its input"),
        ('search\nAction Input: ```json\n{"query": "x', "unclosed", "cut off"),
        ("search for something\nmore", "bad_json", "an action is written name[input]"),
        ("search", "unclosed", "cut off before its input"),
        ("search\nAction Input:", "unclosed", "cut off before its input"),
        ("search[x", "unclosed", "closing bracket"),
        ('search[{"query": "x"}', "unclosed", "closing bracket"),
        ("search[a ] b]", "bad_json", "extra text behind the closing bracket: b]"),
        ('search[{"query": "x"} y]', "bad_json", "expected ']'"),
        ('search\nAction Input: {"query": "x', "unclosed", "cut off"),
        ('search\nAction Input: {"query": "C:\\path"}', "bad_json", "escape"),
        ('search\nAction Input: {"query": "x"} y', "bad_json", "extra text behind the object: y"),
        ("add[1, 2]", "bad_json", "the input must be a JSON object: this tool takes the arguments a, b"),
        ("now[please]", "bad_json", "this tool takes no arguments"),
        ("[x]", "bad_json", "the name of the tool is missing"),
    ],
)
def test_what_cannot_be_run_says_why(action: str, status: str, sentence: str) -> None:
    call = only(f"Thought: hm\nAction: {action}")
    assert call.status == status
    assert call.error is not None and sentence in call.error
    assert isinstance(call.arguments, str)


def test_several_actions_keep_their_order() -> None:
    read = parse('Action: search[x]\nAction: take\nAction Input: {"count": 1}\nAction: now[]')
    assert [call.name for call in read.calls] == ["search", "take", "now"]


def test_an_invented_observation_ends_the_reading() -> None:
    text = "Action: search[x]\nObservation: It is y.\nThought: so\nAction: search[y]\nObservation: z"
    read = parse(text)
    assert [call.arguments for call in read.calls] == [{"query": "x"}]
    assert read.content == text[len("Action: search[x]") :]


def test_nothing_behind_a_broken_action_is_run() -> None:
    for broken in (
        'search\nAction Input: {"query": "\nAction: now[]\n',
        "search[x\nAction: now[]",
        "do it\nAction: now[]",
    ):
        assert all(call.status != "ok" for call in parse(f"Action: {broken}").calls)


@pytest.mark.parametrize("label", ["Final Answer:", "**Final Answer:**", "**Final Answer**:", " Final Answer:"])
def test_a_call_that_the_final_answer_quotes_is_not_run(label: str) -> None:
    text = f"Thought: done.\n{label} The page says:\nAction: search[x]"
    assert parse(text) == ParsedText(text, [])
    [call] = parse(f"Action: take[3]\n{text}").calls
    assert call.arguments == {"count": 3}


def test_a_call_that_finish_quotes_is_not_run() -> None:
    text = "Action: Finish[The page says:\nAction: search[x]\n]"
    assert parse(text) == ParsedText(text, [])


@pytest.mark.parametrize("said", ["None", "none.", "N/A", "None\nAction Input: None", "None "])
def test_no_action_is_no_call(said: str) -> None:
    text = f"Thought: I know.\nAction: {said}\n"
    assert parse(text) == ParsedText(text, [])
    [call] = parse(text + "Thought: no, I do not.\nAction: search[x]").calls
    assert call.arguments == {"query": "x"}
    assert parse("Action: None\nAction Input: 3", [function("None", x="string")]).calls[0].arguments == {"x": "3"}


@pytest.mark.parametrize("bold", ["**{}:**", "**{}**:", " **{}:**"])
def test_labels_may_be_bold(bold: str) -> None:
    action, label = bold.format("Action"), bold.format("Action Input")
    for said in ('{"query": "x"}', "x", '"x"'):
        read = parse(f"{bold.format('Thought')} hm\n{action} search\n{label} {said}\n{bold.format('Observation')} y")
        assert [(call.arguments, call.status) for call in read.calls] == [({"query": "x"}, "ok")]
        assert read.content == f"{bold.format('Thought')} hm\n\n{bold.format('Observation')} y"
    assert only(f"{bold.format('Action 2')} search[x]").arguments == {"query": "x"}


def test_finish_is_the_end_and_no_call_unless_there_is_such_a_tool() -> None:
    text = "Thought: I know.\nAction: Finish[1,800 to 7,000 ft]"
    assert parse(text) == ParsedText(text, [])
    [call] = parse(text, [function("Finish", answer="string")]).calls
    assert call.arguments == {"answer": "1,800 to 7,000 ft"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Final Answer: 42",
        "One writes `Action: search[x]` then.",
        "- Action: search[x]",
        "action: search[x]",
        "Reaction: search[x]",
        '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
        "<search>\n<query>x</query>\n</search>",
    ],
)
def test_other_text_is_text(text: str) -> None:
    assert parse(text) == ParsedText(text, [])


def test_a_history_is_written_as_the_parser_reads_it() -> None:
    react = PARSERS["react"]
    assert isinstance(react, PlainFormat)
    calls = [
        {"id": str(at), "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate([("weather", {"city": 'R"ö\nme', "days": 3}), ("now", "{}")])
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Thought: hm\n", "tool_calls": calls, "extra": 1},
        {"role": "tool", "tool_call_id": "0", "name": "weather", "content": "12"},
        {"role": "tool", "tool_call_id": "1", "name": "now", "content": [{"type": "text", "text": "noon"}]},
        {"role": "user", "content": "Thanks."},
    ]
    written = react.written(messages)
    assert [message["role"] for message in written] == ["user", "assistant", "user", "user"]
    assert written[2]["content"] == "Observation: 12\nObservation: noon"
    assert written[1].keys() == {"role", "content", "extra"}
    read = parse(written[1]["content"])
    assert [(call.name, call.arguments) for call in read.calls] == [
        ("weather", {"city": 'R"ö\nme', "days": 3}),
        ("now", {}),
    ]
    assert messages[1]["tool_calls"] is calls, "what was given is not changed"
