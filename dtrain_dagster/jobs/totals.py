"""What a job took over all of its launches, by the records in its run directory: its time, and that of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.clusters import presence
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker, bill_usage, paid_wall_seconds
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.cluster_kinds import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.events import PhaseEvent, read_events
from trainer.documents.presences import NodePresence
from trainer.elastic.generation_record import generations
from trainer.rundir import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTotals:
    """The time and dollars of a job over all launches, and of the last one."""

    launches: int
    seconds: float
    """Seconds in which at least one node was there."""
    node_hours: float
    usd: float | None
    """None where no price was asked for, or none is known."""
    last: LaunchTotals | None = None
    """The same of the last launch; None for a job with one launch."""

    @property
    def words(self) -> str:
        """Return the time for a person: ``10 min 02 s over 2 launches, of which the last took 2 min 12 s``."""
        return f"{format_duration(self.seconds)} {self.of_which}".strip()

    @property
    def of_which(self) -> str:
        """Return the launches, and what of the time the last one took; "" for a job with one launch."""
        if self.last is None:
            return ""
        return f"over {self.launches} launches, of which the last took {format_duration(self.last.seconds)}"

    @property
    def node_hours_words(self) -> str:
        """Return the node-hours for a person, with those of the last launch where there were several."""
        of_last = f" (the last launch: {self.last.node_hours:.4f})" if self.last else ""
        return f"{self.node_hours:.4f} node-hours{of_last}"


def sum_launches(usage: Sequence[NodeUsage], tier: Tier | None = None) -> LaunchTotals:
    """Return the totals of a job from the paid presence of its nodes; what is recorded twice is paid for once. Nodes of
    its probes count among hours and dollars; they are no launch of it. ``tier``: the one that was requested, with which
    dollars are counted as well."""
    mine = [item for item in usage if not item.is_probe]
    numbers = {item.launch for item in mine}
    last = sum_launches([item for item in mine if item.launch == max(numbers)], tier) if len(numbers) > 1 else None
    usd = None
    if tier is not None:
        with suppress(PriceError):
            usd = CostTracker("", usage, tier).total_usd
    return LaunchTotals(
        launches=len(numbers),
        seconds=paid_wall_seconds(mine),
        node_hours=sum(item.hours for item in bill_usage(usage)[0]),
        usd=usd,
        last=last,
    )


def cost_of(usage: Sequence[NodeUsage], tier: Tier, price_words: str) -> tuple[float | None, str]:
    """Return a training's dollars as a number (None without a known price) and in words. An unknown price raises
    nothing: the training is already paid for."""
    try:
        total = CostTracker("", usage, tier).total_usd
    except PriceError as error:
        return None, f"cost not known: {error}"
    return total, f"{dollars(total)} ({', '.join(sorted({node.sku for node in usage}))}: {price_words})"


def launched_usage(
    nodes: Sequence[NodePresence], launch: Mapping[str, Any], running: bool, now: float, stale: float, sku: str = ""
) -> list[NodeUsage]:
    """Return the paid time of a job's nodes, each with the size and tier that its launch was given. A silent node has
    cost until it was last heard of: there may be no process left to record its end. ``launch``: the content of
    ``launch.json``; ``sku``: of launches that do not say theirs. Pure."""
    given = {item["launch"]: item for item in [*launch.get("history", ()), launch] if "launch" in item}
    usage, seen = [], presence.usage(nodes, sku, running, now, stale)
    for node, item in zip(nodes, seen, strict=True):
        kind = given.get(node.launch, launch)
        usage.append(replace(item, sku=kind.get("sku") or sku, tier=kind.get("tier")))
    return usage


def read_phase_totals(rundir: RunDir, events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase over all launches, from the job's events and its record of generations."""
    return sum_phases(events, {item.number: item.launch for item in generations(rundir.storage)})


def sum_phases(events: Iterable[Mapping[str, Any]], launches: Mapping[int, int]) -> dict[str, float]:
    """Return the seconds of each phase over all launches. ``launches``: the launch of each generation; one that is not
    there, as in a world of fixed ranks, is a launch of its own. Pure.

    A process reports sums since it was started, and another may be rank 0 after a node was lost: the largest sum of a
    launch is that of a process that was there from its beginning.
    """
    largest: dict[tuple[tuple[str, int], str], float] = defaultdict(float)
    for phase in read_events(PhaseEvent, events):
        if phase.rank == 0:
            known = phase.generation in launches
            launch = ("launch", launches[phase.generation]) if known else ("generation", phase.generation)
            largest[launch, phase.name] = max(largest[launch, phase.name], float(phase.seconds))
    totals: dict[str, float] = defaultdict(float)
    for (_, name), seconds in largest.items():
        totals[name] += seconds
    return dict(totals)
