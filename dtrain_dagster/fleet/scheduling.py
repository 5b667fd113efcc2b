"""Which jobs of a fleet run now, with how many dollars: `decide`. Pure: no clock, no storage.

A *grant* is the dollars that a job may have cost in all when its nodes stop by themselves; they know it as node-seconds
(`trainer.engine.budget`). What a node is paid for after the limit (it has to notice; one that was just started has to
load its program first) is part of the grant and not of the limit: `FleetLimits.margin_seconds`. So the sum of all
grants, kept within the budget, bounds what is paid, whoever is alive.

    grant = paid + nodes * (margin + the seconds that it may go on)

In order of rank: the higher priority, then what is begun, then what takes less. The rules:

1. A job that can no longer end by its deadline, or within what the budget has left, is ended or never begun.
2. A job is promised all dollars to its end before it begins, and more if it takes longer. One for which too few are
   left saves a checkpoint at its limit, and is continued if dollars come back.
3. The first job that waits begins as soon as its nodes are free, and the dollars to its end and to those of all that
   runs. Nobody passes a job that waits for nodes, and a running job keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dtrain_dagster.costs.money import usd
from dtrain_dagster.fleet.jobs import FleetLimits, FleetState, Standing
from dtrain_dagster.planning.projection import count_nodes
from dtrain_dagster.support.formatting import dollars, format_duration

LEAST_WORK_SECONDS = 30.0
"""A job that still runs after all that was expected of it is promised dollars for at least these seconds: the next
look, which may be some seconds away, and its evaluation fit into them."""
UNFORESEEN_SHARE, UNFORESEEN_SECONDS = 0.25, 450.0
"""Such a job is promised dollars for this share of its whole work, but for no more than these seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is to be done with one job."""

    job_id: str
    kind: Literal["start", "raise", "end"]
    """Begin or continue it as a new launch; promise it more while it runs; end it for good, or never begin it."""
    grant_units: int = 0
    """Its new grant."""
    reason: str = ""


def node_limit(standing: Standing, limits: FleetLimits) -> float:
    """Return the node-seconds over all launches at which the nodes of a job stop by themselves. On nodes that cost less
    than the dearest, more of its grant is left at each look."""
    unpaid = standing.grant_units - standing.paid_units - margin_units(standing.nodes, limits)
    return standing.node_seconds + limits.seconds_of(max(0, unpaid))


def margin_units(nodes: int, limits: FleetLimits) -> int:
    """Return what nodes may cost after their job has come to its limit."""
    return limits.units_of(nodes * limits.margin_seconds)


def units_to_end(standing: Standing, limits: FleetLimits, deviations: float = 1.0) -> int:
    """Return what a job still costs to its end, if its work takes so many standard deviations more than expected; with
    the margin."""
    nodes, seconds = standing.job.nodes, standing.seconds_left(deviations)
    if standing.is_training and deviations:  # it may have done all that was expected of it, and still run
        unforeseen = min(UNFORESEEN_SECONDS, UNFORESEEN_SHARE * standing.job.paid_seconds / nodes)
        seconds = max(seconds, LEAST_WORK_SECONDS, unforeseen)
    return limits.units_of(nodes * seconds) + margin_units(nodes, limits)


def decide(
    limits: FleetLimits, jobs: Sequence[Standing], now: float, more_may_come: bool = False, settled_units: int = 0
) -> tuple[Decision, ...]:
    """Return what to do at Unix time ``now``, in this order: dollars are promised out of what is free before. Arguments
    as of `Look`."""
    return tuple(Look(limits, jobs, now, more_may_come, settled_units).decisions)


def rank(standing: Standing) -> tuple[float, ...]:
    """Return the key by which jobs are sorted, first ones first."""
    return (-standing.job.priority, not standing.is_begun, standing.left, standing.number)


class Look:
    """All that is decided at one moment."""

    def __init__(
        self,
        limits: FleetLimits,
        jobs: Sequence[Standing],
        now: float,
        more_may_come: bool = False,
        settled_units: int = 0,
    ) -> None:
        """``more_may_come``: whether the source may give more jobs; ``settled_units``: what jobs were paid that are
        over and not among these."""
        self.limits, self.now = limits, now
        self.jobs = sorted((item for item in jobs if not item.state.is_final), key=rank)
        settled = settled_units + sum(item.paid_units for item in jobs if item.state.is_final)
        self.unspent_units = limits.budget_units - settled - sum(item.paid_units for item in self.jobs)
        promised = sum(max(item.grant_units, item.paid_units) for item in self.jobs)  # nodes may stop too late
        self.free_units = limits.budget_units - settled - promised
        """Dollars that nobody was promised, or needs to its end; below 0 where they need more than there are."""
        self.decisions: list[Decision] = []
        self.waits: dict[str, str] = {}
        """By job without nodes that neither begins nor ends now, why it waits."""
        running = [item for item in self.jobs if item.state is FleetState.RUNNING and not self._is_late(item)]
        candidates = [item for item in self.jobs if not item.state.has_nodes and not self._is_hopeless(item)]
        for item in running:
            self._promise(item)
        self._begin(candidates)
        if not more_may_come:
            self._end_the_rest(candidates)

    def _end(self, standing: Standing, reason: str) -> bool:
        self.decisions.append(Decision(job_id=standing.job_id, kind="end", reason=reason))
        return True

    def _is_late(self, item: Standing) -> bool:
        """End a running job that can no longer end in time, and return whether it is one."""
        left, at_least = item.deadline(self.limits) - self.now, item.seconds_left(deviations=-2.0)
        if left <= 0:
            return self._end(item, "its deadline has passed")
        words = f"it needs at least {format_duration(at_least)} more, and its deadline is in "
        return at_least > left and self._end(item, words + format_duration(left))

    def _is_hopeless(self, item: Standing) -> bool:
        """End a job without nodes that cannot end in time, or needs more nodes than there are, and return whether it is
        one."""
        left, needs, nodes = item.deadline(self.limits) - self.now, item.seconds_left(), item.job.nodes
        if nodes > self.limits.nodes:
            return self._end(item, f"it needs {nodes} nodes, but the fleet has {self.limits.nodes}")
        if needs <= left:
            return False
        words = f"not {item.verb}: it would take {format_duration(needs)} on {count_nodes(nodes)}, and its deadline is "
        return self._end(item, f"{words}in {format_duration(max(0.0, left))}")

    def _promise(self, item: Standing) -> None:
        """Promise a running job more as soon as it has half of what it needs to its end, and keep free what it needs
        besides. One that cannot end with all that is left comes to its limit."""
        has, needs = item.grant_units - item.paid_units, units_to_end(item, self.limits)
        more, expected = max(0, needs - has), units_to_end(item, self.limits, 0.0)
        if expected > self.unspent_units:
            return
        margin, given = margin_units(item.nodes, self.limits), min(more, self.free_units)
        if given > 0 and 2 * (has - margin) < needs - margin and has + given >= expected:
            self.decisions.append(Decision(job_id=item.job_id, kind="raise", grant_units=item.grant_units + given))
        self.free_units -= more

    def _begin(self, candidates: Sequence[Standing]) -> None:
        """Choose the jobs that begin or are continued, in order of rank."""
        in_use = sum(item.nodes for item in self.jobs if item.state.has_nodes)
        free_nodes = max(0, self.limits.nodes - in_use)  # somebody may have taken nodes from the fleet
        first = ""
        for number, item in enumerate(candidates):
            if not free_nodes:
                self.waits |= {other.job_id: "no node is free" for other in candidates[number:]}
                break
            if item.not_before > self.now:
                self.waits[item.job_id] = "the cluster had no nodes for it: it is tried again later"
                continue
            needs = units_to_end(item, self.limits)
            if needs > self.unspent_units:
                self._end(item, too_dear(item, needs, self.unspent_units))
                continue
            self.free_units -= needs  # also where it has to wait, so that what comes after it does not use it up
            if self.free_units < 0:
                self.waits[item.job_id] = "the rest of the budget is needed by jobs ahead of it"
            elif first:
                self.waits[item.job_id] = f"nodes are kept for {first}, which comes before it"
            elif item.job.nodes > free_nodes:
                first, are_free = item.job_id, f"{free_nodes} {'is' if free_nodes < 2 else 'are'} free"
                self.waits[first] = f"it needs {count_nodes(item.job.nodes)}, and {are_free}"
            else:
                free_nodes -= item.job.nodes
                grant = item.paid_units + needs
                self.decisions.append(Decision(job_id=item.job_id, kind="start", grant_units=grant, reason=item.verb))

    def _end_the_rest(self, candidates: Sequence[Standing]) -> None:
        """End what waits, where nothing runs that could make room for it."""
        is_retried = any(item.not_before > self.now for item in candidates)
        starts = any(item.kind == "start" for item in self.decisions)
        if is_retried or starts or any(item.state.has_nodes for item in self.jobs):
            return
        for item in candidates:
            if why := self.waits.pop(item.job_id, ""):
                self._end(item, f"not begun: {why}")


def too_dear(standing: Standing, needs: int, unspent: int) -> str:
    """Return why a job is not begun: it costs more than is left."""
    return (
        f"not {standing.verb}: it would cost {dollars(usd(needs))} to its end, and "
        f"{dollars(max(0.0, usd(unspent)))} of the budget is left"
    )
