"""An object with MiniMind's `rollout(...)` as an engine: what it is given, and how its tensors are read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from unspool.engines import Batching, GenerateRequest, as_engine
from unspool.types import EngineError, InvalidTypeError, InvalidValueError, SamplingParams

torch = pytest.importorskip("torch")

EOS = 9  # end and pad token, as in many models


class Written:
    """Answers with the rows that it is given, filled up with its pad token."""

    def __init__(self, rows: dict[int, list[int]], **more: Any) -> None:
        """`rows`: the answer to the prompt that begins with this id."""
        self.rows, self.calls, self.more = rows, [], more
        self.tokenizer = SimpleNamespace(pad_token_id=EOS, eos_token_id=EOS)

    def rollout(
        self, prompt_ids: Any, attention_mask: Any, num_generations: int, max_new_tokens: int, temperature: float = 0.8
    ) -> Any:
        self.calls.append((prompt_ids, attention_mask, num_generations, max_new_tokens, temperature))
        firsts = [int(ids[mask.bool()][0]) for ids, mask in zip(prompt_ids, attention_mask, strict=True)]
        rows = [self.rows[first] for first in firsts]
        width = max(map(len, rows))
        completion = torch.tensor([row + [EOS] * (width - len(row)) for row in rows])
        logps = torch.tensor([[-0.25 * (at + 1) for at in range(width)] for _ in rows])
        fields: dict[str, Any] = {
            "output_ids": torch.cat([prompt_ids, completion], dim=1),
            "completion_ids": completion,
            "per_token_logps": logps,
            "completions": ["?"] * len(rows),
            **{name: make(rows, width) for name, make in self.more.items()},
        }
        return SimpleNamespace(**{name: value for name, value in fields.items() if value is not None})


def ask(*ids: int, max_tokens: int | None = 4, stops: tuple[int, ...] = (EOS,), **params: Any) -> GenerateRequest:
    return GenerateRequest(list(ids), SamplingParams(max_tokens=max_tokens, **params), stop_token_ids=stops)


async def answers(engine: Any, *requests: GenerateRequest) -> list[Any]:
    adapted = as_engine(engine)
    return await asyncio.gather(*(adapted.generate(request) for request in requests))


async def test_prompts_are_padded_on_the_left_and_go_in_one_call() -> None:
    engine = Written({1: [5, EOS], 2: [6, EOS]})
    await answers(engine, ask(1, 3, 4, temperature=0.5), ask(2, temperature=0.5))
    [(ids, mask, num_generations, max_new_tokens, temperature)] = engine.calls
    assert ids.tolist() == [[1, 3, 4], [EOS, EOS, 2]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert ids.dtype == torch.int64
    assert (num_generations, max_new_tokens, temperature) == (1, 4, 0.5)


async def test_an_answer_ends_with_its_first_stop_token_and_keeps_it_though_it_is_the_pad_token() -> None:
    short, long = await answers(Written({1: [5, EOS], 2: [5, 6, 7, 8]}), ask(1), ask(2))
    assert (short.tokens, short.logprobs, short.stop_reason) == ([5, EOS], [-0.25, -0.5], "stop")
    assert (long.tokens, long.logprobs, long.stop_reason) == ([5, 6, 7, 8], [-0.25, -0.5, -0.75, -1.0], "length")


async def test_a_pad_token_that_ends_nothing_is_an_answers_own() -> None:
    """Two stop tokens; the one sampled is not the one that rows are filled with."""
    engine = Written({1: [5, 7], 2: [0, 0, 5, 7]})
    engine.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=EOS)
    short, zeros = await answers(engine, ask(1, stops=(7,)), ask(2, stops=(7,)))
    assert short.tokens == [5, 7]
    assert (zeros.tokens, zeros.stop_reason) == ([0, 0, 5, 7], "stop")


async def test_the_objects_own_completion_mask_says_where_a_row_ends() -> None:
    def masks(rows: list[list[int]], width: int) -> Any:
        return torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])

    cut, whole = await answers(Written({1: [5], 2: [5, 6, EOS]}, completion_mask=masks), ask(1), ask(2))
    assert (cut.tokens, cut.stop_reason) == ([5], "stop")  # by something else than a token: a stop string of its own
    assert (whole.tokens, whole.stop_reason) == ([5, 6, EOS], "stop")


async def test_completion_ids_are_found_behind_the_prompts_where_only_output_ids_are_given() -> None:
    engine = Written({1: [5, EOS], 2: [6, 7, EOS]}, completion_ids=lambda rows, width: None)
    assert [answer.tokens for answer in await answers(engine, ask(1, 3), ask(2))] == [[5, EOS], [6, 7, EOS]]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"top_k": 5}, "top_k is 5"),
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"stop": "."}, r"stop is \('.',\)"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"logprobs": 2}, "logprobs is 2"),
        ({"max_tokens": None}, "max_tokens is None"),
    ],
)
async def test_what_the_interface_cannot_say_is_refused(params: dict[str, Any], said: str) -> None:
    engine = Written({1: [5, EOS]})
    with pytest.raises(InvalidValueError, match=said):
        await answers(engine, ask(1, **params))
    assert engine.calls == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"completion_ids": lambda *_: None, "output_ids": lambda *_: None}, "no token ids"),
        ({"per_token_logps": lambda *_: None}, "no log-probabilities"),
        ({"completion_ids": lambda *_: torch.zeros(3, 2)}, "returned 3 answers to 1 prompts"),
        ({"per_token_logps": lambda *_: torch.zeros(1, 1)}, "2 tokens has 1 log-probabilities"),
        ({"per_token_logps": lambda *_: torch.zeros(1, 5)}, "5 log-probabilities for a row of 2 tokens"),
        ({"completion_ids": lambda *_: torch.zeros(1)}, "returned 0.0 in place of a row"),
        ({"completion_ids": lambda *_: "text"}, "returned a str as answers; it must be a tensor"),
        ({"completion_mask": lambda *_: torch.ones(1, 1)}, "completion_mask of 1 entries for a row of 2 tokens"),
        ({"completion_mask": lambda *_: torch.ones(0, 2)}, "returned 0 rows of completion_mask to 1 prompts"),
        ({"completion_mask": lambda *_: torch.tensor([[0, 1]])}, r"not ones and then zeros \(\[0, 1\]\)"),
        ({"completion_mask": lambda *_: torch.tensor([[1.0, 0.5]])}, "not ones and then zeros"),
    ],
)
async def test_an_answer_that_cannot_be_recorded_is_an_error(more: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        await answers(Written({1: [5, EOS]}, **more), ask(1))


async def test_lists_and_masks_of_bool_are_read_like_tensors() -> None:
    more = {
        "completion_ids": lambda rows, width: [[*row, *[EOS] * (width - len(row))] for row in rows],
        "per_token_logps": lambda rows, width: [[-0.5] * width for _ in rows],
        "completion_mask": lambda rows, width: torch.arange(width) < torch.tensor([[len(row)] for row in rows]),
    }
    cut, whole = await answers(Written({1: [5], 2: [5, 6, 7]}, **more), ask(1), ask(2))
    assert (cut.tokens, cut.logprobs, whole.tokens) == ([5], [-0.5], [5, 6, 7])
    more = {"completion_ids": lambda *_: None, "output_ids": lambda rows, width: [[1, *rows[0]]]}
    assert [answer.tokens for answer in await answers(Written({1: [5, EOS]}, **more), ask(1))] == [[5, EOS]]


async def _later() -> None: ...


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda: None, "Other.rollout returned None; it must be"),
        (lambda: {"completion_ids": [[5]]}, "Other.rollout returned a dict; it must be"),
        (_later, "Other.rollout returned a coroutine; it must be a plain function, and return an object"),
    ],
    ids=["None", "dict", "async"],
)
async def test_what_is_no_result_is_named_by_its_type(result: Any, said: str) -> None:
    class Other:
        def rollout(self, **_: Any) -> Any:
            return result()

    with pytest.raises(EngineError, match=said):
        await answers(Other(), ask(1))


async def test_new_weights_go_to_update_policy_and_are_counted() -> None:
    engine = Written({1: [5, EOS]})
    adapted = as_engine(engine)
    with pytest.raises(EngineError, match="no update_policy"):
        await adapted.update_weights("weights")
    given: list[object] = []
    engine.update_policy = given.append  # type: ignore[attr-defined]
    await adapted.update_weights("weights")
    assert (given, adapted.version, adapted.logprobs) == (["weights"], 1, True)
    await adapted.update_weights("more", 7)
    assert adapted.version == 7


def test_it_stands_behind_batching_and_classes_are_refused() -> None:
    assert isinstance(as_engine(Written({})), Batching)
    with pytest.raises(InvalidTypeError, match="give an instance"):
        as_engine(Written)
