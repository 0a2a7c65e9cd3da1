"""`TorchEngine`: a causal language model of `transformers`, sampled in this process.

What this module promises:

- Token ids in, token ids out: every token that was sampled is in the answer, with the log-probability of the
  distribution that it was drawn from and the version of the weights that produced it.
- Requests from any number of event loops share one thread and one batch, which rows join and leave between steps.
- Each request has its own random numbers. In float32 the same request with the same seed gives the same tokens
  whatever runs beside it; in bfloat16 the size of the batch changes the arithmetic, and with it the tokens.
- The keys and values of a conversation are kept between its turns (`GenerateRequest.session`): a turn computes what
  is new in it. Tokens and log-probabilities are those of a turn computed whole, to rounding.
- After new weights every token comes from a forward pass of those weights alone: what was cached of the running
  rows is computed anew, and what was kept between turns is dropped.
- A forked child has a thread of its own, made at its first request. An engine pickles as where it was loaded from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from unspool.engines.protocol import EngineBase, GenerateRequest, Generation
from unspool.engines.torch.model import Model, text_config
from unspool.engines.torch.row import Decoder, Row, StopStrings
from unspool.engines.torch.sampling import stream
from unspool.engines.torch.scheduler import Scheduler
from unspool.engines.torch.weights import Weights, load
from unspool.types import EngineError, InvalidTypeError, InvalidValueError


class TorchEngine(EngineBase):
    """See the module's docstring.

    Greedy requests (temperature 0) report the model's own log-probability, at temperature 1 and without penalty or
    truncation. A request whose `params.logprobs` is not None, or whose `extra["raw_logprobs"]` is true, gets that
    value for every token beside the other one, in `Generation.extra["raw_logprobs"]`; `params.logprobs=n` also gets the
    n likeliest tokens at each place, `(id, log-probability at temperature 1)`, in `extra["top_logprobs"]`.
    `prompt_logprobs` are not given: a request that asks for them is refused, and so is one whose `extra` has any other
    name (`structured_outputs` and `adapter` are for engines that have them).

    Args:
        model: a causal language model, with one engine. It is used as it is, not copied; a trainer may share it, and
            must hold the engine (`pause`) for each forward and backward pass of its own and while it changes the
            weights, then say so (`update_weights(model)`).
        device: where to move the model; None: leave it where it is.
        tokenizer: needed for stop strings only.
        max_batch_tokens: most tokens, padding included, in one forward pass and its cache.
        max_batch_size: most rows in the batch.
        max_kept_tokens: most tokens whose keys and values are kept between the turns of conversations; 0: none,
            each turn is computed from its first token on; None: as many as `max_batch_tokens`.
        version: of the weights as they are.
        stop_token_ids: end a turn where a request names none; None: the model's own end tokens.
        threads: CPU threads of the computation; None: as torch has it.
    """

    logprobs = True

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        device: str | torch.device | None = None,
        tokenizer: Decoder | None = None,
        max_batch_tokens: int = 65_536,
        max_batch_size: int = 128,
        max_kept_tokens: int | None = None,
        version: int = 0,
        stop_token_ids: Iterable[int] | None = None,
        threads: int | None = None,
    ) -> None:
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_batch_size", max_batch_size)):
            if value < 1:
                raise InvalidValueError(f"{name} must be at least 1, not {value}")
        if max_kept_tokens is not None and max_kept_tokens < 0:
            raise InvalidValueError(f"max_kept_tokens must be at least 0 (keep nothing), not {max_kept_tokens}")
        _check_kind(model)
        if device is not None:
            model.to(device)
        self.model = model
        self.tokenizer = tokenizer
        self.context_length = _context_length(model)
        self._vocabulary = _vocabulary(model)
        self._stops = frozenset(_end_tokens(model) if stop_token_ids is None else stop_token_ids)
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_size = max_batch_size
        self._max_kept_tokens = max_batch_tokens if max_kept_tokens is None else max_kept_tokens
        self._threads = threads
        self._version = version
        self._weights = Weights(model)
        self._lock = threading.Lock()
        self._scheduler: Scheduler | None = None
        self._stop: weakref.finalize[[], Any] | None = None
        self._closed = False
        self._loaded_from: tuple[str, dict[str, Any]] | None = None
        _engines.add(self)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        adapter: str | Path | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Self:
        """Load a model folder (or hub name) with its tokenizer.

        `adapter` is the folder of a PEFT LoRA, merged in float32 before the cast to `dtype` ("float32", "bfloat16",
        "float16", or "auto" for that of the folder). `options` go to the constructor.

        Such an engine pickles, as these arguments: it is loaded anew where it is unpickled, with the weights and the
        version that it began with.
        """
        given = {**options, "adapter": adapter, "dtype": dtype, "device": device, "threads": threads}
        model, tokenizer, base = load(path, adapter=adapter, dtype=dtype, trust_remote_code=trust_remote_code)
        options.setdefault("tokenizer", tokenizer)
        engine = cls(model, device=device, threads=threads, **options)
        engine._weights.base = base
        engine._loaded_from = (str(path), {**given, "trust_remote_code": trust_remote_code})
        return engine

    def __reduce__(self) -> tuple[Any, ...]:
        if self._loaded_from is None:
            raise InvalidTypeError(
                "a TorchEngine around a model cannot be pickled; make the engine in the process that uses it, or load "
                "it with TorchEngine.from_pretrained"
            )
        return _load_anew, (type(self), *self._loaded_from)

    # ------------------------------------------------------------------ life

    @property
    def version(self) -> int:
        """The version of the weights that the next token is sampled with."""
        return self._scheduler.version if self._scheduler is not None else self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self._scheduler is not None:
            self._scheduler.version = value

    async def start(self) -> None:
        """Start the thread, again after `close` too. Requests do so themselves where the engine was not closed."""
        self._closed = False
        self._running()

    async def close(self) -> None:
        """Fail what is running, and end the thread."""
        with self._lock:
            self._closed = True
            scheduler, stop = self._scheduler, self._stop
            self._scheduler = self._stop = None
        if scheduler is not None and stop is not None:
            scheduler.ask_to_stop()
            await asyncio.wrap_future(scheduler.ended)
            stop()
            self._version = scheduler.version

    def end_session(self, session: str) -> None:
        """Drop what is kept of the session."""
        scheduler = self._scheduler
        if scheduler is not None:
            scheduler.end_session(session)

    def _forked(self) -> None:
        """In a forked child: the scheduler's thread has stayed behind, and whoever held a lock."""
        self._lock = threading.Lock()
        if self._stop is not None:
            self._stop.detach()
        if self._scheduler is not None:
            self._version = self._scheduler.version
        self._scheduler = self._stop = None

    async def pause(self) -> None:
        """Hold; on return no forward pass runs, and the weights may be changed in place."""
        await asyncio.wrap_future(self._running().pause())

    async def resume(self) -> None:
        """Go on."""
        if self._scheduler is not None:
            await asyncio.wrap_future(self._scheduler.resume())

    async def update_weights(self, source: Any, version: int | None = None) -> None:
        """Take new weights, between two steps of whatever is running.

        `source` is a module (the engine's own too: then it has been changed in place), a state dict, the folder of a
        model, or the folder of a LoRA adapter, which is merged in float32 with the weights below any earlier adapter.
        Running rows go on: what they hold in the cache is computed anew with the new weights, so that every token's
        log-probability is that of a forward pass of its own version. `version` counts on where it is not given.

        Raises:
            EngineError: names, shapes or files do not fit the model; nothing has been changed then.
        """
        scheduler = self._running()

        def apply() -> None:
            self._weights.update(source)
            scheduler.refresh(scheduler.version + 1 if version is None else version)

        await asyncio.wrap_future(scheduler.command(apply))

    def _running(self) -> Scheduler:
        with self._lock:
            if self._closed:
                raise EngineError("the engine was closed; call start() before using it again")
            if self._scheduler is None:
                self._scheduler = Scheduler(
                    Model(self.model),
                    max_batch_tokens=self._max_batch_tokens,
                    max_batch_size=self._max_batch_size,
                    max_kept_tokens=self._max_kept_tokens,
                    version=self._version,
                    threads=self._threads,
                )
                # Runs when the engine is dropped, or at exit: no thread is left within the model then.
                self._stop = weakref.finalize(self, self._scheduler.stop)
            return self._scheduler

    # ------------------------------------------------------------------ generating

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn.

        Raises:
            EngineError: the request cannot be served, or the model failed on it; no other request is touched.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Generation] = loop.create_future()

        def settle(outcome: Generation | EngineError) -> None:
            if answer.done():
                return
            if isinstance(outcome, EngineError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        def resolve(outcome: Generation | EngineError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, outcome)

        row = self._row(request)
        row.resolve = resolve
        scheduler = self._running()
        scheduler.submit(row)
        try:
            return await answer
        finally:
            if not answer.done() or answer.cancelled():
                scheduler.cancel(row)

    def _row(self, request: GenerateRequest) -> Row:
        """The request, checked, as a row."""
        params, prompt = request.params, list(request.input_ids)
        if not prompt:
            raise EngineError("input_ids is empty; a prompt needs at least one token")
        if params.num_samples != 1:
            raise EngineError(f"num_samples is {params.num_samples}; send one request for each sample")
        if params.prompt_logprobs is not None:
            raise EngineError(
                f"prompt_logprobs is {params.prompt_logprobs}, and TorchEngine gives none for prompts; leave it None"
            )
        _check_extra(request.extra)
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._vocabulary:
            raise EngineError(
                f"token id {low if low < 0 else high} is not in the model's vocabulary of {self._vocabulary}; "
                "encode with the tokenizer of this model"
            )
        strings = None
        if params.stop:
            if self.tokenizer is None:
                raise EngineError(f"stop strings {params.stop!r} need a tokenizer; give TorchEngine(tokenizer=...)")
            strings = StopStrings(self.tokenizer, params.stop)
        return Row(
            prompt=prompt,
            params=params,
            stops=frozenset(request.stop_token_ids) or self._stops,
            limit=self._limit(len(prompt), params.max_tokens),
            random=stream(request.seed),
            resolve=lambda _: None,
            session=request.session,
            stop_strings=strings,
            wants_raw=params.logprobs is not None or bool(request.extra.get("raw_logprobs")),
        )

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        """Most new tokens of a row. The context may end an answer early; the memory bound only one without a limit."""
        left = sys.maxsize if self.context_length is None else self.context_length - prompt
        if left < 1:
            raise EngineError(
                f"the prompt has {prompt} tokens and leaves no room in the model's context of {self.context_length}; "
                "shorten it"
            )
        room = self._max_batch_tokens - prompt
        wanted = min(left, max(room, 1) if max_tokens is None else max_tokens)
        if wanted > room:
            raise EngineError(
                f"a prompt of {prompt} tokens with max_tokens={max_tokens} exceeds max_batch_tokens="
                f"{self._max_batch_tokens}; raise the bound or ask for less"
            )
        return wanted


_engines: weakref.WeakSet[TorchEngine] = weakref.WeakSet()


def _in_forked_child() -> None:
    for engine in list(_engines):
        engine._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def _load_anew(kind: type[TorchEngine], path: str, options: dict[str, Any]) -> TorchEngine:
    return kind.from_pretrained(path, **options)


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Raises EngineError for what would have to be left undone."""
    for name, value in extra.items():
        if name == "structured_outputs":
            raise EngineError(
                "TorchEngine cannot hold an answer to a form (structured_outputs, which tool_choice asks for too); "
                "VLLMEngine, VLLMSampler and ServerEngine can"
            )
        if name == "adapter":
            raise EngineError(
                f"TorchEngine has no adapters by name, and extra asks for {value!r}: merge one "
                "(from_pretrained(adapter=...), update_weights), or take VLLMEngine, VLLMSampler or ServerEngine"
            )
        if name != "raw_logprobs":
            raise EngineError(
                f"extra has {name!r}, which TorchEngine does not know; it knows raw_logprobs, so leave it out"
            )


def _check_kind(model: torch.nn.Module) -> None:
    """Raises EngineError for what left padding and a cache of all tokens cannot serve."""
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(f"{type(model).__name__} is an encoder-decoder; give a causal language model")
    if isinstance(config, PreTrainedConfig) and any(DynamicCache(config=config).is_linear):
        raise EngineError(
            f"{type(model).__name__} keeps a recurrent state, which left padding would change; "
            "serve it with vLLM or SGLang instead"
        )


def _context_length(model: torch.nn.Module) -> int | None:
    """The model's own; with "longrope" the part of it in which a row's values do not hang on who is beside it.

    Beyond, the longest row of a batch decides the rotation of all, and what is cached has that of an earlier step.
    """
    config = text_config(model)
    value = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = [int(value)] if value else []
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # some have one a kind of layer
        if kind.get("rope_type") == "longrope" and kind.get("original_max_position_embeddings"):
            lengths.append(int(kind["original_max_position_embeddings"]))
    return min(lengths, default=None)


def _vocabulary(model: torch.nn.Module) -> int:
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embeddings.weight.shape[0])


def _end_tokens(model: torch.nn.Module) -> list[int]:
    """The end tokens of the generation config, else of the config."""
    for config in (getattr(model, "generation_config", None), text_config(model)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return [int(ids)] if isinstance(ids, int) else [int(i) for i in ids]
    return []
