"""Requests to servers: pooled connections for each event loop, a wall clock over each request, what a failure means.

`SendError` says whether the same request may be tried again. That is so for what is of the moment: no connection, one
that broke, a body that is no JSON, no answer in time, and the statuses 408, 409, 429 and 5xx. No other answer of a
server is ever tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from weakref import WeakKeyDictionary

import httpx

from unspool.types import EngineError

_AGAIN: Final = frozenset({408, 409, 429})
_OVERLOADED: Final = frozenset({429, 503})
_IN_A_POOL: Final = 64
"""Connections in use in one pool; further ones go to a further pool. What httpx does for a request takes time in
proportion to its pool."""

_KEPT_OPEN: Final = 2.0
"""Seconds that an idle connection is kept. Servers close theirs after 5 s, and one that both use up at once breaks."""


class SendError(EngineError):
    """A request that failed.

    Attributes:
        status: the status that the server answered; None: it did not answer.
        again: whether the same request may be tried again.
        after: seconds that the server asked to wait (`Retry-After`).
    """

    def __init__(
        self, message: str, *, status: int | None = None, again: bool = True, after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.again = again
        self.after = after

    @property
    def overloaded(self) -> bool:
        return self.status in _OVERLOADED


@dataclass(eq=False, slots=True)
class _Pool:
    """Some connections, and how many of them are in use."""

    client: httpx.AsyncClient
    busy: int = 0


class Http:
    """The connections of one engine, whatever the number of servers.

    Args:
        api_key: sent as a bearer token.
        connect_timeout: seconds for a connection to be made.
    """

    def __init__(self, api_key: str | None, connect_timeout: float) -> None:
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._tls = httpx.create_ssl_context()
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Pool]] = WeakKeyDictionary()

    def _pool(self) -> _Pool:
        """A pool of the running loop that has room."""
        loop = asyncio.get_running_loop()
        with self._lock:
            pools = self._pools.setdefault(loop, [])
            for pool in pools:
                if pool.busy < _IN_A_POOL:
                    return pool
            client = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=self._connect_timeout),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT_OPEN),
                verify=self._tls,
            )
            pools.append(_Pool(client))
            return pools[-1]

    async def send(self, url: str, body: Mapping[str, Any] | None = None, *, seconds: float, get: bool = False) -> str:
        """The body of the answer. The connection is closed where the wait for it is cancelled.

        Raises:
            SendError: there was no answer within `seconds`, or one that says no.
        """
        pool = self._pool()
        pool.busy += 1
        try:
            async with asyncio.timeout(seconds):
                if get:
                    response = await pool.client.get(url)
                else:
                    response = await pool.client.post(url, json=body)
        except TimeoutError:
            raise SendError(f"{url} did not answer within {seconds:g} s") from None
        except httpx.TransportError as error:
            raise SendError(f"{url}: {_say(error)}") from error
        except (httpx.InvalidURL, httpx.DecodingError) as error:
            raise SendError(f"{url}: {_say(error)}", again=False) from error
        finally:
            pool.busy -= 1
        status = response.status_code
        if status >= 300:
            raise SendError(
                f"{url} answered {status}: {_reason(response.text)}",
                status=status,
                again=status in _AGAIN or status >= 500,
                after=_retry_after(response.headers.get("Retry-After")),
            )
        return response.text

    async def send_json(self, url: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> Any:
        """The same, decoded.

        Raises:
            SendError: also where the body is no JSON, which a connection that broke leaves behind.
        """
        return decoded(await self.send(url, body, seconds=seconds), url)

    async def close(self) -> None:
        """Close the connections of this loop and of others that run."""
        with self._lock:
            pools = [(loop, pool.client) for loop, several in self._pools.items() for pool in several]
            self._pools.clear()
        here = asyncio.get_running_loop()
        for loop, client in pools:
            if loop is here:
                await client.aclose()
            elif loop.is_running():
                with contextlib.suppress(Exception):
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(client.aclose(), loop))


def decoded(text: str, url: str) -> Any:
    """Raises SendError where a body is no JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise SendError(f"{url} answered with a body that is no JSON ({error}): {text!r:.80}") from error


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _reason(text: str) -> str:
    """The sentence within an answer that says no, whatever its form."""
    reason: object = text.strip()
    with contextlib.suppress(ValueError):
        reason = json.loads(text)
    while isinstance(reason, Mapping):
        reason = next((reason[name] for name in ("error", "message", "detail") if reason.get(name)), str(dict(reason)))
    return f"{reason!s:.500}" or "(nothing)"


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait, from a number of them or from a date."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        moment = parsedate_to_datetime(value)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    return None
