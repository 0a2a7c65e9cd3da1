"""From a request to vLLM's sampling parameters, and from its outputs back, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams as VLLMSamplingParams
from vllm.logprobs import FlatLogprobs, Logprob

from unspool.engines.vllm.answers import Answer, own_logprobs, versions_of
from unspool.engines.vllm.params import check_meaning, meaning_of, room, sampling_fields
from unspool.types import EngineError, SamplingParams

KNOWN = frozenset(VLLMSamplingParams.__struct_fields__)


def fields(params: SamplingParams | None = None, **given: Any) -> dict[str, Any]:
    return sampling_fields(params or SamplingParams(), **{"seed": 0, "known": KNOWN, **given})


def test_every_parameter_reaches_vllm() -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1, stop=("x", "y"), logprobs=3
    )
    made = VLLMSamplingParams(**fields(params, seed=11, stop_token_ids=(2, 7)))
    assert (made.max_tokens, made.temperature, made.top_k, made.top_p) == (9, 0.7, 5, 0.9)
    assert (made.repetition_penalty, made.stop, made.seed, made.logprobs) == (1.1, ["x", "y"], 11, 3)
    assert (made.stop_token_ids, made.ignore_eos) == ([2, 7], True)


def test_a_request_that_names_no_stop_tokens_ends_at_the_models_own() -> None:
    assert fields()["ignore_eos"] is False


def test_text_is_made_for_stop_strings_alone_and_holds_special_tokens() -> None:
    assert fields()["detokenize"] is False
    with_stop = fields(SamplingParams(stop="\n"))
    assert with_stop["detokenize"] is True
    assert with_stop["skip_special_tokens"] is False


def test_all_tokens_are_zero_for_vllm_where_top_k_is_minus_one() -> None:
    assert fields()["top_k"] == 0


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (2**64 + 5, 5)])
def test_no_seed_is_taken_for_none(seed: int, sent: int) -> None:
    assert fields(seed=seed)["seed"] == VLLMSamplingParams(seed=sent).seed == sent


def test_fields_of_vllm_pass_through_and_the_others_are_refused() -> None:
    extra = {"min_p": 0.1, "adapter": "a", "structured_outputs": {"regex": "x"}}
    made = fields(extra=extra)
    assert made["min_p"] == 0.1
    assert not {"adapter", "structured_outputs"} & set(made)
    with pytest.raises(EngineError, match="extra has 'best_of', which vLLM's sampling parameters do not have"):
        fields(extra={"best_of": 2})
    with pytest.raises(EngineError, match="extra has 'temperature', which is a sampling parameter; give it there"):
        fields(extra={"temperature": 2})
    assert fields(extra={"ignore_eos": True})["ignore_eos"] is True


@pytest.mark.parametrize("params", [{"num_samples": 2}, {"prompt_logprobs": 0}])
def test_what_a_rollout_cannot_use_is_refused(params: dict[str, int]) -> None:
    with pytest.raises(EngineError, match=next(iter(params))):
        fields(SamplingParams(**params))


def test_a_raw_mode_refuses_the_requests_that_it_makes_wrong_and_no_other() -> None:
    raw = meaning_of("raw_logprobs")
    for good in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(temperature=0, top_k=5)):
        check_meaning(raw, good, {})
    for bad, named in (
        (SamplingParams(temperature=0.7), "temperature=0.7"),
        (SamplingParams(top_k=5), "top_k=5"),
        (SamplingParams(top_p=0.9), "top_p=0.9"),
        (SamplingParams(temperature=0, repetition_penalty=1.2), "repetition_penalty=1.2"),
    ):
        check_meaning(meaning_of("processed_logprobs"), bad, {})
        with pytest.raises(EngineError, match=f"{named} make; make it with logprobs_mode='processed_logprobs'"):
            check_meaning(raw, bad, {})
    with pytest.raises(EngineError, match=r"min_p=0\.1"):
        check_meaning(raw, SamplingParams(), {"min_p": 0.1})


def test_logits_are_no_log_probabilities() -> None:
    with pytest.raises(EngineError, match="raw_logits, which are no log-probabilities"):
        meaning_of("raw_logits")


def test_a_prompt_must_leave_room_and_hold_tokens_of_the_model() -> None:
    assert room([1, 2, 3], 10, 100) == 7
    with pytest.raises(EngineError, match="the prompt has 10 tokens and leaves no room in the context of 10"):
        room([1] * 10, 10, 100)
    with pytest.raises(EngineError, match="token id 100 is not in the model's vocabulary of 100"):
        room([1, 100], 10, 100)
    with pytest.raises(EngineError, match="token id -1"):
        room([1, -1], 10, 100)
    with pytest.raises(EngineError, match="input_ids is empty"):
        room([], 10, 100)


def flat(*places: dict[int, float]) -> FlatLogprobs:
    made = FlatLogprobs()
    for place in places:
        made.append({token: Logprob(value) for token, value in place.items()})
    return made


def output(tokens: list[int], entries: Any, finish: str | None = "stop", spans: Any = ()) -> Any:
    part = SimpleNamespace(token_ids=tokens, logprobs=entries, finish_reason=finish, weight_versions=spans)
    return SimpleNamespace(outputs=[part], num_cached_tokens=3)


def span(version: str, start: int, end: int) -> Any:
    return SimpleNamespace(version=version, start=start, end=end)


def test_of_alternatives_the_sampled_tokens_own_entry_is_taken_wherever_it_stands() -> None:
    assert own_logprobs([5, 6], flat({5: -0.5}, {6: -0.25})) == [-0.5, -0.25]
    assert own_logprobs([5, 6], flat({9: -0.1, 5: -3.0}, {6: -0.25, 8: -2.0})) == [-3.0, -0.25]
    with pytest.raises(EngineError, match="do not hold that token itself"):
        own_logprobs([5], flat({9: -0.1}))


def test_versions_are_those_of_the_spans_for_the_last_tokens() -> None:
    spans = [span("3", 0, 4), span("4", 4, 6)]
    assert versions_of(spans, 6, 9) == [3, 3, 3, 3, 4, 4]
    assert versions_of(spans, 3, 9) == [3, 4, 4]
    assert versions_of([span("default", 0, 2)], 2, 9) == [9, 9]
    assert versions_of(None, 2, 9) == [9, 9]


def test_an_answer_in_two_parts_is_one_answer() -> None:
    answer = Answer()
    answer.add(output([5], flat({5: -0.5, 9: -0.7}), None), 2, 0)
    answer.add(output([6, 2], flat({6: -0.25, 8: float("-inf")}, {2: 0.0, 1: -9.0})), 2, 0)
    made = answer.generation()
    assert (made.tokens, made.logprobs, made.versions) == ([5, 6, 2], [-0.5, -0.25, 0.0], [0, 0, 0])
    assert made.extra["cached_tokens"] == 3
    assert made.extra["top_logprobs"] == [[(5, -0.5), (9, -0.7)], [(6, -0.25)], [(2, 0.0), (1, -9.0)]]


@pytest.mark.parametrize(("reason", "stop"), [("stop", "stop"), ("length", "length"), ("repetition", "length")])
def test_reasons_to_stop_are_told_in_unspools_words(reason: str, stop: str) -> None:
    answer = Answer()
    answer.add(output([5], flat({5: -0.5}), reason), 0, 0)
    assert answer.generation().stop_reason == stop


@pytest.mark.parametrize(("reason", "told"), [("abort", "was aborted after 1 tokens"), ("error", "with 'error'")])
def test_a_request_that_failed_is_an_error(reason: str, told: str) -> None:
    answer = Answer()
    answer.add(output([5], flat({5: -0.5}), reason), 0, 0)
    with pytest.raises(EngineError, match=told):
        answer.generation()
