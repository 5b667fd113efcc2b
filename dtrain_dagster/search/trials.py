"""The trials of a search as they are remembered: what was drawn, what was measured, how it ended. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dtrain_dagster.search.curves import Curve


class TrialState(StrEnum):
    """The state of a trial."""

    RUNNING = "running"
    COMPLETE = "complete"
    """It was trained to its end."""
    PRUNED = "pruned"
    """It was ended early by the search's own decision."""
    FAILED = "failed"
    """It could not be trained, or was ended by something else; what it had reached until then counts."""

    @property
    def is_final(self) -> bool:
        """Return whether the trial is over."""
        return self is not TrialState.RUNNING


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One trial."""

    number: int
    values: Mapping[str, Any]
    """Name of a parameter → its value."""
    of: int
    """Evaluations that it has in all if it goes to its end."""
    known: tuple[int, ...] = ()
    """The trials whose results its values were drawn with."""
    scores: tuple[float, ...] = ()
    """The metric at each evaluation."""
    times: tuple[float, ...] = ()
    """Unix time of each evaluation."""
    steps: tuple[int, ...] = ()
    """Optimizer steps done at each evaluation."""
    state: TrialState = TrialState.RUNNING
    reason: str = ""
    """Why it was ended early, or failed."""
    usd: float = 0.0
    node_seconds: float = 0.0
    """What was paid for it; 0 while it runs."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """What a pruner keeps of it, such as its rungs."""

    def curve(self, sign: float) -> Curve:
        """Return its evaluations as a curve at which lower is better. ``sign``: 1 for a metric that is minimised, else
        -1. An evaluation that is not finite is the worst possible one, at infinity."""
        scores = tuple(sign * score if math.isfinite(score) else math.inf for score in self.scores)
        return Curve(scores, max(self.of, len(scores)))

    def best(self, sign: float) -> float | None:
        """Return the best score of the metric itself; None where there is none that is finite."""
        finite = [score for score in self.scores if math.isfinite(score)]
        return sign * min(sign * score for score in finite) if finite else None


def best_trial(trials: Sequence[Trial], sign: float) -> Trial | None:
    """Return the trial with the best score, of equals the first; None where none was evaluated."""
    scored = [(sign * score, trial.number, trial) for trial in trials if (score := trial.best(sign)) is not None]
    return min(scored)[2] if scored else None
