"""What is sent to the two kinds of servers, and what is made of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.server.asking import PROMPT, serving, turn
from tests.engines.server.fakes import FakeServer, FakeSGLang, FakeVLLM, changed
from unspool.types import EngineError


@pytest.fixture
def vllm() -> Iterator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


@pytest.fixture
def sglang() -> Iterator[FakeSGLang]:
    with FakeSGLang() as server:
        yield server


@pytest.fixture(params=[FakeVLLM, FakeSGLang], ids=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with request.param() as server:
        yield server


async def test_the_servers_own_ids_and_log_probabilities_are_the_answer(server: FakeServer) -> None:
    async with serving(server) as engine:
        answer = await engine.generate(turn())
    assert answer.tokens == [14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 2]
    assert answer.logprobs == pytest.approx([-1 - token / 10_000 for token in answer.tokens])
    assert answer.versions == [0] * 11
    assert answer.stop_reason == "stop"
    assert answer.extra == {}


async def test_max_tokens_ends_an_answer_as_length(server: FakeServer) -> None:
    async with serving(server) as engine:
        answer = await engine.generate(turn(max_tokens=3))
    assert (answer.tokens, answer.stop_reason) == ([14, 15, 16], "length")


async def test_without_max_tokens_as_many_are_asked_for_as_fit(server: FakeServer) -> None:
    async with serving(server) as engine:
        await engine.generate(turn(max_tokens=None))
    body = server.bodies[-1]
    assert (body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]) == 997


async def test_vllm_gets_every_parameter_said_the_neutral_ones_too(vllm: FakeVLLM) -> None:
    async with serving(vllm) as engine:
        await engine.generate(turn(seed=7, temperature=0.5, top_p=0.9, stop="\n\n"))
    assert vllm.bodies[-1] == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 7,
        "stop": ["\n\n"],
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "n": 1,
        "stream": False,
        "echo": False,
    }


async def test_vllm_takes_adapter_structured_outputs_and_whatever_else_from_extra(vllm: FakeVLLM) -> None:
    extra = {"adapter": "an-adapter", "structured_outputs": {"regex": "[0-9]+"}, "min_p": 0.1, "priority": 3}
    async with serving(vllm) as engine:
        await engine.generate(turn(extra=extra))
    body = vllm.bodies[-1]
    assert body["model"] == "an-adapter"
    assert body["structured_outputs"] == {"regex": "[0-9]+"}
    assert (body["min_p"], body["priority"]) == (0.1, 3)
    assert "adapter" not in body


async def test_sglang_gets_ids_parameters_and_a_name_of_ours(sglang: FakeSGLang) -> None:
    async with serving(sglang) as engine:
        await engine.generate(turn(seed=2**40 + 5, temperature=0.5, stop="\n\n", extra={"adapter": "an-adapter"}))
    body = dict(sglang.bodies[-1])
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": PROMPT,
        "return_logprob": True,
        "top_logprobs_num": 0,
        "stream": False,
        "lora_path": "an-adapter",
        "sampling_params": {
            "max_new_tokens": 20,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "sampling_seed": 5,
            "stop": ["\n\n"],
            "stop_token_ids": [2],
            "skip_special_tokens": False,
            "n": 1,
        },
    }


@pytest.mark.parametrize(
    ("form", "field", "said"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"choice": ["yes", 'no "way"']}, "ebnf", 'root ::= "yes" | "no \\"way\\""'),
    ],
    ids=["schema", "schema as text", "regex", "grammar", "choice"],
)
async def test_sglang_has_structured_outputs_in_its_own_words(
    sglang: FakeSGLang, form: dict[str, Any], field: str, said: str
) -> None:
    async with serving(sglang) as engine:
        await engine.generate(turn(extra={"structured_outputs": form}))
    assert sglang.bodies[-1]["sampling_params"][field] == said
    assert "structured_outputs" not in sglang.bodies[-1]


async def test_sglang_refuses_a_form_that_it_does_not_have(sglang: FakeSGLang) -> None:
    async with serving(sglang) as engine:
        with pytest.raises(EngineError, match="no structured outputs of form 'poem'"):
            await engine.generate(turn(extra={"structured_outputs": {"poem": "x"}}))


async def test_alternatives_come_beside_the_answer_where_they_are_asked_for(server: FakeServer) -> None:
    async with serving(server) as engine:
        answer = await engine.generate(turn(max_tokens=2, logprobs=1))
    assert answer.extra["top_logprobs"] == [[(14, pytest.approx(-1.0014))], [(15, pytest.approx(-1.0015))]]


def _drop_logprob(answer: dict[str, Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["logprobs"]["token_logprobs"].pop()
    else:
        answer["meta_info"]["output_token_logprobs"].pop()


def _add_logprob(answer: dict[str, Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["logprobs"]["token_logprobs"].append(-1.0)
    else:
        answer["meta_info"]["output_token_logprobs"].append([-1.0, 9, None])


def _drop_ids(answer: dict[str, Any]) -> None:
    (answer["choices"][0] if "choices" in answer else answer).pop("token_ids" if "choices" in answer else "output_ids")


def _logits(answer: dict[str, Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = 17.5
    else:
        answer["meta_info"]["output_token_logprobs"][0][0] = 17.5


def _strange_end(answer: dict[str, Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["finish_reason"] = "bored"
    else:
        answer["meta_info"]["finish_reason"] = {"type": "bored"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_drop_logprob, "returned 10 log-probabilities for 11 tokens"),
        (_add_logprob, "returned 12 log-probabilities for 11 tokens"),
        (_drop_ids, "returned no token ids; it must be (vLLM 0.10.2|SGLang 0.4.7) or newer"),
        (_logits, "returned 17.5 as a log-probability"),
        (_strange_end, "finish_reason .*bored"),
    ],
    ids=["too few", "too many", "no ids", "logits", "unknown end"],
)
async def test_an_answer_that_breaks_the_contract_is_an_error_and_is_not_asked_for_again(
    server: FakeServer, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    async with serving(server) as engine:
        server.faults = [changed(change)]
        with pytest.raises(EngineError, match=says):
            await engine.generate(turn())
        assert len(server.bodies) == 1
        assert (await engine.generate(turn())).stop_reason == "stop"


async def test_a_server_that_feeds_other_ids_than_it_was_given_is_refused(vllm: FakeVLLM) -> None:
    async with serving(vllm) as engine:
        vllm.faults = [changed(lambda answer: answer["choices"][0]["prompt_token_ids"].insert(0, 1))]
        with pytest.raises(EngineError, match="fed the model 4 prompt tokens that are not the 3 it was given"):
            await engine.generate(turn())


async def test_sglangs_log_probabilities_must_be_of_the_tokens_that_it_returned(sglang: FakeSGLang) -> None:
    def other(answer: dict[str, Any]) -> None:
        answer["meta_info"]["output_token_logprobs"][3][1] = 999

    async with serving(sglang) as engine:
        sglang.faults = [changed(other)]
        with pytest.raises(EngineError, match="of other tokens than it returned"):
            await engine.generate(turn())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_samples": 2}, "num_samples is 2"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is 1"),
        ({"prompt": [1] * 1000}, "1000 tokens and leaves no room in the servers' context of 1000"),
    ],
)
async def test_what_no_server_can_answer_is_refused_before_it_is_sent(
    vllm: FakeVLLM, options: dict[str, Any], says: str
) -> None:
    async with serving(vllm) as engine:
        with pytest.raises(EngineError, match=says):
            await engine.generate(turn(**options))
    assert vllm.bodies == []
