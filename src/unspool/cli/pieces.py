"""Tokens as text that a terminal can be shown: whole characters, and nothing that a terminal would obey.

`pieces` cuts a run of ids where characters end, so that an emoji split over four tokens is one piece; joined, the
pieces are the text of the run. `visible` spells out control characters, escape sequences, bidirectional overrides,
invisible formatting and lone surrogates: what a model or a tool wrote is shown, never carried out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Decode: TypeAlias = Callable[[list[int]], str]

_CONTEXT = 6  # tokens in front, for tokenizers whose text of a token depends on its neighbours
_LONGEST = 16  # most tokens to wait for the end of a character
_BROKEN = "\ufffd"
_JOINERS = "\u200c\u200d"  # of emoji and of Indic and Persian script


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions `start` to `end` (half-open) and their text; empty where the tokenizer has none for the id."""

    start: int
    end: int
    text: str


def decoder(template_or_tokenizer: Any) -> Decode:
    """How ids become text, from a ChatTemplate or a Hugging Face tokenizer; special tokens are kept."""
    if hasattr(template_or_tokenizer, "tokenizer"):
        plain: Decode = template_or_tokenizer.decode
        return plain

    def decode(ids: list[int]) -> str:
        return str(template_or_tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def pieces(decode: Decode, ids: Sequence[int], start: int, end: int) -> Iterator[Piece]:
    """The text of `ids[start:end]` in its context: one token a piece, or the fewest that make whole characters."""
    first, known = start, _Known(decode, ids, start)
    for position in range(start, end):
        text = known.text_to(first, position + 1)
        if text.endswith(_BROKEN) and position + 1 < end and position + 1 - first < _LONGEST:
            continue
        yield Piece(first, position + 1, text)
        first, known = position + 1, _Known(decode, ids, position + 1)


class _Known:
    """The text of a few tokens in front, to tell what the next ones add to it."""

    def __init__(self, decode: Decode, ids: Sequence[int], at: int) -> None:
        self._decode, self._ids, self._begin = decode, ids, max(0, at - _CONTEXT)
        self._text = self._safe(self._begin, at)

    def text_to(self, first: int, end: int) -> str:
        text = self._safe(self._begin, end)
        return text[len(self._text) :] if text.startswith(self._text) else self._safe(first, end)

    def _safe(self, begin: int, end: int) -> str:
        try:
            return self._decode(list(self._ids[begin:end]))
        except Exception:  # tokenizers differ in what they raise for ids that they do not have
            return "" if end - begin == 1 else "".join(self._safe(at, at + 1) for at in range(begin, end))


def visible(text: str) -> str:
    """The text with whatever a terminal would obey, or not show, spelled out; line feeds stay."""
    return text.translate(_VISIBLE)


class _Visible(dict[int, str]):
    def __missing__(self, code: int) -> str:
        character = chr(code)
        if code < 0x20 and character != "\n":
            shown = chr(0x2400 + code)
        elif code == 0x7F:
            shown = "\u2421"
        elif character == "\n" or character in _JOINERS:
            shown = character
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            shown = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        else:
            shown = character
        self[code] = shown
        return shown


_VISIBLE = _Visible()
