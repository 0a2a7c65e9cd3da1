"""Our environment renders every template to the text that transformers renders it to."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError as JinjaError

from tests import families
from tests.template import scenarios as s
from unspool.template.jinja import Renderer
from unspool.types import TemplateError

TEMPLATES = tuple(families.trl_templates())
SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "preserve_thinking": True, "reasoning_effort": "low", "builtin_tools": ["get_time"]},
)


def conversations(template: str) -> list[list[dict[str, Any]]]:
    hello, more = s.user(template, "Héllo <b>&\n"), s.user(template, "And {{ this }}?")
    thinking = {**s.said(template), "reasoning_content": "hm\n\nhm", "thinking": "hm"}
    system = {"role": "system", "content": s.content(template, "Be brief.")}
    return [
        [hello],
        [system, hello, s.said(template), more],
        [hello, thinking, more],
        [hello, s.asked(template), s.tool(template, '{"t": 12}')],
        [system, hello, s.asked(template, text="Let me see."), s.tool(template, "12"), s.said(template), more],
        [s.said(template)],
        [{"role": "stranger", "content": s.content(template, "x")}],
    ]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(template: str) -> None:
    tokenizer, source = families.tokenizer_for(template), families.trl_templates()[template]
    for switches in SWITCHES:
        renderer = Renderer(source, {**tokenizer.special_tokens_map, **switches})
        for messages in conversations(template):
            for tools in (None, s.TOOLS):
                for generation in (True, False):
                    try:
                        theirs = tokenizer.apply_chat_template(
                            messages,
                            tools=tools,
                            chat_template=source,
                            tokenize=False,
                            add_generation_prompt=generation,
                            **switches,
                        )
                    except (JinjaError, TypeError, AttributeError, ValueError) as error:
                        with pytest.raises(TemplateError) as raised:
                            renderer.render(messages, tools, generation)
                        assert str(error) in str(raised.value)
                    else:
                        assert renderer.render(messages, tools, generation) == theirs


def test_a_template_that_is_not_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(TemplateError, match=r"line 2"):
        Renderer("x\n{% if %}", {})


def test_a_template_cannot_change_what_it_is_given() -> None:
    with pytest.raises(TemplateError, match=r"unsafe|not safely callable"):
        Renderer("{{ messages.append(1) }}", {}).render([], None)
    with pytest.raises(TemplateError, match="unsafe"):
        Renderer("{{ messages.__class__.__mro__ }}", {}).render([], None)
