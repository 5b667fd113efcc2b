"""A hard budget, as the nodes keep it: in node-seconds (`trainer.engine.budget`), whatever it was given in."""

from __future__ import annotations

from collections.abc import Iterable

from dtrain_dagster.costs.prices import Tier, price_of
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from trainer.rundir import LIMIT, RunDir


def node_seconds_of(stop_at_usd: float, usage: Iterable[NodeUsage], sku: str, tier: Tier) -> float:
    """How many node-seconds a job may be paid in all, for its dollars to be spent just then: those that it was paid so
    far, on whatever nodes, and what is left of the dollars at the price of the nodes that it goes on with. Pure.
    ``tier``: also of stays that do not name theirs. `PriceError` where a price is not known."""
    stays = list(usage)
    seconds = sum(max(0.0, stay.ended_at - stay.started_at) for stay in stays)  # as the nodes count them
    left_usd = max(0.0, stop_at_usd - CostTracker("", stays, tier).total_usd)
    return seconds + left_usd / price_of(sku).usd_per_hour(tier) * 3600


def write_limit(rundir: RunDir, max_node_seconds: float | None, stop_at_usd: float | None = None) -> None:
    """Set the budget of a job, also of one that runs: its nodes read it within a minute, and before they stop for it.
    None: it has none. ``stop_at_usd``: the dollars it was made of, for whoever goes on with it at another price."""
    if max_node_seconds is None and not rundir.storage.exists(LIMIT):
        return
    rundir.write_json(LIMIT, {"max_node_seconds": max_node_seconds, "stop_at_usd": stop_at_usd or None})


def reprice(rundir: RunDir, usage: Iterable[NodeUsage], sku: str, tier: Tier) -> None:
    """Have a budget in dollars hold for a job that goes on with these nodes. `PriceError` where that cannot be."""
    dollars = (rundir.read_json(LIMIT) or {}).get("stop_at_usd")
    if dollars:
        write_limit(rundir, node_seconds_of(dollars, usage, sku, tier), dollars)
