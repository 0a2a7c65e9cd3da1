"""`OpenAI`: a model behind an OpenAI-compatible API, by the official SDK.

It is cheap to make and pickles: the SDK is loaded, and its client made, at the first request. Each event loop has a
client of its own, so that one object serves sync and async entries. Time-outs and retries are the SDK's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakKeyDictionary

from unspool.types import EngineError, InvalidTypeError, InvalidValueError, MissingExtraError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from unspool.engines.meaning import LogprobMeaning

_NO_KEY: Final = "no key"
"""Sent where a server of one's own is named and no key is given: it asks for none."""

_KEPT_OPEN: Final = 2.0
"""Seconds that an idle connection is kept. Many servers close theirs after 5 s, and one that both use up at once
breaks."""


@dataclass(eq=False, slots=True)
class _Line:
    """What one event loop has: a client, and a lock for what is found out once."""

    client: AsyncOpenAI
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class OpenAI:
    """A model behind an OpenAI-compatible chat-completions API.

    Args:
        model: its name there.
        api_key: None: `OPENAI_API_KEY` of the environment; where that is not set either, a server that `base_url` names
            is sent a placeholder.
        base_url: such as "http://localhost:8000/v1"; None: `OPENAI_BASE_URL` of the environment, or OpenAI's own.
        client_kwargs: for the SDK's `AsyncOpenAI`: `max_retries` (0: none), `timeout`, `default_headers`,
            `http_client`, ... An `http_client` belongs to the event loop that uses it first.

    Raises:
        MissingExtraError: the SDK is not installed.
    """

    def __init__(
        self,
        model: str,
        api_key: str | None = None,
        base_url: str | None = None,
        client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise InvalidValueError(f"model must be the name of a model, not {model!r:.80}")
        if client_kwargs is not None and not isinstance(client_kwargs, Mapping):
            raise InvalidTypeError(f"client_kwargs must be a mapping, not {type(client_kwargs).__name__}")
        for name, value in (("api_key", api_key), ("base_url", base_url)):
            if value is not None and name in (client_kwargs or {}):
                raise InvalidValueError(f"{name} is given twice, by itself and in client_kwargs; give it once")
        if find_spec("openai") is None:
            raise MissingExtraError("OpenAI needs the package openai: run `pip install 'unspool[api]'`.")
        self.model = model
        self.client_kwargs: dict[str, Any] = dict(client_kwargs or {})
        self.api_key: str | None = self.client_kwargs.pop("api_key", api_key)
        self.base_url: str | None = self.client_kwargs.pop("base_url", base_url)
        self._begin()

    def _begin(self) -> None:
        self.meaning: LogprobMeaning | None = None  # of its log-probabilities, once a recording has asked
        self._guard = threading.Lock()
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"OpenAI({self.model!r}, base_url={self.base_url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "api_key", "base_url", "client_kwargs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # ------------------------------------------------------------------ the client

    def client(self) -> AsyncOpenAI:
        """The SDK's client of the running event loop.

        Raises:
            InvalidValueError: there is no key, and none can be done without.
            InvalidTypeError: the SDK does not take what `client_kwargs` hold.
        """
        return self._line().client

    @property
    def lock(self) -> asyncio.Lock:
        """One lock for each event loop."""
        return self._line().lock

    def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        with self._guard:
            line = self._lines.get(loop)
            if line is None:
                for old in [old for old in self._lines if old.is_closed()]:
                    del self._lines[old]
                line = self._lines[loop] = _Line(self._made())
            return line

    def _made(self) -> AsyncOpenAI:
        import openai

        base_url = self.base_url or os.environ.get("OPENAI_BASE_URL")
        options: dict[str, Any] = {"api_key": self.api_key, "base_url": self.base_url, **self.client_kwargs}
        if not (self.api_key or os.environ.get("OPENAI_API_KEY")):
            if not base_url:
                raise InvalidValueError(
                    "OpenAI's API needs a key: give api_key, or set OPENAI_API_KEY; for a server of your own give its "
                    "base_url, such as 'http://localhost:8000/v1'"
                )
            options["api_key"] = _NO_KEY
        if "http_client" not in options:
            limits = openai.DEFAULT_CONNECTION_LIMITS
            options["http_client"] = openai.DefaultAsyncHttpxClient(
                limits=type(limits)(
                    max_connections=limits.max_connections,
                    max_keepalive_connections=limits.max_keepalive_connections,
                    keepalive_expiry=_KEPT_OPEN,
                )
            )
        try:
            return openai.AsyncOpenAI(**options)
        except TypeError as error:
            raise InvalidTypeError(f"client_kwargs do not suit the SDK's client: {error}") from error

    async def close(self) -> None:
        """Close the connections of this event loop, and of others that run. A later request opens new ones."""
        with self._guard:
            lines = list(self._lines.items())
            self._lines.clear()
        here = asyncio.get_running_loop()
        for loop, line in lines:
            if loop is here:
                await line.client.close()
            elif loop.is_running():
                with contextlib.suppress(Exception):
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(line.client.close(), loop))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------ requests

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the API answers to one request for a chat completion, undressed: every field as it came.

        Raises:
            openai.APIStatusError: the API said no, after the SDK's retries.
            EngineError: it cannot be reached, or its answer is no JSON object.
        """
        return await self._post("chat/completions", {"model": self.model, **body})

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of these ids, where the server is one that says (vLLM); raises where it is not."""
        root = str(self.client().base_url).rstrip("/").removesuffix("/v1")
        answer = await self._post(f"{root}/detokenize", {"model": self.model, "tokens": tokens})
        return str(answer["prompt"])

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        import httpx
        import openai

        client = self.client()
        try:
            response = await client.post(path, body=dict(body), cast_to=httpx.Response)
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            said = f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__
            raise EngineError(f"{client.base_url} gave no answer ({said})") from error
        try:
            answer = json.loads(response.content)
        except ValueError as error:
            raise EngineError(
                f"{response.url} answered with something that is no JSON ({response.text!r:.80}); is base_url the "
                "API's, with its /v1?"
            ) from error
        if not isinstance(answer, dict):
            raise EngineError(f"{response.url} answered with {answer!r:.80}, which is no chat completion")
        return answer
