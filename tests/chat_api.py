"""A small OpenAI-compatible server for tests: it says what it is told, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from unspool import OpenAI

Reply = dict[str, Any] | Response
Script = Callable[[dict[str, Any]], Reply | Awaitable[Reply]]


def completion(content: str | None = None, *, finish: str | None = None, **message: Any) -> dict[str, Any]:
    """An answer of the API. Names that are none of a message's (`usage`, `prompt_token_ids`) stand beside it."""
    outside = {name: message.pop(name) for name in ("usage", "prompt_token_ids") if name in message}
    inside = {name: message.pop(name) for name in ("token_ids", "logprobs") if name in message}
    reason = finish or ("tool_calls" if message.get("tool_calls") else "stop")
    said = {"role": "assistant", "content": content, **message}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": said, "finish_reason": reason, **inside}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14},
        **outside,
    }


def a_call(name: str, arguments: Any, id: Any = "call_a") -> dict[str, Any]:
    """A call as the API writes it; a dict of arguments becomes JSON text."""
    text = json.dumps(arguments) if isinstance(arguments, dict) else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


class ChatAPI:
    """A server on a free port, on a thread of its own, for the length of a `with`.

    Args:
        script: answers, one a request, the last one from then on; or a function of a request's body.

    Attributes:
        bodies, headers: of the requests for completions, in their order.
        connections: how many were open at once at most.
        hung_up: released for each request that its client gave up.
    """

    def __init__(self, script: Script | Iterable[Reply]) -> None:
        self.script = script if callable(script) else _in_turn(list(script))
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.texts: Callable[[list[int]], str] | None = None
        self.connections = 0
        self.hung_up = threading.Semaphore(0)

    def api(self, **options: Any) -> OpenAI:
        options = {"client_kwargs": {"max_retries": 0}, "api_key": "a key", **options}
        return OpenAI("tiny", base_url=f"{self.url}/v1", **options)

    def __enter__(self) -> Self:
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()

    async def _complete(self, request: Request) -> Response:
        self.connections = max(self.connections, len(self._server.server_state.connections))
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        reply = self.script(body)
        if inspect.isawaitable(reply):
            said, gone = asyncio.ensure_future(reply), asyncio.ensure_future(request.receive())
            await asyncio.wait([said, gone], return_when=asyncio.FIRST_COMPLETED)
            if not said.done():
                said.cancel()
                self.hung_up.release()
                return Response()
            gone.cancel()
            reply = said.result()
        if not isinstance(reply, Response):  # in ASCII: a lone surrogate comes as its escape
            reply = Response(json.dumps(reply), media_type="application/json")
        return reply

    async def _detokenize(self, request: Request) -> Response:
        if self.texts is None:
            return Response("not found", 404)
        return JSONResponse({"prompt": self.texts((await request.json())["tokens"])})


def _in_turn(replies: list[Reply]) -> Script:
    return lambda body: replies.pop(0) if len(replies) > 1 else replies[0]
