"""Whether a trial is worth its dollars: what it would still cost, against what it can still gain.

The gain of going on is the expected improvement of the best score so far, the cost its dollars until then. Going on is
no promise to go on to the end: a trial may be looked at again and ended there, which makes its first part cheap. So
both are taken over plans of the kind "up to evaluation h, and from there to the end only if it is then among the best
share q of what may have become of it", and the best plan counts, by gain per dollar. The same is done for a fresh
trial, as it would come next. A trial ends where its best plan gains less per dollar than a
fresh one, since there its dollars would do more, in this search or in another one; and where a price that a person has
set is not met. There is nothing to tune. This is an index policy, as Weitzman's for boxes of unknown content (1979),
with learning curves for their content. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtrain_dagster.search.curves import Array, Curve, Mixture

PATHS = 512
"""Courses of a curve that are drawn for each prediction."""
SHARES = (1.0, 0.5, 0.25, 0.1)
"""Shares of its possible courses of which a trial would be continued at the next look."""
MOST_LOOKS = 8
"""Evaluations at which that look may be."""
MOST_LOG = 300.0
"""Largest logarithm of a score above its floor that is drawn: above it numbers overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCost:
    """What a trial costs, in dollars."""

    startup_usd: float
    """From the purchase of its nodes to its first step."""
    evaluation_usd: float
    """Its steps from one evaluation to the next, with that evaluation."""
    finish_usd: float = 0.0
    """From its last evaluation to its end, which only a trial that is not ended early has."""

    def left_usd(self, evaluations: int, of: int) -> float:
        """Return what a trial still costs that has had this many of its evaluations."""
        return (of - evaluations) * self.evaluation_usd + self.finish_usd

    def whole_usd(self, of: int) -> float:
        """Return what a trial costs that goes to its end."""
        return self.startup_usd + self.left_usd(0, of)


@dataclass(frozen=True, slots=True)
class Fresh:
    """The trial that would come next."""

    prior: Mixture
    """What is expected of its curve."""
    cost: TrialCost
    of: int
    """Its evaluations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """What a plan for a trial is expected to bring."""

    gain: float
    """Expected improvement of the best score."""
    usd: float
    """Expected dollars."""
    chance: float
    """Probability that there is an improvement, if the trial went to its end."""

    @property
    def per_usd(self) -> float:
        """Return the gain of a dollar."""
        return self.gain / self.usd if self.usd > 0 else (np.inf if self.gain > 0 else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorthVerdict:
    """A decision, with all that it rests on."""

    ends: bool
    here: Prospect
    """Of going on."""
    elsewhere: Prospect
    """Of a fresh trial."""
    reason: str


def best_prospect(paths: Array, best: float, cost_to: Array, finish_usd: float) -> Prospect:
    """Return the plan with the most gain per dollar. ``paths`` (k, m): courses of the evaluations that are left;
    ``cost_to`` (m,): dollars until each of them; ``finish_usd``: what the end costs besides."""
    count, left = paths.shape
    lowest = np.minimum.accumulate(paths, axis=1)
    gain = np.maximum(best - lowest, 0.0)  # (k, m)
    whole = float(cost_to[-1]) + finish_usd
    chance = float((gain[:, -1] > 0).mean())
    plans = [Prospect(gain=float(gain[:, -1].mean()), usd=whole, chance=chance)]
    looks = np.unique(np.linspace(0, left - 1, min(left, MOST_LOOKS)).astype(int))
    for look in looks[:-1]:
        order = np.argsort(paths[:, look], kind="stable")
        now, end = gain[order, look], gain[order, -1]
        for share in SHARES[1:]:
            kept = max(1, round(share * count))
            expected = float(end[:kept].sum() + now[kept:].sum()) / count
            usd = float(cost_to[look]) + kept / count * (whole - float(cost_to[look]))
            plans.append(Prospect(gain=expected, usd=usd, chance=chance))
    return max(plans, key=lambda plan: plan.per_usd)


def prospect_of(curve: Curve, prior: Mixture, floor: float, best: float, cost: TrialCost) -> Prospect:
    """Return the best plan for a trial with these evaluations; for a fresh one where there are none."""
    done, left = len(curve.scores), curve.of - len(curve.scores)
    start = 0.0 if done else cost.startup_usd
    cost_to = start + cost.evaluation_usd * np.arange(1, left + 1, dtype=np.float64)
    return best_prospect(courses_of(curve, prior, floor), best, cost_to, cost.finish_usd)


def courses_of(curve: Curve, prior: Mixture, floor: float) -> Array:
    """Return courses (k, m) of the evaluations that are left of a trial."""
    paths = prior.given(curve.above(floor)).paths(curve.of, len(curve.scores), PATHS)
    return floor + np.exp(np.minimum(paths, MOST_LOG))


def judge_worth(
    curve: Curve,
    cost: TrialCost,
    prior: Mixture,
    fresh: Fresh,
    floor: float,
    best: float,
    usd_per_score: float | None = None,
) -> WorthVerdict:
    """Return whether a trial with these evaluations goes on. ``prior``: what was expected of its curve before its first
    one, as logarithms of what it lies above ``floor``. ``best``: the best score of all trials, its own with them.
    ``usd_per_score``: the most dollars that a person gives for an improvement by 1."""
    nothing = Prospect(gain=0.0, usd=0.0, chance=0.0)
    if not curve.scores or curve.is_whole or not np.isfinite(curve.scores).all():
        return WorthVerdict(ends=False, here=nothing, elsewhere=nothing, reason="")
    here = prospect_of(curve, prior, floor, best, cost)
    there = prospect_of(Curve((), fresh.of), fresh.prior, floor, best, fresh.cost)
    wanted = 1 / usd_per_score if usd_per_score else 0.0
    left = cost.left_usd(len(curve.scores), curve.of)
    said = f"{left:.2g} dollars more, with a chance of {here.chance:.0%} to improve on {best:.6g} and"
    if here.per_usd < there.per_usd and there.per_usd >= wanted:
        reason = f"not worth it: {said} {here.per_usd:.2g} of score a dollar; a fresh trial has {there.per_usd:.2g}"
        return WorthVerdict(ends=True, here=here, elsewhere=there, reason=reason)
    if here.per_usd < wanted:
        reason = f"not worth it: {said} {here.per_usd:.2g} of score a dollar, and {wanted:.2g} is asked for"
        return WorthVerdict(ends=True, here=here, elsewhere=there, reason=reason)
    return WorthVerdict(ends=False, here=here, elsewhere=there, reason="")
