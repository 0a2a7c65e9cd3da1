"""A vLLM that runs, asynchronous or blocking, and what has to be known of it."""

from __future__ import annotations

import gc
import uuid
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from unspool.engines.vllm.params import meaning_of
from unspool.engines.vllm.sessions import Turn
from unspool.engines.vllm.settings import Adapters, engine_arguments, quiet_vllm
from unspool.engines.vllm.weights import shapes_of
from unspool.threads import run_in_thread
from unspool.types import EngineError


class Made:
    """A vLLM and its facts.

    Attributes:
        llm: the `AsyncLLM` or `LLM`.
        meaning: what its log-probabilities are of.
        context_length: most tokens of prompt and answer together.
        vocabulary: how many tokens the model has.
        shapes: of the tensors of its checkpoint, where that can be read.
        fields: the names of vLLM's sampling parameters.
        most_sessions, most_session_tokens: what resumable sessions may take of it.
    """

    def __init__(self, llm: Any, config: Any) -> None:
        from vllm import SamplingParams

        model, cache = config.model_config, config.cache_config
        self.llm = llm
        self.meaning = meaning_of(str(model.logprobs_mode))
        self.context_length = int(model.max_model_len)
        self.vocabulary = int(model.get_vocab_size())
        self.shapes = shapes_of(Path(model.model))
        self.fields = frozenset(SamplingParams.__struct_fields__)
        self.most_sessions = max(int(config.scheduler_config.max_num_seqs) // 2, 1)
        self.most_session_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size) // 2
        self._sleeps = bool(model.enable_sleep_mode)

    @classmethod
    async def of(cls, given: Any, loaded_from: tuple[str, dict[str, Any]] | None, adapters: Adapters) -> Made:
        """Around a given `AsyncLLM`, or of one made on a thread, which takes a while.

        Raises:
            EngineError: it cannot be made, with vLLM's own reason.
        """
        llm = given
        if llm is None and loaded_from is not None:
            made: list[Any] = []  # no result: vLLM keeps the frames that it was loaded from, and these their results
            await run_in_thread(_make, made, *loaded_from, adapters)
            llm = made.pop()
        adapters.check(llm.vllm_config)
        return cls(llm, llm.vllm_config)

    async def shut_down(self) -> None:
        """End an `AsyncLLM` and its processes; from its own loop."""
        llm, self.llm = self.llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # before its socket closes: it would take that for a failure
        await run_in_thread(llm.shutdown)
        del llm
        gc.collect()  # it is part of cycles, and logs an error where it goes with the interpreter

    def stream(self, turn: Turn) -> AsyncGenerator[Any, None]:
        """The outputs of a request of its own: one, the last."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**turn.fields, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
        name = f"unspool-{uuid.uuid4().hex}"
        outputs: AsyncGenerator[Any, None] = self.llm.generate(
            tokens_input(turn.request.input_ids), params, name, lora_request=turn.adapter
        )
        return outputs

    def structured(self, wanted: Mapping[str, Any] | None) -> Any:
        """vLLM's own form of a request's `structured_outputs`."""
        return None if wanted is None else structured(wanted)

    def check_sleep(self) -> None:
        """Raises EngineError where it cannot sleep."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            raise EngineError("vLLM cannot sleep on a CPU; close() the engine to give its memory back")
        if not self._sleeps:
            raise EngineError("this vLLM cannot sleep; make it with enable_sleep_mode=True")

    def told(self, error: Exception, what: str) -> EngineError:
        """An error of vLLM's, as one of unspool's."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError) or isinstance(error.__cause__, EngineDeadError):
            return EngineError(
                "vLLM's engine core has died, and its log says why; close() and start() the engine to load it again"
            )
        if isinstance(error, VLLMClientError):
            return EngineError(f"vLLM does not take the request: {error}")
        reason = error.__cause__ or error
        return EngineError(f"{what}: {reason}")


def structured(wanted: Mapping[str, Any]) -> Any:
    """vLLM's `StructuredOutputsParams`.

    Raises:
        EngineError: not one form is asked for, or one that vLLM does not know.
    """
    from vllm.sampling_params import StructuredOutputsParams

    try:
        return StructuredOutputsParams(**dict(wanted))
    except Exception as error:  # vLLM's own, and pydantic's
        raise EngineError(
            f"structured_outputs must hold one of json, regex, choice, grammar and structural_tag, not {wanted!r}"
        ) from error


def _make(made: list[Any], path: str, options: dict[str, Any], adapters: Adapters) -> None:
    with quiet_vllm():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = dict(options)
        arguments = engine_arguments(path, adapters.folders, options.pop("dtype"), options)
        try:
            made.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))
        except Exception as error:
            raise EngineError(f"vLLM could not load {path!r}: {error}") from error
