"""Switches of templates: what cannot be one is refused, what does nothing is said."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest

from tests.small import TEMPLATE, small_tokenizer
from unspool import ChatTemplate
from unspool.template.switches import check_switches
from unspool.types import InvalidTypeError, InvalidValueError

SOURCE = "{%- if loud is defined and loud -%}LOUD {% endif -%}" + TEMPLATE.read_text(encoding="utf-8")


def chat(**switches: Any) -> ChatTemplate:
    return ChatTemplate(small_tokenizer(), chat_template=SOURCE, **switches)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_switch_cannot_replace_the_conversation(name: str) -> None:
    said = f"'{name}' cannot be a template switch: it would replace that of the conversation"
    with pytest.raises(InvalidValueError, match=said):
        chat(**{name: []})
    with pytest.raises(InvalidValueError, match=said):
        chat().with_kwargs(**{name: []})


def test_names_of_switches_are_strings() -> None:
    with pytest.raises(InvalidTypeError, match="names of template switches must be strings, not 7"):
        check_switches({7: True})


def test_a_switch_that_is_read_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        template = chat(loud=True)
        hello = [{"role": "user", "content": "Hello"}]
        assert template.decode(template.encode(hello)).startswith("LOUD ")
        assert not template.decode(template.with_kwargs(loud=False).encode(hello)).startswith("LOUD ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("thinkng", r"it never reads the switch 'thinkng' \(did you mean 'thinking'\?\)$"),
        ("luod", r"it never reads the switch 'luod' \(did you mean 'loud'\?\)$"),
        ("enable_thinking", "it never reads the switch 'enable_thinking'"),
        ("message", "it never reads the switch 'message'$"),
    ],
)
def test_a_switch_that_the_template_never_reads_is_warned_of_once(name: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said) as caught:
        template = chat(**{name: "keep"})
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(UserWarning, match=said) as caught:
        plain = chat()
        plain.with_kwargs(**{name: 1})
        plain.with_kwargs(**{name: 2})
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.loads(pickle.dumps(template)).with_kwargs(**{name: 3})


def test_all_that_is_wrong_with_a_template_is_one_warning() -> None:
    with pytest.warns(UserWarning) as caught:
        ChatTemplate(small_tokenizer(), chat_template="{{ messages[0].content }}", luod=True, thinkng=True)
    assert len(caught) == 1
    assert "ignores tools" in str(caught[0].message) and "'luod'" in str(caught[0].message)
    assert "'thinkng'" in str(caught[0].message)
