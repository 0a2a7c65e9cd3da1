"""Looking for right answers in a text: numbers by their value, words as whole words.

`12` is not in `112`, nor in `12.5` or `-12`, and `1,234` is `1234`; `Paris` is in `Paris, France`, not in `Parisian`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import TypeVar

G = TypeVar("G")

# Of scripts that write words apart; 是 right before a number is no part of it.
_LETTER = r"[^\W\u2e80-\u9fff\uac00-\ud7af]"
_NUMBER = re.compile(
    rf"(?<!{_LETTER})(?<!\.)[-+\u2212]?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
    rf"(?!{_LETTER}|\.\d)"
)
_LONGEST = 400  # characters of a number; longer ones are no answers


def validate_gt_in_text(text: object, gt_list: Iterable[G]) -> set[G]:
    """Those of `gt_list` that stand in `text`: a number where a number of the same value does, else the same words.

    Thousands separators do not count (`1,234` and `1234`), nor do trailing zeros (`7` and `7.0`) or a plus sign; a
    hyphen right behind a digit or a word is no minus. Words are compared without case, at word boundaries. An empty
    one is never found. Numbers that differ by less than 1e-6 are equal.

    Args:
        text: what is looked through; anything else than a str as `str(...)` writes it.
        gt_list: right answers, texts or numbers.
    """
    read = str(text)
    numbers = [value for match in _NUMBER.finditer(read) if (value := _value(match)) is not None]
    lowered = read.casefold()
    return {answer for answer in gt_list if _stands(str(answer).strip(), numbers, lowered)}


def _stands(answer: str, numbers: list[Decimal], text: str) -> bool:
    if not answer:
        return False
    match = _NUMBER.fullmatch(answer)
    value = _value(match) if match else None
    if value is not None:
        return any(abs(value - number) < Decimal("1e-6") for number in numbers)
    words = re.escape(answer.casefold())
    return re.search(rf"(?<!{_LETTER}){words}(?!{_LETTER})", text) is not None


def _value(match: re.Match[str]) -> Decimal | None:
    written = match.group()
    if len(written) > _LONGEST:
        return None
    try:
        return Decimal(written.replace(",", "").replace("\N{MINUS SIGN}", "-"))
    except InvalidOperation:
        return None
