"""The benchmarks run, on tiny sizes: what is asserted are counts, never times."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import overhead, peers, scale, schedule
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.report import Result, Target
from benchmarks.workload import Load, encode, make_conversation, text_of
from tests import families


@pytest.fixture(scope="module", autouse=True)
def tokenizer() -> None:
    families.folder("qwen3")  # skips where it cannot be had


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No peers: they take long to import."""
    monkeypatch.setattr(peers, "NAMES", ())
    peers._found.cache_clear()
    yield
    peers._found.cache_clear()


def column(result: Result, contestant: str, name: str) -> object:
    return dict(result.rows)[contestant][result.columns.index(name)]


@pytest.mark.usefixtures("alone")
def test_the_schedule_is_measured_for_every_contestant() -> None:
    result = schedule.run(quick=True)
    assert result.facts == {"episodes": 6, "calls": 12, "slow calls": 1}
    assert [name for name, _ in result.rows] == ["ideal (computed)", *schedule.CONTESTANTS]
    assert len(result.targets) == 1


def test_the_ideal_schedule_is_the_slowest_episode_alone() -> None:
    load = Load.of(2, 2, 28, 14, 16)
    first, second = (one.topics for one in load.conversations)
    seconds = {**dict.fromkeys(first, 1.0), **dict.fromkeys(second, 5.0)}
    assert schedule.ideal(load, 0.5, seconds) == 3 * 0.5 + 2 * 5.0


@pytest.mark.usefixtures("alone")
def test_overhead_is_measured_on_turns_that_are_canonical() -> None:
    result = overhead.run(quick=True)
    assert result.facts["turns"] == 4
    assert column(result, "unspool", "canonical turns") == "4/4"
    assert column(result, overhead.BOUND, "/ bound") == 1.0


def test_turns_that_lost_a_token_are_not_counted_as_canonical() -> None:
    conversation = make_conversation(random.Random(3), 3, 63, 40, 20)
    ids = overhead.unspool(conversation).ids
    assert overhead.canonical_turns(conversation, ids) == 3
    assert overhead.canonical_turns(conversation, [*ids[:-150], *ids[-149:]]) < 3


@pytest.mark.usefixtures("alone")
def test_scale_is_measured_in_processes_of_their_own() -> None:
    result = scale.run(quick=True)
    assert [name for name, _ in result.rows] == list(scale.OWN)
    assert result.facts["turns"] == 40 * scale.TURNS
    assert 270 <= float(result.facts["tokens"]) / 40 <= 290


@pytest.mark.parametrize("tokens", [12, 14, 512])
def test_texts_are_of_an_exact_number_of_tokens(tokens: int) -> None:
    assert len(encode(text_of(random.Random(tokens), tokens))) == tokens


def test_turns_are_of_an_exact_number_of_tokens() -> None:
    conversation = make_conversation(random.Random(0), 3, 63, 20, 16)
    assert [len(turn) for turn in conversation.turns] == [63, 63, 63, 16]


@pytest.mark.usefixtures("alone")
def test_the_command_writes_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert main(["b", "--quick", "--json", str(file)]) == 0
    written = json.loads(file.read_text(encoding="utf-8"))["b"]
    assert [row["contestant"] for row in written["rows"]][:2] == [overhead.BOUND, "unspool"]
    assert {"what", "value", "bound", "kind", "met"} == set(written["targets"][0])


def test_an_unknown_benchmark_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["z"])
    assert "there is no benchmark 'z'; there are: a, b, c, d, e" in capsys.readouterr().err


def test_a_missing_peer_is_a_line_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "NAMES", ("no_such_project",))
    peers._found.cache_clear()
    try:
        assert peers.overhead_contestants() == {}
        missing, how = peers.notes()
    finally:
        peers._found.cache_clear()
    assert missing.startswith("not compared with no_such_project: ModuleNotFoundError")
    assert peers.INSTALL in how


def test_a_target_is_met_from_its_own_side() -> None:
    assert Target("x", 1.0, 1.0).met
    assert not Target("x", 1.1, 1.0).met
    assert Target("x", 1.1, 1.0, "at least").met


@pytest.mark.slow
def test_peers_that_are_installed_do_the_same_work() -> None:
    conversation = make_conversation(random.Random(5), 3, 63, 40, 20)
    for name, (contestant, _) in peers.overhead_contestants().items():
        assert len(contestant(conversation).turns) == 3, name
    load = Load.of(4, 2, 28, 14, 16)
    for name, work in peers.scale_works().items():
        assert len(work(load, 0.0)) == 4, name


@pytest.mark.slow
def test_turns_on_a_real_model_are_counted_against_one_plain_batch() -> None:
    result = BENCHMARKS["d"](True)
    assert result.facts["sampled tokens"] == 2 * 2 * 48
    assert len(result.rows) == 2


@pytest.mark.slow
def test_the_first_token_is_timed_at_every_length() -> None:
    result = BENCHMARKS["e"](True)
    assert [name for name, _ in result.rows] == ["unspool, 60 tokens", "unspool, 120 tokens"]
    assert all(float(cell or 0) > 0 for _, cells in result.rows for cell in cells)


@pytest.mark.vllm
def test_turns_on_vllm_are_counted_against_one_plain_batch_and_prefill_what_is_new() -> None:
    result = BENCHMARKS["f"](True)
    assert result.facts == {"episodes": 2, "turns": 4, "tokens": 2 * 2 * 48}
    assert len(result.rows) == 3
    assert result.targets[2].met  # a count of tokens, whatever the clock says


@pytest.mark.vllm
def test_slow_tools_on_vllm_are_timed_against_both_bounds() -> None:
    result = BENCHMARKS["g"](True)
    assert result.facts == {"episodes": 4, "calls": 4, "slow calls": 1}
    assert len(result.rows) == 4
