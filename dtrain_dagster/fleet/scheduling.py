"""Which jobs of a fleet run now, on how many nodes, with how many dollars: `decide`. Pure: no clock, no storage.

In order of rank: the higher priority, then what is begun, then what takes less. The rules:

1. A job that can no longer end by its deadline, or within what the budget has left, is ended or never begun.
2. Running jobs are promised more dollars as they use up what they have. Where they run short, the lowest in rank is
   paused, so that the others end.
3. A waiting job begins on as few nodes as it may have, or as its deadline needs, if all that runs at its priority or
   above, and it, can still end within the budget. It takes nodes from jobs of lower priority, unless these are about to
   end. A smaller job may pass one that waits for more nodes, where it ends before these are free.
4. Nodes that nobody waits for go to the jobs that begin, one each in turn, as long as they use them well; a running
   job is paused to be continued on more nodes where that ends it much sooner.

Dollars are bounded without any of this: see `grants`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtrain_dagster.costs.money import usd
from dtrain_dagster.fleet.grants import first_grant, next_grant, units_to_end
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState, Standing
from dtrain_dagster.support.formatting import dollars, format_duration

LEAST_EFFICIENCY = 0.6
"""Share of their time that nodes must work as well as one alone, for a job to get more than it has to have."""
WIDEN_SHARE = 0.6
"""A running job is started again on more nodes where that leaves less than this share of its time."""
ABOUT_TO_END_SECONDS = 10.0
LOWEST = -(10**9)
"""Below every priority."""


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """A fleet at one moment."""

    limits: FleetLimits
    jobs: tuple[Standing, ...]
    """Those that are over may be left out, if `settled_units` has what they were paid."""
    more_may_come: bool = False
    """Whether the source may give more jobs, for which nodes are kept."""
    settled_units: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Begin or continue a job as a new launch."""

    job_id: str
    nodes: int
    grant_units: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RaiseGrant:
    """Promise a running job more dollars."""

    job_id: str
    grant_units: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Have a running job save a checkpoint and leave its nodes."""

    job_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """End a job for good, or never begin it."""

    job_id: str
    reason: str


Decision = Start | RaiseGrant | Pause | End


def decide(facts: FleetFacts, now: float) -> tuple[Decision, ...]:
    """Return what to do at Unix time ``now``, in this order: dollars are promised out of what is free before."""
    return tuple(Look(facts, now).decisions)


def rank(standing: Standing) -> tuple[float, ...]:
    """Return the key by which jobs are sorted, first ones first."""
    left = standing.left * standing.job.least_nodes
    return (-standing.job.priority, not standing.is_begun, left, standing.number)


def efficiency(job: FleetJob, nodes: int) -> float:
    """Return the share of their time for which nodes work as well as one alone."""
    return job.seconds_on(1) / (nodes * job.seconds_on(nodes))


class Look:
    """All that is decided at one moment."""

    def __init__(self, facts: FleetFacts, now: float) -> None:
        self.limits, self.now, self.more_may_come = facts.limits, now, facts.more_may_come
        self.jobs = sorted((item for item in facts.jobs if not item.state.is_final), key=rank)
        settled = facts.settled_units + sum(item.paid_units for item in facts.jobs if item.state.is_final)
        paid = settled + sum(item.paid_units for item in self.jobs)
        self.unspent_units = facts.limits.budget_units - paid
        self.free_units = facts.limits.budget_units - settled - sum(item.grant_units for item in self.jobs)
        """Dollars that nobody was promised."""
        self.free_nodes = facts.limits.nodes - sum(item.nodes for item in self.jobs if item.state.has_nodes)
        self.coming_nodes = sum(item.nodes for item in self.jobs if item.state in _LEAVING)
        """Nodes that will be free without another decision."""
        self.decisions: list[Decision] = []
        self.leaving: set[str] = set()
        """Jobs that were told to leave their nodes in this look."""
        self.over: set[str] = set()
        self.left_waiting: dict[str, str] = {}
        """Candidates that do not begin now, and why."""
        self.lowest_priority = min((item.job.priority for item in self.running), default=LOWEST)
        self._needed: dict[int, int] = {}
        """What `needed_above` has found, by priority, until a job is told to leave."""
        self.end_hopeless()
        self.raise_grants()
        self.begin()
        self.widen()
        self.end_the_rest()

    @property
    def waits(self) -> dict[str, str]:
        """Return by job what keeps each one without nodes from being given some, without those that begin or end."""
        return {job_id: why for job_id, why in self.left_waiting.items() if job_id not in self.over}

    @property
    def running(self) -> list[Standing]:
        """Return the jobs that go on as they are, in order of rank."""
        return [item for item in self.jobs if item.state is FleetState.RUNNING and item.job_id not in self.leaving]

    @property
    def candidates(self) -> list[Standing]:
        """Return the jobs without nodes, in order of rank."""
        return [item for item in self.jobs if item.state in _RESTING and item.job_id not in self.over]

    def most_nodes_of(self, standing: Standing) -> int:
        """Return the most nodes that a job may have here."""
        return min(standing.job.most_nodes, self.limits.nodes)

    def end(self, standing: Standing, reason: str) -> None:
        """Decide that a job is over."""
        self.decisions.append(End(job_id=standing.job_id, reason=reason))
        if standing.state.has_nodes:
            self.leave(standing)
        else:
            self.over.add(standing.job_id)

    def pause(self, standing: Standing, reason: str) -> None:
        """Decide that a job leaves its nodes for now."""
        self.decisions.append(Pause(job_id=standing.job_id, reason=reason))
        self.leave(standing)

    def leave(self, standing: Standing) -> None:
        """Count the nodes of a job as coming free."""
        self.leaving.add(standing.job_id)
        self._needed.clear()
        self.coming_nodes += standing.nodes

    def end_hopeless(self) -> None:
        """End what can no longer end in time, or needs more nodes than there are."""
        for item in self.running:
            deadline = item.deadline(self.limits)
            if deadline == math.inf:
                continue
            at_least = item.seconds_left(item.nodes, deviations=-2.0)
            if self.now >= deadline:
                self.end(item, "its deadline has passed")
            elif self.now + at_least > deadline:
                words = f"it needs at least {format_duration(at_least)} more, and its deadline is in "
                self.end(item, words + format_duration(deadline - self.now))
        for item in self.candidates:
            deadline, most = item.deadline(self.limits), self.most_nodes_of(item)
            if item.job.least_nodes > self.limits.nodes:
                self.end(item, f"it needs {item.job.least_nodes} nodes, but the fleet has {self.limits.nodes}")
            elif self.now + item.seconds_left(most) > deadline:
                self.end(item, too_late(item, most, self.limits, self.now))

    def raise_grants(self) -> None:
        """Promise more dollars to those that use up theirs; where they run short, pause the last in rank."""
        short, running = False, self.running
        for item in running:
            answer = next_grant(item, self.free_units, self.limits)
            if answer.grant_units is not None:
                self.free_units -= answer.grant_units - item.grant_units
                self.decisions.append(RaiseGrant(job_id=item.job_id, grant_units=answer.grant_units))
            short = short or (answer.lacks and item is not running[-1])
        if short and not self.leaving and not self.coming_nodes:
            self.pause(running[-1], "the budget is running short, and jobs of higher rank have to end")

    def begin(self) -> None:
        """Choose the jobs that begin or are continued, and their nodes."""
        held_units = 0
        chosen: dict[str, int] = {}
        shadow = math.inf
        """Unix time at which nodes are expected for the first job that waits for them."""
        spare = 0
        """Nodes that are free now and that it does not need then."""
        first, candidates = "", self.candidates
        for number, item in enumerate(candidates):
            job, nodes = item.job, self.fewest_in_time(item)
            behind = f"nodes are kept for {first}, which comes before it" if first else ""
            if not self.free_nodes and (shadow < math.inf or not self.may_claim(job.priority)):
                why = behind or "no node is free, and no running job has a lower priority"
                self.left_waiting |= {other.job_id: why for other in candidates[number:]}
                break
            if item.not_before > self.now:
                self.left_waiting[job.job_id] = "the cluster had no nodes for it: it is tried again later"
                continue
            needs = units_to_end(item, nodes, self.limits)
            if needs > self.unspent_units:
                self.end(item, too_dear(item, needs, self.unspent_units))
                continue
            free_units = self.free_units - held_units - self.needed_above(job.priority)
            held_units += needs  # also where it has to wait, so that what comes after it does not use it up
            if needs > free_units:
                self.left_waiting[job.job_id] = "the rest of the budget is needed by jobs ahead of it"
                continue
            passes = nodes <= spare or self.now + item.seconds_left(nodes) <= shadow
            if nodes <= self.free_nodes and passes:
                chosen[job.job_id] = nodes
                self.free_nodes -= nodes
                spare = max(0, spare - nodes)
                continue
            too_few = wait_for_nodes(nodes, self.free_nodes, job.least_nodes)
            self.left_waiting[job.job_id] = behind or too_few
            if shadow < math.inf:
                continue  # those that wait before it get nodes first
            if self.claim(item, nodes):
                continue
            first = job.job_id  # nodes are kept for it
            shadow, spare = self.expected_free(nodes)
        self.start(chosen, held_units)

    def claim(self, standing: Standing, nodes: int) -> bool:
        """Keep nodes for a job that waits for some: free ones, those that come free, and those of jobs of lower
        priority, which are paused for it. Return False, and keep none, where these are too few."""
        victims = []
        found = self.free_nodes + self.coming_nodes
        for item in reversed(self.running):
            is_lower = item.job.priority < standing.job.priority
            if found < nodes and is_lower and item.seconds_left(item.nodes) > _about_to_end(item.job):
                victims.append(item)
                found += item.nodes
        if found < nodes:
            return False
        for item in victims:
            self.pause(item, f"{standing.job_id}, of higher priority, needs its nodes")
        from_free = min(self.free_nodes, nodes)
        self.free_nodes -= from_free
        self.coming_nodes -= nodes - from_free
        return True

    def may_claim(self, priority: int) -> bool:
        """Return whether a job of this priority might get nodes that are not free now."""
        return self.coming_nodes > 0 or self.lowest_priority < priority

    def expected_free(self, nodes: int) -> tuple[float, int]:
        """Return when this many nodes are expected to be free, and how many more than these will be then."""
        found, at = self.free_nodes + self.coming_nodes, self.now
        for seconds, more in sorted((item.seconds_left(item.nodes), item.nodes) for item in self.running):
            if found >= nodes:
                break
            found, at = found + more, self.now + seconds
        return at, max(0, found - nodes)

    def fewest_in_time(self, standing: Standing) -> int:
        """Return the fewest nodes on which a job probably ends by its deadline; the most that it may have where it
        needs them all."""
        most, left = self.most_nodes_of(standing), standing.deadline(self.limits) - self.now
        fits = (
            nodes
            for nodes in range(standing.job.least_nodes, most + 1)
            if standing.seconds_left(nodes, deviations=1.0) <= left
        )
        return next(fits, most)

    def needed_above(self, priority: int) -> int:
        """Return what running jobs of at least this priority still need beyond what they were promised."""
        if priority not in self._needed:
            self._needed[priority] = sum(
                max(0, item.paid_units + units_to_end(item, item.nodes, self.limits) - item.grant_units)
                for item in self.running
                if item.job.priority >= priority
            )
        return self._needed[priority]

    def start(self, chosen: dict[str, int], held_units: int) -> None:
        """Decide the starts, on more nodes where nobody else waits for them."""
        starting = [item for item in self.candidates if item.job_id in chosen]
        if not self.left_waiting and not self.more_may_come:
            self.spread_free_nodes(starting, chosen, held_units)
        for item in starting:
            job_id, nodes = item.job_id, chosen[item.job_id]
            grant = first_grant(item, nodes, self.free_units, self.limits)
            if grant is None:
                self.left_waiting[job_id] = "the rest of the budget was promised to jobs that run"
                continue
            self.free_units -= grant - item.grant_units
            self.decisions.append(Start(job_id=job_id, nodes=nodes, grant_units=grant, reason=item.verb))
            self.over.add(job_id)

    def spread_free_nodes(self, starting: list[Standing], chosen: dict[str, int], held_units: int) -> None:
        """Give free nodes to jobs that begin, one each in turn, in order of rank."""
        room = self.free_units - held_units - self.needed_above(LOWEST)
        is_given = True
        while self.free_nodes and is_given:
            is_given = False
            for item in starting:
                nodes = chosen[item.job_id]
                if not self.free_nodes or nodes >= item.job.most_nodes:
                    continue
                more = units_to_end(item, nodes + 1, self.limits) - units_to_end(item, nodes, self.limits)
                if efficiency(item.job, nodes + 1) >= LEAST_EFFICIENCY and more <= room:
                    chosen[item.job_id], is_given = nodes + 1, True
                    self.free_nodes, room = self.free_nodes - 1, room - more

    def widen(self) -> None:
        """Pause one running job that ends much sooner on the nodes which nobody uses."""
        if self.more_may_come or self.left_waiting or self.leaving or self.coming_nodes or not self.free_nodes:
            return
        room = self.free_units - self.needed_above(LOWEST)
        for item in self.running:
            if not item.is_training:
                continue
            counts = range(item.nodes + 1, min(self.most_nodes_of(item), item.nodes + self.free_nodes) + 1)
            wide = max((n for n in counts if efficiency(item.job, n) >= LEAST_EFFICIENCY), default=0)
            if not wide:
                continue
            now, then = item.seconds_left(item.nodes), item.seconds_left(wide) + _about_to_end(item.job)
            more = units_to_end(item, wide, self.limits) - units_to_end(item, item.nodes, self.limits)
            if then < WIDEN_SHARE * now and more <= room:
                self.pause(item, f"to be continued on {wide} nodes, which no other job needs")
                return

    def end_the_rest(self) -> None:
        """End what waits, where nothing runs that could make room for it."""
        is_retried = any(item.not_before > self.now for item in self.candidates)
        starts = any(isinstance(item, Start) for item in self.decisions)
        if is_retried or starts or self.more_may_come or any(item.state.has_nodes for item in self.jobs):
            return
        for item in self.candidates:
            wait = self.left_waiting.get(item.job_id)
            self.end(item, f"not begun: {wait or 'no running job could make room for it'}")


_RESTING = (FleetState.WAITING, FleetState.PAUSED)
_LEAVING = (FleetState.PAUSING, FleetState.ENDING)


def _about_to_end(job: FleetJob) -> float:
    """Return the seconds that a pause costs a job: one that ends within them is left alone."""
    return ABOUT_TO_END_SECONDS + job.startup_seconds


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
