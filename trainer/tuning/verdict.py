"""The meaning of a candidate's figures: whether it is faster than chance explains, and whether it learns as much.

Pure functions of measured numbers belong here. The order in which candidates are tried is decided in
`trainer.tuning.search`; `trainer.tuning.tuner` measures them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ROUNDS, FEWEST_ROUNDS = 6, 3
"""The rounds with which a gain can be told from chance, and those that suffice for a candidate that is no faster."""
LEAST_GAIN = 0.02
"""The smallest relative gain that is worth another setting."""
CONFIDENCE = 0.95
"""The probability with which a gain lies in its interval."""
TOLERANCE = 0.005
LEAST_LEARNED = 10
"""The baseline must learn this many times the tolerance in these steps: otherwise a candidate that learns nothing would
not count as worse."""
UNTOLD = "too few rounds to tell"


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningResult:
    """The result of some steps of training."""

    first: float
    """Validation loss before the steps."""
    loss: float
    """Validation loss after the steps."""
    is_likelihood: bool
    """Whether the loss is a negative log likelihood, in nats."""
    why: str = ""
    """The reason if it could not be trained, else ""."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The quartiles of some figures."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class GainInterval:
    """The factor by which a candidate is faster, and the range in which it is expected (`CONFIDENCE`)."""

    low: float
    middle: float
    high: float


def measure_spread(values: Sequence[float]) -> Spread:
    """Return the quartiles of one or more figures."""
    if len(values) < 2:
        return Spread(*(3 * [values[0]]))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def gains(rates: Sequence[float], incumbent: Sequence[float]) -> list[float]:
    """Return by which factor a candidate was faster, round by round: a disturbance of the machine affects both rates of
    a round."""
    return [mine / other for mine, other in zip(rates, incumbent, strict=False)]


def estimate_gain(found: Sequence[float]) -> GainInterval:
    """Return the gain of one or more rounds and its interval, which reaches from 0 to infinity with too few rounds.

    The interval is that of Wilcoxon's signed-rank test, which assumes only that a
    disturbance meets one side of a round as likely as the other, and gives an odd round little weight: it lies between
    the means of pairs of rounds, after as many at each end as chance explains. The middle is the median of these means.
    """
    chance = (1 - CONFIDENCE) / 2
    if min(found) <= 0:  # a loss that was not finite
        return GainInterval(0.0, 0.0, math.inf)
    logs, rounds = [math.log(gain) for gain in found], len(found)
    means = sorted((one + other) / 2 for place, one in enumerate(logs) for other in logs[place:])
    ways = [1]  # by the sum of ranks 1 to n with which a candidate lost: the number of sets of rounds that make it
    for rank in range(1, rounds + 1):
        ways = [sum(part) for part in zip([*ways, *[0] * rank], [*[0] * rank, *ways], strict=True)]
    cut, total = 0, ways[0]
    while total <= chance * 2**rounds:
        cut += 1
        total += ways[cut]
    middle = math.exp(statistics.median(means))
    if not cut:
        return GainInterval(0.0, middle, math.inf)
    return GainInterval(math.exp(means[cut - 1]), middle, math.exp(means[-cut]))


def is_surely_faster(found: Sequence[float]) -> bool:
    """Return whether the median gain is large enough, and the whole interval of the gain is above 1."""
    return statistics.median(found) >= 1 + LEAST_GAIN and estimate_gain(found).low > 1


def no_gain(found: Sequence[float]) -> str:
    """Return the verdict on a candidate that is not surely faster."""
    is_faster = statistics.median(found) >= 1 + LEAST_GAIN
    if len(found) < (LEAST_ROUNDS if is_faster else FEWEST_ROUNDS):
        return UNTOLD
    return "no sure gain" if is_faster else "no gain"


def tolerated(baseline: LearningResult) -> float:
    """Return by how much a validation loss may be higher: 0.5 % of what the loss is measured in.

    The sign and size of a negative log likelihood depend on the unit of the target, so a share of it has no meaning; a
    difference of 0.005 nats means that a sample is 0.5 % less likely, in any unit. Any other loss is compared with its
    own size, or with its decrease over the steps if that is more, because it may end near zero.
    """
    if baseline.is_likelihood:
        return TOLERANCE
    return TOLERANCE * max(abs(baseline.loss), baseline.first - baseline.loss)


def untold(baseline: LearningResult, steps: int) -> str:
    """Return why nothing can be compared with what the baseline has learned, or ""."""
    if baseline.why:
        return f"not compared: the baseline could not be trained beside it: {baseline.why}"
    if baseline.first - baseline.loss >= LEAST_LEARNED * tolerated(baseline):  # not so for NaN
        return ""
    return (
        f"not compared: {steps} steps take the validation loss of the baseline from {baseline.first:.5f} to "
        f"{baseline.loss:.5f} only, so nothing can be concluded about a candidate; give more --seconds"
    )


def explain_worse_learning(found: LearningResult, baseline: LearningResult, steps: int) -> str:
    """Return why a candidate does not learn as the baseline does, or "" if it learns as much or more."""
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
