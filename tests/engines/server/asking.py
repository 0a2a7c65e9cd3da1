"""Engines and requests for the tests of `ServerEngine`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.engines.server.fakes import KEY, FakeServer, FakeSGLang
from unspool import GenerateRequest, SamplingParams, ServerEngine

PROMPT = [11, 12, 13]
STOP = 2


@asynccontextmanager
async def serving(*servers: FakeServer, **options: Any) -> AsyncIterator[ServerEngine]:
    """A started engine of these servers, closed at the end."""
    kind = "sglang" if isinstance(servers[0], FakeSGLang) else "vllm"
    given = {"api_key": KEY, "start_timeout": 10.0, "recover_timeout": 10.0, **options}
    async with ServerEngine([server.url for server in servers], kind, **given) as engine:
        yield engine


def turn(
    session: str = "", prompt: list[int] | None = None, max_tokens: int | None = 20, **options: Any
) -> GenerateRequest:
    """A request; `seed`, `extra` and `stop_token_ids` go there, all else is sampling parameters."""
    own = {name: options.pop(name) for name in ("seed", "extra", "stop_token_ids") if name in options}
    own.setdefault("stop_token_ids", (STOP,))
    return GenerateRequest(prompt or PROMPT, SamplingParams(max_tokens=max_tokens, **options), session, **own)
