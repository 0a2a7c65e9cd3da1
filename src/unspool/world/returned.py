"""What an environment returned, looked at where it comes in.

Promises: behind here an observation is a str, a reward a finite float or None, `done` a bool, `info` a dict; whatever
cannot be read as that is an error with the environment's class, its method and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from unspool.types import InvalidTypeError, InvalidValueError
from unspool.world.protocol import StepResult


def checked(given: object, name: str) -> StepResult:
    """A result with parts of their proper types; `name` is the method that gave it.

    Raises:
        InvalidTypeError: it is no StepResult, or a part has a type that it cannot have.
        InvalidValueError: its reward is not finite.
    """
    if not isinstance(given, StepResult):
        raise InvalidTypeError(f"{name} must return a StepResult, not {given!r:.80}")
    observation: object = given.observation
    if not isinstance(observation, str):
        raise InvalidTypeError(f"the observation of {name} must be a str, not {observation!r:.80}; write it as text")
    info: object = given.info
    if info is not None and not isinstance(info, Mapping):
        raise InvalidTypeError(f"the info of {name} must be a mapping, not {info!r:.80}")
    reward = None if given.reward is None else number(given.reward, f"the reward of {name}")
    return replace(given, reward=reward, done=_truth(given.done, name), info={} if info is None else dict(info))


def number(value: object, what: str) -> float:
    """A number, or a scalar of numpy or torch, as a finite float.

    Raises:
        InvalidTypeError: it is no number; text that reads as one is none either.
        InvalidValueError: it is not finite.
    """
    found = None
    if not isinstance(value, str | bytes | bytearray):
        try:
            found = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
            found = None
    if found is None:
        raise InvalidTypeError(f"{what} must be a number, not {value!r:.80}")
    if not math.isfinite(found):
        raise InvalidValueError(f"{what} must be finite, not {value!r:.80}")
    return found


def _truth(value: object, name: str) -> bool:
    # By its dtype: neither numpy nor torch is imported for it.
    one = isinstance(value, bool) or (
        str(getattr(value, "dtype", "")) in ("bool", "torch.bool") and getattr(value, "ndim", 1) == 0
    )
    if not one:
        raise InvalidTypeError(f"done of {name} must be True or False, not {value!r:.80}")
    return bool(value)
