"""The cost of a probe: what is expected before it is bought, what it has cost, and which training pays for it.

The probe itself, and what is read from it, is in `dtrain_dagster.planning.probe`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager
from dtrain_dagster.costs.budget import node_seconds_of
from dtrain_dagster.costs.estimate import CONFIDENCE_90, Forecast, Sizes
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.plan import ProbeCharge
from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.costs.tracker import CostTracker, paid_wall_seconds
from dtrain_dagster.planning.build_plan import Limits, PlannedJob
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.rundir import RunDir

PAID_BY = "paid_by.json"
"""File of a probe's run directory: the job that pays for it. The first training that rests on it does, and no other."""
GUESSED_SECONDS = 7.0
"""Seconds of a probe whose ranks have a core each, where nothing better is known. The default model's took 6 to 16 s
with 3 ranks on 2 cores, by what else the machine did; for any other model and machine it is a guess."""
PAST_SPREAD, GUESS_SPREAD = 0.35, 0.75
"""Standard deviation of the logarithm of a probe's time, where probes of other trainings are known and where nothing
is: 90 % lie within a factor of 1.8 and of 3.4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastProbe:
    """A probe that has run: on what, and for how long."""

    job_id: str
    sku: str
    node_count: int
    processes_per_node: int
    seconds: float
    """Wall seconds in which a node of it was paid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedProbe:
    """The expected cost of the probes of a plan, before any is bought."""

    seconds: Interval
    """Wall seconds, one probe after the other."""
    usd: Interval
    basis: str
    """Where the figures come from, in words."""

    def __str__(self) -> str:
        """Return it for people: dollars and time with their ranges, and the basis."""
        return f"{self.usd.told(dollars)} and {self.seconds.told(format_duration)}, from {self.basis}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The pace of a planned training, and what it cost to learn it."""

    planned: PlannedJob
    """The plan on the nodes that are available, which may be others than those asked for."""
    forecast: Forecast
    expected: ExpectedProbe | None = None
    """The expected cost of the probes before they ran; None where none had to be run."""
    charges: tuple[ProbeCharge, ...] = ()
    """The probes that the forecast rests on and that no training has paid for, run now or before."""
    seconds: float = 0.0
    """Wall seconds of the probes that were run now."""


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


def expect_probes(
    past: Sequence[PastProbe], counts: Sequence[int], sizes: Sizes, price: SkuPrice, tier: Tier
) -> ExpectedProbe | None:
    """Return the expected cost of probes on these node counts; None where there are none to run. Pure.

    It rests on past probes on this SKU, of any training: on the same number of nodes, or else on the nearest, by how
    many ranks share a core. Without any it is a guess, and its interval says so. Raise `PriceError` for nodes without
    a price.
    """
    if not counts:
        return None
    alike = [item for item in past if item.sku == price.sku and item.processes_per_node == sizes.processes_per_node]
    spread = PAST_SPREAD if alike else GUESS_SPREAD
    each = {count: _expected_seconds(alike, count, sizes) for count in counts}
    factor = math.exp(CONFIDENCE_90 * spread)
    seconds, node_seconds = sum(each.values()), sum(count * value for count, value in each.items())
    usd = node_seconds / 3600 * price.usd_per_hour(tier)
    words = f"{len(alike)} past probe(s) on {price.sku}" if alike else "no past probe: a guess"
    return ExpectedProbe(
        seconds=Interval(low=seconds / factor, expected=seconds, high=seconds * factor),
        usd=Interval(low=usd / factor, expected=usd, high=usd * factor),
        basis=words,
    )


def _expected_seconds(alike: Sequence[PastProbe], count: int, sizes: Sizes) -> float:
    if not alike:
        return sizes.crowding(count) * GUESSED_SECONDS
    nearest = min(abs(math.log(item.node_count / count)) for item in alike)
    took = [
        item.seconds * sizes.crowding(count) / sizes.crowding(item.node_count)
        for item in alike
        if abs(math.log(item.node_count / count)) == nearest
    ]
    return statistics.median(took)


def charge_of(manager: GPUClusterManager, job_id: str) -> ProbeCharge:
    """Return what a probe was paid for, over all of its launches. Raise `ClusterError` for a job that this cluster does
    not know."""
    return ProbeCharge(job_id=job_id, usage=tuple(manager.node_usage(job_id)))


def unpaid_charges(manager: GPUClusterManager, jobs_uri: str, job_ids: Sequence[str]) -> tuple[ProbeCharge, ...]:
    """Return the charges of those probes that no training pays for yet; none of a job that the cluster has
    forgotten."""
    found = []
    for job_id in job_ids:
        if payer_of(RunDir(f"{jobs_uri}/{job_id}")) is None:
            with suppress(ClusterError):
                found.append(charge_of(manager, job_id))
    return tuple(found)


def charge_usd(charges: Sequence[ProbeCharge], tier: Tier) -> float:
    """Return the dollars of these probes. Raise `PriceError` where a price is not known."""
    return CostTracker("", [item for charge in charges for item in charge.usage], tier).total_usd


def charge_seconds(charges: Sequence[ProbeCharge]) -> float:
    """Return the wall seconds in which a node of these probes was paid."""
    return sum(paid_wall_seconds(charge.usage) for charge in charges)


def charge_node_seconds(charges: Sequence[ProbeCharge]) -> float:
    """Return the paid node-seconds of these probes."""
    return sum(3600 * item.hours for charge in charges for item in charge.usage)


def payer_of(rundir: RunDir) -> str | None:
    """Return the id of the job that pays for this probe, None while none does."""
    document = rundir.read_json(PAID_BY)
    return document["job_id"] if document else None


def take_charges(jobs_uri: str, charges: Sequence[ProbeCharge], job_id: str) -> tuple[ProbeCharge, ...]:
    """Make this job pay for those of the probes that no other job pays for, and return them. Whoever comes first gets
    a probe, so that each is paid once."""
    mine = []
    for charge in charges:
        rundir = RunDir(f"{jobs_uri}/{charge.job_id}")
        with suppress(FileExistsError):
            rundir.storage.create(PAID_BY, json.dumps({"job_id": job_id}).encode())
        if payer_of(rundir) == job_id:
            mine.append(charge)
    return tuple(mine)


def left_node_seconds(limit_usd: float, charges: Sequence[ProbeCharge], price: SkuPrice, tier: Tier) -> float | None:
    """Return the node-seconds that a probe may take of a limit in dollars, after these charges; None without a limit.
    Pure."""
    if not limit_usd:
        return None
    left = limit_usd - charge_usd(charges, tier)
    return node_seconds_of(max(0.0, left), (), price.sku, tier)
