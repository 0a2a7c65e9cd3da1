"""The figures of a run, and the table that shows them."""

from __future__ import annotations

from collections import Counter
from statistics import mean
from typing import Any

from rich.table import Table
from rich.text import Text

from unspool.cli.pieces import visible
from unspool.rollout import RolloutStats
from unspool.types import Trajectory

_MALFORMED = ("bad_json", "unclosed", "unknown_tool", "bad_arguments")


def summarise(results: list[Trajectory], stats: RolloutStats) -> dict[str, Any]:
    """Plain figures of finished trajectories; of none, every share and mean is 0.

    `reward_mean` and `success` (the share with a reward of 1 or more) are over the trajectories that have a reward,
    None where none has; `reward_errors` counts the rewards that raised, `reward_error` is the first of those.
    `calling` is the share of trajectories that called a tool; `well_formed` the share of all trajectories that called
    tools and whose every call was well-formed (readable, of a known tool, with arguments that fit its schema);
    `two_or_more_call_turns` the share that called tools in two turns or more. `engine_busy` is the share of the wall
    time in which the engine had work.
    """
    count = len(results)
    rewards = [reward for reward in map(reward_of, results) if reward is not None]
    unscored = [t["reward_error"] for t in results if t.get("reward_error")]
    calls = [_call_turns(t) for t in results]
    bad = [any(error["kind"] in _MALFORMED for error in t["tool_errors"]) for t in results]
    return {
        "trajectories": count,
        "reward_mean": mean(rewards) if rewards else None,
        "success": mean(reward >= 1.0 for reward in rewards) if rewards else None,
        "reward_errors": len(unscored),
        "reward_error": unscored[0] if unscored else None,
        "turns_mean": _share(sum(t["turns"] for t in results), count),
        "turns": dict(sorted(Counter(t["turns"] for t in results).items())),
        "stop_reasons": dict(Counter(t["stop_reason"] for t in results)),
        "calling": _share(sum(turns > 0 for turns in calls), count),
        "well_formed": _share(sum(turns > 0 and not wrong for turns, wrong in zip(calls, bad, strict=True)), count),
        "two_or_more_call_turns": _share(sum(turns >= 2 for turns in calls), count),
        "tool_errors": dict(Counter(error["kind"] for t in results for error in t["tool_errors"])),
        "sampled_tokens": sum(map(_sampled, results)),
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens_per_second,
        "engine_busy": stats.busy_share,
        "failed": stats.failed,
    }


def reward_of(trajectory: Trajectory) -> float | None:
    """The reward, where there is one; a column of the data that has its name and is no number is none."""
    reward = trajectory.get("reward")
    return float(reward) if isinstance(reward, int | float) else None


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0


def _sampled(trajectory: Trajectory) -> int:
    """Tokens that were sampled: as recorded, or as an API counted them."""
    if "spans" in trajectory:
        return sum(span["length"] for span in trajectory["spans"] if span["origin"] == "sampled")
    counted = (trajectory.get("usage") or {}).get("completion_tokens", 0)
    return int(counted)


def _call_turns(trajectory: Trajectory) -> int:
    return sum(bool(message.get("tool_calls")) for message in trajectory["messages"])


def summary_table(summary: dict[str, Any]) -> Table:
    """The figures for a person."""
    table = Table(title="results", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = [
        ("trajectories", f"{summary['trajectories']} ({summary['failed']} failed)"),
        ("reward, mean", "none given" if summary["reward_mean"] is None else f"{summary['reward_mean']:.2f}"),
        ("full reward", "none given" if summary["success"] is None else f"{summary['success']:.0%}"),
        *_reward_errors(summary),
        ("turns, mean", f"{summary['turns_mean']:.2f}"),
        ("turns", _counts(summary["turns"])),
        ("stop reasons", _counts(summary["stop_reasons"])),
        ("called tools", f"{summary['calling']:.0%}"),
        ("all calls well-formed", f"{summary['well_formed']:.0%}"),
        ("called in 2 turns or more", f"{summary['two_or_more_call_turns']:.0%}"),
        ("tool errors", _counts(summary["tool_errors"]) or "none"),
        ("sampled tokens", f"{summary['sampled_tokens']:,}"),
        ("wall time", f"{summary['seconds']:.1f} s"),
        ("tokens/s", f"{summary['tokens_per_second']:,.0f}"),
        ("engine busy", f"{summary['engine_busy']:.0%} of wall time"),
    ]
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _reward_errors(summary: dict[str, Any]) -> list[tuple[str, str]]:
    if not summary["reward_errors"]:
        return []
    first = visible(str(summary["reward_error"])).replace("\n", " ")
    return [("rewards that raised", f"{summary['reward_errors']}, the first: {first[:200]}")]


def _counts(counts: dict[Any, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
