"""What a training is expected to cost, said before it is started: on how many nodes, at which price, from which past
runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from dtrain_dagster.cli.common import cluster_of, ranks_of
from dtrain_dagster.costs.estimate import Estimate, Forecast, estimate_cost, estimate_forecast
from dtrain_dagster.costs.prices import SkuPrice, hardware_of, price_of, price_words
from dtrain_dagster.jobs.spending import Wanted
from dtrain_dagster.planning.build_plan import sizes_of
from dtrain_dagster.planning.check_job import data_of
from dtrain_dagster.planning.evidence import HomeHistory
from dtrain_dagster.settings.cluster_kinds import Tier, tier_in_words
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import JobConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a training is expected to cost."""

    nodes: int
    price: SkuPrice
    tier: Tier
    price_words: str
    estimate: Estimate | None = None
    """None where no past run tells."""
    basis: str = ""
    """What the estimate rests on, in words."""
    limit_node_seconds: float | None = None
    """Its hard budget; None: it has none."""

    @property
    def usd_per_hour(self) -> float:
        """Return what all nodes cost in an hour."""
        return self.nodes * self.price.usd_per_hour(self.tier)

    @property
    def limit_usd(self) -> float | None:
        """Return the dollars of its hard budget."""
        each = self.price.usd_per_hour(self.tier)
        return None if self.limit_node_seconds is None else self.limit_node_seconds / 3600 * each

    @property
    def usd(self) -> float | None:
        """Return what it may cost: its hard budget, else what is expected; None where neither is known."""
        if self.limit_usd is not None:
            return self.limit_usd
        return self.estimate.usd.expected if self.estimate else None

    def wanted(self, name: str) -> Wanted:
        """Return the job of this name as a start."""
        return Wanted(name=name, usd=self.usd, usd_per_hour=self.usd_per_hour)

    def on(self, price: SkuPrice, tier: Tier) -> Expected:
        """Return the same on other nodes, whose speed is that of the price table: a rough guess."""
        told, slower = self.estimate, self.price.speed / price.speed
        if told is not None:
            told = estimate_cost(told.seconds.scaled(slower), price, tier, self.nodes)
        return replace(self, price=price, tier=tier, estimate=told)

    @property
    def price_line(self) -> str:
        """Return what its nodes cost in an hour, for a person."""
        each, count = dollars(self.price.usd_per_hour(self.tier)), f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        return (
            f"price: {count} of {self.price.sku} ({tier_in_words(self.tier)}) at {each} are "
            f"{dollars(self.usd_per_hour)} per hour ({self.price_words})"
        )

    def lines(self) -> list[str]:
        """Return it in lines for a person."""
        lines = [self.price_line]
        if self.estimate is not None:
            seconds = self.estimate.seconds.told(format_duration)
            lines.append(f"expected: {self.estimate.usd.told(dollars)}, in {seconds}; from {self.basis}")
        else:
            why = "this home has no past run of the same model, data and batch on this SKU"
            lines.append(f"expected: not known, since {why}")
        if self.limit_usd is not None:
            lines.append(f"hard budget: {dollars(self.limit_usd)} (training.max_node_seconds)")
        return lines


def past_forecasts(settings: Settings) -> Callable[[JobConfig], Forecast | None]:
    """Return a function that tells a training's time from this home's past runs alike on the settings' SKU. It raises
    OSError or RuntimeError where they cannot be read."""
    history = HomeHistory(settings.home, ranks_of(settings), sku_of(settings), settings.kind.is_this_machine)
    cores = os.cpu_count() if history.shares_machine else None

    def forecast(job: JobConfig) -> Forecast | None:
        if not history.runs_like(job):  # then its dataset need not be read
            return None
        return history.forecast(job, sizes_of(job, data_of(job).samples, history.processes_per_node, cores))

    return forecast


def sku_of(settings: Settings) -> str:
    """Return the SKU of the settings' nodes as past runs have it: in the table's letters, with the partition that a
    site prices. Raise `PriceError` for an unknown one."""
    return hardware_of(cluster_of(settings)[0].sku).sku


def expect_nodes(settings: Settings, nodes: int) -> Expected:
    """Return what nodes of the settings' cluster cost, whatever they do. Raise `PriceError` where they have no
    price."""
    sku, tier = cluster_of(settings)[0].sku, settings.tiers[0]
    price = price_of(sku)
    price.usd_per_hour(tier)
    return Expected(nodes=nodes, price=price, tier=tier, price_words=price_words(sku, settings.kind.buys_nodes))


def expect(settings: Settings, job: JobConfig, nodes: int) -> Expected:
    """Return what a training is expected to cost on the settings' cluster. Raise as `expect_nodes` does."""
    found = replace(expect_nodes(settings, nodes), limit_node_seconds=job.training.max_node_seconds)
    if not job.is_of_script:  # of which other code may have the same fields
        with suppress(OSError, RuntimeError):  # of past runs: what is missing is a figure, and it is said
            if (known := past_forecasts(settings)(job)) is not None:
                told = estimate_forecast(known, found.price, found.tier, nodes)
                return replace(found, estimate=told, basis=known.basis_words)
    return found
