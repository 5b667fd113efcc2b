"""What a search costs at most, what it is expected to cost, and what it is expected to find; said beforehand. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.trials import REDUCTION, Pruner, TrialSeconds
from dtrain_dagster.support.formatting import dollars, format_duration

SURE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPlan:
    """The plan of a search."""

    trial_usd: float
    """A trial that is trained to its end."""
    at_most_usd: float
    expected_usd: float
    seconds: float
    """Expected seconds to the last trial."""
    lines: tuple[str, ...]
    """The same in sentences."""


def plan_search(
    settings: SearchSettings, usual: TrialSeconds, usd_per_node_hour: float, at_once: int, budget_usd: float | None
) -> SearchPlan:
    """Return the plan. ``usual``: what a trial takes; ``at_once``: nodes that work at the same time."""
    whole = usual.total * usd_per_node_hour / 3600
    most = settings.trials * whole
    share, basis = 1.0, "no trial is ended early"
    if settings.pruner is Pruner.ASHA:
        fixed = (usual.startup + usual.finish) / usual.total
        share, basis = fixed + (1 - fixed) * halving_share(usual.of), "as successive halving ends trials"
    limit = math.inf if budget_usd is None else budget_usd
    expected = min(limit, share * most)
    seconds = share * settings.trials * usual.total / max(1, at_once)
    capped = f", and never above the budget of {dollars(limit)}" if limit < most else ""
    lines = [
        f"{settings.trials} trials of {usual.of} evaluation(s); one that goes to its end takes "
        f"{format_duration(usual.total)} of node time, {dollars(whole)}",
        f"at most {dollars(min(limit, most))}{capped}; expected {dollars(expected)} ({basis}), in about "
        f"{format_duration(seconds)}",
        f"with {SURE:.0%} confidence, the best of {settings.trials} random trials is among the best "
        f"{100 * (1 - (1 - SURE) ** (1 / settings.trials)):.2g} % of the space",
    ]
    return SearchPlan(
        trial_usd=whole, at_most_usd=min(limit, most), expected_usd=expected, seconds=seconds, lines=tuple(lines)
    )


def halving_share(of: int) -> float:
    """Return the share of all evaluations that successive halving does, where scores say nothing of each other."""
    alive, done, rung = 1.0, 0.0, 1
    for number in range(1, of + 1):
        done += alive
        if number == rung and number < of:
            alive, rung = alive / REDUCTION, rung * REDUCTION
    return done / of
