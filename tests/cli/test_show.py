"""What `unspool show` prints: every token at its origin, and nothing that a terminal would obey."""

from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from unspool.cli.pieces import Piece, decoder, pieces, visible
from unspool.cli.show import load_any, render_trajectory, show
from unspool.data import write_jsonl, write_parquet
from unspool.record import Record
from unspool.trace import TraceWriter
from unspool.types import InvalidValueError


class Bytes:
    """A tokenizer whose ids are bytes; 256 is a special token, higher ids have no text."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        if any(token > 300 for token in ids):
            raise OverflowError("out of range")
        raw = b"".join(bytes([token]) if token < 256 else b"<|end|>" * (token == 256) for token in ids)
        return raw.decode("utf-8", "replace")


class Words:
    """A tokenizer like sentencepiece: the space in front of a word shows only where something stands before it."""

    words = ("", "Hello", "big", "world")

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(self.words[token] for token in ids)


def ids(text: str) -> list[int]:
    return list(text.encode())


def conversation(**more: Any) -> dict[str, Any]:
    record = Record()
    record.append_prompt(ids("Q: 1+1?\n"))
    record.append_sampled([*ids("ab"), 256], logprobs=[-0.01, -3.0, -0.5], message=1)
    record.append_bridge(ids("tool\n"), message=2)
    record.append_sampled([*ids("ok"), 256], logprobs=[-0.01, -0.01, -0.01], message=3)
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "ok"}, {"type": "image"}],
            "reasoning_content": "hm",
        },
    ]
    return {
        **record.to_trajectory(),
        "messages": messages,
        "id": "math/1",
        "turns": 2,
        "stop_reason": "stop",
        "truncated": False,
        "error": None,
        "tool_errors": [],
        **more,
    }


def printed(trajectory: dict[str, Any], tokenizer: Any = None, **options: Any) -> str:
    stream = io.StringIO()
    render_trajectory(trajectory, tokenizer, Console(file=stream, width=40), **options)
    return stream.getvalue()


def coloured(trajectory: dict[str, Any], tokenizer: Any) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", no_color=False)
    render_trajectory(trajectory, tokenizer, console)
    return stream.getvalue()


# --------------------------------------------------------------------------- text of tokens


def test_a_character_split_over_tokens_is_one_piece() -> None:
    tokens = ids("a\U0001f99cé!")
    assert list(pieces(decoder(Bytes()), tokens, 0, len(tokens))) == [
        Piece(0, 1, "a"),
        Piece(1, 5, "\U0001f99c"),
        Piece(5, 7, "é"),
        Piece(7, 8, "!"),
    ]


def test_a_character_that_a_span_cuts_is_shown_broken_on_both_sides() -> None:
    tokens = ids("aé!")
    assert [piece.text for piece in pieces(decoder(Bytes()), tokens, 0, 2)] == ["a", "\ufffd"]
    assert [piece.text for piece in pieces(decoder(Bytes()), tokens, 2, 4)] == ["\ufffd!"]


def test_the_space_in_front_of_a_word_is_kept() -> None:
    assert [piece.text for piece in pieces(decoder(Words()), [1, 2, 3], 0, 3)] == ["Hello", " big", " world"]
    assert [piece.text for piece in pieces(decoder(Words()), [1, 2, 3], 1, 3)] == [" big", " world"]


def test_bytes_that_are_never_a_character_do_not_wait_for_ever() -> None:
    tokens = [0xFF] * 100
    shown = list(pieces(decoder(Bytes()), tokens, 0, 100))
    assert "".join(piece.text for piece in shown) == "\ufffd" * 100
    assert [shown[0].start, shown[-1].end] == [0, 100] and len(shown) > 5


@given(st.text())
def test_the_pieces_joined_are_the_text(text: str) -> None:
    tokens = ids(text)
    shown = list(pieces(decoder(Bytes()), tokens, 0, len(tokens)))
    assert "".join(piece.text for piece in shown) == text
    assert [token for piece in shown for token in tokens[piece.start : piece.end]] == tokens


@cache
def real_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_real_byte_level_tokenizer_shows_whole_characters() -> None:
    tokens = real_tokenizer().encode("日本 \U0001f99c", add_special_tokens=False)
    assert len(tokens) == 11
    shown = list(pieces(decoder(real_tokenizer()), tokens, 0, len(tokens)))
    assert [piece.text for piece in shown] == ["日", "本", " ", "\U0001f99c"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\rb\tc\0\x7f", "a␍b␉c␀␡"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\u200b\ufeff\u2028", "\\u200b\\ufeff\\u2028"),
        ("\ud83d", "\\ud83d"),
        ("\U000e0041", "\\U000e0041"),
        ("line\nfeed", "line\nfeed"),
        ("\U0001f469\u200d\U0001f680 नमस्ते שלום é", "\U0001f469\u200d\U0001f680 नमस्ते שלום é"),
    ],
    ids=range(9),
)
def test_what_a_terminal_would_obey_is_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_visible_controls_a_terminal(text: str) -> None:
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", visible(text))


# --------------------------------------------------------------------------- pages


def test_without_colour_origins_have_letters_and_unlikely_tokens_have_marks() -> None:
    assert printed(conversation(reward=0.5), Bytes()) == (
        "math/1 · stop_reason stop · turns 2 · 19 tokens, 6 sampled, 6 trained · reward 0.5\n"
        "P| prompt  B| bridge  S| sampled  ‹less than 10% likely›\n"
        "-- prompt · turn 0 · 8 tokens --\n"
        "P| Q: 1+1?⏎\n"
        "-- sampled · turn 0 · 3 tokens · logprob mean -1.17, least -3.00 --\n"
        "S| a‹b›<|end|>\n"
        "-- bridge · turn 1 · 5 tokens --\n"
        "B| tool⏎\n"
        "-- sampled · turn 1 · 3 tokens · logprob mean -0.01, least -0.01 --\n"
        "S| ok<|end|>\n"
    )


def test_with_colour_origins_have_colours_and_probabilities_have_shades() -> None:
    page = coloured(conversation(), Bytes())
    assert "\x1b[36mP| Q: 1+1?\x1b[0m" in page
    assert "\x1b[35mB| tool\x1b[0m" in page
    assert "\x1b[32mS| a\x1b[0m\x1b[38;5;208mb\x1b[0m\x1b[38;5;76m<|end|>\x1b[0m" in page
    assert "‹" not in page


def test_no_color_gives_the_marks_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    render_trajectory(conversation(), Bytes(), Console(file=stream, force_terminal=True))
    assert "a‹b›" in stream.getvalue() and "\x1b[3" not in stream.getvalue()


def test_the_header_tells_what_went_wrong() -> None:
    failure = {"name": "add", "call_id": "c1", "kind": "timeout", "error": "took\n30 s"}
    page = printed(conversation(truncated=True, error="boom\x1b[2J", tool_errors=[failure, "odd"]), Bytes())
    assert page.splitlines()[0].endswith("· truncated")
    assert page.splitlines()[1:4] == ["error: boom␛[2J", "tool error: add c1 timeout: took␊30 s", "tool error: odd"]


@pytest.mark.parametrize(
    ("logprob", "shown"),
    [
        (0.0, "0.00"),
        (-0.0, "0.00"),
        (-9e-9, "0.00"),
        (-0.0004, "-0.0004"),
        (-0.012345, "-0.0123"),
        (-0.01, "-0.01"),
        (-0.123456, "-0.12"),
        (-12.3456, "-12.35"),
        (float("-inf"), "-inf"),
    ],
)
def test_small_log_probabilities_are_told_apart_from_none(logprob: float, shown: str) -> None:
    row = {"input_ids": ids("qa"), "loss_mask": [0, 1], "logprobs": [0.0, logprob]}
    assert f"logprob mean {shown}, least {shown} --" in printed(row, Bytes())


def test_a_branch_says_why_it_parted() -> None:
    record = Record()
    record.append_prompt(ids("q"))
    record.append_sampled(ids("a"), logprobs=[-0.1])
    branch = record.fork(1, "edited")
    branch.append_prompt(ids("b"))
    page = printed({"id": "x", **branch.to_trajectory()}, Bytes())
    assert "branch 2 of 2 (cause edited)" in page


def test_hostile_text_is_printed_as_text_only() -> None:
    hostile = "[red]x[/red] :smile: \x1b]0;title\x07[link=http://x]"
    record = Record()
    record.append_prompt(ids(hostile))
    trajectory = {**record.to_trajectory(), "id": "[b]\x1b[2J", "messages": [{"role": "[b]\x1b", "content": hostile}]}
    shown = "[red]x[/red] :smile: ␛]0;title␇[link=http://x]"
    for page in (printed(trajectory, Bytes()), printed(trajectory)):
        assert shown in page and "\x1b" not in page and "[b]␛[2J" in page


def test_long_lines_are_neither_wrapped_nor_cut() -> None:
    record = Record()
    record.append_prompt(ids("word " * 100))
    assert f"P| {'word ' * 100}\n" in printed(record.to_trajectory(), Bytes())


def test_tokens_without_text_show_their_ids() -> None:
    record = Record()
    record.append_prompt([257, 5000])
    record.append_sampled([104, 5000], logprobs=[-0.1, -0.1])
    page = printed(record.to_trajectory(), Bytes())
    assert "P| <id 257><id 5000>" in page and "S| h<id 5000>" in page


def test_sampled_tokens_without_logprobs_are_shown_unshaded() -> None:
    record = Record()
    record.append_prompt(ids("q"))
    record.append_sampled(ids("a"), trained=False)
    page = printed(record.to_trajectory(), Bytes())
    assert "-- sampled · turn 0 · 1 token · not trained --\nS| a" in page and "likely" not in page


def test_rows_without_spans_are_told_apart_by_their_loss_mask() -> None:
    row = {"input_ids": ids("qab"), "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.1, -0.1]}
    page = printed(row, Bytes())
    assert "-- prompt · 1 token --\nP| q\n-- sampled · 2 tokens · logprob" in page


def test_without_a_tokenizer_messages_are_shown_with_token_counts() -> None:
    lines = printed(conversation()).splitlines()[1:]
    assert lines == [
        "-- user --  prompt · turn 0 · 8 tokens",
        "  1+1?",
        "-- assistant --  sampled · turn 0 · 3 tokens · logprob mean -1.17, least -3.00",
        '  -> add({"a": 1})',
        "-- tool add c1 --  bridge · turn 1 · 5 tokens",
        "  2",
        "-- assistant --  sampled · turn 1 · 3 tokens · logprob mean -0.01, least -0.01",
        "  hm",
        "  ok",
        '  [{"type": "image"}]',
    ]


def test_a_trajectory_of_messages_alone_is_shown() -> None:
    assert "  hi" in printed({"messages": [{"role": "user", "content": "hi"}], "id": "api"}, Bytes())


def test_an_output_that_takes_ascii_only_gets_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    record = Record()
    record.append_prompt(ids("é\n"))
    render_trajectory(record.to_trajectory(), Bytes(), Console(file=stream))
    stream.seek(0)
    assert "P| \\xe9" in stream.read()


# --------------------------------------------------------------------------- files


def on_page(file: Path, **options: Any) -> str:
    stream = io.StringIO()
    show(file, console=Console(file=stream), **options)
    return stream.getvalue()


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    rows = [conversation(), conversation(id="second")]
    write_jsonl(rows, tmp_path / "x.jsonl")
    write_parquet(rows, tmp_path / "x.parquet")
    trace = TraceWriter(tmp_path).write(rows[0])
    assert trace is not None
    assert load_any(tmp_path / "x.jsonl") == load_any(tmp_path / "x.parquet") == rows
    assert load_any(trace) == rows[:1]


def test_the_row_is_picked_by_index_or_id(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_jsonl([conversation(), conversation(id="second"), conversation(id=3)], path)
    assert "math/1 ·" in on_page(path)
    assert "second ·" in on_page(path, index=1)
    assert "3 ·" in on_page(path, index=-1)
    assert "second ·" in on_page(path, id="second")
    assert "3 ·" in on_page(path, id="3")
    with pytest.raises(InvalidValueError, match="has 3 trajectories; there is none at index 3"):
        show(path, index=3)
    with pytest.raises(InvalidValueError, match="no trajectory with the id 'x'; it has 'math/1', 'second', 3"):
        show(path, id="x")


def test_the_tokenizer_noted_in_the_file_is_used(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    real_tokenizer().save_pretrained(folder)
    record = Record()
    record.append_prompt(real_tokenizer().encode("hi \U0001f99c", add_special_tokens=False))
    trajectory = {"id": "x", "messages": [], **record.to_trajectory()}
    write_parquet([trajectory], tmp_path / "x.parquet", metadata={"tokenizer": folder})
    trace = TraceWriter(tmp_path, metadata={"model": folder}).write(trajectory)
    assert trace is not None
    write_jsonl([{**trajectory, "model": folder}], tmp_path / "own.jsonl")
    write_jsonl([trajectory], tmp_path / "none.jsonl")
    for file in (tmp_path / "x.parquet", trace, tmp_path / "own.jsonl"):
        assert "P| hi \U0001f99c" in on_page(file)
        assert "P|" not in on_page(file, messages=True)
    assert "--tokenizer FOLDER" in on_page(tmp_path / "none.jsonl")
    assert "P| hi \U0001f99c" in on_page(tmp_path / "none.jsonl", tokenizer=folder)


def test_a_tokenizer_noted_elsewhere_falls_back_to_messages(tmp_path: Path) -> None:
    write_parquet([conversation()], tmp_path / "x.parquet", metadata={"tokenizer": str(tmp_path / "gone")})
    assert "-- user --" in on_page(tmp_path / "x.parquet")


def test_a_tokenizer_that_was_asked_for_and_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    write_jsonl([conversation()], tmp_path / "x.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidValueError, match="empty' cannot be loaded"):
        show(tmp_path / "x.jsonl", tokenizer=str(tmp_path / "empty"))


@pytest.mark.parametrize(("name", "said"), [("x.csv", r"\.csv"), ("x.jsonl", "cannot be read")])
def test_files_that_cannot_be_shown_are_named(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=said):
        show(tmp_path / name)


@pytest.mark.parametrize("row", [{"messages": ["hi"]}, {"input_ids": [1], "spans": [{}]}])
def test_rows_that_are_no_trajectories_are_one_sentence(row: dict[str, Any], tmp_path: Path) -> None:
    write_jsonl([row], tmp_path / "x.jsonl")
    with pytest.raises(InvalidValueError, match=r"x\.jsonl does not hold a trajectory"):
        show(tmp_path / "x.jsonl")
