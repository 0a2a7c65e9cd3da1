"""Shared beginnings are encoded once, and no id is another for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests import families
from unspool.template.encoding import Encoder
from unspool.template.heads import Heads, splitting_tokens

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "\n",
    " ",
    "system\n",
    "user\n",
    "the weather",
    " é",
    "👩‍👩‍👧",
    "<tool_call>",
    "  x",
    "0.5",
]


def whole(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", families.NAMES)
def test_texts_that_share_a_beginning_have_the_ids_of_the_whole(name: str) -> None:
    tokenizer = families.load(name)
    encoder, rng = Encoder(tokenizer), random.Random(name)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special][:6]
    for _ in range(20):
        shared = "".join(rng.choices(PIECES + special, k=90)) + rng.choice(special)
        for _ in range(6):
            text = shared + "".join(rng.choices(PIECES + special, k=rng.randrange(6)))
            assert encoder.encode(text) == whole(tokenizer, text)


def test_a_shared_beginning_is_encoded_once(qwen3: Any) -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return whole(qwen3, text)

    heads = Heads(encode, qwen3.get_added_vocab(), splitting_tokens(qwen3.backend_tokenizer))
    system = "<|im_start|>system\n" + "You are a careful assistant. " * 20 + "<|im_end|>\n"
    for question in ("first", "second", "third", "fourth"):
        text = f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert heads.encode(text) == whole(qwen3, text)
    assert [text.startswith("<|im_start|>user") for text in encoded[-2:]] == [True, True]


def test_a_beginning_is_not_used_where_other_text_follows_it(qwen3: Any) -> None:
    heads = Heads(lambda text: whole(qwen3, text), qwen3.get_added_vocab(), splitting_tokens(qwen3.backend_tokenizer))
    system = "<|im_start|>system\n" + "word " * 80 + "\n"
    for text in (f"{system}<|im_end|>a", f"{system}<|im_end|>b", f"{system}\n c", f"{system}<|im_end", f"{system}"):
        assert heads.encode(text) == whole(qwen3, text)


def test_texts_without_a_place_to_cut_are_encoded_whole(qwen3: Any) -> None:
    encoder = Encoder(qwen3)
    for end in ("a", "b", "c"):
        text = "no added token in here " * 30 + end
        assert encoder.encode(text) == whole(qwen3, text)
