"""`ServerEngine`: inference by servers of vLLM or SGLang over HTTP.

What this module promises:

- Token ids in, token ids out: the ids are those that the server returned, with the log-probabilities of the same
  answer. An answer without ids, or with more or fewer log-probabilities, is an error.
- A request whose parameters make the server's log-probabilities others than those sampled from is refused.
- An episode stays with its server; it goes to another one when its own is lost or overloaded, and waits where there is
  none. What was tried again is said, turn by turn.
- New weights change `versions` exactly where they change the model: before they are loaded every request in flight has
  come back with what it had, and it goes on afterwards behind the tokens that it has.
- A cancelled request is stopped in the server. Any number of event loops may use one engine. An engine pickles as its
  arguments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from unspool.engines.protocol import EngineBase, GenerateRequest, Generation
from unspool.engines.server.control import Control, Times
from unspool.engines.server.http import Http, SendError
from unspool.engines.server.kinds import Answer, Kind
from unspool.engines.server.kinds.sglang import SGLang
from unspool.engines.server.kinds.vllm import VLLM
from unspool.engines.server.replicas import Fleet, MaxEpisodes, Replica, Seat
from unspool.engines.server.turn import Turn
from unspool.types import EngineError, InvalidTypeError, InvalidValueError, check_value, is_count

_KINDS: Final[dict[str, type[Kind]]] = {"vllm": VLLM, "sglang": SGLang}
_OVERLOAD_PAUSE: Final = 1.0
"""Seconds of rest for a server that is overloaded and does not say for how long."""
_BACKOFF: Final = wait_random_exponential(multiplier=0.25, max=10)


class _InterruptedError(Exception):
    """A request was ended by us, as no fault of its own; without a word: it had not been sent."""


class ServerEngine(EngineBase):
    """See the module's docstring.

    Args:
        urls: of one or several servers of the same model, such as "http://host:8000" (a trailing /v1 is dropped).
        kind: "vllm" (0.10.2 or newer) or "sglang" (0.4.7 or newer).
        model: its name on the server; None: the first that the server lists.
        api_key: sent as a bearer token.
        max_episodes: most episodes at once on a server; "auto": no new episode goes to a server in which requests wait;
            None: no bound. Those beyond it wait in their order.
        max_retries: how often a turn is tried again at servers that live, and how often it may lose its server.
        request_timeout: seconds for one request, wall clock.
        connect_timeout: seconds for a connection.
        health_timeout: seconds for a server to say that it is healthy.
        start_timeout: seconds for a server to become ready in `start`.
        recover_timeout: seconds that a turn waits while no server is live.
        version: of the weights that the servers have.
    """

    logprobs = True

    def __init__(
        self,
        urls: str | Iterable[str],
        kind: Literal["vllm", "sglang"] = "vllm",
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_episodes: MaxEpisodes = None,
        max_retries: int = 5,
        request_timeout: float = 3600.0,
        connect_timeout: float = 10.0,
        health_timeout: float = 30.0,
        start_timeout: float = 600.0,
        recover_timeout: float = 300.0,
        version: int = 0,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.urls = _urls(urls)
        self._arguments["urls"] = self.urls
        if kind not in _KINDS:
            raise InvalidValueError(f"kind must be 'vllm' or 'sglang', not {kind!r}")
        if max_episodes not in (None, "auto"):
            check_value("max_episodes", max_episodes, is_count, "a whole number, at least 1, 'auto', or None")
        check_value("max_retries", max_retries, lambda value: is_count(value, 0), "a whole number, at least 0")
        for name in ("request_timeout", "connect_timeout", "health_timeout", "start_timeout", "recover_timeout"):
            check_value(name, self._arguments[name], lambda value: value > 0, "a number of seconds above 0")
        self._kind = _KINDS[kind]()
        self._max_retries = max_retries
        self._request_timeout = request_timeout
        self._health_timeout = health_timeout
        self._http = Http(api_key, connect_timeout)
        self._fleet = Fleet(self.urls, max_episodes, recover_timeout, self._keep)
        self._fleet.version = version
        times = Times(start_timeout, request_timeout, health_timeout)
        self._control = Control(self._kind, self._http, self._fleet, times, model, queue=max_episodes == "auto")
        self._started = False

    def _keep(self) -> None:
        self._control.keep()

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self), {**self._arguments, "version": self.version})

    # ------------------------------------------------------------------ life

    @property
    def version(self) -> int:  # type: ignore[override]
        """The version of the weights that the next token is sampled with."""
        return self._fleet.version

    @property
    def context_length(self) -> int | None:  # type: ignore[override]
        """The shortest context of the servers, once `start` has asked them."""
        return self._control.context

    async def start(self) -> None:
        """Wait until a server is ready, and ask what it is. Requests do so themselves where nobody did.

        Raises:
            EngineError: none is ready within `start_timeout`, or none can be used.
        """
        if not self._started:
            await self._control.start()
            self._started = True

    async def close(self) -> None:
        """End what is under way, and close the connections. `start` opens it again."""
        self._started = False
        await self._control.close()
        await self._http.close()

    async def pause(self) -> None:
        """Hold: running turns come back from the servers with what they have, and go on after `resume`.

        Raises:
            EngineError: no server can be paused.
        """
        await self.start()
        await self._control.pause()

    async def resume(self) -> None:
        """Go on."""
        await self._control.resume()

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Load a checkpoint folder that every server can read under this path. A cancelled call is done all the same.

        Turns under way go on with the tokens that they have. Those with stop strings or structured outputs, of which
        the server would have to know the beginning, are sampled whole again. A server that does not take the weights is
        taken out until it does, with a warning.

        Raises:
            InvalidTypeError: `source` is no path.
            EngineError: no server took them; the version and the servers are as before.
        """
        if not isinstance(source, (str, Path)):
            raise InvalidTypeError(
                f"ServerEngine loads weights from a checkpoint folder that its servers can read: give its path (str or "
                f"Path), not {type(source).__name__}"
            )
        await self.start()
        await self._control.update(Path(source), version)

    def end_session(self, session: str) -> None:
        self._fleet.end(session)

    # ------------------------------------------------------------------ generating

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn.

        Raises:
            EngineError: the servers refuse it, answer in a form that cannot be used, fail again and again, or are gone.
        """
        if self._fleet.closed:
            raise EngineError("the engine was closed; call start() before using it again")
        await self.start()
        self._check(request)
        turn = Turn(
            request,
            self.context_length,
            from_the_start=self._kind.from_the_start(request),
            most_empty=self._max_retries,
        )
        while turn.stop is None:
            answer, version = await self._answer(turn)
            turn.take(answer, version)
            if turn.stop is None and turn.empty > 1 and self._fleet.open:
                await asyncio.sleep(min(0.05 * 2**turn.empty, 5.0))
        return turn.generation()

    def _check(self, request: GenerateRequest) -> None:
        params, context = request.params, self.context_length
        if not request.input_ids:
            raise EngineError("input_ids is empty; a prompt needs at least one token")
        if params.num_samples != 1:
            raise EngineError(f"num_samples is {params.num_samples}; send one request for each sample")
        if params.prompt_logprobs is not None:
            raise EngineError(
                f"prompt_logprobs is {params.prompt_logprobs}, and ServerEngine gives none for prompts; leave it None"
            )
        if context is not None and len(request.input_ids) >= context:
            raise EngineError(
                f"the prompt has {len(request.input_ids)} tokens and leaves no room in the servers' context of "
                f"{context}; shorten it"
            )
        meaning = self._control.meaning
        wrong = meaning.missing(params)
        if not (meaning.truncation and meaning.penalty):
            wrong += sorted(self._kind.shaping.intersection(request.extra))
        if wrong:
            raise EngineError(
                f"the servers' log-probabilities are not those of the distribution sampled from with "
                f"{', '.join(wrong)}; {self._kind.logprobs_remedy}, or leave it at its default"
            )

    async def _answer(self, turn: Turn) -> tuple[Answer, int]:
        """The answer to one try, with the version of its tokens; tried again where that may help."""
        tries = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, SendError) and error.again),
            wait=_pause_after,
            stop=stop_after_attempt(self._max_retries + 1),
            reraise=True,
        )
        try:
            return await tries(self._ask, turn)
        except SendError as error:
            if not error.again:
                raise
            raise EngineError(f"{error}; it was tried {self._max_retries + 1} times (max_retries)") from error

    async def _ask(self, turn: Turn) -> tuple[Answer, int]:
        """One try at a live server; a try that loses its server is followed by the next at once."""
        losses, moved = 0, False
        while True:
            seat = await self._fleet.take(turn.request.session, moved=moved)
            replica = seat.replica
            try:
                return await self._send(seat, turn)
            except _InterruptedError as interrupted:
                if str(interrupted):
                    turn.failed(str(interrupted))
                error: Exception = EngineError(str(interrupted))
            except SendError as failure:
                turn.failed(str(failure))
                if failure.status is not None or await self._control.check(replica):
                    self._make_way(seat, failure)
                    raise
                error = failure
            finally:
                self._fleet.leave(seat)
            moved = True
            losses += not replica.live
            if losses > self._max_retries:
                raise EngineError(f"a turn lost its server {losses} times; the last error was: {error}") from error

    def _make_way(self, seat: Seat, failure: SendError) -> None:
        """Let an episode's next try go elsewhere; where there is nowhere, it waits as long as the server asked for."""
        if failure.overloaded and failure.after is None:
            failure.after = _OVERLOAD_PAUSE
        if failure.after is not None:
            self._fleet.hold(seat.replica, failure.after)
        if failure.again and self._fleet.move(seat):
            failure.after = None

    async def _send(self, seat: Seat, turn: Turn) -> tuple[Answer, int]:
        """Send a try, and wait for its answer.

        Raises:
            SendError: it failed.
            _InterruptedError: we ended it, or it was not sent (then without a word).
        """
        replica = seat.replica
        await self._control.fresh(replica)
        await self._fleet.gate_moved.until(lambda: self._fleet.open or not replica.live)
        asked = turn.asked(replica.model)
        url, body = replica.url + self._kind.path, self._kind.body(asked)
        work = asyncio.ensure_future(self._http.send_json(url, body, seconds=self._request_timeout))
        call = self._fleet.enter(seat, work)
        if call is None:
            work.cancel()
            raise _InterruptedError
        turn.sent()
        try:
            while not (await asyncio.wait({work}, timeout=self._health_timeout))[0]:
                await self._control.check(replica)  # a server that hangs is lost, and the call interrupted
            data = work.result()
        except asyncio.CancelledError:
            self._hang_up(replica, asked.rid, work)
            if work.cancelled() and call.why is not None:
                raise _InterruptedError(call.why) from None
            raise
        except SendError as error:
            if error.status is None:
                self._hang_up(replica, asked.rid, work)
            raise
        finally:
            self._fleet.done(replica, call)
        replica.heard = time.monotonic()
        return self._kind.read(data, asked), call.version

    def _hang_up(self, replica: Replica, rid: str, work: asyncio.Future[Any]) -> None:
        """Have a request stopped that nobody waits for any more."""
        work.cancel()
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._control.abort(replica, rid)


def _pause_after(state: RetryCallState) -> float:
    """Seconds until the next try: more and more of them by chance, and no fewer than the server asked for."""
    failure = state.outcome.exception() if state.outcome is not None else None
    return max(_BACKOFF(state), (failure.after or 0.0) if isinstance(failure, SendError) else 0.0)


def _urls(urls: str | Iterable[str]) -> list[str]:
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise InvalidValueError("urls is empty; give the address of at least one server")
    cleaned: list[str] = []
    for url in given:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise InvalidValueError(f"a server's address must begin with http:// or https://, not {url!r}")
        cleaned.append(url.rstrip("/").removesuffix("/v1").rstrip("/"))
    if len(set(cleaned)) < len(cleaned):
        raise InvalidValueError(f"a server stands twice in urls: {', '.join(cleaned)}")
    return cleaned


def _made(kind: type[ServerEngine], arguments: dict[str, Any]) -> ServerEngine:
    return kind(**arguments)
