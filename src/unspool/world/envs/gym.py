"""Text environments with Gymnasium's interface: `reset(seed=) -> (observation, info)`, `step(action) -> five values`.

Nothing of gymnasium is imported: any object with the two methods will do, also with those of the older gym (`reset`
gives the observation alone, `step` four values).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from unspool.types import InvalidTypeError, InvalidValueError, Trajectory
from unspool.world.env import TextEnv
from unspool.world.protocol import StepResult
from unspool.world.taken import give_back, take


class GymLike(Protocol):
    """What is needed of an environment."""

    def reset(self) -> Any: ...

    def step(self, action: Any, /) -> Any: ...


class GymTextEnv(TextEnv):
    """A Gymnasium-style environment whose action is read from what the model says.

    Args:
        make: makes the environment, when the episode begins; or the environment.
        action: from the turn's text to the action; None: the text, stripped. Where it raises ValueError or KeyError the
            environment is not stepped, and the model is told what is wrong.
        observe: from an observation to text.
        seeded: whether `reset` gets the trajectory's `seed`, where it takes one; the members of a group share it.
    """

    def __init__(
        self,
        make: Callable[[], GymLike] | GymLike,
        *,
        action: Callable[[str], Any] | None = None,
        observe: Callable[[Any], str] = str,
        seeded: bool = True,
    ) -> None:
        if not callable(make) and not (hasattr(make, "reset") and hasattr(make, "step")):
            raise InvalidTypeError(f"make must make an environment with reset and step, or be one, not {make!r:.80}")
        self._make = make
        self._action = action or str.strip
        self._observe = observe
        self._seeded = seeded
        self._env: GymLike | None = None

    @property
    def env(self) -> GymLike | None:
        """The environment; None before the reset."""
        return self._env

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        env = self._env if self._env is not None else self._made()
        take([env], self)  # of another that acts on it nothing is kept here: its owner closes it
        self._env = env
        seed = (trajectory or {}).get("seed")
        if self._seeded and seed is not None and _takes_seed(env.reset):
            given = env.reset(seed=int(seed) % 2**31)  # type: ignore[call-arg]
        else:
            given = env.reset()
        pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)
        observation, info = given if pair else (given, {})
        return StepResult(self._observe(observation), None, info=dict(info))

    def _made(self) -> GymLike:
        make: Any = self._make
        made: GymLike = make() if inspect.isclass(make) or not hasattr(make, "reset") else make
        return made

    def act(self, text: str) -> StepResult:
        if self._env is None:
            raise InvalidValueError("the environment was not reset; call reset first")
        try:
            action = self._action(text)
        except (ValueError, KeyError) as error:
            return StepResult(f"Error: this is no action ({error}); try again")
        given = self._env.step(action)
        if not isinstance(given, tuple) or len(given) not in (4, 5):
            raise InvalidTypeError(f"step must return five values (or the older four), not {given!r:.80}")
        observation, reward, *ended, info = given
        return StepResult(self._observe(observation), float(reward), any(bool(end) for end in ended), dict(info or {}))

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        try:
            if close is not None:
                close()
        finally:
            give_back([self._env], self)


def _takes_seed(reset: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(reset).parameters
    except (TypeError, ValueError):
        return False
    return "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
