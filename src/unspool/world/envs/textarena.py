"""Games of `textarena`: the model is one player, and others, where there are any, are functions.

Promises: the model sees each message of the game once (not the whole history again with each turn, which its
conversation has already); an opponent's moves are made inside the model's step.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from unspool.threads import run_in_thread
from unspool.types import InvalidValueError, MissingExtraError, Trajectory, check_value, is_count
from unspool.world.env import TextEnv
from unspool.world.env_calls import is_async
from unspool.world.protocol import StepResult

_SEEDING = threading.Lock()
"""textarena seeds the process's own `random`; one reset at a time, so that each draws from its own seed."""

Opponent = Callable[[str], str | Awaitable[str]]
"""From what a player sees to what it says: a function that may block, or an async one, such as a `PolicyPlayer`."""


class TextArenaEnv(TextEnv):
    """One game, such as `TextArenaEnv("GuessTheNumber-v0")`.

    Args:
        env_id: the game's name. Its `-raw` variant is played where there is one, which keeps messages apart; the text
            that the model gets is made here.
        player_id: which player the model is.
        opponent: plays every other player: a function from what that player has seen since its last move to its
            move, or a dict of one for each player.
        num_players: None: as many as there are opponents, and the model.
        seed: None: the trajectory's own, which the members of a group share.
        options: the game's own parameters (`max_turns`, ...).
    """

    def __init__(
        self,
        env_id: str,
        player_id: int = 0,
        opponent: Opponent | Mapping[int, Opponent] | None = None,
        *,
        num_players: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        check_value("player_id", player_id, lambda v: is_count(v, 0), "0 or more")
        self.env_id = env_id
        self.player_id = player_id
        if num_players is None:
            others = len(opponent) if isinstance(opponent, Mapping) else int(opponent is not None)
            num_players = max(others + 1, player_id + 1)
        check_value("num_players", num_players, lambda v: is_count(v, player_id + 1), "above player_id")
        self._opponents: dict[int, Opponent] = {}
        for other in range(num_players):
            plays = opponent.get(other) if isinstance(opponent, Mapping) else opponent
            if plays is not None and other != player_id:
                self._opponents[other] = plays
            elif other != player_id:
                raise InvalidValueError(f"player {other} of {env_id} has nobody who plays it; give opponent=")
        self.num_players = num_players
        self._seed = seed
        self._options = options
        self._env: Any = None

    async def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        seed = self._seed if self._seed is not None else (trajectory or {}).get("seed")
        await run_in_thread(self._begin, None if seed is None else int(seed) % 2**31)
        return await self._until_our_turn(False)

    def _begin(self, seed: int | None) -> None:
        arena = _textarena()
        names = arena.envs.registration.ENV_REGISTRY
        name = f"{self.env_id}-raw" if f"{self.env_id}-raw" in names else self.env_id
        if name not in names:
            raise InvalidValueError(f"textarena has no game named {self.env_id!r}; see textarena's ENV_REGISTRY")
        self._env = arena.make(name, **self._options)
        with _SEEDING:
            state = random.getstate()
            try:
                self._env.reset(num_players=self.num_players, seed=seed)
            finally:
                random.setstate(state)

    async def act(self, text: str) -> StepResult:
        return await self._until_our_turn(await self._move(text))

    async def _move(self, text: str) -> bool:
        done, _ = await run_in_thread(self._env.step, action=text)
        return bool(done)

    async def _until_our_turn(self, done: bool) -> StepResult:
        while not done:
            player, observed = self._env.get_observation()
            text = self._text(observed, player)
            if player == self.player_id:
                return StepResult(text, None)
            plays = self._opponents[player]
            move = plays(text) if is_async(plays) else await run_in_thread(plays, text)
            done = await self._move(await move if inspect.isawaitable(move) else move)
        rewards, infos = self._env.close()
        reward = float((rewards or {}).get(self.player_id, 0.0))
        info = dict((infos or {}).get(self.player_id, {}))
        seen = self._text(self._env.state.observations.get(self.player_id, []), self.player_id)
        why = str(info.get("reason") or "")
        return StepResult(seen if why in seen else f"{seen}\n{why}".strip(), reward, True, info)

    def _text(self, observed: Any, player: int) -> str:
        """What a player sees, without its own moves, which it has said itself."""
        if isinstance(observed, str):
            return observed.strip()
        roles = self._env.state.role_mapping
        lines = []
        for sender, message, *_ in observed:
            if sender == player:
                continue
            name = "" if sender == -1 else f"[{roles.get(sender, f'Player {sender}')}] "
            lines.append(f"{name}{message}")
        return "\n".join(lines).strip()

    def close(self) -> None:
        self._env = None


def _textarena() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise MissingExtraError("games of textarena need it: run `pip install 'unspool[envs]'`") from error
    return textarena
