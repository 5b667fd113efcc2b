"""What the figures of a candidate mean: whether it is faster than chance explains, and whether it learns as much.

Pure functions of measured numbers belong here. In which order candidates are tried, and when, is
`trainer.tuning.search`; how they are measured is `trainer.tuning.tuner`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ROUNDS = 6
"""Rounds with which a gain can be told from chance."""
LEAST_GAIN = 0.02
"""What is not faster by so much is not worth another setting…"""
MOST_CHANCE = 0.02
"""…nor what is faster in so few rounds that a candidate which is not would do as well this often, by chance."""
TOLERANCE = 0.005
LEAST_LEARNED = 10
"""Times what is tolerated, that the baseline has to learn in these steps: else what learns nothing is not worse."""
UNTOLD = "too few rounds to tell"


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningResult:
    """What some steps of training came to."""

    first: float
    """Validation loss before them."""
    loss: float
    """Validation loss after them."""
    is_likelihood: bool
    """The loss is a negative log likelihood, in nats."""
    why: str = ""
    """It could not be trained."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The quartiles of some figures."""

    low: float
    median: float
    high: float


def measure_spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(*(3 * [values[0]]))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def gains(rates: Sequence[float], incumbent: Sequence[float]) -> list[float]:
    """By how much a candidate was faster, round by round: what disturbs the machine disturbs both of a round."""
    return [mine / other for mine, other in zip(rates, incumbent, strict=False)]


def pays(found: Sequence[float]) -> bool:
    """Faster by enough in the median, and in more rounds than chance has it (a sign test)."""
    rounds, won = len(found), sum(gain > 1 for gain in found)
    chance = sum(math.comb(rounds, count) for count in range(won, rounds + 1)) / 2**rounds
    return statistics.median(found) >= 1 + LEAST_GAIN and chance <= MOST_CHANCE


def no_gain(found: Sequence[float], enough: int) -> str:
    """What is said of a candidate that does not pay. So many rounds are ``enough`` where it is no faster in them."""
    is_faster = statistics.median(found) >= 1 + LEAST_GAIN
    if len(found) < (LEAST_ROUNDS if is_faster else enough):
        return UNTOLD
    return "no sure gain" if is_faster else "no gain"


def tolerated(baseline: LearningResult) -> float:
    """By how much a validation loss may be higher: 0.5 % of what the loss is measured in.

    A negative log likelihood has a sign and a size that hang on the unit of the target, so a share of it says nothing;
    a difference of 0.005 nats means that a sample is 0.5 % less likely, in any unit. Any other loss is held against its
    own size, or against what the steps have taken off it where that is more, for it may end near zero.
    """
    if baseline.is_likelihood:
        return TOLERANCE
    return TOLERANCE * max(abs(baseline.loss), baseline.first - baseline.loss)


def untold(baseline: LearningResult, steps: int) -> str:
    """Why nothing can be compared with what the baseline has learned; "" where it can."""
    if baseline.why:
        return f"not compared: the baseline could not be trained beside it: {baseline.why}"
    if baseline.first - baseline.loss >= LEAST_LEARNED * tolerated(baseline):  # not so for NaN
        return ""
    return (
        f"not compared: {steps} steps take the validation loss of the baseline from {baseline.first:.5f} to "
        f"{baseline.loss:.5f} only, so that nothing is told by what a candidate learns in them; give more --seconds"
    )


def explain_worse_learning(found: LearningResult, baseline: LearningResult, steps: int) -> str:
    """Why a candidate does not learn as the baseline does; "" where it does, or learns more."""
    if why := untold(baseline, steps):
        return why
    if found.why:
        return f"not compared: {found.why}"
    worse, limit = found.loss - baseline.loss, tolerated(baseline)
    if worse <= limit:  # not so for NaN
        return ""
    return (
        f"learns less: after {steps} steps its validation loss is {found.loss:.5f}, that of the baseline "
        f"{baseline.loss:.5f}; at most {limit:.5f} more is allowed"
    )
