"""What is expected of a fleet as it stands: when each job begins and ends, and which will not fit any more. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain_dagster.fleet.grants import units_to_end
from dtrain_dagster.fleet.jobs import FleetState
from dtrain_dagster.fleet.scheduling import FleetFacts, rank
from dtrain_dagster.fleet.waits import too_dear, too_late


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of a job."""

    begins_at: float | None
    """Unix time at which it is given nodes; None where it has some, or gets none."""
    ends_at: float
    state: FleetState
    reason: str = ""
    """Why it is ended, or never begun."""


def expect(facts: FleetFacts, now: float) -> dict[str, Expected]:
    """Return by job what becomes of those that are not over, if each takes what is expected of it: in order of rank,
    each on the fewest nodes that it may have as soon as so many are free, as long as the budget lasts. Jobs that are
    paused for others, widened, fail or come later are not foreseen."""
    limits = facts.limits
    live = [item for item in facts.jobs if not item.state.is_final]
    unspent = limits.budget_units - facts.settled_units - sum(item.paid_units for item in facts.jobs)
    free_at = [now] * limits.nodes
    found = {}
    for item in sorted(live, key=lambda item: (not item.state.has_nodes, rank(item))):
        nodes, job_id = item.nodes or item.job.least_nodes, item.job.job_id
        if nodes > limits.nodes:
            found[job_id] = Expected(None, now, FleetState.ENDED, f"it needs {nodes} nodes")
            continue
        free_at.sort()
        begins = now if item.state.has_nodes else max(item.not_before, free_at[nodes - 1])
        seconds = 0.0 if item.state is FleetState.ENDING else item.seconds_left(nodes)
        reason = ""
        if begins + seconds > item.deadline(limits):
            reason = too_late(item, nodes, limits, begins)
        elif not item.state.has_nodes and (needs := units_to_end(item, nodes, limits)) > unspent:
            reason = too_dear(item, needs, unspent)
        if reason or item.state is FleetState.ENDING:
            found[job_id] = Expected(None, begins, FleetState.ENDED, reason)
            continue
        unspent -= limits.units_of(nodes * seconds)
        free_at[:nodes] = [begins + seconds] * nodes
        found[job_id] = Expected(None if item.state.has_nodes else begins, begins + seconds, FleetState.SUCCEEDED)
    return found
