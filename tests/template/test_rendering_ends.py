"""Templates that write without end, or make values without end: refused in one sentence."""

from __future__ import annotations

import pytest

from examples.scripted import CHATML
from tests.small import small_tokenizer
from unspool import doctor
from unspool.template.jinja import Renderer
from unspool.types import TemplateError

USER = [{"role": "user", "content": "Hi."}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (ENDLESS, "does not come to an end"),
        (ENDLESS.replace("x", "{{ '' }}"), "does not come to an end"),
        ('{{ "a" * 10 ** 12 }}', "too large"),
        ("{{ 10 ** 12 * 'a' }}", "too large"),
        ("{{ ([1] * 10 ** 9) | length }}", "too large"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "[Rr]ange"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)
def test_what_grows_without_end_is_refused(source: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        Renderer(source, {}).render(USER, None)


def test_sums_and_repeats_of_common_sizes_are_made() -> None:
    source = "{{ '-' * 80 }}{{ 3 * 2000001 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}{{ ('ab' * 0) ~ ([1] * 2) }}"
    assert Renderer(source, {}).render(USER, None) == "-" * 80 + "600000310243.00.5[1, 1]"


def test_a_long_conversation_is_rendered_whole() -> None:
    """More than a template may write by itself, because as much was given."""
    text = "long " * 600_000
    rendered = Renderer(CHATML, {}).render([{"role": "user", "content": text}] * 3, None)
    assert rendered.count(text) == 3


def test_the_doctor_comes_to_an_end() -> None:
    found = doctor(small_tokenizer(), chat_template=ENDLESS)
    assert [finding.code for finding in found.findings] == ["bad_template"]
    assert "does not come to an end" in found.verdict
