"""Many episodes at once: from a list of prompts to a list of finished trajectories."""

from unspool.rollout.base import Rollout
from unspool.rollout.multi_turn import MultiTurnRollout
from unspool.rollout.stats import RolloutStats

__all__ = ["MultiTurnRollout", "Rollout", "RolloutStats"]
