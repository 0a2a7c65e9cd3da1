"""Content as a list of parts: text is joined, anything else goes to templates that read parts, or is refused."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from tests.small import small_template, small_tokenizer
from unspool import ChatTemplate
from unspool.types import TemplateError

PARTS = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{%- if message.content is string %}
{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}
{%- endfor %}{% endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
TEXT = {"type": "text", "text": "What is this?"}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "an image_url part"),
        ({"type": "image"}, "an image part"),
        ({"image": "a.png"}, "an image part"),
        ({"type": "input_audio", "input_audio": {}}, "an input_audio part"),
        ({"type": "video", "video": "a.mp4"}, "a video part"),
        ({"type": "hologram", "text": "x"}, "a hologram part"),
        ({"type": "text"}, "a textless part"),
        ({}, "an empty part"),
        (7, "an int part"),
    ],
)
def test_a_part_that_is_no_text_is_refused_where_the_template_reads_no_parts(part: Any, said: str) -> None:
    words = f"content holds {said}, and this chat template renders text only; leave such parts out"
    with pytest.raises(TemplateError, match=re.escape(words)):
        small_template().encode(user(TEXT, part))
    with pytest.raises(TemplateError, match=re.escape(words)):
        small_template().bridge([1], [{"role": "tool", "name": "f", "content": [part]}])


def test_parts_of_text_are_joined() -> None:
    plain = small_template().encode([{"role": "user", "content": "What is this? It is"}])
    assert small_template().encode(user(TEXT, " It", {"text": " is"})) == plain
    assert small_template().encode(user()) == small_template().encode([{"role": "user", "content": ""}])


def test_a_template_that_reads_parts_gets_them_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        template = ChatTemplate(small_tokenizer(), chat_template=PARTS)
    made = template.decode(template.encode(user({"type": "image"}, TEXT)))
    assert made == "<|im_start|>user[image]What is this?<|im_end|>\n<|im_start|>assistant\n"
