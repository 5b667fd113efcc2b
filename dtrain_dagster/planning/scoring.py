"""How good estimates were, and what the next one learns from it: pure.

An error is ``log(actual / estimated)``: twice too much and half as much are equally wrong. What is learned is the
typical error and how much errors vary, each shrunk towards a prior that counts as much as `PRIOR_RUNS` runs, so that
one odd run teaches little and twenty teach much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain_dagster.costs.estimate import PRIOR_SPREAD, Basis, Interval, Learned

PRIOR_RUNS = 4
MOST_RUNS = 30
"""Only so many runs count, the latest: machines and code change."""
LARGEST_ERROR = 0.7
"""Of the logarithm. A run that took longer than twice its estimate had an accident; it counts, but no more than so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One finished run against its estimate."""

    at: float
    """When it was scored; Unix seconds."""
    job_id: str
    basis: Basis
    sku: str
    """On which it ran, and was to run."""
    seconds: Interval
    usd: Interval
    actual_seconds: float
    """In which a node was there."""
    actual_usd: float
    learned_factor: float = 1.0
    """What the estimate had been multiplied with, of what was learned before."""
    disturbed: str = ""
    """What came in between, in words. Such a run says nothing of how long the next one takes; "" where nothing did."""

    @property
    def seconds_error(self) -> float:
        """Signed, relative to the estimate: 0.1 took 10 % longer."""
        return self.actual_seconds / self.seconds.expected - 1

    @property
    def usd_error(self) -> float:
        return self.actual_usd / self.usd.expected - 1

    @property
    def is_within(self) -> bool:
        """Were both time and dollars in their intervals?"""
        return _holds(self.seconds, self.actual_seconds) and _holds(self.usd, self.actual_usd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Some scores together. None where there are none."""

    runs: int
    median_error: float | None
    """Of the absolute errors of dollars."""
    coverage: float | None
    """Share of runs that lay within their interval."""


def learn(scores: Sequence[Score], basis: Basis, sku: str) -> Learned:
    """What scores, the oldest first, say of the next estimate on that basis and SKU."""
    undisturbed = (score for score in scores if not score.disturbed)
    alike = [score for score in undisturbed if score.basis == basis and score.sku == sku][-MOST_RUNS:]
    errors = [_log_error(score) for score in alike]
    count = len(errors) + PRIOR_RUNS
    bias = sum(errors) / count
    squares = PRIOR_RUNS * PRIOR_SPREAD**2 + sum((error - bias) ** 2 for error in errors)
    if errors:
        squares += PRIOR_RUNS * bias**2  # as far as the prior is away from the bias, it is not certain
    spread = math.sqrt(squares / count * (1 + 1 / count))
    return Learned(factor=math.exp(bias), spread=spread if errors else PRIOR_SPREAD, runs=len(errors))


def summarise_scores(scores: Sequence[Score]) -> Summary:
    if not scores:
        return Summary(runs=0, median_error=None, coverage=None)
    return Summary(
        runs=len(scores),
        median_error=statistics.median(abs(score.usd_error) for score in scores),
        coverage=sum(score.is_within for score in scores) / len(scores),
    )


def _log_error(score: Score) -> float:
    """Of the estimate as it was before it was corrected by what had been learned."""
    error = math.log(score.actual_seconds / score.seconds.expected * score.learned_factor)
    return max(-LARGEST_ERROR, min(LARGEST_ERROR, error))


def _holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high
