"""Environments behind an OpenEnv server (`openenv-core`): one WebSocket session each, at the server's `/ws`.

The protocol, as openenv-core 0.3 has it: JSON messages `{"type": "reset" | "step" | "state" | "close", "data": {...}}`;
a step's data is the action. The answer is `{"type": "observation", "data": {"observation", "reward", "done"}}`, or
`{"type": "error", "data": {"message", "code"}}`. The session, and the server's environment with it, ends with the
connection, so a client that dies leaves nothing behind there either.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from unspool.types import MissingExtraError, ToolInfo, Trajectory
from unspool.world.env import Env
from unspool.world.env_calls import EnvError
from unspool.world.protocol import StepResult

_GOODBYE = 1.0
"""Seconds that a server has to end a session that was said goodbye to."""

_KEYS = ("text", "message", "content", "observation", "output", "result", "prompt", "echoed_message")
"""Where an observation has its text, where nothing else is said."""


class OpenEnvEnv(Env):
    """One session with an OpenEnv server.

    Args:
        base_url: the server, such as `http://localhost:8000`.
        action: where the model's text is the action: from text to the action's dict, or the name of its one field that
            is the text. None: the server's tools are the actions (its environment knows the actions `list_tools` and
            `call_tool`).
        observe: from an observation's dict to text, or the name of its field; None: a field that is usual, else JSON.
        reset: data of every reset (`episode_id`, ...); the trajectory's `seed` is put in where it has none.
        connect_timeout: seconds to reach the server.
        max_message_bytes: most bytes of one message of the server.
    """

    def __init__(
        self,
        base_url: str,
        *,
        action: Callable[[str], Mapping[str, Any]] | str | None = None,
        observe: Callable[[Mapping[str, Any]], str] | str | None = None,
        reset: Mapping[str, Any] | None = None,
        connect_timeout: float = 10.0,
        max_message_bytes: int = 16 * 2**20,
    ) -> None:
        self.url = _websocket_url(base_url)
        self.acts_on_text = action is not None
        self._action = action
        self._observe = observe
        self._reset = dict(reset or {})
        self._connect_timeout = connect_timeout
        self._max_bytes = max_message_bytes
        self._socket: Any = None

    async def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        seed = (trajectory or {}).get("seed")
        data = dict(self._reset)
        if seed is not None:
            data.setdefault("seed", int(seed) % 2**31)
        return self._result(await self._ask("reset", data), True)

    async def tools(self) -> list[ToolInfo]:
        if self.acts_on_text:
            return []
        answer = await self._ask("step", {"type": "list_tools"})
        tools = answer.get("observation", {}).get("tools", [])
        return [{"type": "function", "function": _function(tool)} for tool in tools]

    async def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        if self.acts_on_text:
            return await self.act(str(arguments.get("text", "")))
        call = {"type": "call_tool", "tool_name": tool_name, "arguments": arguments}
        return self._result(await self._ask("step", call))

    async def act(self, text: str) -> StepResult:
        """Do the action that a turn's text is."""
        assert self._action is not None
        action = {self._action: text} if isinstance(self._action, str) else dict(self._action(text))
        return self._result(await self._ask("step", action))

    async def state(self) -> dict[str, Any]:
        """The state that the server tells of."""
        return await self._ask("state", None)

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):  # of a connection that is gone already
                await socket.send(json.dumps({"type": "close"}))
                await asyncio.wait_for(socket.wait_closed(), _GOODBYE)  # the server hangs up
            await socket.close()

    # ------------------------------------------------------------------ the wire

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        socket = await self._connected()
        await socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        try:
            answer = json.loads(await socket.recv())
        except ValueError as error:
            raise EnvError(f"the server at {self.url} answered with what is no JSON ({error})") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise EnvError(f"the server at {self.url} answered in a form that is not OpenEnv's: {answer!r:.200}")
        if answer.get("type") == "error":
            data = answer["data"]
            raise EnvError(f"the server at {self.url} refused a {kind}: {data.get('message')} ({data.get('code')})")
        wanted = "state" if kind == "state" else "observation"
        if answer.get("type") != wanted:
            raise EnvError(
                f"the server at {self.url} answered a {kind} with {answer.get('type')!r:.80}, not with {wanted!r}: "
                f"{answer['data']!r:.200}; it speaks another protocol than OpenEnv's"
            )
        return cast(dict[str, Any], answer["data"])

    async def _connected(self) -> Any:
        if self._socket is None:
            try:
                from websockets.asyncio.client import connect
            except ImportError as error:
                raise MissingExtraError("OpenEnv servers need websockets: run `pip install 'unspool[envs]'`") from error
            try:
                self._socket = await connect(
                    self.url, open_timeout=self._connect_timeout, max_size=self._max_bytes, proxy=None
                )
            except (OSError, TimeoutError) as error:
                raise EnvError(
                    f"no OpenEnv server answers at {self.url} ({error}); start it, or mend base_url"
                ) from error
        return self._socket

    def _result(self, data: Mapping[str, Any], first: bool = False) -> StepResult:
        observation = data.get("observation")
        reward = data.get("reward")
        info = dict(observation.get("metadata") or {}) if isinstance(observation, Mapping) else {}
        text = self._text(observation if isinstance(observation, Mapping) else {"text": observation})
        silent = first and not self.acts_on_text and not text.strip()
        return StepResult(
            "" if silent else text, None if reward is None else float(reward), bool(data.get("done")), info
        )

    def _text(self, observation: Mapping[str, Any]) -> str:
        if callable(self._observe):
            return self._observe(observation)
        keys = _KEYS if self._observe is None else (self._observe,)
        found = next((observation[key] for key in keys if observation.get(key) is not None), None)
        if found is None:
            error = observation.get("error")
            if isinstance(error, Mapping):
                return f"Error: {error.get('message')}"
            found = {key: value for key, value in observation.items() if key != "metadata" and value is not None} or ""
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}


def _websocket_url(base_url: str) -> str:
    url = base_url.rstrip("/")
    for plain, socket in (("http://", "ws://"), ("https://", "wss://")):
        if url.startswith(plain):
            url = socket + url.removeprefix(plain)
    return url if url.endswith("/ws") else f"{url}/ws"
