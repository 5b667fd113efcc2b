"""Dollars that are promised to the jobs of a fleet: how much, before which nodes may spend it. Pure.

A *grant* is the dollars that a job may have cost in all when its nodes stop by themselves; they know it as node-seconds
(`trainer.engine.budget`). What a node is paid for after the limit (it has to notice; one that was just started has to
load its program first) is part of the grant and not of the limit: `FleetLimits.margin_seconds`. So the sum of all
grants, kept within the budget, bounds what is paid, whoever is alive.

    grant = paid + nodes * (margin + the seconds that it may go on)
"""

from __future__ import annotations

from typing import NamedTuple

from dtrain_dagster.fleet.jobs import FleetLimits, Standing

LEAST_WORK_SECONDS = 30.0
"""Seconds after its start for which a launch must be promised dollars, unless its work takes less; and for which a job
is, that still runs after all that was expected of it. The next look, which may be some seconds away, and its evaluation
fit into it."""
LEAST_RAISE_SHARE = 0.05
"""The smallest raise, as a share of what a job is promised beforehand."""
UNFORESEEN_SHARE = 0.25
"""Share of its whole work, or of a slice if that is less, that a job is promised at least which has done all that was
expected of it, and still runs."""
SURE = 2.0
"""Standard deviations above the expected work up to which a job is promised dollars without another look."""


def seconds_ahead(standing: Standing, limits: FleetLimits) -> float:
    """Return the seconds that a job with nodes may go on before it comes to the limit that they know; not below 0. On
    nodes that cost less than the dearest, more of its grant is left at each look."""
    unpaid = standing.grant_units - standing.paid_units - margin_units(standing.nodes, limits)
    return limits.seconds_of(max(0, unpaid)) / standing.nodes


def node_limit(standing: Standing, limits: FleetLimits) -> float:
    """Return the node-seconds over all launches at which the nodes of a job stop by themselves."""
    return standing.node_seconds + standing.nodes * seconds_ahead(standing, limits)


def margin_units(nodes: int, limits: FleetLimits) -> int:
    """Return what nodes may cost after their job has come to its limit."""
    return limits.units_of(nodes * limits.margin_seconds)


def units_to_end(standing: Standing, limits: FleetLimits) -> int:
    """Return what a job still costs to its end, if its work takes a standard deviation more than expected; with the
    margin."""
    nodes = standing.job.nodes
    return limits.units_of(nodes * standing.seconds_left(deviations=1.0)) + margin_units(nodes, limits)


def first_grant(standing: Standing, free_units: int, limits: FleetLimits) -> int | None:
    """Return the grant with which a job is started: a slice, or less where that is enough or no more is free. None
    where too little is free for a start that gets anything done."""
    whole, nodes = standing.seconds_left(SURE), standing.job.nodes
    start = standing.job.startup_seconds
    least = min(start + LEAST_WORK_SECONDS, standing.seconds_left())
    wanted = max(least, min(whole, start + limits.slice_seconds))
    free_seconds = limits.seconds_of(max(0, free_units)) / nodes - limits.margin_seconds
    if free_seconds < least:
        return None
    return standing.paid_units + limits.units_of(nodes * (limits.margin_seconds + min(wanted, free_seconds)))


class Raise(NamedTuple):
    """The answer to what a running job should be promised more."""

    grant_units: int | None
    """Its new grant; None: the old one."""
    lacks: bool = False
    """Whether it will soon stop at its limit, since too little is free."""


def next_grant(standing: Standing, free_units: int, limits: FleetLimits) -> Raise:
    """Return the raise of a running job, as soon as half of a slice is used, or half of what it still needs."""
    ahead = seconds_ahead(standing, limits)
    needed, whole = standing.seconds_left(SURE), standing.job.paid_seconds / standing.job.nodes
    unforeseen = max(LEAST_WORK_SECONDS, UNFORESEEN_SHARE * min(limits.slice_seconds, whole))
    wanted = min(limits.slice_seconds, max(needed, unforeseen))
    if ahead >= wanted / 2:
        return Raise(None)
    more = limits.units_of(standing.nodes * (wanted - ahead))
    given = min(more, max(0, free_units))
    least = limits.units_of(standing.nodes * LEAST_RAISE_SHARE * wanted)
    lacks = given < more and ahead + limits.seconds_of(given) / standing.nodes < wanted / 2
    return Raise(standing.grant_units + given if given >= min(least, more) else None, lacks)
