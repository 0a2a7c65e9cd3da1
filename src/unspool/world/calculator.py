"""A calculator that does one operation a call, so that a sum takes a model several turns.

Nothing is evaluated: two numbers and an operator are read by one pattern, and the arithmetic is exact. Integers
stay integers and decimals do not drift (0.1 + 0.2 is 0.3); only a division that does not come out is rounded, to
12 significant digits. Operands have at most 50 digits and two of exponent, so no result is large.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal
from fractions import Fraction

from unspool.types import InvalidValueError
from unspool.world.output import shorten
from unspool.world.tool import Tool

_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
_OPERAND = rf"({_NUMBER}|\(\s*{_NUMBER}\s*\))"
_OPERATION = re.compile(rf"\s*{_OPERAND}\s*([-+*/])\s*{_OPERAND}\s*=?\s*", re.ASCII)
_WRITTEN_OTHERWISE = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/"})
_MAX_CHARS = 200
_MAX_DIGITS = 50
_DIVISION_DIGITS = 12


async def _calculate(expression: str) -> str:
    """The result of `expression`.

    Raises:
        InvalidValueError: it is not one operation on two numbers, or it divides by zero.
    """
    match = None
    if len(expression) <= _MAX_CHARS:
        match = _OPERATION.fullmatch(expression.translate(_WRITTEN_OTHERWISE))
    if match is None:
        raise InvalidValueError(
            "calculator takes one operation a call, two numbers with one of + - * / between them, "
            f"such as '12 + 7', not {shorten(repr(expression), _MAX_CHARS).text}"
        )
    left, operator, right = _number(match[1]), match[2], _number(match[3])
    if operator == "+":
        return _exact(left + right)
    if operator == "-":
        return _exact(left - right)
    if operator == "*":
        return _exact(left * right)
    if right == 0:
        raise InvalidValueError(f"{expression.strip()} divides by zero")
    return _rounded(Fraction(left) / right)


def _number(text: str) -> Fraction | int:
    text = text.strip("() \t\r\n").replace(",", "")
    if len(text) > _MAX_DIGITS and sum(character.isdigit() for character in text) > _MAX_DIGITS:
        raise InvalidValueError(f"calculator takes numbers of at most {_MAX_DIGITS} digits, not {text}")
    return Fraction(text) if any(mark in text for mark in ".eE") else int(text)


def _exact(value: Fraction | int) -> str:
    """A number whose denominator has only the factors 2 and 5, in full."""
    if value.denominator == 1:
        return str(value.numerator)
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(abs((value * 10**places).numerator)).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def _rounded(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=_DIVISION_DIGITS)
    text = format(context.divide(Decimal(value.numerator), Decimal(value.denominator)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


# What the model is shown is written out, not derived: trained adapters depend on every byte of it.
calculator = Tool(
    name="calculator",
    description="Compute one binary operation, such as '12 + 7'. Longer sums need several calls.",
    parameters={
        "type": "object",
        "properties": {
            "expression": {"type": "string", "description": "Two numbers with one of + - * / between them."}
        },
        "required": ["expression"],
    },
    function=_calculate,
)
"""`calculator(expression: str) -> str`: the built-in tool."""
