"""`VLLMEngine`: a model served in this process by vLLM's asynchronous engine, with continuous batching.

What this module promises:

- Token ids in, token ids out, with the log-probability of the distribution that each token was drawn from and the
  version of the weights that produced it; a generation that an update interrupts goes on, and holds both versions.
- It works from any event loop, from several at once, and after one is closed: vLLM lives on a loop of its own.
- Cancelling `generate` aborts the request in vLLM. A weight update is never half done: it goes on where its caller is
  cancelled, one at a time; one that fails leaves the version, and generation goes on.
- An engine pickles as the arguments that it was made with, and starts where it is first used.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from unspool.engines.meaning import LogprobMeaning
from unspool.engines.protocol import EngineBase, GenerateRequest, Generation
from unspool.engines.vllm.answers import Answer
from unspool.engines.vllm.home import Home
from unspool.engines.vllm.made import Made
from unspool.engines.vllm.params import check_meaning, room, sampling_fields
from unspool.engines.vllm.sessions import Sessions, Turn, resumable
from unspool.engines.vllm.settings import Adapters
from unspool.engines.vllm.weights import checkpoint
from unspool.loop import private_loop
from unspool.threads import run_in_thread
from unspool.types import EngineError, InvalidTypeError, InvalidValueError

SessionMode = Literal["cache", "resumable"]


class VLLMEngine(EngineBase):
    """See the module's docstring, and docs/vllm.md.

    Greedy requests (temperature 0) report the model's own log-probability, at temperature 1 and without truncation.
    A request with `params.logprobs=n` also gets the n likeliest tokens at each place, `(id, log-probability under the
    sampling distribution)`, in `Generation.extra["top_logprobs"]`; `extra["cached_tokens"]` says how much of the prompt
    was found in the cache. `GenerateRequest.extra` may hold `adapter`,
    `structured_outputs`, and any field of vLLM's SamplingParams that a request does not set itself (`min_p`, say).

    Args:
        llm: an `AsyncLLM` that you made; it stays yours, `close` does not shut it down. See `from_pretrained` for an
            engine that makes its own.
        adapters: folders of LoRA adapters, by the names that requests use.
        sessions: "cache": each turn is a request, which finds its past in the prefix cache; "resumable": a
            conversation is one request of vLLM, to which each turn adds what is new.
        version: of the weights as they are.
    """

    logprobs = True

    def __init__(
        self,
        llm: Any,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        sessions: SessionMode = "cache",
        version: int = 0,
    ) -> None:
        if isinstance(llm, str | Path):
            raise InvalidTypeError(f"VLLMEngine takes an AsyncLLM; load {str(llm)!r} with VLLMEngine.from_pretrained")
        if not hasattr(llm, "generate") or not hasattr(llm, "pause_generation"):
            raise InvalidTypeError(
                f"VLLMEngine takes an AsyncLLM, not {type(llm).__name__}; give an LLM to VLLMSampler"
            )
        self._set_up(llm, adapters, sessions, version)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        dtype: str = "auto",
        sessions: SessionMode = "cache",
        version: int = 0,
        **engine_args: Any,
    ) -> Self:
        """An engine of a model folder (or hub name); it is loaded when the engine starts.

        `engine_args` are those of vLLM's `AsyncEngineArgs` and come before the engine's own, which are
        `logprobs_mode="processed_logprobs"`, `enable_prefix_caching=True`, `disable_log_stats=True`, what the adapters
        need, and on a CPU `block_size=32`, `enforce_eager=True` and a cache of 4 GiB.
        """
        engine = cls.__new__(cls)
        engine._set_up(None, adapters, sessions, version)
        engine._loaded_from = (str(path), {"dtype": dtype, **engine_args})
        length = engine_args.get("max_model_len")
        engine.context_length = length if isinstance(length, int) else None
        return engine

    def _set_up(self, llm: Any, adapters: Mapping[str, str | Path] | None, sessions: SessionMode, version: int) -> None:
        if sessions not in ("cache", "resumable"):
            raise InvalidValueError(f"sessions must be 'cache' or 'resumable', not {sessions!r}")
        self._given = llm
        self._adapters = Adapters(adapters)
        self._mode: SessionMode = sessions
        self._version = self._first_version = version
        self._loaded_from: tuple[str, dict[str, Any]] | None = None
        self._made: Made | None = None
        self._sessions: Sessions | None = None
        self._closed = self._paused = False
        self._asleep = 0  # the level
        self._running: set[asyncio.Task[Any]] = set()
        self._home: Home | None = None
        self._process = os.getpid()
        self._starting: asyncio.Lock | None = None
        self._updating: asyncio.Lock | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._loaded_from is None:
            raise InvalidTypeError(
                "a VLLMEngine around an AsyncLLM cannot be pickled; make the engine in the process that uses it, or "
                "with VLLMEngine.from_pretrained"
            )
        path, arguments = self._loaded_from
        own = {"adapters": self._adapters.folders, "sessions": self._mode, "version": self._first_version}
        return _load_anew, (type(self), path, own | arguments)

    # ------------------------------------------------------------------ life

    @property
    def version(self) -> int:  # type: ignore[override]
        """The version of the weights that the next token is sampled with."""
        return self._version

    async def start(self) -> None:
        """Load the model, again after `close` too. Requests do so themselves where the engine was not closed."""
        self._closed = False
        home = self._at_home()
        await home.finish(self._ready())

    async def close(self) -> None:
        """Fail what is running, shut vLLM down and give its memory back."""
        self._closed = True
        if self._home is not None and self._made is not None:
            await self._home.finish(self._close())

    async def pause(self) -> None:
        """Hold: no token is sampled until `resume`; running requests keep their cache."""
        await self._at_home().finish(self._pause())

    async def resume(self) -> None:
        """Go on."""
        await self._at_home().finish(self._resume())

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: 1 moves weights to the CPU and drops the cache, 2 drops both.

        Running requests are held, and computed anew afterwards. After level 2 it is `update_weights` that wakes it up.

        Raises:
            EngineError: vLLM was made without `enable_sleep_mode=True`, or runs on a CPU, which cannot.
        """
        await self._at_home().finish(self._sleep(level))

    async def wake_up(self) -> None:
        """Take the memory again, and go on.

        Raises:
            EngineError: it sleeps at level 2, and has no weights to go on with.
        """
        await self._at_home().finish(self._wake_up())

    def end_session(self, session: str) -> None:
        if self._sessions is not None and self._home is not None:
            self._home.soon(self._sessions.end, session)

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Take new weights, between two steps of whatever is running.

        `source` is the folder of a checkpoint, a module (a PEFT one with its adapters merged) or a state dict; the two
        latter are written to a temporary folder first. Running requests go on: their cache is computed anew with the
        new weights, and the prefix cache is emptied. `version` counts on where it is not given.

        Raises:
            EngineError: the source cannot be weights of this model, or vLLM could not take them.
        """
        await self._at_home().finish(self._update(source, version))

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn.

        Raises:
            EngineError: the request cannot be served, or vLLM failed on it.
        """
        return await self._at_home().run(self._generate(request))

    # ------------------------------------------------------------------ on the engine's own loop

    def _at_home(self) -> Home:
        """Where vLLM lives: the loop that a given one already runs on, else the process's private loop."""
        if self._process != os.getpid():
            raise EngineError(
                "this VLLMEngine belongs to the process that it was forked from; make one in this process"
            )
        if self._home is None:
            handler = getattr(self._given, "output_handler", None)
            self._home = Home(private_loop() if handler is None else handler.get_loop())
        return self._home

    async def _ready(self) -> Made:
        if self._closed:
            raise EngineError("the engine was closed; call start() before using it again")
        if self._made is not None:
            return self._made
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._made is None:
                await self._start()
            assert self._made is not None
            return self._made

    async def _start(self) -> None:
        made = await Made.of(self._given, self._loaded_from, self._adapters)
        await made.llm.update_weight_version(str(self._version))
        self.context_length = made.context_length
        if self._mode == "resumable":
            assert self._home is not None
            self._sessions = Sessions(made.llm, self._home, made.most_sessions, made.most_session_tokens)
        self._paused, self._asleep = False, 0
        self._made = made

    async def _close(self) -> None:
        made, self._made, self._sessions = self._made, None, None
        if made is None:
            return
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running), timeout=10)
        if self._given is None:
            if made.llm.output_handler is not None:
                made.llm.output_handler.cancel()  # it would take the end of the engine core for its death, and say so
            await run_in_thread(made.llm.shutdown)
            del made
            gc.collect()  # an AsyncLLM lies in cycles, and what it holds would stay until one is looked for

    async def _pause(self) -> None:
        made = await self._ready()
        await made.llm.pause_generation(mode="keep", clear_cache=False)
        self._paused = True

    async def _resume(self) -> None:
        if self._made is not None:
            self._paused = False
            await self._made.llm.resume_generation()

    async def _sleep(self, level: int) -> None:
        made = await self._ready()
        made.check_sleep()
        async with self._alone():
            if self._sessions is not None:
                await self._sessions.interrupt()
            try:
                await made.llm.sleep(level, mode="keep")
                self._asleep = level
            finally:
                if self._sessions is not None:
                    self._sessions.go_on()

    async def _wake_up(self) -> None:
        made = await self._ready()
        async with self._alone():
            if self._asleep == 2:
                raise EngineError("sleep(2) has dropped the weights; update_weights(source) wakes the engine up")
            if self._asleep:
                await self._wake(made)

    async def _wake(self, made: Made, tags: list[str] | None = None) -> None:
        """Take memory again; once all of it is there, vLLM goes on by itself."""
        if await made.llm.wake_up(tags):
            self._asleep, self._paused = 0, False

    def _alone(self) -> asyncio.Lock:
        self._updating = self._updating or asyncio.Lock()
        return self._updating

    async def _update(self, source: Any, version: int | None) -> None:
        made = await self._ready()
        async with self._alone():
            if self._asleep == 1:
                raise EngineError("the engine sleeps; wake_up() before update_weights")
            new = self._version + 1 if version is None else version
            with_folder = checkpoint(source, made.shapes)
            folder = await run_in_thread(with_folder.__enter__)
            try:
                await self._replace_weights(made, folder, new)
            finally:
                await run_in_thread(with_folder.__exit__, None, None, None)

    async def _replace_weights(self, made: Made, folder: Path, version: int) -> None:
        if self._sessions is not None:
            await self._sessions.interrupt()
        try:
            if self._asleep:
                await self._wake(made, ["weights"])
            else:
                await made.llm.pause_generation(mode="keep", clear_cache=True)
            await made.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            await made.llm.update_weight_version(str(version))
            self._version = version
            if self._asleep:
                await self._wake(made, ["kv_cache"])
        except Exception as error:
            raise made.told(error, f"vLLM could not take the weights of {str(folder)!r}") from error
        finally:
            if not self._paused and not self._asleep:
                await made.llm.resume_generation()
            if self._sessions is not None:
                self._sessions.go_on()

    async def _generate(self, request: GenerateRequest) -> Generation:
        made = await self._ready()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._sampled(made, request)
        except asyncio.CancelledError:
            if self._closed and self._made is not made:
                raise EngineError("the engine was closed; call start() before generating again") from None
            raise
        except EngineError:
            raise
        except Exception as error:
            raise made.told(error, "vLLM failed on a request") from error
        finally:
            self._running.discard(task)

    async def _sampled(self, made: Made, request: GenerateRequest) -> Generation:
        turn = _turn(made, request, self._adapters, made.meaning)
        if self._sessions is None or not resumable(request):
            return (await self._ordinary(made, turn)).generation()
        begun = await self._sessions.sample(turn, self._version)
        if begun is None:
            return (await self._ordinary(made, turn)).generation()
        if begun.finish != "abort":
            return begun.generation()
        return await self._go_on(made, turn, begun)

    async def _ordinary(self, made: Made, turn: Turn) -> Answer:
        """A turn as a request of its own."""
        answer = Answer()
        async with aclosing(made.stream(turn)) as outputs:
            async for output in outputs:
                answer.add(output, turn.request.params.logprobs or 0, self._version)
                answer.cached = output.num_cached_tokens or 0
        return answer

    async def _go_on(self, made: Made, turn: Turn, begun: Answer) -> Generation:
        """The rest of a turn whose session an update ended, as a request of its own behind the tokens so far."""
        request, count = turn.request, len(begun.tokens)
        rest = replace(
            request,
            input_ids=request.input_ids + begun.tokens,
            params=replace(request.params, max_tokens=turn.limit - count),
            seed=request.seed + count,
        )
        answer = await self._ordinary(made, _turn(made, rest, self._adapters, made.meaning))
        answer.cached = begun.cached
        answer.tokens = begun.tokens + answer.tokens
        answer.logprobs = begun.logprobs + answer.logprobs
        answer.versions = begun.versions + answer.versions
        answer.alternatives = begun.alternatives + answer.alternatives
        return answer.generation()


def _turn(made: Made, request: GenerateRequest, adapters: Adapters, meaning: LogprobMeaning) -> Turn:
    """A request, checked."""
    check_meaning(meaning, request.params, request.extra)
    prompt = list(request.input_ids)
    left = room(prompt, made.context_length, made.vocabulary)
    limit = min(left, request.params.max_tokens or left)
    fields = sampling_fields(
        request.params,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        extra=request.extra,
        max_tokens=limit,
        known=made.fields,
    )
    fields["structured_outputs"] = made.structured(request.extra.get("structured_outputs"))
    adapter = adapters.request(request.extra.get("adapter"))
    return Turn(replace(request, input_ids=prompt), fields, adapter, limit)


def _load_anew(kind: type[VLLMEngine], path: str, options: dict[str, Any]) -> VLLMEngine:
    return kind.from_pretrained(path, **options)
