"""What a training is expected to cost, said before it is started: on how many nodes, at which price, from which past
runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from dtrain_dagster.cli.ceilings import promising
from dtrain_dagster.cli.common import cluster_of, ranks_of, say
from dtrain_dagster.clusters.base import ClusterConfig
from dtrain_dagster.costs.estimate import Estimate, Forecast, estimate_cost, estimate_forecast
from dtrain_dagster.costs.prices import SkuPrice, price_of, price_words
from dtrain_dagster.jobs.promises import Wanted, owner_here
from dtrain_dagster.planning.build_plan import sizes_of
from dtrain_dagster.planning.check_job import data_of
from dtrain_dagster.planning.history import HomeHistory
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.tiers import Tier, tier_in_words, tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import JobConfig, TrackingConfig


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

    def on(self, price: SkuPrice, tier: Tier) -> Expected:
        """Return the same on other nodes, whose speed is that of the price table: a rough guess."""
        told = None
        if self.estimate is not None:
            seconds = self.estimate.seconds.scaled(self.price.speed / price.speed)
            told = estimate_cost(seconds, price, tier, self.nodes)
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
            lines.append("expected: not known, since this home has no past run of the same model, data and batch")
        if self.limit_usd is not None:
            lines.append(f"hard budget: {dollars(self.limit_usd)} (training.max_node_seconds)")
        return lines


@contextmanager
def promising_training(
    settings: Settings, job: JobConfig, nodes: int, got: ClusterConfig | None = None
) -> Iterator[None]:
    """Print what a training is expected to cost, and promise it, as `promising` does. ``got``: other nodes than those
    that the settings name."""
    expected = expect(settings, job, nodes)
    if got is not None:
        expected = expected.on(price_of(got.gpu_type), tier_of(got.tier or settings.tiers[0]))
    say(*expected.lines(), err=True)
    with promising(settings, wanted_training(settings, job, expected)):
        yield


def wanted_training(settings: Settings, job: JobConfig, expected: Expected) -> Wanted:
    """Return a training as a start, whose project is the experiment in which it is recorded."""
    stated = job.tracking.mlflow_experiment
    experiment = settings.experiment if stated == TrackingConfig().mlflow_experiment else stated
    owner = owner_here(experiment)
    return Wanted(name=job.job_id, owner=owner, usd=expected.usd, usd_per_hour=expected.usd_per_hour)


def past_forecasts(settings: Settings) -> Callable[[JobConfig], Forecast | None]:
    """Return a function that tells a training's time from this home's past runs alike; None where there are none. It
    raises OSError or RuntimeError where they cannot be read."""
    history = HomeHistory(settings.home, ranks_of(settings), settings.gpu_type, settings.kind.is_this_machine)
    cores = os.cpu_count() if history.shares_machine else None

    def forecast(job: JobConfig) -> Forecast | None:
        if not history.runs_like(job):  # then its dataset need not be read
            return None
        return history.forecast(job, sizes_of(job, data_of(job).samples, history.processes_per_node, cores))

    return forecast


def expect_nodes(settings: Settings, nodes: int) -> Expected:
    """Return what nodes of the settings' cluster cost, whatever they do. Raise `PriceError` where they have no
    price."""
    sku, tier = cluster_of(settings)[0].sku, settings.tiers[0]
    price = price_of(sku)
    price.usd_per_hour(tier)
    return Expected(nodes=nodes, price=price, tier=tier, price_words=price_words(sku, settings.kind.buys_nodes))


def expect(settings: Settings, job: JobConfig, nodes: int) -> Expected:
    """Return what a training is expected to cost on the settings' cluster. Raise as `expect_nodes` does."""
    found, told, basis = expect_nodes(settings, nodes), None, ""
    if not job.is_of_script:  # of which other code may have the same fields
        with suppress(OSError, RuntimeError):  # of past runs: what is missing is a figure, and it is said
            if (known := past_forecasts(settings)(job)) is not None:
                told = estimate_forecast(known, found.price, found.tier, nodes)
                basis = known.basis_words
    return replace(found, estimate=told, basis=basis, limit_node_seconds=job.training.max_node_seconds)
