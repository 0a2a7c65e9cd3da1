"""vLLM's server: `/v1/completions` with token prompts, and its developer endpoints for weights.

Every sampling parameter is sent, the neutral ones too: what is left out a server fills in from the model's
`generation_config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unspool.engines.protocol import GenerateRequest
from unspool.engines.server.http import SendError
from unspool.engines.server.kinds import Answer, Asked, End, Post, as_mapping, checked_ids, checked_logprobs
from unspool.types import EngineError

_OWN: Final = frozenset({"adapter"})
_ENDS: Final[Mapping[object, End]] = {"stop": "stop", "length": "length", "abort": "abort"}
_IDS_REMEDY: Final = (
    "it must be vLLM 0.10.2 or newer, which understands `return_token_ids`, at the address of its /v1/completions"
)
_TOKEN_ID: Final = "token_id:"
_SEES_THE_ANSWER: Final = frozenset(
    {
        *("structured_outputs", "response_format", "presence_penalty", "frequency_penalty", "min_tokens"),
        *("bad_words", "thinking_token_budget", "repetition_detection"),
    }
)


class VLLM:
    """See `Kind`."""

    path = "/v1/completions"
    waiting = "vllm:num_requests_waiting"
    metrics_remedy = "start the server without --disable-log-stats"
    logprobs_remedy = "start the server with `--logprobs-mode processed_logprobs`"
    shaping = frozenset(
        {
            *("min_p", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
            "min_tokens",
        }
    )

    def body(self, asked: Asked) -> dict[str, Any]:
        params, extra = asked.request.params, asked.request.extra
        neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {
            **neutral,
            **{name: value for name, value in extra.items() if name not in _OWN},
            "model": extra.get("adapter") or asked.model,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "repetition_penalty": params.repetition_penalty,
            "seed": asked.seed,
            "stop": list(params.stop),
            "stop_token_ids": list(asked.request.stop_token_ids),
            "skip_special_tokens": False,
            "logprobs": params.logprobs or 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "n": 1,
            "stream": False,
            "echo": False,
        }

    def read(self, data: Any, asked: Asked) -> Answer:
        choice = _choice(data)
        tokens = checked_ids(choice.get("token_ids"), _IDS_REMEDY)
        fed = choice.get("prompt_token_ids")
        if fed is not None and fed != asked.prompt:
            raise EngineError(
                f"the server fed the model {len(fed)} prompt tokens that are not the {len(asked.prompt)} it was given"
            )
        given = as_mapping(choice.get("logprobs") or {}, "the server's `logprobs`")
        logprobs = checked_logprobs(given.get("token_logprobs") or [], len(tokens))
        end = _ENDS.get(choice.get("finish_reason"))
        if end is None:
            raise EngineError(f"the server ended a turn with finish_reason {choice.get('finish_reason')!r}")
        extra: dict[str, list[Any]] = {}
        if asked.request.params.logprobs:
            extra["top_logprobs"] = [_pairs(entry) for entry in given.get("top_logprobs") or []]
        return Answer(tokens, logprobs, end, extra)

    def likeliest(self, data: Any) -> float:
        given = as_mapping(_choice(data).get("logprobs") or {}, "the server's `logprobs`")
        return max(value for _, value in _pairs((given.get("top_logprobs") or [{}])[0]))

    def from_the_start(self, request: GenerateRequest) -> bool:
        return bool(request.params.stop) or not _SEES_THE_ANSWER.isdisjoint(request.extra)

    async def pause(self, post: Post) -> None:
        await _developer(post, "/pause?mode=abort")

    async def resume(self, post: Post) -> None:
        await _developer(post, "/resume")

    async def load(self, post: Post, path: Path, tag: str) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await _developer(post, "/collective_rpc", reload)
        dropped = await _developer(post, "/reset_prefix_cache")
        if isinstance(dropped, Mapping) and dropped.get("success") is False:
            raise EngineError("the server could not drop what it had cached of the old weights")
        try:
            await post("/update_weight_version", {"new_version": tag})
        except SendError as failure:
            if failure.status != 404:  # a server that remembers none
                raise

    async def tag(self, post: Post) -> str | None:
        try:
            info = await post("/weight_info", get=True)
        except SendError as failure:
            if failure.status == 404:
                return None
            raise
        return str(as_mapping(info, "the server's weight_info").get("weight_version"))

    async def abort(self, post: Post, rid: str) -> None:
        """Nothing: a closed connection is enough."""


async def _developer(post: Post, path: str, body: Mapping[str, Any] | None = None) -> Any:
    try:
        return await post(path, body)
    except SendError as failure:
        if failure.status == 404:
            raise SendError(
                f"{failure}; vLLM has it in developer mode only: start the server with VLLM_SERVER_DEV_MODE=1 in its "
                "environment",
                status=404,
                again=False,
            ) from failure
        raise


def _choice(data: Any) -> Mapping[str, Any]:
    choices = as_mapping(data, "the server's answer").get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise EngineError(f"the server's answer has {choices!r:.80} as `choices`, where a list of one was asked for")
    return as_mapping(choices[0], "the server's choice")


def _pairs(entry: Mapping[str, float]) -> list[tuple[int, float]]:
    """Alternatives at one place as (id, log-probability), from names such as `token_id:42`."""
    return [(int(name.removeprefix(_TOKEN_ID)), value) for name, value in entry.items() if name.startswith(_TOKEN_ID)]
