"""A server of openenv-core on a port of its own: `python openenv_server.py {guess,tools}` prints the port.

openenv-core's server imports a client of `fastmcp`, which it needs for no environment here; where that is not
installed, a name without anything behind it stands in.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
import types
from typing import Any

if importlib.util.find_spec("fastmcp") is None:
    names = {
        "fastmcp": ["Client"],
        "fastmcp.client": [],
        "fastmcp.client.client": ["CallToolResult"],
        "mcp": [],
        "mcp.types": ["TextContent"],
    }
    for name, members in names.items():
        sys.modules[name] = types.ModuleType(name)
        for member in members:
            setattr(sys.modules[name], member, type(member, (), {}))

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)


class GuessAction(Action):  # type: ignore[misc]
    message: str


class GuessObservation(Observation):  # type: ignore[misc]
    message: str


class Guess(Environment):  # type: ignore[misc]
    """Guess a number; `crash` raises. Many sessions at once."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.steps = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> GuessObservation:
        self.number, self.steps = (seed or 0) % 10, 0
        return GuessObservation(message="Guess a number from 0 to 9.", done=False)

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> GuessObservation:
        self.steps += 1
        if "crash" in action.message:
            raise RuntimeError("the game crashed")
        if str(self.number) in action.message:
            return GuessObservation(message="right", reward=1.0, done=True)
        return GuessObservation(message="wrong", reward=-0.5, done=self.steps >= 3)

    @property
    def state(self) -> State:
        return State(episode_id="x", step_count=self.steps)


class Adds(Environment):  # type: ignore[misc]
    """An environment with one tool, `add`; it is done at 10."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.total = 0
        return Observation(done=False)

    def step(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
            return ListToolsObservation(tools=[Tool(name="add", description="Add a number.", input_schema=number)])
        assert isinstance(action, CallToolAction)
        self.total += action.arguments["n"]
        return CallToolObservation(tool_name="add", result={"total": self.total}, reward=0.5, done=self.total >= 10)

    @property
    def state(self) -> State:
        return State(step_count=0)


def main(kind: str) -> None:
    from openenv.core.env_server.types import ConcurrencyConfig

    many = ConcurrencyConfig(max_concurrent_envs=64)
    if kind == "guess":
        app = create_fastapi_app(Guess, GuessAction, GuessObservation, concurrency_config=many)
    else:
        app = create_fastapi_app(Adds, Action, Observation, concurrency_config=many)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
