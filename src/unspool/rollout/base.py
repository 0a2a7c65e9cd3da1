"""What every rollout is: a list of trajectories in, a list of as many out, in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from unspool.types import Trajectory


class Rollout(ABC):
    """Takes trajectories, returns as many, each with what happened added to it."""

    @abstractmethod
    def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Run them all and wait."""
        raise NotImplementedError
