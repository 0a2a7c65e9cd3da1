"""What the tests with a real vLLM server share: an engine on it, its traffic, and requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.vllm_server import KEY, VLLMServer
from unspool import ServerEngine


@asynccontextmanager
async def engine_of(*servers: VLLMServer, **options: Any) -> AsyncIterator[ServerEngine]:
    async with ServerEngine([server.url for server in servers], api_key=KEY, **options) as engine:
        yield engine


class Tap:
    """Sees what an engine's turns send and get: `exchanges` holds (body, first choice of the answer)."""

    def __init__(self, engine: ServerEngine) -> None:
        self.exchanges: list[tuple[dict[str, Any], dict[str, Any]]] = []
        send = engine._http.send_json

        async def watched(url: str, body: Any = None, *, seconds: float) -> Any:
            data = await send(url, body, seconds=seconds)
            self.exchanges.append((body, data["choices"][0]))
            return data

        engine._http.send_json = watched  # type: ignore[method-assign]


async def ask(server: VLLMServer, path: str, body: dict[str, Any] | None = None) -> Any:
    """One request of our own to the server."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
        response = await (client.get(path) if body is None else client.post(path, json=body))
        response.raise_for_status()
        return response.json() if response.headers["content-type"].startswith("application/json") else response.text


async def running(server: VLLMServer) -> float:
    """Requests that run in the server now, by its own metrics."""
    lines = (await ask(server, "/metrics")).splitlines()
    [line] = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    return float(line.rsplit(" ", 1)[1])
