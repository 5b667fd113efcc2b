"""The errors of past estimates, and the correction that the next one learns from them. Pure.

An error is ``log(actual / estimated)``: twice too much and half as much are equally wrong. Two things are learned. The
typical error corrects the next estimate, as far as it stands out from how much errors vary. The size of what remains
makes the interval, and each past run that its interval would have missed makes it wider, each that it would have held a
little narrower: so it follows a machine whose load changes. Late runs count more than early ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain_dagster.costs.estimate import PRIOR_SPREAD, Basis, Interval, LearnedCorrection, interval_margin

PRIOR_RUNS = 4
"""The number of runs that the assumption without experience counts as much as: no bias, `PRIOR_SPREAD`."""
MOST_RUNS = 30
"""Number of the latest runs that count: machines and code change."""
HALF_LIFE = 5
"""The number of runs after which a run counts half as much."""
LEAST_TAUGHT = 3
CERTAINTY = 2.0
"""Times its standard error that a typical error must be to correct anything; beyond that it is corrected by a growing
share."""
WIDER_PER_MISS, MOST_NARROW, MOST_WIDE = 0.5, -0.7, 1.2
"""Logarithms: by how much a run outside its interval widens the next one, and the limits of all together. A run inside
narrows it by a ninth of the first, so that nine of ten inside leave it as it is."""
MISSES = 0.1
"""Share of runs outside a 90 % interval."""
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
        return self.actual_usd / self.usd.expected - 1

    @property
    def is_within(self) -> bool:
        told = ((self.seconds, self.actual_seconds), (self.usd, self.actual_usd))
        return all(interval.low <= value <= interval.high for interval, value in told)

    @property
    def log_error(self) -> float:
        """Return the logarithm of the error before the learned correction, as far as it counts."""
        error = math.log(self.actual_seconds / self.seconds.expected * self.learned_factor)
        return max(-LARGEST_ERROR, min(LARGEST_ERROR, error))


def learn(scores: Sequence[Score], basis: Basis, sku: str) -> LearnedCorrection:
    """Return the correction for the next estimate on that basis and SKU. ``scores``: the oldest first."""
    undisturbed = (score for score in scores if not score.disturbed)
    alike = [score for score in undisturbed if score.basis == basis and score.sku == sku][-MOST_RUNS:]
    return learn_errors([score.log_error for score in alike])


def learn_errors(errors: Sequence[float]) -> LearnedCorrection:
    """Return the correction that these errors of estimates before any correction teach; the oldest first."""
    wider = 0.0
    for count, error in enumerate(errors):
        before = _corrected(errors[:count])
        margin = interval_margin(before.spread * math.exp(wider))
        is_missed = abs(error - math.log(before.factor)) > margin
        change = WIDER_PER_MISS if is_missed else -WIDER_PER_MISS * MISSES / (1 - MISSES)
        wider = max(MOST_NARROW, min(MOST_WIDE, wider + change))
    found = _corrected(errors)
    return replace(found, spread=found.spread * math.exp(wider))


def _corrected(errors: Sequence[float]) -> LearnedCorrection:
    """Return the weighted mean as far as it is larger than its own uncertainty, and the standard deviation of the next
    error after that correction."""
    if not errors:
        return LearnedCorrection()
    weights = [0.5 ** (age / HALF_LIFE) for age in reversed(range(len(errors)))]
    whole = sum(weights)
    runs = whole**2 / sum(weight**2 for weight in weights)  # with equal weights, whose mean would be as certain

    def variance(bias: float) -> float:
        squares = sum(weight * (error - bias) ** 2 for weight, error in zip(weights, errors, strict=True)) / whole
        return (PRIOR_RUNS * PRIOR_SPREAD**2 + runs * squares) / (PRIOR_RUNS + runs)

    mean, bias = sum(weight * error for weight, error in zip(weights, errors, strict=True)) / whole, 0.0
    if len(errors) >= LEAST_TAUGHT and mean:
        bias = mean * max(0.0, 1 - CERTAINTY**2 * variance(mean) / runs / mean**2)
    spread = math.sqrt(variance(bias) * (1 + 1 / (PRIOR_RUNS + runs)))
    return LearnedCorrection(factor=math.exp(bias), spread=spread, runs=len(errors))
