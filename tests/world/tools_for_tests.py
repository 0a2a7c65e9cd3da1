"""Importable tools, for the tests of pickling."""

from __future__ import annotations

from dataclasses import dataclass

from unspool.world import tool


@dataclass
class Point:
    x: int
    y: int = 0


@tool
def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


@tool(name="where", timeout=5, max_chars=200)
def move(point: Point, by: int) -> Point:
    """Move a point."""
    return Point(point.x + by, point.y)


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


def double(value: float) -> float:
    """Twice the value."""
    return 2 * value
