"""Many episodes at once: from a list of prompts to a list of finished trajectories."""

from unspool.rollout.active_batch import BatchRollout, SingleRollout, rollout_batch, rollout_single
from unspool.rollout.answers import validate_gt_in_text
from unspool.rollout.api_multi_turn import APIMultiTurnRollout
from unspool.rollout.base import Rollout
from unspool.rollout.called import execute_tool, parse_tool_calls
from unspool.rollout.multi_turn import MultiTurnRollout
from unspool.rollout.stats import RolloutStats

__all__ = [
    "APIMultiTurnRollout",
    "BatchRollout",
    "MultiTurnRollout",
    "Rollout",
    "RolloutStats",
    "SingleRollout",
    "execute_tool",
    "parse_tool_calls",
    "rollout_batch",
    "rollout_single",
    "validate_gt_in_text",
]
