"""Thinking is split from content, and what is never closed stays thinking."""

from __future__ import annotations

import pytest

from unspool.template.parsers import PARSERS
from unspool.template.thinking import Thinking, split_thinking

CALL = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("Hello.", False, None, "Hello."),
        ("", False, None, ""),
        ("", True, "", ""),
        ("<think>\nhm\n</think>\n\nHello.", False, "\nhm\n", "Hello."),
        (" \n<think>hm</think>Hello.", False, "hm", "Hello."),
        ("hm\n</think>\n\n  Hello.\n", True, "hm\n", "  Hello.\n"),
        ("<think>\n\n</think>\n\nHello.", False, "\n\n", "Hello."),
        ("<think></think>", False, "", ""),
        ("<think>", False, "", ""),
        ("<think>never closed", False, "never closed", ""),
        ("never closed", True, "never closed", ""),
        ("a </think> b </think> c", True, "a ", " b </think> c"),
        ("So <think>hm</think>", False, None, "So <think>hm</think>"),
        ("no tag </think> here", False, None, "no tag </think> here"),
        ("<think>a<think>b</think>c", False, "a<think>b", "c"),
    ],
)
def test_thinking_ends_at_its_first_closing_tag(text: str, opened: bool, reasoning: str | None, content: str) -> None:
    found = split_thinking(text, opened)
    assert found == Thinking(reasoning, len(text) - len(content))
    assert text[found.content_start :] == content


@pytest.mark.parametrize(("text", "opened"), [(f"<think>I call {CALL}", False), (f"I call {CALL}", True)])
def test_calls_inside_thinking_that_is_not_closed_are_not_in_the_content(text: str, opened: bool) -> None:
    content = text[split_thinking(text, opened).content_start :]
    assert PARSERS["hermes"].parse(content).calls == []


def test_calls_behind_the_thinking_are_in_the_content() -> None:
    text = f"<think>I may {CALL}</think>\n\n{CALL}"
    assert text[split_thinking(text, False).content_start :] == CALL
