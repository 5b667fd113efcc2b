"""What a job took over all of its launches, by the records in its run directory: its time, and that of each phase."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters import presence
from dtrain_dagster.costs.launches import LaunchTotals, sum_launches
from trainer.documents.events import PhaseEvent, read_events
from trainer.documents.presences import NodePresence
from trainer.elastic.generation_record import generations
from trainer.rundir import RunDir


def sum_presences(nodes: Sequence[NodePresence], running: bool, now: float, stale: float = math.inf) -> LaunchTotals:
    """Return what a job took over all launches, without dollars, by the records of its nodes; ``running``, ``now`` and
    ``stale``: see `dtrain_dagster.clusters.presence.usage`."""
    return sum_launches(presence.usage(nodes, "", running, now, stale))


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
