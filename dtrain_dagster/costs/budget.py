"""A hard budget in node-seconds, the unit that the nodes keep (`trainer.engine.budget`), whatever it was given in."""

from __future__ import annotations

from collections.abc import Iterable

from dtrain_dagster.costs.plan import PLAN, probe_usage_of
from dtrain_dagster.costs.prices import PriceError, price_of
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.tiers import Tier, tier_of
from trainer.rundir import LAUNCH, LIMIT, RunDir

LEAST_RAISE_SECONDS = 1.0
"""Node-seconds by which a spent budget must be raised to continue. Dollars become seconds again with an error of about
a microsecond, and no checkpoint and step fit into a second."""


def node_seconds_of(stop_at_usd: float, usage: Iterable[NodeUsage], sku: str, tier: Tier) -> float:
    """Return how many node-seconds a job may be paid in all until its dollars are spent: those paid so far, on any
    nodes, and those that the rest of the dollars buys at the price of the nodes that it continues with. Pure. Its
    probes cost dollars, but none of the seconds that its nodes count. ``tier``: also of intervals that do not name
    theirs. Raise `PriceError` where a price is not known."""
    intervals = list(usage)
    mine = [item for item in intervals if not item.is_probe]
    seconds = sum(max(0.0, item.ended_at - item.started_at) for item in mine)  # as the nodes count them
    left_usd = max(0.0, stop_at_usd - CostTracker("", intervals, tier).total_usd)
    return seconds + left_usd / price_of(sku).usd_per_hour(tier) * 3600


def is_spent(limit: float, paid: float, stopped_at: float | None) -> bool:
    """Return whether a job has no budget left to continue with. Pure. ``limit``, ``paid``: the node-seconds that it may
    be paid in all and that it was paid. ``stopped_at``: the budget at which its last launch stopped, if it did. Such a
    job has kept back what a checkpoint takes, so it was paid less than that budget, and yet no step fits into it."""
    return paid >= limit or (stopped_at is not None and limit < stopped_at + LEAST_RAISE_SECONDS)


def write_limit(rundir: RunDir, max_node_seconds: float | None, stop_at_usd: float | None = None) -> None:
    """Set the budget of a job, running or not: its nodes read it within a minute, and before they stop for it. None: no
    budget. ``stop_at_usd``: the dollars it was computed from, for a later launch at another price."""
    if max_node_seconds is None and not rundir.storage.exists(LIMIT):
        return
    rundir.write_json(LIMIT, {"max_node_seconds": max_node_seconds, "stop_at_usd": stop_at_usd or None})


def launch_price(rundir: RunDir, tier: Tier) -> float | None:
    """Return what a node of a job's last launch costs in an hour; None where that is not known."""
    launch = rundir.read_json(LAUNCH) or {}
    try:
        return price_of(launch["sku"]).usd_per_hour(tier_of(launch.get("tier") or tier)) if "sku" in launch else None
    except PriceError:
        return None


def reprice(rundir: RunDir, usage: Iterable[NodeUsage], sku: str, tier: Tier) -> None:
    """Recompute a budget in dollars for a job that continues on these nodes. Raise `PriceError`."""
    dollars = (rundir.read_json(LIMIT) or {}).get("stop_at_usd")
    if dollars:
        paid = [*usage, *probe_usage_of(rundir.read_json(PLAN))]
        write_limit(rundir, node_seconds_of(dollars, paid, sku, tier), dollars)
