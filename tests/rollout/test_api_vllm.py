"""`APIMultiTurnRollout` on a real vLLM server: every way to end, exact recordings, and many at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_server import ADAPTER, KEY, VLLMServer
from unspool import (
    APIMultiTurnRollout,
    ChatTemplate,
    Message,
    OpenAI,
    Record,
    Step,
    ToolManager,
    TorchEngine,
    calculator,
)
from unspool.engines.embedded import embedded_adapter, ensure_embedded_model

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")

SUMS = [(37, 25, 14), (8, 91, 3), (120, 45, 66), (5, 5, 9), (70, 12, 1), (33, 48, 20)]
IDS = {"return_token_ids": True}
BF16 = 0.3
"""Most that a log-probability of the server, which computes in bfloat16, may be from that of float32; the mean is held
to a tenth of it."""


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """What the server renders with."""
    source = (embedded_adapter() / "chat_template.jinja").read_text(encoding="utf-8")
    return ChatTemplate(str(ensure_embedded_model()), chat_template=source)


def sums(count: int = len(SUMS)) -> list[dict[str, Any]]:
    text = "State the final answer to the following arithmetic problem: {} + {} - {} ="
    return [{"messages": [{"role": "user", "content": text.format(*sum)}]} for sum in SUMS[:count]]


def hello(text: str = "Say hello.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def run(
    server: VLLMServer, trajectories: Sequence[dict[str, Any]], tools: Any = None, model: str = ADAPTER, **options: Any
) -> list[dict[str, Any]]:
    api = OpenAI(model, options.pop("api_key", KEY), f"{server.url}/v1", {"max_retries": 0})
    with APIMultiTurnRollout(api, tools, progress=False, **options) as rollout:
        return rollout(list(trajectories))


# ------------------------------------------------------------------ what ends an episode


def test_an_answer_without_calls_is_a_stop(vllm_server: VLLMServer) -> None:
    outs = run(vllm_server, sums(3), ToolManager([calculator]), sampling_params={"max_tokens": 64, "temperature": 0.0})
    assert [(out["stop_reason"], out["truncated"], out["error"]) for out in outs] == [("stop", False, None)] * 3
    first = outs[0]
    assert [message["role"] for message in first["messages"]][:3] == ["user", "assistant", "tool"]
    assert "input_ids" not in first
    call = first["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "calculator", "arguments": {"expression": "37 + 25"}}
    assert first["messages"][2] == {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": "calculator",
        "content": "62",
    }
    assert first["usage"]["completion_tokens"] >= 3 * first["turns"]


def test_an_answer_that_max_tokens_cut_is_length(vllm_server: VLLMServer) -> None:
    [out] = run(vllm_server, [hello("Count from 1 to 50.")], model="smollm2", sampling_params={"max_tokens": 4})
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("length", True, 1)
    assert out["usage"]["completion_tokens"] == 4


def test_a_model_that_must_call_tools_ends_by_max_turns(vllm_server: VLLMServer) -> None:
    closed = calculator.info()
    closed["function"]["parameters"] = {**closed["function"]["parameters"], "additionalProperties": False}
    outs = run(
        vllm_server,
        [{**trajectory, "tools": [closed]} for trajectory in sums(2)],
        ToolManager([calculator]),
        sampling_params={"max_tokens": 64, "temperature": 0.0},
        max_turns=3,
        extra_body={"tool_choice": "required"},
    )
    for out in outs:
        assert (out["stop_reason"], out["truncated"], out["turns"], out["error"]) == ("max_turns", True, 3, None)
        roles = [message["role"] for message in out["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert all(message["tool_calls"] for message in out["messages"] if message["role"] == "assistant")


def test_a_tool_that_is_required_at_first_only_leaves_the_model_free_to_answer(vllm_server: VLLMServer) -> None:
    def held(turn: int) -> dict[str, Any]:
        return {"tool_choice": "required"} if turn == 0 else {"tool_choice": "none"}

    greedy = {"max_tokens": 64, "temperature": 0.0}
    [out] = run(vllm_server, [hello("3 + 4?")], ToolManager([calculator]), sampling_params=greedy, extra_body=held)
    assert (out["stop_reason"], out["turns"]) == ("stop", 2)
    assert out["messages"][1]["tool_calls"]


def test_what_fails_is_an_api_error_that_says_what(vllm_server: VLLMServer) -> None:
    class Broken(ToolManager):
        async def step(self, message: Message) -> Step:
            raise RuntimeError("no tools today")

    [refused] = run(vllm_server, [hello()], api_key="another")
    [unknown] = run(vllm_server, [hello()], model="nobody")
    required = {"tool_choice": "required"}
    [broken] = run(vllm_server, sums(1), Broken([calculator]), sampling_params={"max_tokens": 64}, extra_body=required)
    assert [out["stop_reason"] for out in (refused, unknown, broken)] == ["api_error"] * 3
    assert refused["error"].startswith("AuthenticationError: Error code: 401")
    assert unknown["error"].startswith("NotFoundError: Error code: 404")
    assert (broken["error"], broken["turns"]) == ("RuntimeError: no tools today", 1)


# ------------------------------------------------------------------ recording


def test_recorded_turns_are_what_a_token_level_rollout_would_have(
    vllm_server: VLLMServer, template: ChatTemplate
) -> None:
    taught = TorchEngine.from_pretrained(ensure_embedded_model(), adapter=embedded_adapter(), dtype="float32")
    tools = ToolManager([calculator])
    params = {"max_tokens": 64, "temperature": 0.8}
    outs = run(vllm_server, sums(), tools, sampling_params=params, extra_body=IDS, seed=3)
    assert [out["error"] for out in outs] == [None] * len(SUMS)
    canonical = 0
    for out in outs:
        assert len(out["input_ids"]) == len(out["labels"]) == len(out["logprobs"]) == len(out["versions"])
        assert sum(out["loss_mask"]) == out["usage"]["completion_tokens"]
        compare_with_float32(taught, out, temperature=0.8)
        if "branches" in out:
            continue
        canonical += 1
        record = Record.from_trajectory(out)
        start = 0
        for span in record.spans:
            said, before = out["messages"][span.message :], out["input_ids"][:start]
            if span.origin == "prompt":
                assert list(span.tokens) == template.encode(out["messages"][:1], tools.tool_infos())
            elif span.origin == "bridge":
                assert list(span.tokens) == template.bridge(before, said[:1], tools.tool_infos())
            else:
                read = template.parse(list(span.tokens), before)
                assert read.content == said[0]["content"]
                calls = [call["function"] for call in said[0].get("tool_calls", [])]
                assert [(c.name, c.arguments) for c in read.tool_calls] == [(c["name"], c["arguments"]) for c in calls]
            start += len(span.tokens)
    assert canonical >= len(SUMS) - 2  # the others have a turn whose tokens are not those of its text


def compare_with_float32(taught: TorchEngine, out: dict[str, Any], temperature: float) -> None:
    with torch.no_grad():
        logits = taught.model(torch.tensor([out["input_ids"]])).logits[0].float() / temperature
    scores = logits.log_softmax(-1)
    places = [place for place, bit in enumerate(out["loss_mask"]) if bit]
    errors = [abs(scores[place - 1, out["input_ids"][place]].item() - out["logprobs"][place]) for place in places]
    assert max(errors) < BF16
    assert sum(errors) / len(errors) < BF16 / 10


class GoesOn:
    """A person who says one thing after every turn."""

    def tool_infos(self) -> list[dict[str, Any]]:
        return []

    def wants(self, message: Message) -> bool:
        return True

    async def step(self, message: Message) -> Step:
        return Step([{"role": "user", "content": "Go on."}])


def test_a_turn_in_other_tokens_than_its_text_has_branches_the_record(
    vllm_server: VLLMServer, template: ChatTemplate
) -> None:
    letters = [template.tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert len(template.tokenizer.encode("the", add_special_tokens=False)) == 1
    held = {
        **IDS,
        "allowed_token_ids": [*letters, *template.stop_token_ids],
        "logit_bias": {str(template.stop_token_ids[0]): -100},
    }

    def extra(turn: int) -> dict[str, Any]:
        """The first turn is letters that the tokenizer would join, and ends where they say `he`."""
        return {**held, "stop": ["he"], "include_stop_str_in_output": True} if turn == 0 else IDS

    [out] = run(
        vllm_server,
        [hello()],
        GoesOn(),
        model="smollm2",
        sampling_params={"max_tokens": 200},
        max_turns=2,
        extra_body=extra,
        seed=1,
    )
    assert out["error"] is None
    said = out["messages"][1]["content"]
    assert said.endswith("he")
    assert [branch["cause"] for branch in out["branches"]] == [None, "bpe"]
    first = out["branches"][0]["input_ids"]
    assert set(first[-len(said) :]) <= set(letters)
    assert out["input_ids"][: len(first)] != first
    rendered = template.encode(out["messages"][:3])
    assert out["input_ids"][: len(rendered)] == rendered


# ------------------------------------------------------------------ many at once


class Connections(threading.Thread):
    """The most connections to a port that this process opened and had at once, looked at all the time."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port, self._over = port, threading.Event()
        self._before = self._open()
        self.most = self.threads = 0

    def _open(self) -> set[str]:
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return {local for _, local, remote, state, *_ in rows if state == "01" and int(remote[9:], 16) == self._port}

    def run(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, len(self._open() - self._before))
            self.threads = max(self.threads, threading.active_count())

    def end(self) -> None:
        self._over.set()
        self.join()


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="connections are counted in Linux's /proc")
def test_200_trajectories_on_concurrency_64_use_64_connections_and_80_threads_at_most(vllm_server: VLLMServer) -> None:
    already = threading.active_count()
    looking = Connections(vllm_server.port)
    looking.start()
    trajectories = [hello(f"Say the number {n}.") for n in range(200)]
    try:
        outs = run(
            vllm_server, trajectories, model="smollm2", sampling_params={"max_tokens": 8, "seed": 2}, concurrency=64
        )
    finally:
        looking.end()
    assert [out["messages"][0] for out in outs] == [trajectory["messages"][0] for trajectory in trajectories]
    assert [out["error"] for out in outs] == [None] * 200
    assert {out["stop_reason"] for out in outs} <= {"stop", "length"}
    assert 32 < looking.most <= 64
    assert looking.threads - already < 80
