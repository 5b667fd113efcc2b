"""The cost of a job, from the presence of each node: `CostTracker`. No guess, no rate times duration.

All times are Unix time, which knows neither time zones nor daylight saving; where a person reads one, it is UTC.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dtrain_dagster.costs.money import HOUR, SECOND, is_finite, microseconds, nano_usd, usd
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.cluster_kinds import Tier, tier_of
from dtrain_dagster.support.formatting import format_duration


@dataclass(frozen=True, kw_only=True, slots=True)
class CostMetrics:
    """The cost of one job."""

    cluster_name: str
    total_cost_usd: float
    cost_per_node_hour: float
    training_duration_hours: float
    """Hours in which at least one node was paid for, over all launches."""
    cost_per_epoch: float
    estimated_total_cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCost:
    """An interval for which a node was paid; no two of one node overlap."""

    node_id: int
    sku: str
    tier: str | None
    """Tier that was paid; None: the tier that was requested."""
    began: int
    """Unix time in microseconds, as ``ended``."""
    ended: int
    nano_usd_per_hour: int = 0
    preflight_until: int | None = None
    """Until when its pre-flight took, in microseconds; None where none was made."""
    kept_since: int | None = None
    """Since when it stayed for a person to look at; None where it did not."""
    is_probe: bool = False
    """Whether the node worked for a probe of the training, and not for the training itself."""

    @property
    def microseconds(self) -> int:
        return self.ended - self.began

    @property
    def units(self) -> int:
        return self.microseconds * self.nano_usd_per_hour

    @property
    def started_at(self) -> float:
        return self.began / SECOND

    @property
    def ended_at(self) -> float:
        return self.ended / SECOND

    @property
    def hours(self) -> float:
        return self.microseconds / HOUR

    @property
    def usd(self) -> float:
        return usd(self.units)


class CostTracker:
    """The sum of a job's node presence. Odd intervals count zero or once, and ``notes`` says so."""

    def __init__(self, cluster_name: str, usage: Iterable[NodeUsage], tier: Tier) -> None:
        self.cluster_name = cluster_name
        intervals, self.notes = bill_usage(usage)
        tiers = [tier_of(item.tier or tier) for item in intervals]
        self.nodes = tuple(
            replace(item, tier=paid, nano_usd_per_hour=nano_usd(price_of(item.sku).usd_per_hour(paid)))
            for item, paid in zip(intervals, tiers, strict=True)
        )

    @property
    def node_hours(self) -> float:
        return sum(node.microseconds for node in self.nodes) / HOUR

    @property
    def total_units(self) -> int:
        return sum(node.units for node in self.nodes)

    @property
    def total_usd(self) -> float:
        return usd(self.total_units)

    @property
    def training_nodes(self) -> tuple[NodeCost, ...]:
        return tuple(node for node in self.nodes if not node.is_probe)

    @property
    def training_usd(self) -> float:
        return usd(sum(node.units for node in self.training_nodes))

    @property
    def probe_usd(self) -> float:
        return usd(sum(node.units for node in self.nodes if node.is_probe))

    @property
    def wall_seconds(self) -> float:
        """Return the seconds in which at least one node of the training, without its probes, was paid for."""
        return paid_wall_seconds(self.training_nodes)

    def metrics(self, epochs: float, estimated_usd: float) -> CostMetrics:
        """Return the job as `CostMetrics`. ``epochs`` may be a fraction."""
        return CostMetrics(
            cluster_name=self.cluster_name,
            total_cost_usd=self.total_usd,
            cost_per_node_hour=self.total_usd / self.node_hours if self.node_hours else 0.0,
            training_duration_hours=self.wall_seconds / 3600,
            cost_per_epoch=self.total_usd / epochs if epochs else self.total_usd,
            estimated_total_cost=estimated_usd,
        )


def _moment(at: float | None) -> int | None:
    return microseconds(at) if at is not None and is_finite(at) else None


def bill_usage(usage: Iterable[NodeUsage]) -> tuple[list[NodeCost], tuple[str, ...]]:
    """Return the paid intervals, without prices, in order of node and time, and their oddities in words. Where two
    records of one node overlap it is paid for once, as the later one says."""
    by_node: dict[int, list[NodeCost]] = defaultdict(list)
    backward, twice = 0, 0
    jumps: dict[int, float] = defaultdict(float)
    for item in usage:
        if is_finite(item.not_billed_seconds):  # of several intervals the largest: the same setting may be in each
            jumps[item.node_id] = max(jumps[item.node_id], item.not_billed_seconds, key=abs)
        if not (is_finite(item.started_at) and is_finite(item.ended_at)) or item.ended_at < item.started_at:
            backward += 1
            continue
        interval = NodeCost(
            node_id=item.node_id,
            sku=item.sku,
            tier=item.tier,
            began=microseconds(item.started_at),
            ended=microseconds(item.ended_at),
            preflight_until=_moment(item.preflight_until),
            kept_since=_moment(item.kept_since),
            is_probe=item.is_probe,
        )
        if interval.microseconds:
            by_node[item.node_id].append(interval)
    found: list[NodeCost] = []
    for _, intervals in sorted(by_node.items()):
        once = _once(intervals)
        twice += sum(item.microseconds for item in intervals) - sum(item.microseconds for item in once)
        found += once
    notes = [
        f"the clock of node {node_id} was set {'forward' if seconds > 0 else 'back'} by "
        f"{format_duration(abs(seconds))} while it was there: not billed"
        for node_id, seconds in sorted(jumps.items())
        if seconds
    ]
    if backward:
        notes.append(
            f"{backward} interval(s) of nodes end before they start (a clock stepped back): they count as zero"
        )
    if twice:
        notes.append(f"{twice / SECOND:,.1f} s of nodes are recorded twice: paid once, at the later record's price")
    return found, tuple(notes)


def utc(microseconds: int) -> str:
    """Return a time for people and files: ``2026-10-25T00:30:00Z``, the same in every time zone."""
    return datetime.fromtimestamp(microseconds / SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def overrun(actual_usd: float, estimated_usd: float) -> float:
    """Return the cost above the estimate as a fraction of it: 0.25 is 25 % too much, negative is below."""
    if estimated_usd <= 0:
        raise ValueError(f"the estimate must be positive, not {estimated_usd} dollars")
    return actual_usd / estimated_usd - 1


def _once(intervals: list[NodeCost]) -> list[NodeCost]:
    ordered = sorted(intervals, key=lambda item: (item.began, item.ended))
    moments = sorted({moment for item in ordered for moment in (item.began, item.ended)})
    found: list[NodeCost] = []
    source: NodeCost | None = None
    for begin, end in itertools.pairwise(moments):
        here = [item for item in ordered if item.began <= begin and end <= item.ended]
        if not here:
            source = None
        elif here[-1] is source:
            found[-1] = replace(found[-1], ended=end)
        else:
            source = here[-1]
            found.append(replace(source, began=begin, ended=end))
    return found


def paid_wall_seconds(usage: Sequence[NodeUsage | NodeCost]) -> float:
    """Return the seconds in which at least one node was paid for; the time between two launches is not."""
    total, until = 0.0, -math.inf
    for node in sorted(usage, key=lambda node: node.started_at):
        total += max(0.0, node.ended_at - max(until, node.started_at))
        until = max(until, node.ended_at)
    return total
