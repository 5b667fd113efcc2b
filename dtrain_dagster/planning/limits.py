"""The check of an estimate against a budget and a deadline: what exceeds them, and what would fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dtrain_dagster.costs.estimate import Estimate, Forecast, estimate_cost, estimate_forecast
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration

if TYPE_CHECKING:
    from dtrain_dagster.planning.probe_cost import ExpectedProbe

LEAST_SECONDS = 5.0
"""Least seconds of any training: its processes start, load their libraries, and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a plan. 0: no such limit."""

    budget_usd: float = 0.0
    deadline_hours: float = 0.0
    spent_usd: float = 0.0
    """Dollars that the plan has cost before its training starts: those of its probe. They count against the budget."""
    spent_seconds: float = 0.0
    """Seconds that this took just now; they count against the deadline."""

    def __bool__(self) -> bool:
        return bool(self.budget_usd or self.deadline_hours)


class PlanFigures(Protocol):
    """The figures that an estimate and a choice both have."""

    @property
    def usd(self) -> Interval:
        """The dollars."""
        ...

    @property
    def seconds(self) -> Interval:
        """The wall-clock seconds."""
        ...


def explain_excess(estimate: PlanFigures, limits: Limits, at_least: bool = False) -> str | None:
    """Return in words how the estimate exceeds the limits; None where it fits. ``at_least``: only what is beyond doubt
    counts, the lower end of the interval."""
    usd, seconds = estimate.usd, estimate.seconds
    said = []
    if limits.budget_usd and (usd.low if at_least else usd.expected) + limits.spent_usd > limits.budget_usd:
        after = f" after {dollars(limits.spent_usd)} for its probe" if limits.spent_usd else ""
        said.append(
            f"it would cost {_told(usd, dollars, at_least)}{after}, and budget_usd is {dollars(limits.budget_usd)}"
        )
    took = (seconds.low if at_least else seconds.expected) + limits.spent_seconds
    if limits.deadline_hours and took > limits.deadline_hours * 3600:
        after = f" after {format_duration(limits.spent_seconds)} for its probe" if limits.spent_seconds else ""
        said.append(
            f"it would take {_told(seconds, format_duration, at_least)}{after}, "
            f"and deadline_hours is {limits.deadline_hours:g}"
        )
    return "; ".join(said) or None


def explain_dear_probe(probe: ExpectedProbe, limits: Limits, stop_at_usd: float) -> str | None:
    """Return in words why not even the plan's probe fits its limits; None where it does, as expected. A probe that was
    run before is free."""
    said = [
        f"{name} is {dollars(limit)}"
        for name, limit in (("budget_usd", limits.budget_usd), ("stop_at_usd", stop_at_usd))
        if 0 < limit < probe.usd.expected
    ]
    if 0 < limits.deadline_hours * 3600 < probe.seconds.expected:
        said.append(f"deadline_hours is {limits.deadline_hours:g}")
    return f"the probe alone would take {probe}, and {' and '.join(said)}" if said else None


def least(price: SkuPrice, tier: Tier, node_count: int) -> Estimate:
    """Return the least time and cost of any training on these nodes, before anything is known of it."""
    seconds = Interval(low=LEAST_SECONDS, expected=LEAST_SECONDS, high=LEAST_SECONDS)
    return estimate_cost(seconds, price, tier, node_count)


def remedies(
    forecast: Forecast, limits: Limits, price: SkuPrice, tier: Tier, node_counts: Iterable[int], planned: int
) -> list[str]:
    """Return what would fit, in words: another number of nodes, fewer epochs."""
    found = []
    for count in node_counts:
        estimate = estimate_forecast(forecast, price, tier, count)
        if count != planned and explain_excess(estimate, limits) is None:
            cost = f"{dollars(estimate.usd.expected)} and {format_duration(estimate.seconds.expected)}"
            found.append(f"{count} node(s) (DTRAIN_NODES={count}): about {cost}")
    if epochs := most_epochs(forecast, limits, price, tier, planned):
        found.append(f"epochs={epochs} instead of {forecast.sizes.epochs} on {planned} node(s)")
    return found


def most_epochs(forecast: Forecast, limits: Limits, price: SkuPrice, tier: Tier, node_count: int) -> int:
    """Return the most epochs that fit, fewer than planned; 0 where none do."""
    fits, too_many = 0, forecast.sizes.epochs
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fewer = replace(forecast, sizes=replace(forecast.sizes, epochs=middle), totals=())
        estimate = estimate_forecast(fewer, price, tier, node_count)
        if explain_excess(estimate, limits) is None:
            fits = middle
        else:
            too_many = middle
    return fits


def _told(interval: Interval, write: Callable[[float], str], at_least: bool) -> str:
    if at_least:
        return f"at least {write(interval.low)}"
    return f"about {write(interval.expected)} ({write(interval.low)} to {write(interval.high)})"
