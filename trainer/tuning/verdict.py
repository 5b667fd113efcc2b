"""The meaning of a candidate's figures: whether it is faster than chance explains, and whether it learns as much.

Two rules tell a gain from chance. `pays` is for the search, which looks at many candidates and may take one that was
only lucky. `is_surely_faster` is for the last comparison, whose figures no choice was made from.

Pure functions of measured numbers belong here. The order in which candidates are tried is decided in
`trainer.tuning.search`; `trainer.tuning.tuner` measures them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ROUNDS = 6
"""The rounds with which a gain can be told from chance."""
LEAST_GAIN = 0.02
"""The smallest relative gain that is worth another setting."""
MOST_CHANCE = 0.02
"""The largest probability with which a candidate that is not faster would win as many rounds by chance."""
CONFIDENCE = 0.95
"""The probability with which the gains of all candidates of a last comparison lie in their intervals."""
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


def pays(found: Sequence[float]) -> bool:
    """Return whether the median gain is large enough, and chance hardly explains it: by the number of rounds that the
    candidate won (a sign test), or by the mean of their logarithms (Student's test)."""
    if statistics.median(found) < 1 + LEAST_GAIN or len(found) < LEAST_ROUNDS:
        return False
    rounds, won = len(found), sum(gain > 1 for gain in found)
    chance = sum(math.comb(rounds, count) for count in range(won, rounds + 1)) / 2**rounds
    return chance <= MOST_CHANCE or _student_chance(found) <= MOST_CHANCE


def estimate_gain(found: Sequence[float], comparisons: int = 1) -> GainInterval:
    """Return the gain of one or more rounds and its interval, which reaches from 0 to infinity with too few rounds.

    ``comparisons``: the number of candidates among which the fastest is taken; the more there are, the wider is the
    interval of each (Bonferroni). The interval is that of Wilcoxon's signed-rank test, which assumes only that a
    disturbance meets one side of a round as likely as the other, and gives an odd round little weight: it lies between
    the means of pairs of rounds, after as many at each end as chance explains. The middle is the median of these means.
    """
    chance = (1 - CONFIDENCE) / 2 / comparisons
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


def is_surely_faster(found: Sequence[float], comparisons: int = 1) -> bool:
    """Return whether the median gain is large enough, and the whole interval of the gain is above 1."""
    return statistics.median(found) >= 1 + LEAST_GAIN and estimate_gain(found, comparisons).low > 1


def least_rounds(comparisons: int) -> int:
    """Return the rounds with which one of that many candidates can be surely faster."""
    rounds = 1
    while comparisons * 2 > (1 - CONFIDENCE) * 2**rounds:
        rounds += 1
    return max(LEAST_ROUNDS, rounds)


def _student_chance(found: Sequence[float]) -> float:
    """Return the probability of such a mean by chance, where the logarithms vary as a normal distribution."""
    from scipy.special import stdtr  # not above: what trains does not need it, and loading it takes a moment

    if min(found) <= 0:
        return 1.0
    logs = [math.log(gain) for gain in found]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return float(stdtr(len(logs) - 1, -mean / error)) if error else float(mean <= 0)


def no_gain(found: Sequence[float], enough: int) -> str:
    """Return the verdict on a candidate that does not pay. ``enough``: the number of rounds that suffice for one that
    is no faster."""
    is_faster = statistics.median(found) >= 1 + LEAST_GAIN
    if len(found) < (LEAST_ROUNDS if is_faster else enough):
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
