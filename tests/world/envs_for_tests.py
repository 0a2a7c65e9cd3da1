"""Environments that tests share: one acted on with a tool, one with text; both note what was done to them."""

from __future__ import annotations

import threading
from typing import Any

from unspool import Env, StepResult, TextEnv

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
}


_LOCK = threading.Lock()


class Noted:
    """What was done to an environment, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.closed = 0
        self.most_at_once = 0
        self._inside = 0

    def enter(self, what: str) -> None:
        with _LOCK:
            self.log.append(what)
            self._inside += 1
            self.most_at_once = max(self.most_at_once, self._inside)

    def leave(self) -> None:
        with _LOCK:
            self._inside -= 1


class GuessEnv(Env):
    """Guess a number with the tool `guess`; every guess costs 0.25, the right one earns 1."""

    def __init__(self, number: int = 7) -> None:
        self.number, self.noted = number, Noted()

    def reset(self, trajectory: Any = None) -> StepResult:
        self.noted.log.append("reset")
        return StepResult("Guess a number below 10.", info={"seed": (trajectory or {}).get("seed")})

    def tools(self) -> list[Any]:
        return [GUESS]

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        assert tool_name == "guess"
        self.noted.enter(str(arguments["number"]))
        try:
            right = arguments["number"] == self.number
            return StepResult(
                "right" if right else "wrong", 1.0 if right else -0.25, right, {"last": arguments["number"]}
            )
        finally:
            self.noted.leave()

    def close(self) -> None:
        self.noted.closed += 1


class CountEnv(TextEnv):
    """Ends when the model has said `done`; async throughout."""

    def __init__(self, first: str = "Go on.") -> None:
        self.first, self.noted = first, Noted()

    async def reset(self, trajectory: Any = None) -> StepResult:
        self.noted.log.append("reset")
        return StepResult(self.first)

    async def act(self, text: str) -> StepResult:
        self.noted.log.append(text)
        return StepResult(f"heard {len(self.noted.log) - 1}", 1.0, text == "done")

    async def close(self) -> None:
        self.noted.closed += 1
