"""A rendered tail is reused only where a template writes contents in one way, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest

from tests import families
from tests.template import scenarios as s
from unspool.template import ChatTemplate
from unspool.template.jinja import Renderer

IM_END = 151645
TOOL = [s.tool("qwen3", "12 degrees")]


def template_that_writes(qwen3: Any, content: str) -> ChatTemplate:
    source = families.trl_templates()["qwen3"]
    assert "{{- content }}" in source
    return ChatTemplate(qwen3, chat_template=source.replace("{{- content }}", content))


def learned(chat: ChatTemplate) -> list[bool]:
    for _ in range(4):
        chat.bridge([IM_END], TOOL, s.TOOLS)
    return [skeleton is not None for skeleton in chat._bridge._skeletons._known.values()]


CONTENTS = ["12", " 12 ", "", '"x"\n', "secret", "the secret is out", "7", "x" * 5000, "é\u2028", "[1]"]


@pytest.mark.parametrize("content", ["{{- content }}", "{{- content|trim }}", "{{- content|tojson }}"])
def test_contents_that_are_written_in_one_way_are_put_into_a_kept_tail(
    qwen3: Any, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, fresh = template_that_writes(qwen3, content), template_that_writes(qwen3, content)
    assert learned(chat) == [True]
    expected = []
    for text in CONTENTS:
        fresh._bridge._skeletons._uses.clear()  # so that it never learns
        expected.append(fresh.bridge([IM_END], [s.tool("qwen3", text)], s.TOOLS))
    monkeypatch.setattr(Renderer, "render", None)
    assert [chat.bridge([IM_END], [s.tool("qwen3", text)], s.TOOLS) for text in CONTENTS] == expected


@pytest.mark.parametrize(
    "content",
    [
        "{{- content if content != 'secret' else '***' }}",
        "{{- content }}{% if 'secret' in content %}!{% endif %}",
        "{{- content }}{% if content.endswith('secret') %}!{% endif %}",
        "{{- content[:1000] }}",
        "{{- content|replace('&', '&amp;') }}",
        "{{- content|replace('\\n', ' ') }}",
        "{{- content if content else 'nothing' }}",
        "{{- content }}{% if message.name == 'python' %}!{% endif %}",
    ],
)
def test_a_template_that_looks_into_contents_is_rendered_each_time(qwen3: Any, content: str) -> None:
    assert learned(template_that_writes(qwen3, content)) == [False]


def test_tools_that_show_in_the_tail_are_rendered_each_time(qwen3: Any) -> None:
    chat = template_that_writes(qwen3, "{{- content }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}")
    for tools in (s.TOOLS, s.TOOLS[:1], None, s.TOOLS):
        for _ in range(4):
            made = chat.decode(chat.bridge([IM_END], TOOL, tools))
            assert ("get_time" in made, "get_weather" in made) == (tools == s.TOOLS, bool(tools))
