"""`VLLMSampler`: a whole batch at once, with vLLM's blocking `LLM`.

What this module promises: the answers are as long as the batch and in its order; each has its own seed, limit, stop
tokens, adapter and form; log-probabilities are those of the distribution that tokens were drawn from.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from unspool.engines.protocol import SampledSequence, SampleResponse
from unspool.engines.vllm.answers import Answer
from unspool.engines.vllm.made import Made, structured
from unspool.engines.vllm.params import check_meaning, room, sampling_fields
from unspool.engines.vllm.settings import Adapters, engine_arguments, quiet_vllm
from unspool.engines.vllm.weights import checkpoint
from unspool.types import EngineError, InvalidTypeError, SamplingParams

_OF_BATCH = frozenset({"input_ids", "session", "seed", "max_tokens", "stop_token_ids"})


class VLLMSampler:
    """A blocking batch sampler over `vllm.LLM`; give it to a rollout as it is, or behind `Batching`.

    Args:
        llm: an `LLM` that you made. See `from_pretrained` for a sampler that makes its own.
        adapters: folders of LoRA adapters, by the names that batch items use.
        version: of the weights as they are.
    """

    def __init__(self, llm: Any, *, adapters: Mapping[str, str | Path] | None = None, version: int = 0) -> None:
        if isinstance(llm, str | Path):
            raise InvalidTypeError(f"VLLMSampler takes an LLM; load {str(llm)!r} with VLLMSampler.from_pretrained")
        if not hasattr(llm, "llm_engine"):
            raise InvalidTypeError(f"VLLMSampler takes an LLM, not {type(llm).__name__}; VLLMEngine takes an AsyncLLM")
        self.version = version
        self._first_version = version
        self._adapters = Adapters(adapters)
        self._adapters.check(llm.llm_engine.vllm_config)
        self._made: Made | None = Made(llm, llm.llm_engine.vllm_config)
        self.context_length = self._made.context_length
        self._loaded_from: tuple[str, dict[str, Any]] | None = None
        self._alone = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        dtype: str = "auto",
        version: int = 0,
        **engine_args: Any,
    ) -> Self:
        """Load a model folder (or hub name); see `VLLMEngine.from_pretrained` for the arguments.

        Such a sampler pickles, as these arguments: it is loaded anew where it is unpickled.

        Raises:
            EngineError: it cannot be loaded, with vLLM's own reason.
        """
        folders = Adapters(adapters).folders
        with quiet_vllm():
            from vllm import LLM

            try:
                llm = LLM(**engine_arguments(str(path), folders, dtype, engine_args))
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"vLLM could not load {str(path)!r}: {error}") from error
        sampler = cls(llm, adapters=adapters, version=version)
        sampler._loaded_from = (str(path), {"adapters": adapters, "dtype": dtype, **engine_args})
        return sampler

    def __reduce__(self) -> tuple[Any, ...]:
        if self._loaded_from is None:
            raise InvalidTypeError(
                "a VLLMSampler around an LLM cannot be pickled; make it in the process that uses it, or with "
                "VLLMSampler.from_pretrained"
            )
        path, options = self._loaded_from
        return _load_anew, (type(self), path, options | {"version": self._first_version})

    def sample(self, batch: list[dict[str, Any]], sampling_params: SamplingParams) -> list[SampleResponse]:
        """Answer a batch (see `unspool.engines.protocol.Sampler`) with one call of vLLM.

        Beside the protocol's, an item may hold `adapter`, `structured_outputs` and fields of vLLM's SamplingParams.

        Raises:
            EngineError: an item cannot be served, or vLLM failed on the batch.
        """
        made, params = self._open(), SamplingParams.of(sampling_params)
        if not batch:
            return []
        items = [self._item(made, item, params) for item in batch]
        with self._alone:
            try:
                outputs = made.llm.generate(
                    [{"prompt_token_ids": item["input_ids"]} for item in batch],
                    [fields for fields, _ in items],
                    use_tqdm=False,
                    lora_request=[adapter for _, adapter in items] if self._adapters.folders else None,
                )
            except Exception as error:
                raise made.told(error, f"vLLM failed on a batch of {len(batch)}") from error
        return [self._answer(output, params) for output in outputs]

    def update_weights(self, source: Any, version: int | None = None) -> None:
        """Take new weights; see `VLLMEngine.update_weights`."""
        made = self._open()
        with self._alone, checkpoint(source, made.shapes) as folder:
            new = self.version + 1 if version is None else version
            try:
                made.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                made.llm.reset_prefix_cache()
            except Exception as error:
                raise made.told(error, f"vLLM could not take the weights of {str(folder)!r}") from error
            self.version = new

    def close(self) -> None:
        """Shut an `LLM` down that the sampler made, and give its memory back; called again, do nothing."""
        made, self._made = self._made, None
        if made is not None and self._loaded_from is not None:
            made.llm.llm_engine.engine_core.shutdown()

    def _open(self) -> Made:
        if self._made is None:
            raise EngineError("the sampler was closed; make another one")
        return self._made

    def _item(self, made: Made, item: Mapping[str, Any], params: SamplingParams) -> tuple[Any, Any]:
        """vLLM's sampling parameters and adapter for one item."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = {name: value for name, value in item.items() if name not in _OF_BATCH}
        check_meaning(made.meaning, params, extra)
        left = room(item["input_ids"], made.context_length, made.vocabulary)
        fields = sampling_fields(
            params,
            seed=item.get("seed", 0),
            stop_token_ids=item.get("stop_token_ids", ()),
            extra=extra,
            max_tokens=min(left, item.get("max_tokens") or params.max_tokens or left),
            known=made.fields,
        )
        wanted = extra.get("structured_outputs")
        fields["structured_outputs"] = None if wanted is None else structured(wanted)
        own = VLLMSamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
        return own, self._adapters.request(extra.get("adapter"))

    def _answer(self, output: Any, params: SamplingParams) -> SampleResponse:
        answer = Answer()
        answer.add(output, params.logprobs or 0, self.version)
        made = answer.generation()
        return SampleResponse([SampledSequence(made.stop_reason, made.tokens, made.logprobs)])


def _load_anew(kind: type[VLLMSampler], path: str, options: dict[str, Any]) -> VLLMSampler:
    return kind.from_pretrained(path, **options)
