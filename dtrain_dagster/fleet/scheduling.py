"""Which jobs of a fleet run now, with how many dollars: `decide`. Pure: no clock, no storage.

In order of rank: the higher priority, then what is begun, then what takes less. The rules:

1. A job that can no longer end by its deadline, or within what the budget has left, is ended or never begun.
2. Running jobs are promised more dollars as they use up what they have. Where they run short, the last in rank is
   paused, so that the others end.
3. The first job that waits begins as soon as its nodes are free, and all that runs, and it, can still end within the
   budget. Nobody passes a job that waits for nodes, and a running job keeps its own.

Dollars are bounded without any of this: see `grants`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain_dagster.costs.money import usd
from dtrain_dagster.fleet.grants import first_grant, next_grant, units_to_end
from dtrain_dagster.fleet.jobs import FleetLimits, FleetState, Standing
from dtrain_dagster.planning.projection import count_nodes
from dtrain_dagster.support.formatting import dollars, format_duration


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """A fleet at one moment."""

    limits: FleetLimits
    jobs: tuple[Standing, ...]
    """Those that are over may be left out, if `settled_units` has what they were paid."""
    more_may_come: bool = False
    """Whether the source may give more jobs."""
    settled_units: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Begin or continue a job as a new launch."""

    job_id: str
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
    return (-standing.job.priority, not standing.is_begun, standing.left, standing.number)


class Look:
    """All that is decided at one moment."""

    def __init__(self, facts: FleetFacts, now: float) -> None:
        self.limits, self.now, self.more_may_come = facts.limits, now, facts.more_may_come
        self.jobs = sorted((item for item in facts.jobs if not item.state.is_final), key=rank)
        self.running = [item for item in self.jobs if item.state is FleetState.RUNNING]
        """The jobs that go on as they are, in order of rank."""
        self.candidates = [item for item in self.jobs if not item.state.has_nodes]
        """The jobs without nodes, in order of rank."""
        settled = facts.settled_units + sum(item.paid_units for item in facts.jobs if item.state.is_final)
        self.unspent_units = facts.limits.budget_units - settled - sum(item.paid_units for item in self.jobs)
        self.free_units = facts.limits.budget_units - settled - sum(item.grant_units for item in self.jobs)
        """Dollars that nobody was promised."""
        in_use = sum(item.nodes for item in self.jobs if item.state.has_nodes)
        self.free_nodes = max(0, facts.limits.nodes - in_use)  # somebody may have taken nodes from the fleet
        self.decisions: list[Decision] = []
        self.waits: dict[str, str] = {}
        """By job without nodes that neither begins nor ends now, why it waits."""
        self.end_hopeless()
        self.raise_grants()
        self.begin()
        self.end_the_rest()

    def end(self, standing: Standing, reason: str) -> None:
        """Decide that a job is over."""
        self.decisions.append(End(job_id=standing.job_id, reason=reason))

    def end_hopeless(self) -> None:
        """End what can no longer end in time, or needs more nodes than there are."""
        for item in self.running:
            left, at_least = item.deadline(self.limits) - self.now, item.seconds_left(deviations=-2.0)
            if left <= 0:
                self.end(item, "its deadline has passed")
            elif at_least > left:
                words = f"it needs at least {format_duration(at_least)} more, and its deadline is in "
                self.end(item, words + format_duration(left))
        for item in self.candidates:
            left, needs, nodes = item.deadline(self.limits) - self.now, item.seconds_left(), item.job.nodes
            if nodes > self.limits.nodes:
                self.end(item, f"it needs {nodes} nodes, but the fleet has {self.limits.nodes}")
            elif needs > left:
                words = f"not {item.verb}: it would take {format_duration(needs)} on {count_nodes(nodes)}, and its "
                self.end(item, f"{words}deadline is in {format_duration(max(0.0, left))}")
        self._drop_ended()

    def _drop_ended(self) -> None:
        over = {item.job_id for item in self.decisions if isinstance(item, End | Pause)}
        self.running = [item for item in self.running if item.job_id not in over]
        self.candidates = [item for item in self.candidates if item.job_id not in over]

    def raise_grants(self) -> None:
        """Promise more dollars to those that use up theirs; where they run short, pause the last in rank."""
        is_short, is_someone_leaving = False, len(self.running) < sum(item.state.has_nodes for item in self.jobs)
        for item in self.running:
            answer = next_grant(item, self.free_units, self.limits)
            if answer.grant_units is not None:
                self.free_units -= answer.grant_units - item.grant_units
                self.decisions.append(RaiseGrant(job_id=item.job_id, grant_units=answer.grant_units))
            is_short = is_short or (answer.lacks and item is not self.running[-1])
        if is_short and not is_someone_leaving:
            why = "the budget is running short, and jobs of higher rank have to end"
            self.decisions.append(Pause(job_id=self.running[-1].job_id, reason=why))
            self._drop_ended()

    def begin(self) -> None:
        """Choose the jobs that begin or are continued, in order of rank."""
        needed = sum(  # to the ends of all that runs, beyond what it was promised
            max(0, item.paid_units + units_to_end(item, self.limits) - item.grant_units) for item in self.running
        )
        first, chosen = "", list[Standing]()
        for number, item in enumerate(self.candidates):
            if not self.free_nodes:
                self.waits |= {other.job_id: "no node is free" for other in self.candidates[number:]}
                break
            if item.not_before > self.now:
                self.waits[item.job_id] = "the cluster had no nodes for it: it is tried again later"
                continue
            needs = units_to_end(item, self.limits)
            if needs > self.unspent_units:
                self.end(item, too_dear(item, needs, self.unspent_units))
                continue
            needed += needs  # also where it has to wait, so that what comes after it does not use it up
            if needed > self.free_units:
                self.waits[item.job_id] = "the rest of the budget is needed by jobs ahead of it"
            elif first:
                self.waits[item.job_id] = f"nodes are kept for {first}, which comes before it"
            elif item.job.nodes > self.free_nodes:
                first, are_free = item.job_id, f"{self.free_nodes} {'is' if self.free_nodes < 2 else 'are'} free"
                self.waits[first] = f"it needs {count_nodes(item.job.nodes)}, and {are_free}"
            else:
                self.free_nodes -= item.job.nodes
                chosen.append(item)
        for item in chosen:
            grant = first_grant(item, self.free_units, self.limits)
            if grant is None:
                self.waits[item.job_id] = "the rest of the budget was promised to jobs that run"
                continue
            self.free_units -= grant - item.grant_units
            self.decisions.append(Start(job_id=item.job_id, grant_units=grant, reason=item.verb))

    def end_the_rest(self) -> None:
        """End what waits, where nothing runs that could make room for it."""
        is_retried = any(item.not_before > self.now for item in self.candidates)
        starts = any(isinstance(item, Start) for item in self.decisions)
        if is_retried or starts or self.more_may_come or any(item.state.has_nodes for item in self.jobs):
            return
        for item in self.candidates:
            if why := self.waits.pop(item.job_id, ""):
                self.end(item, f"not begun: {why}")


def too_dear(standing: Standing, needs: int, unspent: int) -> str:
    """Return why a job is not begun: it costs more than is left."""
    return (
        f"not {standing.verb}: it would cost {dollars(usd(needs))} to its end, and "
        f"{dollars(max(0.0, usd(unspent)))} of the budget is left"
    )
