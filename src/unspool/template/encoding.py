"""Text to ids and back, exactly as inside a whole rendered conversation.

A piece of a conversation is encoded as it would be in the middle of one: added tokens split the text, a stop token
that swallows the whitespace behind it does so, and nothing is ever put in front (no bos, no prefix space). Control text
(an added token's string that somebody typed) is encoded without added tokens, that piece alone.
"""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from unspool.template.heads import SHORTEST, Heads, splitting_tokens


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token: str | None
    eos_token_id: int | None
    name_or_path: str
    special_tokens_map: dict[str, Any]

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def __len__(self) -> int: ...


class Encoder:
    """A tokenizer, and what has to be known of its added tokens.

    Attributes:
        added: id of each added token by its text.
        text_of: text of each added token by its id.
        vocab_size: what every id of the tokenizer is below.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.added: dict[str, int] = dict(tokenizer.get_added_vocab())
        self.text_of = {token: text for text, token in self.added.items()}
        self.vocab_size = max(len(tokenizer), max(self.text_of, default=-1) + 1)
        control = [text for text in self.added if text.strip(" \t\r\n▁")]
        self._firsts = tuple({text[0] for text in control})
        self._pattern = re.compile(_trie_pattern(control)) if control else None
        self._swallows = self._tokens_that_swallow()
        self._prefixes = self._puts_something_in_front()
        self._plain_ids: dict[str, list[int]] = {}
        self._texts = _Texts(self.decode)

    def __reduce__(self) -> tuple[type[Encoder], tuple[Tokenizer]]:
        return Encoder, (self.tokenizer,)

    # ------------------------------------------------------------------ control text

    def has_control_text(self, text: str) -> bool:
        """Whether an added token's string stands in the text (whitespace that is one does not count)."""
        if self._pattern is None or not any(first in text for first in self._firsts):
            return False
        return self._pattern.search(text) is not None

    def control_text(self, text: str) -> Iterator[re.Match[str]]:
        """Every added token's string in the text, leftmost longest first, as the tokenizer finds them."""
        return iter(()) if self._pattern is None else self._pattern.finditer(text)

    def pieces(self, text: str) -> list[tuple[str, int | None]]:
        """The text cut into added tokens (with their id) and what stands between them (with None)."""
        pieces: list[tuple[str, int | None]] = []
        start = 0
        for match in self.control_text(text):
            if match.start() > start:
                pieces.append((text[start : match.start()], None))
            pieces.append((match[0], self.added[match[0]]))
            start = match.end()
        if start < len(text):
            pieces.append((text[start:], None))
        return pieces

    def first_token(self, text: str) -> tuple[int, int] | None:
        """The first added token in the text, and where it ends."""
        match = None if self._pattern is None else self._pattern.search(text)
        return None if match is None else (self.added[match[0]], match.end())

    # ------------------------------------------------------------------ encoding

    def encode(self, text: str) -> list[int]:
        """The text as the beginning of a conversation; its own text is the truth about bos."""
        try:
            if len(text) > SHORTEST and self._heads is not None:
                return self._heads.encode(text)
            return self._encode_whole(text)
        except UnicodeEncodeError:
            return self.encode(replace_surrogates(text))

    def _encode_whole(self, text: str) -> list[int]:
        backend = self._backend
        if backend is not None and backend.padding is None and backend.truncation is None:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids
        return self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _heads(self) -> Heads | None:
        if self._backend is None or self._prefixes or self._backend.encode_special_tokens:
            return None
        splitting = splitting_tokens(self._backend)
        return Heads(self._encode_whole, self.added, splitting) if splitting else None

    def encode_behind(self, text: str, last: int | None) -> list[int]:
        """The text as it is encoded where it follows the token `last` (None: plain text) in a conversation."""
        if not text:
            return []
        if not self._prefixes and last not in self._swallows:
            return self.encode(text)
        match = None if self._pattern is None else self._pattern.search(text)
        if match is not None and match.start() == 0:
            return self.encode(text)
        anchor = None if last is None else self.text_of.get(last)
        if anchor is not None:
            ids = self.encode(anchor + text)
            if ids and ids[0] == last:
                return ids[1:]
        head = len(text) if match is None else match.start()
        return self._encode_plain(text[:head]) + (self.encode(text[head:]) if text[head:] else [])

    def encode_control_text(self, text: str) -> list[int]:
        """A string that is an added token, as plain text: no id of an added token comes of it."""
        ids = self._plain_ids.get(text)
        if ids is None:
            ids = self._encode_plain(text)
            if not self.text_of.keys().isdisjoint(ids):  # the vocabulary has the whole word as well
                ids = [token for part in (text[:1], text[1:-1], text[-1:]) for token in self._encode_plain(part)]
            if len(self._plain_ids) < 4096:
                self._plain_ids[text] = ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """The text without added tokens and with nothing in front."""
        if not text:
            return []
        if self._backend is None:
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _plain(self) -> Any:
        return _without_added_tokens(self._backend)

    # ------------------------------------------------------------------ decoding

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids: special tokens kept, spaces as they are; ids that the tokenizer does not have are none.

        Such ids are whatever is no whole number from 0 to below `vocab_size`.
        """
        ids = token_ids if isinstance(token_ids, list) else list(token_ids)
        try:
            return self._decode(ids)
        except (TypeError, ValueError, OverflowError, IndexError, KeyError):
            return self._decode([token for token in map(whole, ids) if 0 <= token < self.vocab_size])

    def _decode(self, ids: list[int]) -> str:
        if self._backend is not None:
            text: str = self._backend.decode(ids, skip_special_tokens=False)
            return text
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def may_end_in(self, token_ids: Sequence[int], char: str) -> bool:
        """Whether the text of the ids, but for blanks at its end, can end in this character; quick to say no."""
        for token in reversed(token_ids):
            text = self._texts[token].rstrip()
            if text:
                return text[-1] in (char, "\ufffd")  # a part of a character may be part of a blank
        return False

    def token_starts(self, token_ids: Sequence[int], text: str, words: Sequence[str]) -> frozenset[int] | None:
        """Where in `text`, which is `decode(token_ids)`, these words stand as tokens of their own.

        None: wherever they stand in the text. A word that is no token of the tokenizer counts wherever it stands.
        """
        tokens = {self.added[word]: word for word in words if word in self.added}
        if sum(map(text.count, tokens.values())) == sum(token in tokens for token in token_ids):
            return None
        starts, run, at = set[int](), list[int](), 0
        for token in token_ids:
            if token in tokens:
                at += len(self.decode(run))
                run.clear()
                starts.add(at)
                at += len(tokens[token])
            else:
                run.append(token)
        if at + len(self.decode(run)) != len(text):
            return None  # this tokenizer's texts depend on what stands around them
        for word in words:
            if word not in self.added:
                starts |= {match.start() for match in re.finditer(re.escape(word), text)}
        return frozenset(starts)

    def token_span(self, token_ids: Sequence[int], start: int, end: int, text: str | None = None) -> tuple[int, int]:
        """The half-open range of tokens that wrote the characters [start, end) of `decode(token_ids)`, or of `text`."""
        pieces = list(map(self._texts.__getitem__, token_ids))
        joined = "".join(pieces)
        if "\ufffd" not in joined and joined == (self.decode(token_ids) if text is None else text):
            ends = list(accumulate(map(len, pieces), initial=0))
            first = bisect_right(ends, start) - 1
            return first, min(bisect_left(ends, end, first), len(pieces))
        return self._search_token_span(token_ids, start, end)  # characters that share tokens, text that depends on both

    def _search_token_span(self, token_ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
        count = len(token_ids)
        low, high = 0, count
        while low < high:  # the most tokens that end at or before `start`
            middle = (low + high + 1) // 2
            if len(self.decode(token_ids[:middle])) <= start:
                low = middle
            else:
                high = middle - 1
        first, high = low, count
        while low < high:  # the fewest tokens that reach `end`
            middle = (low + high) // 2
            if len(self.decode(token_ids[:middle])) >= end:
                high = middle
            else:
                low = middle + 1
        return first, low

    # ------------------------------------------------------------------ what kind of tokenizer it is

    def _tokens_that_swallow(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset()
        decoder = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, added in decoder.items() if added.rstrip)

    def _puts_something_in_front(self) -> bool:
        if self._backend is None:
            return False
        ids = self.encode("a")
        return bool(ids) and self._backend.id_to_token(ids[0]) != "a"


class _Texts(dict[int, str]):
    """The text of each token alone, decoded when it is first asked for."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token: int) -> str:
        self[token] = text = self._decode([token])
        return text


def _without_added_tokens(backend: Any) -> Any:
    """A tokenizer around the same model that knows no added tokens and puts nothing in front."""
    steps = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
    description: dict[str, Any] = dict.fromkeys(("truncation", "padding", "post_processor", "decoder"))
    for name, inner in steps.items():
        step = getattr(backend, name)
        description[name] = None if step is None else _without_prefix(json.loads(step.__getstate__()), inner)
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    plain = type(backend).from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": empty, **description}))
    plain.model = backend.model
    return plain


def _without_prefix(step: dict[str, Any], inner: str) -> dict[str, Any] | None:
    """A step of a tokenizer, from its description, that puts nothing in front; None: that is all that it did."""
    if step["type"] == "Prepend":
        return None
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    if inner in step:
        parts = (_without_prefix(part, inner) for part in step[inner])
        return {**step, inner: [part for part in parts if part is not None]}
    return step


def whole(token: object) -> int:
    """A token id as an int; -1 where it is no whole number."""
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        return -1


def replace_surrogates(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _trie_pattern(words: Iterable[str]) -> str:
    """A regular expression for the longest of the words at each place, fast for thousands of them."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = []
        for char in sorted(node):
            if char:
                chars, child = char, node[char]
                while len(child) == 1 and "" not in child:
                    ((following, child),) = child.items()
                    chars += following
                branches.append(re.escape(chars) + pattern(child))
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return joined + ("?" if "" in node else "")

    return pattern(trie)
