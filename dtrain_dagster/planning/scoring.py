"""The errors of past estimates, and the correction that the next one learns from them. Pure.

An error is ``log(actual / estimated)``: twice too much and half as much are equally wrong. What is learned is the
typical error and how much errors vary, each shrunk towards a prior that counts as much as `PRIOR_RUNS` runs, so that
one odd run teaches little and twenty teach much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain_dagster.costs.estimate import PRIOR_SPREAD, Basis, Interval, LearnedCorrection

PRIOR_RUNS = 4
MOST_RUNS = 30
"""Number of the latest runs that count: machines and code change."""
LARGEST_ERROR = 0.7
"""Largest error that counts, of the logarithm. A run that took longer than twice its estimate had an accident; its
error is cut to this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The comparison of one finished run with its estimate."""

    at: float
    """The time at which it was scored; Unix seconds."""
    job_id: str
    basis: Basis
    sku: str
    """SKU on which it ran, as planned."""
    seconds: Interval
    usd: Interval
    actual_seconds: float
    """Seconds in which a node was present."""
    actual_usd: float
    learned_factor: float = 1.0
    """Learned correction that the estimate contained."""
    disturbed: str = ""
    """Incidents in words; "" without any. A disturbed run does not tell how long the next one takes."""

    @property
    def seconds_error(self) -> float:
        """Return the signed error of time relative to the estimate: 0.1 took 10 % longer."""
        return self.actual_seconds / self.seconds.expected - 1

    @property
    def usd_error(self) -> float:
        """Return the signed error of dollars relative to the estimate."""
        return self.actual_usd / self.usd.expected - 1

    @property
    def is_within(self) -> bool:
        """Return whether both time and dollars were in their intervals."""
        return _holds(self.seconds, self.actual_seconds) and _holds(self.usd, self.actual_usd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Several scores together; fields are None where there are none."""

    runs: int
    median_error: float | None
    """Median of the absolute errors of dollars."""
    coverage: float | None
    """Share of runs that lay within their interval."""


def learn(scores: Sequence[Score], basis: Basis, sku: str) -> LearnedCorrection:
    """Return the correction for the next estimate on that basis and SKU. ``scores``: the oldest first."""
    undisturbed = (score for score in scores if not score.disturbed)
    alike = [score for score in undisturbed if score.basis == basis and score.sku == sku][-MOST_RUNS:]
    errors = [_log_error(score) for score in alike]
    count = len(errors) + PRIOR_RUNS
    bias = sum(errors) / count
    squares = PRIOR_RUNS * PRIOR_SPREAD**2 + sum((error - bias) ** 2 for error in errors)
    if errors:
        squares += PRIOR_RUNS * bias**2  # as far as the prior is away from the bias, it is not certain
    spread = math.sqrt(squares / count * (1 + 1 / count))
    return LearnedCorrection(factor=math.exp(bias), spread=spread if errors else PRIOR_SPREAD, runs=len(errors))


def summarise_scores(scores: Sequence[Score]) -> Summary:
    """Return the median error and the coverage of these scores."""
    if not scores:
        return Summary(runs=0, median_error=None, coverage=None)
    return Summary(
        runs=len(scores),
        median_error=statistics.median(abs(score.usd_error) for score in scores),
        coverage=sum(score.is_within for score in scores) / len(scores),
    )


def _log_error(score: Score) -> float:
    """Return the error of the estimate before the learned correction."""
    error = math.log(score.actual_seconds / score.seconds.expected * score.learned_factor)
    return max(-LARGEST_ERROR, min(LARGEST_ERROR, error))


def _holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high
