"""Environments of other projects: Gymnasium's interface, textarena's games, OpenEnv's servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.small import call, rollout, script, small_template, user
from unspool import Limits, PolicyPlayer, TokenPolicy
from unspool.types import InvalidTypeError, InvalidValueError
from unspool.world.env_calls import EnvError
from unspool.world.envs import GymTextEnv, OpenEnvEnv, TextArenaEnv


def said(out: dict[str, Any], role: str = "user") -> list[str]:
    return [message["content"] for message in out["messages"] if message["role"] == role]


# ------------------------------------------------------------------ Gymnasium's interface


class Door:
    """A text environment as Gymnasium writes them."""

    def __init__(self) -> None:
        self.closed = False
        self.seed: int | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return "A door.", {"room": 1}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return ("It opens.", 1.0, True, False, {"open": True}) if action == "push" else ("No.", -0.1, False, False, {})

    def close(self) -> None:
        self.closed = True


def test_a_gymnasium_environment_is_played_with_text() -> None:
    made: list[Door] = []

    def make() -> Door:
        made.append(Door())
        return made[-1]

    [out] = rollout(script("pull", " push\n"), lambda trajectory: GymTextEnv(make))([user("Get out.")])
    assert said(out) == ["Get out.", "A door.", "No.", "It opens."]
    assert (out["stop_reason"], out["reward"], out["env_info"]) == ("env_done", 0.9, {"room": 1, "open": True})
    assert made[0].closed
    assert made[0].seed is not None


def test_an_old_gym_environment_with_actions_by_number() -> None:
    class Old:
        def reset(self) -> list[int]:
            return [0, 0]

        def step(self, action: int) -> tuple[list[int], float, bool, dict[str, Any]]:
            return [action, 0], 1.0, action == 2, {}

    env = GymTextEnv(Old, action=lambda text: {"left": 1, "right": 2}[text], observe=lambda cells: f"cells {cells}")
    [out] = rollout(script("up", "left", "right"), env)([{}])
    assert said(out) == ["cells [0, 0]", "Error: this is no action ('up'); try again", "cells [1, 0]", "cells [2, 0]"]
    assert out["reward"] == 2.0


def test_what_cannot_be_an_environment_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="make must make an environment"):
        GymTextEnv(3)  # type: ignore[arg-type]


# ------------------------------------------------------------------ textarena


def test_a_game_for_one_is_won_from_its_hints() -> None:
    [low] = rollout(script("[1]", "[2]"), lambda: TextArenaEnv("GuessTheNumber-v0", seed=3), max_turns=2)([{}])
    assert "between 1 and 20" in said(low)[0]
    assert said(low)[1] == "The target number is higher."
    for number in range(1, 21):
        [out] = rollout(script(f"[{number}]"), TextArenaEnv("GuessTheNumber-v0", seed=3), max_turns=2)([{}])
        if out["stop_reason"] == "env_done" and out["turns"] == 1:
            break
    assert (out["reward"], out["turns"]) == (1.0, 1)
    assert "Congratulations" in said(out)[-1]


def test_a_game_for_two_is_played_against_a_function_and_its_own_random_state_stays_its_own() -> None:
    import random

    seen: list[str] = []

    def opponent(text: str) -> str:
        seen.append(text)
        return re.findall(r"'(\[\d\])'", text.rpartition("Available Moves:")[2])[-1]

    random.seed(1)
    state = random.getstate()
    env = TextArenaEnv("TicTacToe-v0", opponent=opponent)
    [out] = rollout(script("[0]", "[1]", "[2]"), env)([{}])
    assert random.getstate() == state
    assert (out["stop_reason"], out["reward"], out["turns"]) == ("env_done", 1.0, 3)
    assert len(seen) == 2
    assert "You are Player 1" in seen[0] and "You are Player 0" in said(out)[0]
    assert "[8]" in said(out)[1]  # what the opponent did
    assert "You are Player 0" not in said(out)[1]  # what was said is not said again


def test_the_second_player_may_be_the_model_and_the_first_a_policy() -> None:
    policy = TokenPolicy(script("[4]", "[3]", "[5]"), small_template())
    player = PolicyPlayer(policy)
    env = TextArenaEnv("TicTacToe-v0", player_id=1, opponent=player)
    [out] = rollout(script("[0]", "[1]", "[2]"), env)([{}])
    assert (out["stop_reason"], out["turns"]) == ("env_done", 2)
    assert out["reward"] == -1.0
    assert [message["role"] for message in player.messages] == ["user", "assistant"] * 3
    assert sum(out["loss_mask"]) == len(small_template().tokenizer.encode("[0]<|im_end|>[1]<|im_end|>"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TextArenaEnv("TicTacToe-v0", num_players=2), "player 1 of TicTacToe-v0 has nobody"),
        (lambda: TextArenaEnv("TicTacToe-v0", player_id=-1), "player_id must be 0 or more"),
    ],
)
def test_a_game_without_players_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        make()


def test_an_unknown_game_is_named() -> None:
    [out] = rollout(script("x"), TextArenaEnv("Nothing-v0"))([{}])
    assert "textarena has no game named 'Nothing-v0'" in out["error"]


# ------------------------------------------------------------------ OpenEnv


def serve(kind: str) -> Iterator[str]:
    server = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([sys.executable, str(server), kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def guessing() -> Iterator[str]:
    yield from serve("guess")


@pytest.fixture(scope="module")
def adding() -> Iterator[str]:
    yield from serve("tools")


def test_episodes_have_a_session_each_with_an_openenv_server(guessing: str) -> None:
    def make(trajectory: dict[str, Any]) -> OpenEnvEnv:
        return OpenEnvEnv(guessing, action="message", reset={"seed": trajectory["number"]})

    outs = rollout(script("it is 3", "it is 4"), make)([user("Play.", number=n) for n in (3, 4, 5)] * 4)
    assert [(out["stop_reason"], out["turns"]) for out in outs[:2]] == [("env_done", 1), ("env_done", 2)]
    assert [out["reward"] for out in outs] == [1.0, 0.5, -1.5] * 4
    assert said(outs[1]) == ["Play.", "Guess a number from 0 to 9.", "wrong", "right"]


def test_an_openenv_environment_that_crashes_costs_its_own_episode(guessing: str) -> None:
    def make(trajectory: dict[str, Any]) -> OpenEnvEnv:
        action = (lambda text: {"message": "crash"}) if trajectory["bad"] else "message"
        return OpenEnvEnv(guessing, action=action, reset={"seed": 1})

    bad, good = rollout(script("it is 1"), make)([user("Play.", bad=True), user("Play.", bad=False)])
    assert (bad["stop_reason"], good["stop_reason"]) == ("api_error", "env_done")
    assert "the game crashed" in bad["error"]


def test_the_tools_of_an_openenv_server_are_the_models(adding: str) -> None:
    engine = script(call("add", n=4), call("add", n="x"), call("add", n=6))
    [out] = rollout(engine, OpenEnvEnv(adding))([user("Reach ten.")])
    assert (out["stop_reason"], out["reward"]) == ("env_done", 1.0)
    answers = said(out, "tool")
    assert (answers[0], answers[2]) == ('{"total": 4}', '{"total": 10}')
    assert answers[1].startswith("Error: argument 'n' of add")


async def test_an_openenv_session_by_hand(guessing: str) -> None:
    async with OpenEnvEnv(guessing, action=lambda text: {"message": text}, observe="message") as env:
        assert (await env.reset({"seed": 17})).observation == "Guess a number from 0 to 9."
        assert (await env.act("8")).reward == -0.5
        assert (await env.state())["step_count"] == 1
        assert (await env.act("7")).done


def test_a_server_that_is_not_there_is_named() -> None:
    [out] = rollout(script("x"), OpenEnvEnv("http://127.0.0.1:9", action="message"), limits=Limits())([user("Play.")])
    assert (out["stop_reason"], out["turns"]) == ("api_error", 0)
    assert "no OpenEnv server answers at ws://127.0.0.1:9/ws" in out["error"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            {"type": "banner", "data": {"hello": 1}},
            "answered a reset with 'banner', not with 'observation': {'hello': 1}",
        ),
        ({"data": {}}, "answered a reset with None, not with 'observation'"),
        ({"type": "state", "data": {}}, "answered a reset with 'state', not with 'observation'"),
        ([1], "answered in a form that is not OpenEnv's"),
    ],
)
async def test_an_answer_of_another_type_is_said(answer: Any, words: str) -> None:
    from websockets.asyncio.server import serve as listen

    async def handle(connection: Any) -> None:
        async for _ in connection:
            await connection.send(json.dumps(answer))

    async with listen(handle, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with OpenEnvEnv(f"http://127.0.0.1:{port}", action="message") as env:
            with pytest.raises(EnvError, match=re.escape(words)):
                await env.reset()
