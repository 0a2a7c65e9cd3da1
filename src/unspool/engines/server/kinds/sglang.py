"""SGLang's server: its native `/generate` with token ids, and its endpoints for weights.

Every sampling parameter is sent, the neutral ones too: what is left out a server fills in from the model's
`generation_config.json`. Seeds are followed by a server that was started with `--enable-deterministic-inference` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unspool.engines.protocol import GenerateRequest
from unspool.engines.server.http import SendError
from unspool.engines.server.kinds import Answer, Asked, End, Post, as_mapping, checked_ids, checked_logprobs
from unspool.types import EngineError

_OWN: Final = frozenset({"adapter", "structured_outputs", "sampling_params"})
_ENDS: Final[Mapping[object, End]] = {"stop": "stop", "length": "length", "abort": "abort"}
_IDS_REMEDY: Final = "it must be SGLang 0.4.7 or newer, at the address of its /generate"
_SEED_BITS: Final = 0x7FFFFFFF
_SEES_THE_ANSWER: Final = frozenset({"min_new_tokens", "presence_penalty", "frequency_penalty"})


class SGLang:
    """See `Kind`."""

    path = "/generate"
    waiting = "sglang:num_queue_reqs"
    metrics_remedy = "start the server with --enable-metrics"
    logprobs_remedy = (
        "SGLang returns none of a truncated distribution; for temperatures, start it without "
        "SGLANG_RETURN_ORIGINAL_LOGPROB"
    )
    shaping = frozenset({"sampling_params", "custom_logit_processor"})

    def body(self, asked: Asked) -> dict[str, Any]:
        params, extra = asked.request.params, asked.request.extra
        sampling = {
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **as_mapping(extra.get("sampling_params") or {}, "extra['sampling_params']"),
            **_form(extra.get("structured_outputs")),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "repetition_penalty": params.repetition_penalty,
            "sampling_seed": asked.seed & _SEED_BITS,
            "stop": list(params.stop),
            "stop_token_ids": list(asked.request.stop_token_ids),
            "skip_special_tokens": False,
            "n": 1,
        }
        if asked.max_tokens is None:
            raise EngineError("max_tokens is None and the server does not say how much fits; give a max_tokens")
        sampling["max_new_tokens"] = asked.max_tokens
        body = {
            **{name: value for name, value in extra.items() if name not in _OWN},
            "rid": asked.rid,
            "input_ids": asked.prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": params.logprobs or 0,
            "stream": False,
        }
        if extra.get("adapter"):
            body["lora_path"] = extra["adapter"]
        return body

    def read(self, data: Any, asked: Asked) -> Answer:
        answer = as_mapping(data, "the server's answer")
        meta = as_mapping(answer.get("meta_info"), "the server's `meta_info`")
        triples = meta.get("output_token_logprobs") or []
        tokens = checked_ids(answer.get("output_ids"), _IDS_REMEDY)
        logprobs = checked_logprobs([entry[0] for entry in triples], len(tokens))
        if [entry[1] for entry in triples] != tokens:
            raise EngineError("the server's log-probabilities are of other tokens than it returned")
        reason = as_mapping(meta.get("finish_reason"), "the server's `finish_reason`")
        end = _ENDS.get(reason.get("type"))
        if end is None:
            raise EngineError(f"the server ended a turn with finish_reason {dict(reason)!r:.200}")
        extra: dict[str, list[Any]] = {}
        if asked.request.params.logprobs:
            tops = meta.get("output_top_logprobs") or []
            extra["top_logprobs"] = [[(entry[1], entry[0]) for entry in place or ()] for place in tops]
        return Answer(tokens, logprobs, end, extra)

    def likeliest(self, data: Any) -> float:
        meta = as_mapping(as_mapping(data, "the server's answer").get("meta_info"), "the server's `meta_info`")
        tops = meta.get("output_top_logprobs")
        if not tops or not tops[0]:
            raise EngineError("the server returned no `output_top_logprobs`")
        return float(max(entry[0] for entry in tops[0]))

    def from_the_start(self, request: GenerateRequest) -> bool:
        sampling = request.extra.get("sampling_params") or {}
        return (
            bool(request.params.stop)
            or request.params.repetition_penalty != 1  # counts what was sampled, not the prompt
            or not {"structured_outputs", "custom_logit_processor"}.isdisjoint(request.extra)
            or not _SEES_THE_ANSWER.isdisjoint(sampling)
        )

    async def pause(self, post: Post) -> None:
        await post("/pause_generation", {"mode": "abort"})

    async def resume(self, post: Post) -> None:
        await post("/continue_generation", {})

    async def load(self, post: Post, path: Path, tag: str) -> None:
        answer = await post(
            "/update_weights_from_disk", {"model_path": str(path), "weight_version": tag, "flush_cache": True}
        )
        if as_mapping(answer, "the answer to new weights").get("success") is not True:
            raise EngineError(f"the server did not load the weights: {answer.get('message')}")

    async def tag(self, post: Post) -> str | None:
        try:
            info = await post("/get_model_info", get=True)
        except SendError as failure:
            if failure.status != 404:
                raise
            info = await post("/model_info", get=True)
        version = as_mapping(info, "the server's model_info").get("weight_version")
        return None if version is None else str(version)

    async def abort(self, post: Post, rid: str) -> None:
        await post("/abort_request", {"rid": rid})


def _form(structured: object) -> dict[str, str]:
    """`structured_outputs` in SGLang's words: grammars are texts there, and a choice is a grammar.

    Raises:
        EngineError: it is of a form that SGLang does not have.
    """
    if structured is None:
        return {}
    wanted = {name: value for name, value in as_mapping(structured, "structured_outputs").items() if value is not None}
    if len(wanted) != 1:
        raise EngineError(f"structured_outputs must have exactly one form, not {sorted(wanted)}")
    [(name, value)] = wanted.items()
    if name == "choice":
        return {"ebnf": "root ::= " + " | ".join(json.dumps(str(text)) for text in value)}
    field = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}.get(name)
    if field is None:
        raise EngineError(f"SGLang has no structured outputs of form {name!r}; use json, regex, choice or grammar")
    return {field: value if isinstance(value, str) else json.dumps(value)}
