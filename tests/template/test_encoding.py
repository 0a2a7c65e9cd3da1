"""Pieces of a conversation are encoded as in its middle, also by tokenizers that put something in front of a text."""

from __future__ import annotations

from typing import Any

import pytest

from unspool.template.encoding import Encoder, _trie_pattern, replace_surrogates

SCHEMES = ("first", "always", "never", "prepend", "byte_level")


def small(scheme: str) -> Any:
    """A tokenizer that marks the beginning of a text in one of the ways there are."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "byte_level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    words = ["hello world user tool answers in degrees and 12 more words < | > " * 3]
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"]))
    backend.add_tokens([AddedToken("<|end|>", rstrip=True, special=True, normalized=False)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("stop", ["</s>", "<|end|>"])
@pytest.mark.parametrize("text", [" world", "world</s>hello", "  user tool</s> more", "</s>hello", "\nwords", ""])
def test_behind_a_stop_token_a_text_is_what_it_is_in_the_whole(scheme: str, stop: str, text: str) -> None:
    tokenizer = small(scheme)
    encoder = Encoder(tokenizer)
    whole = tokenizer.encode(f"hello{stop}{text}", add_special_tokens=False)
    stop_id = tokenizer.convert_tokens_to_ids(stop)
    assert encoder.encode_behind(text, stop_id) == whole[whole.index(stop_id) + 1 :]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_behind_plain_text_nothing_is_put_in_front(scheme: str) -> None:
    tokenizer = small(scheme)
    made = Encoder(tokenizer).encode_behind("world</s> hello", None)
    assert tokenizer.convert_ids_to_tokens(made)[0][0] == "w"
    assert made[made.index(1) :] == tokenizer.encode("</s> hello", add_special_tokens=False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_control_text_is_cut_into_plain_tokens(scheme: str) -> None:
    encoder = Encoder(small(scheme))
    assert encoder.text_of.keys().isdisjoint(encoder.encode_control_text("<|end|>"))


def test_padding_that_a_user_turned_on_does_not_reach_us(qwen3: Any) -> None:
    import pickle

    tokenizer = pickle.loads(pickle.dumps(qwen3))
    tokenizer(["a", "a b c"], padding="max_length", truncation=True, max_length=2)
    assert Encoder(tokenizer).encode("a b c d") == qwen3.encode("a b c d", add_special_tokens=False)


def test_the_longest_word_is_found_first() -> None:
    import re

    pattern = re.compile(_trie_pattern(["<a", "<a>", "<ab>", "b", "[x]"]))
    assert pattern.findall("<ab><a><ax b[x]") == ["<ab>", "<a>", "<a", "b", "[x]"]


def test_lone_surrogates_become_the_replacement_character_and_pairs_one_character() -> None:
    assert replace_surrogates("a\ud800b\ud83d\ude00c\udc00") == "a\ufffdb😀c\ufffd"


def test_token_spans_cover_their_characters(qwen3: Any) -> None:
    encoder = Encoder(qwen3)
    ids = encoder.encode("one 👩‍👩‍👧 two <tool_call>three</tool_call> four")
    text = encoder.decode(ids)
    start, end = text.index("<tool_call>"), text.index(" four")
    assert encoder.decode(ids[slice(*encoder.token_span(ids, start, end))]) == text[start:end]
    assert encoder.token_span(ids, 0, len(text)) == (0, len(ids))
