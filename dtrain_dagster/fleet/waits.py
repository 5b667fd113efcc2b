"""Why a job of a fleet waits, or is never begun, in a sentence. Pure."""

from __future__ import annotations

from dtrain_dagster.costs.money import usd
from dtrain_dagster.fleet.grants import Standing
from dtrain_dagster.fleet.jobs import FleetLimits
from dtrain_dagster.support.formatting import dollars, format_duration

BUDGET_IS_NEEDED = "the rest of the budget is needed by jobs ahead of it"
BUDGET_IS_PROMISED = "the rest of the budget was promised to jobs that run"
NO_NODE_IS_FREE = "no node is free, and no running job has a lower priority"
NONE_WERE_TO_BE_HAD = "the cluster had no nodes for it: it is tried again later"


def wait_behind(first: str) -> str:
    """Return why a job waits that comes after ``first``, which waits itself."""
    return f"nodes are kept for {first}, which comes before it"


def wait_for_nodes(nodes: int, free: int, least_nodes: int) -> str:
    """Return why a job waits that needs this many nodes, by itself (``least_nodes``) or for its deadline."""
    count = f"{nodes} node{'s' if nodes > 1 else ''}"
    for_it = " to end by its deadline" if nodes > least_nodes else ""
    return f"it needs {count}{for_it}, and {free or 'none'} {'is' if free < 2 else 'are'} free"


def too_late(standing: Standing, nodes: int, limits: FleetLimits, at: float) -> str:
    """Return why a job is not begun on this many nodes at this Unix time: it would end after its deadline."""
    needs, left = standing.seconds_left(nodes), max(0.0, standing.deadline(limits) - at)
    return (
        f"not {standing.verb}: it would take {format_duration(needs)} on {nodes} node{'s' if nodes > 1 else ''}, and "
        f"its deadline is in {format_duration(left)}"
    )


def too_dear(standing: Standing, needs: int, unspent: int) -> str:
    """Return why a job is not begun: it costs more than is left."""
    return (
        f"not {standing.verb}: it would cost {dollars(usd(needs))} to its end, and "
        f"{dollars(max(0.0, usd(unspent)))} of the budget is left"
    )
