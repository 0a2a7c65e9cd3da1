"""Worlds of other projects with the real small model: what was recorded is a played game, each episode by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unspool import ChatTemplate, MultiTurnRollout, TorchEngine
from unspool.engines.embedded import ensure_embedded_model
from unspool.world.envs import OpenEnvEnv, TextArenaEnv

pytestmark = pytest.mark.slow
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def play() -> Any:
    folder = ensure_embedded_model()
    engine = TorchEngine.from_pretrained(folder, dtype="float32")
    template = ChatTemplate(str(folder))

    def run(world: Any, trajectories: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        rollout = MultiTurnRollout(
            engine, template, world, {"max_tokens": 32, "stop": ["]", ".", "!", ","]}, seed=5, progress=False, **options
        )
        return rollout(trajectories)

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    path = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([sys.executable, str(path), "guess"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.terminate()
    process.wait()
    process.stdout.close()


def check(out: dict[str, Any]) -> None:
    """Exactly the turns are trained, and every observation stands in the tokens as a user's message."""
    assert out["error"] is None, out["error"]
    assert len(out["input_ids"]) == len(out["loss_mask"]) == len(out["logprobs"])
    sampled = [span for span in out["spans"] if span["origin"] == "sampled"]
    assert len(sampled) == out["turns"]
    for mask, value in zip(out["loss_mask"], out["logprobs"], strict=True):
        assert value <= 0 if mask else value == 0


def test_a_textarena_game_is_played_by_the_real_model(play: Any) -> None:
    how = "Play the game. Answer with one number in square brackets, such as [5], and nothing else."
    prompts = [{"messages": [{"role": "system", "content": how}]} for _ in range(3)]
    outs = play(lambda: TextArenaEnv("GuessTheNumber-v0"), prompts, num_generations=2, max_turns=4)
    for out in outs:
        check(out)
        assert out["stop_reason"] in ("env_done", "max_turns", "length")
        assert "Guess The Number" in out["messages"][1]["content"]
    # The members of a group play the same game, each against its own state.
    assert max(out["turns"] for out in outs) >= 2
    ended = [out for out in outs if out["stop_reason"] == "env_done"]
    assert all("reward" in out and out["env_info"]["turn_count"] >= 1 for out in ended)


def test_an_openenv_server_is_played_by_the_real_model(play: Any, server: str) -> None:
    prompts = [{"messages": [{"role": "system", "content": "Answer with one digit."}]} for _ in range(4)]
    outs = play(lambda: OpenEnvEnv(server, action="message"), prompts, max_turns=5)
    for out in outs:
        check(out)
        assert out["messages"][1] == {"role": "user", "content": "Guess a number from 0 to 9."}
        if out["stop_reason"] == "env_done":
            assert out["messages"][-1]["content"] in ("right", "wrong")
            assert out["reward"] in (1.0, 0.5, 0.0, -1.5)
    assert any(out["stop_reason"] == "env_done" for out in outs)
