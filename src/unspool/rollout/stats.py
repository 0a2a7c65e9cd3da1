"""Live figures of a rollout, counted by the episodes as they go."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from unspool.types import Trajectory


@dataclass(slots=True)
class RolloutStats:
    """Figures of one call of a rollout.

    Attributes:
        total: episodes asked for; `done` of them have ended, `failed` of those with `api_error`.
        active: episodes under way; `generating` and `tools_running` say how many wait for what.
        tokens: sampled so far.
        busy: seconds in which at least one episode waited for the engine.
        seconds: wall time, up to now while the rollout runs.
        stop_reasons: how many episodes ended how.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    active: int = 0
    generating: int = 0
    tools_running: int = 0
    tokens: int = 0
    busy: float = 0.0
    stop_reasons: Counter[str] = field(default_factory=Counter)
    _started: float = field(default_factory=time.perf_counter)
    _ended: float | None = None
    _busy_since: float = 0.0

    @property
    def seconds(self) -> float:
        return (time.perf_counter() if self._ended is None else self._ended) - self._started

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def busy_share(self) -> float:
        """Share of the wall time in which the engine had work, 0 to 1."""
        running = time.perf_counter() - self._busy_since if self.generating else 0.0
        return min((self.busy + running) / self.seconds, 1.0) if self.seconds > 0 else 0.0

    def phase(self, name: Literal["generate", "tools"], change: int) -> None:
        """See `unspool.episode.Observer`."""
        if name == "tools":
            self.tools_running += change
            return
        now = time.perf_counter()
        if change > 0 and not self.generating:
            self._busy_since = now
        self.generating += change
        if not self.generating:
            self.busy += now - self._busy_since

    def sampled(self, tokens: int) -> None:
        self.tokens += tokens

    def ended(self, trajectory: Trajectory) -> None:
        """Count one finished episode."""
        self.done += 1
        self.failed += trajectory["stop_reason"] == "api_error"
        self.stop_reasons[trajectory["stop_reason"]] += 1

    def close(self) -> None:
        """Stop the clock."""
        self._ended = time.perf_counter()
