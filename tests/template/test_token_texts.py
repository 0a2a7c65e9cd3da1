"""What is found from the tokens' own texts is what decoding finds."""

from __future__ import annotations

import random

import pytest

from tests import families
from unspool.template.encoding import Encoder

WORDS = ["the", "<tool_call>", '{"a": 1}', "é", "👩‍👩‍👧", "日本", "x\n\n", "<think>", "\u3000", " >", "\n"]


def samples(encoder: Encoder, rng: random.Random) -> list[int]:
    """Ids of a text, or any ids at all, which may be parts of characters."""
    if rng.random() < 0.5:
        return [rng.randrange(40_000) for _ in range(rng.randrange(12))]
    return encoder.encode(" ".join(rng.choices(WORDS, k=rng.randrange(1, 9))))


@pytest.mark.parametrize("name", families.NAMES)
def test_the_tokens_of_a_range_are_those_that_decoding_finds(name: str) -> None:
    encoder, rng = Encoder(families.load(name)), random.Random(name)
    for _ in range(200):
        ids = samples(encoder, rng)
        text = encoder.decode(ids)
        start = rng.randrange(len(text) + 1)
        end = rng.randrange(start, len(text) + 2)
        found = encoder.token_span(ids, start, end)
        assert found == encoder._search_token_span(ids, start, end) == encoder.token_span(ids, start, end, text)


@pytest.mark.parametrize("name", families.NAMES)
def test_a_text_that_ends_in_a_character_is_never_denied(name: str) -> None:
    encoder, rng = Encoder(families.load(name)), random.Random(name)
    denied = 0
    for _ in range(400):
        ids = samples(encoder, rng)
        if not encoder.may_end_in(ids, ">"):
            denied += 1
            assert not encoder.decode(ids).rstrip().endswith(">")
    assert denied > 50
