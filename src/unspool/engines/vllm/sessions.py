"""Resumable sessions: a conversation as one request of vLLM, which takes each turn's new tokens as they come.

What this module promises:

- A turn goes to its session only where its `input_ids` begin with the very tokens that the session holds, and where
  nothing in its parameters is fixed at a session's first turn; else the session is ended and another one begins.
- Sessions that wait for a tool hold keys and values and count as running requests: at most half of each is theirs.
  The one that has waited longest makes room; a turn that finds none is served as an ordinary request.
- What a session has cached is of the weights that it was computed with: `interrupt` ends them all, and gives the turns
  that were under way back with the tokens that they had.

vLLM keeps the tokens of a finished turn that it has computed, which are all but the last one sampled: the next chunk
begins with that one. All of this runs on the engine's own loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from unspool.engines.protocol import GenerateRequest
from unspool.engines.vllm.answers import Answer
from unspool.engines.vllm.home import Home

_CARRIED: Final = frozenset({"adapter", "ignore_eos", "min_p", "logit_bias", "allowed_token_ids", "bad_words"})
"""Keys of `extra` that vLLM takes anew with each chunk, or that are part of a session's key."""

_GREEDY: Final = 1e-5
"""vLLM takes a temperature below it for greedy."""

_WHOLE_TURN: Final = 2**30
"""Tokens between two outputs: a session says its first token, then whole turns."""


def resumable(request: GenerateRequest) -> bool:
    """Whether a request can be a turn of a session: stop strings and structured outputs are beyond vLLM there."""
    return bool(request.session) and not request.params.stop and set(request.extra) <= _CARRIED


@dataclass(frozen=True)
class Turn:
    """A request as a session needs it: the sampling fields, the adapter, and most tokens that it may take."""

    request: GenerateRequest
    fields: Mapping[str, Any]
    adapter: Any
    limit: int

    @property
    def key(self) -> tuple[object, ...]:
        """What vLLM fixes with a session's first chunk: adapter, whether there are random numbers, alternatives."""
        return self.request.extra.get("adapter"), self.request.params.temperature < _GREEDY, self.fields["logprobs"]


class Session:
    """One request of vLLM with an open input."""

    def __init__(self, llm: Any, turn: Turn) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.id = f"unspool-{uuid.uuid4().hex}"
        self.name = turn.request.session
        self.key = turn.key
        self.held: list[int] = []
        self.reserved = 0
        self.ended = False
        self.fed = asyncio.Event()  # the engine core has all that it was given
        self.idle = asyncio.Event()  # no turn is under way
        self._form = {"output_kind": RequestOutputKind.DELTA, "stream_interval": _WHOLE_TURN}
        self._make = SamplingParams
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        first = self._params(turn.fields)
        self._outputs = llm.generate(self._chunks(), first, self.id, lora_request=turn.adapter)

    @property
    def busy(self) -> bool:
        """Whether a turn is under way."""
        return not self.idle.is_set()

    def begin(self, needed: int) -> None:
        """A turn is about to be taken, which may come to so many tokens in all."""
        self.reserved = needed
        self.fed.clear()
        self.idle.clear()

    def fits(self, turn: Turn) -> bool:
        """Whether a turn goes on where this session stands."""
        ids, held = turn.request.input_ids, self.held
        return self.key == turn.key and ids[: len(held)] == held

    async def take(self, turn: Turn, version: int) -> Answer:
        """Sample a turn, after `begin`. The reason is "abort" where the session was interrupted."""
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs import tokens_input

        ids, wanted = turn.request.input_ids, turn.request.params.logprobs or 0
        cached = max(len(self.held) - 1, 0)
        chunk = ids[cached:]  # from the last sampled token on: vLLM does not hold it
        self._inbox.put_nowait(StreamingInput(tokens_input(chunk), self._params(turn.fields)))
        answer = Answer(cached=cached)
        try:
            while answer.finish is None:
                output = await anext(self._outputs)
                answer.add(output, wanted, version)
        except BaseException:
            self.ended = True
            await self._outputs.aclose()
            raise
        finally:
            self.fed.set()
            self.idle.set()
        answer.cached = max(answer.cached, len(self.held) - 1)
        self.held = ids + answer.tokens
        return answer

    async def close(self) -> None:
        """End it, when no turn is under way."""
        await self._outputs.aclose()

    async def _chunks(self) -> AsyncGenerator[Any, None]:
        while True:
            chunk = await self._inbox.get()
            yield chunk
            self.fed.set()  # asked for the next one: this one has been handed to the engine core

    def _params(self, fields: Mapping[str, Any]) -> Any:
        return self._make(**fields, **self._form)


class Sessions:
    """The sessions of one engine.

    Args:
        most: how many there may be.
        most_tokens: how many tokens they may hold together, what a running turn may yet sample included.
    """

    def __init__(self, llm: Any, home: Home, most: int, most_tokens: int) -> None:
        self._llm = llm
        self._home = home
        self._most = most
        self._most_tokens = most_tokens
        self._open: OrderedDict[str, Session] = OrderedDict()  # by name; the one used last stands last
        self._all: set[Session] = set()
        self._entry = asyncio.Lock()  # held while a turn finds its session, and from `interrupt` to `go_on`

    def __len__(self) -> int:
        return len(self._all)

    async def sample(self, turn: Turn, version: int) -> Answer | None:
        """A turn of its session; None where there is no room for one."""
        async with self._entry:
            session = await self._session(turn)
        if session is None:
            return None
        try:
            answer = await session.take(turn, version)
        except BaseException:
            self._forget(session)
            raise
        session.reserved = len(session.held)
        if answer.finish == "abort" or session.ended or self._open.get(session.name) is not session:
            self._forget(session)
            self._home.keep(session.close())
        return answer

    def end(self, name: str) -> None:
        """No further turn will come."""
        session = self._open.get(name)
        if session is None:
            return
        session.ended = True
        if not session.busy:
            self._forget(session)
            self._home.keep(session.close())

    async def interrupt(self) -> None:
        """End all sessions, and hold new turns until `go_on`; turns under way get "abort" and what they had."""
        await self._entry.acquire()
        for session in list(self._all):
            await session.fed.wait()  # else its chunk is still on the way to the engine core
            if session.busy:
                await self._llm.abort(session.id)
                await session.idle.wait()
            await self._end(session)

    def go_on(self) -> None:
        """Let turns in again."""
        self._entry.release()

    async def _session(self, turn: Turn) -> Session | None:
        """The session for a turn, as it is or a new one."""
        name = turn.request.session
        session = self._open.get(name)
        if session is not None and session.busy:
            return None  # two turns of one session at once: the second one is a request of its own
        needed = len(turn.request.input_ids) + turn.limit
        fits = session is not None and session.fits(turn)
        if session is not None and not fits:
            await self._end(session)
            session = None
        if not await self._make_room(needed, session):
            if session is not None:
                await self._end(session)
            return None
        if session is None:
            session = Session(self._llm, turn)
            self._all.add(session)
            self._open[name] = session
        self._open.move_to_end(name)
        session.begin(needed)
        return session

    async def _make_room(self, needed: int, mine: Session | None) -> bool:
        """Whether a session of so many tokens has room, once idle ones have gone that are not `mine`."""
        for session in (None, *list(self._open.values())):
            if session is not None:
                if session.busy or session is mine:
                    continue
                await self._end(session)
            others = [other for other in self._all if other is not mine]
            held = sum(other.reserved for other in others)
            if len(others) < self._most and held + needed <= self._most_tokens:
                return True
        return False

    async def _end(self, session: Session) -> None:
        self._forget(session)
        await session.close()

    def _forget(self, session: Session) -> None:
        self._all.discard(session)
        if self._open.get(session.name) is session:
            del self._open[session.name]
