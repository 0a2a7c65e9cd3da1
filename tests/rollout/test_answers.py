"""Right answers in a text: numbers by value, words as words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.rollout import validate_gt_in_text


@pytest.mark.parametrize(
    ("text", "answers", "found"),
    [
        ("112", ["12"], set()),
        ("It is 12.", ["12"], {"12"}),
        ("1,234", ["1234"], {"1234"}),
        ("1234", ["1,234"], {"1,234"}),
        ("12,345,678.50 in all", ["12345678.5", "345", "12"], {"12345678.5"}),
        ("12.5", ["12", "5", "12.50"], {"12.50"}),
        ("-12", ["12", "-12", -12], {"-12", -12}),
        ("\N{MINUS SIGN}3 degrees", ["-3"], {"-3"}),
        ("5-12", ["12", "5", "-12"], {"12", "5"}),
        ("x12 and 12km and v1.2.3", ["12", "1.2", "2.3"], set()),
        ("1, 2,3", ["1", "2", "3", "23"], {"1", "2", "3"}),
        ("7.0", [7, "7", 7.0000001], {7, "7", 7.0000001}),
        ("2.5e3", ["2500"], {"2500"}),
        ("结果是19。共1,234元", ["19", "1234", "9"], {"19", "1234"}),
        ("温度 28°C", ["28", "28°C"], {"28", "28°C"}),
        ("Paris, France", ["paris", "FRANCE", "Par"], {"paris", "FRANCE"}),
        ("Parisian", ["Paris"], set()),
        ("他在北京市。答案是Paris。", ["北京", "Paris"], {"北京", "Paris"}),
        ("anything", ["", "  "], set()),
        ("", ["1"], set()),
        (None, ["none"], {"none"}),
        (12, ["12"], {"12"}),
        ("9" * 10_000, ["9"], set()),
    ],
)
def test_what_is_found(text: Any, answers: list[Any], found: set[Any]) -> None:
    assert validate_gt_in_text(text, answers) == found


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "so {}.", "({:,})", "**{:,}**", "= {}\n", "${}$", "是{}。"])
)
def test_a_number_is_found_however_it_is_written(number: int, form: str) -> None:
    text = form.format(number)
    assert validate_gt_in_text(text, [number, str(number), f"{number:,}"]) == {number, str(number), f"{number:,}"}
    assert validate_gt_in_text(text, [number + 1, number * 10 + 1]) == set()


@given(st.text(), st.lists(st.text() | st.integers() | st.floats()))
def test_nothing_raises(text: str, answers: list[Any]) -> None:
    assert validate_gt_in_text(text, answers) <= set(answers)
