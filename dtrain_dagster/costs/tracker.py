"""What a job has cost, from when each node was there: `CostTracker`. No guess, no rate times duration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtrain_dagster.clusters.base import NodeUsage
from dtrain_dagster.costs.prices import Tier, price_of, tier_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CostMetrics:
    """The cost of one job."""

    cluster_name: str
    total_cost_usd: float
    cost_per_node_hour: float
    training_duration_hours: float
    """From the first node's start to the last node's end."""
    cost_per_epoch: float
    estimated_total_cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCost:
    """The cost of one stretch of one node's presence."""

    node_id: int
    sku: str
    started_at: float
    ended_at: float
    hours: float
    usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodCost:
    """Dollars spent on one node within one period of time. Times are Unix seconds."""

    node_id: int
    started_at: float
    ended_at: float
    usd: float


class CostTracker:
    """Adds up node presence. One tracker looks at one job."""

    def __init__(self, cluster_name: str, usage: Iterable[NodeUsage], tier: Tier) -> None:
        self.cluster_name = cluster_name
        self.nodes = tuple(
            NodeCost(
                node_id=stretch.node_id,
                sku=stretch.sku,
                started_at=stretch.started_at,
                ended_at=stretch.ended_at,
                hours=stretch.hours,
                usd=stretch.hours * price_of(stretch.sku).usd_per_hour(tier_of(stretch.tier or tier)),
            )
            for stretch in usage
        )

    @property
    def node_hours(self) -> float:
        return sum(node.hours for node in self.nodes)

    @property
    def total_usd(self) -> float:
        return sum(node.usd for node in self.nodes)

    def metrics(self, epochs: float, estimated_usd: float) -> CostMetrics:
        """The job as `CostMetrics`. ``epochs`` may be a fraction; with none, an epoch costs as much as the whole."""
        started = min((node.started_at for node in self.nodes), default=0.0)
        ended = max((node.ended_at for node in self.nodes), default=0.0)
        return CostMetrics(
            cluster_name=self.cluster_name,
            total_cost_usd=self.total_usd,
            cost_per_node_hour=self.total_usd / self.node_hours if self.node_hours else 0.0,
            training_duration_hours=(ended - started) / 3600,
            cost_per_epoch=self.total_usd / epochs if epochs else self.total_usd,
            estimated_total_cost=estimated_usd,
        )

    def by_period(self, periods: int = 12) -> list[PeriodCost]:
        """The same dollars by node and time, in ``periods`` equal stretches; they add up to `total_usd`."""
        if not self.nodes:
            return []
        first = min(node.started_at for node in self.nodes)
        last = max(node.ended_at for node in self.nodes)
        width = (last - first) / periods
        rows = []
        for node in self.nodes:
            usd_per_second = node.usd / (node.ended_at - node.started_at) if node.ended_at > node.started_at else 0.0
            for period in range(periods):
                begin = max(node.started_at, first + period * width)
                end = min(node.ended_at, first + (period + 1) * width)
                if end > begin:
                    usd = (end - begin) * usd_per_second
                    rows.append(PeriodCost(node_id=node.node_id, started_at=begin, ended_at=end, usd=usd))
        return rows


def overrun(actual_usd: float, estimated_usd: float) -> float:
    """Cost above the estimate as a fraction of it: 0.25 is 25 % too much, negative is below."""
    if estimated_usd <= 0:
        raise ValueError(f"the estimate must be positive, not {estimated_usd} dollars")
    return actual_usd / estimated_usd - 1
