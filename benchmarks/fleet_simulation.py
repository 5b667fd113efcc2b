"""A fleet played through without nodes: the same `scheduling.decide`, jobs that behave as they may, virtual seconds.

Jobs take longer or shorter than was expected of them, fail, and lose nodes; the orchestrator is away at times, and then
nodes stop at their limits by themselves, late by as much as they are allowed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dtrain_dagster.costs.money import usd
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.scheduling import Decision, decide, node_limit

TICK_SECONDS = 1e-6
"""The least time that passes between two events, so that rounding does not hold time up."""
KNOWN_FROM = 0.05
"""Share of a job's work from which on its speed is known."""
Policy = Callable[[FleetLimits, Sequence[Standing], float, bool, int], Sequence[Decision]]
"""Decides as `dtrain_dagster.fleet.scheduling.decide` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedJob:
    """A job, and how it really behaves."""

    job: FleetJob
    arrives_at: float = 0.0
    node_seconds: float
    """The paid seconds of all its nodes that it really takes."""
    fails_at: float | None = None
    """Share of its work after which it fails; None: it does not."""
    losses_per_node_hour: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What happens around the jobs."""

    look_seconds: float = 300.0
    """Seconds between two looks of the orchestrator, besides those at every end and arrival."""
    away: Sequence[tuple[float, float]] = ()
    """From when to when the orchestrator is dead, in order of time."""
    seed: int = 0
    pause_seconds: tuple[float, float] = (1.0, 20.0)
    """The least and the most seconds that a job takes to save a checkpoint and leave its nodes."""
    startup_shares: tuple[float, float] = (0.7, 1.4)
    """The least and the most that a start takes, as a share of what is expected of it."""
    late_shares: tuple[float, ...] = (0.02, 0.05, 0.999)
    """How late nodes stop, as a share of what they are allowed: usually little, at times nearly all."""
    stops_at_budget: bool = False
    """Whether all nodes stop at the very moment at which the last dollar is spent, which no cluster can do: for the
    comparison with policies that promise no dollars."""


@dataclass(slots=True)
class _Run:
    """A job as the simulation moves it."""

    spec: SimulatedJob
    number: int
    state: FleetState = FleetState.WAITING
    nodes: int = 0
    grant_units: int = 0
    paid_seconds: float = 0.0
    done: float = 0.0
    """Work done, in node-seconds."""
    limit: float = math.inf
    """Node-seconds at which its nodes stop."""
    works_from: float = math.inf
    """Time at which its present launch comes to its next step: after its start, or after a loss."""
    next_loss: float = math.inf
    leaves_at: float = math.inf
    """Time at which it has left its nodes, having been asked to."""
    launched_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    launches: int = 0
    at_rest: Standing | None = None
    """Its standing while it has no nodes, which does not change."""

    @property
    def rate(self) -> float:
        """Return the node-seconds of work done in a second."""
        return float(self.nodes)

    @property
    def work(self) -> float:
        """Return the work until it ends, in whichever way."""
        share = 1.0 if self.spec.fails_at is None else self.spec.fails_at
        return self.spec.node_seconds * share


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedEnd:
    """How a job ended."""

    job_id: str
    state: FleetState
    paid_seconds: float
    ended_at: float
    launches: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A fleet that was played through."""

    ends: tuple[SimulatedEnd, ...]
    used_usd: float
    overspent_usd: float
    seconds: float
    """Seconds from the first arrival to the last end."""
    idle_share: float
    """Share of the nodes' time until then in which no job had them."""
    most_granted_usd: float
    """The largest sum of all grants at any moment."""
    most_nodes: int
    decisions: dict[str, int] = field(default_factory=dict)
    """How often each kind of decision was made."""


def play(jobs: Iterable[SimulatedJob], limits: FleetLimits, around: Surroundings, policy: Policy = decide) -> Played:
    """Return what becomes of these jobs under these limits."""
    ordered = sorted(jobs, key=lambda item: item.arrives_at)
    runs = [_Run(spec=spec, number=number) for number, spec in enumerate(ordered)]
    return _Play(runs, limits, around, policy).run()


class _Play:
    """The state of one call of `play`. ``runs``: in order of their arrival."""

    def __init__(self, runs: list[_Run], limits: FleetLimits, around: Surroundings, policy: Policy) -> None:
        self.limits, self.around, self.policy = limits, around, policy
        self.random = random.Random(around.seed)
        self.runs = runs
        self.by_id = {run.spec.job.job_id: run for run in self.runs}
        self.arrived = 0
        self.now = self.runs[0].spec.arrives_at
        self.next_look = self.now
        self.live: list[_Run] = []
        self.settled_units = 0
        self.busy_seconds = 0.0
        self.most_granted, self.most_nodes = 0, 0
        self.counts: dict[str, int] = {}

    def run(self) -> Played:
        """Play until no job is left."""
        began = self.now
        while self.arrived < len(self.runs) or self.live:
            self._arrive()
            if self.now >= self.next_look and not self._is_away():
                self._look()
            self._move(self._next_time())
        ends = tuple(
            SimulatedEnd(
                job_id=run.spec.job.job_id,
                state=run.state,
                paid_seconds=run.paid_seconds,
                launches=run.launches,
                ended_at=run.ended_at if run.ended_at is not None else self.now,
                reason=run.reason,
            )
            for run in self.runs
        )
        over = max((end.ended_at for end in ends if end.paid_seconds), default=began)
        used = sum(self.limits.units_of(run.paid_seconds) for run in self.runs)
        return Played(
            ends=ends,
            used_usd=usd(used),
            overspent_usd=usd(max(0, used - self.limits.budget_units)),
            seconds=over - began,
            idle_share=1 - self.busy_seconds / (self.limits.nodes * (over - began)) if over > began else 0.0,
            most_granted_usd=usd(self.most_granted),
            most_nodes=self.most_nodes,
            decisions=self.counts,
        )

    def _arrive(self) -> None:
        while self.arrived < len(self.runs) and self.runs[self.arrived].spec.arrives_at <= self.now:
            self.live.append(self.runs[self.arrived])
            self.arrived += 1
            self.next_look = self.now

    def _is_away(self) -> bool:
        return any(began <= self.now < ended for began, ended in self.around.away)

    def _look(self) -> None:
        """Let the policy decide, and do what it says."""
        self.next_look = self.now + self.around.look_seconds
        standings = tuple(map(self._standing, self.live))
        for item in self.policy(self.limits, standings, self.now, False, self.settled_units):
            self.counts[item.kind] = self.counts.get(item.kind, 0) + 1
            run = self.by_id[item.job_id]
            if item.kind == "start":
                self._start(run, item)
            elif item.kind == "raise":
                run.grant_units = item.grant_units
                self._set_limit(run)
            else:
                self._leave(run, item)
        granted = self.settled_units + sum(run.grant_units for run in self.live)
        self.most_granted = max(self.most_granted, granted)
        self.most_nodes = max(self.most_nodes, sum(run.nodes for run in self.live))

    def _standing(self, run: _Run) -> Standing:
        if run.at_rest is None or run.nodes:
            run.at_rest = self._standing_now(run)
        return run.at_rest

    def _standing_now(self, run: _Run) -> Standing:
        known = run.done >= KNOWN_FROM * run.spec.node_seconds
        left = run.spec.node_seconds - run.done if known else None
        return Standing(
            job=run.spec.job,
            number=run.number,
            state=run.state,
            nodes=run.nodes,
            grant_units=run.grant_units,
            paid_units=self.limits.units_of(run.paid_seconds),
            node_seconds=run.paid_seconds,
            left_node_seconds=left,
            launched_at=run.launched_at,
            is_training=run.nodes > 0 and self.now >= run.works_from,
        )

    def _start(self, run: _Run, start: Decision) -> None:
        run.state, run.nodes, run.grant_units = FleetState.RUNNING, run.spec.job.nodes, start.grant_units
        run.launched_at, run.launches = self.now, run.launches + 1
        run.works_from = self.now + run.spec.job.startup_seconds * self.random.uniform(*self.around.startup_shares)
        run.leaves_at = math.inf
        self._draw_loss(run)
        self._set_limit(run)

    def _set_limit(self, run: _Run) -> None:
        """Tell the nodes their limit, which they pass by no more than they are allowed."""
        late = run.nodes * self.limits.margin_seconds * self.random.choice(self.around.late_shares)
        run.limit = node_limit(self._standing(run), self.limits) + late

    def _draw_loss(self, run: _Run) -> None:
        rate = run.spec.losses_per_node_hour * run.nodes / 3600
        run.next_loss = self.now + self.random.expovariate(rate) if rate else math.inf

    def _leave(self, run: _Run, decision: Decision) -> None:
        run.reason = decision.reason
        if not run.nodes:
            self._rest(run, FleetState.ENDED)
            return
        run.state = FleetState.ENDING
        run.leaves_at = self.now + self.random.uniform(*self.around.pause_seconds)

    def _next_time(self) -> float:
        """Return when something happens next."""
        times = [self.next_look]
        if self._is_away():
            times = [next(ended for began, ended in self.around.away if began <= self.now < ended)]
        if self.arrived < len(self.runs):
            times.append(self.runs[self.arrived].spec.arrives_at)
        for run in self.live:
            if run.nodes:
                ready = max(self.now, run.works_from)
                times.append(ready + (run.work - run.done) / run.rate)
                times.append(self.now + (run.limit - run.paid_seconds) / run.nodes)
                times += [run.next_loss, run.leaves_at]
        if self.around.stops_at_budget and (busy := sum(run.nodes for run in self.live)):
            times.append(self.now + self._left_seconds() / busy)
        return max(self.now + TICK_SECONDS, min(times))

    def _left_seconds(self) -> float:
        """Return the node-seconds that the budget still pays for."""
        paid = self.settled_units + sum(self.limits.units_of(run.paid_seconds) for run in self.live)
        return self.limits.seconds_of(max(0, self.limits.budget_units - paid))

    def _move(self, until: float) -> None:
        """Let time pass, and end what has come to its end."""
        took, before = until - self.now, self.now
        self.now = until
        for run in [run for run in self.live if run.nodes]:
            self.busy_seconds += took * run.nodes
            run.paid_seconds += took * run.nodes
            run.done += max(0.0, until - max(before, run.works_from)) * run.rate
            if run.done >= run.work * (1 - 1e-12):
                failed = run.spec.fails_at is not None
                run.reason = ""
                self._rest(run, FleetState.FAILED if failed else FleetState.SUCCEEDED)
            elif until >= run.leaves_at or run.paid_seconds >= run.limit * (1 - 1e-12):
                self._rest(run, FleetState.ENDED if run.state is FleetState.ENDING else FleetState.PAUSED)
            elif until >= run.next_loss:
                run.works_from = until + run.spec.job.startup_seconds  # another one starts, and steps are done again
                self._draw_loss(run)
        if self.around.stops_at_budget and self._left_seconds() < 1e-3:
            for run in [run for run in self.live if run.nodes]:
                self._rest(run, FleetState.PAUSED)

    def _rest(self, run: _Run, state: FleetState) -> None:
        """Note that a job has no nodes; what it did not use is free again."""
        run.state, run.nodes = state, 0
        run.works_from = run.next_loss = run.leaves_at = math.inf
        run.grant_units = self.limits.units_of(run.paid_seconds)
        run.at_rest = None
        self.next_look = self.now
        if state.is_final:
            run.ended_at = self.now
            self.settled_units += run.grant_units
            self.live.remove(run)
