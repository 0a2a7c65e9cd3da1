"""A small OpenAI-compatible server that says the lines that it is given, for examples and for tests without a model.

    with chat_server(call("add", a=12, b=7), "It is 19.") as url:
        api = OpenAI("scripted", base_url=url)

Every conversation gets the lines in their order, the last one from then on; a `call(...)` is a tool call.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Line = str | dict[str, Any]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call, as the API writes it."""
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@contextmanager
def chat_server(*lines: Line) -> Iterator[str]:
    """Serve the lines; yields the API's address, which ends in /v1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            turn = sum(message["role"] == "assistant" for message in asked["messages"])
            self.answer(_completion(lines[min(turn, len(lines) - 1)]))

        def answer(self, completion: dict[str, Any]) -> None:
            body = json.dumps(completion).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def _completion(line: Line) -> dict[str, Any]:
    said: dict[str, Any] = {"content": line} if isinstance(line, str) else {"content": None, "tool_calls": [line]}
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", **said}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28},
    }
