"""The orchestrator of a fleet: it looks at the jobs, lets `scheduling.decide` decide, and does what that says.

It may be killed at any moment and started again. Before it acts, it writes down what it is about to do; a job that was
given nodes is known by the launch that its run directory held before, so it is started again only where nothing was
started. Nodes keep their limits while nobody looks.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobState, JobStatus
from dtrain_dagster.costs.budget import launch_price, write_limit
from dtrain_dagster.costs.money import SECOND, usd
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.fleet.grants import Standing, margin_units, node_limit
from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetLimits, FleetState, JobOrder, Outcome
from dtrain_dagster.fleet.launches import MEASURED_SPREAD, Followed, explain_launch_end, judge_launch_end
from dtrain_dagster.fleet.records import Entry, FleetRecords
from dtrain_dagster.fleet.scheduling import Decision, End, FleetFacts, Look, Pause, RaiseGrant, Start
from dtrain_dagster.fleet.source import JobSource
from dtrain_dagster.jobs.progress import note_job, start_job
from dtrain_dagster.settings.tiers import Tier
from trainer.documents.events import EvaluationEvent
from trainer.errors import ConfigError, DamagedError
from trainer.rundir import LAUNCH, RunDir

AT_ONCE = 8
"""Jobs that are started or asked to leave their nodes at the same time: each takes seconds."""
LOOK_SECONDS = 1.0
"""Seconds between two looks."""
LIMIT_CHANGE_SECONDS = 1.0
"""Node-seconds by which a limit must differ from the one that nodes were told, for them to be told."""
CANCELLED = "the fleet was cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTerms:
    """What all jobs of a fleet are started with."""

    processes_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    tier: Tier = "dedicated"


class FleetRunner:
    """Runs one fleet. Make it, and use it, within `FleetRecords.sole_orchestrator`.

    ``told`` is called with a sentence for each thing that a person should know. The limits are those of the records.
    """

    def __init__(
        self,
        manager: GPUClusterManager,
        records: FleetRecords,
        source: JobSource,
        terms: LaunchTerms,
        told: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.manager, self.records, self.source, self.terms, self.told = manager, records, source, terms, told
        self.limits: FleetLimits = records.limits()
        self.entries: dict[str, Entry] = {entry.job.job_id: entry for entry in records.entries()}
        self.followed: dict[str, Followed] = {}
        self.judged: dict[str, Sequence[EvaluationEvent]] = {}
        """The evaluations that the source has judged, by job."""
        self.paid_units: dict[str, int] = {}
        """What running jobs have cost at the last look."""
        self.source_is_dry = False
        self.has_begun = False
        """Whether the last look began a job."""
        self.trouble: dict[str, str] = {}
        """What kept the last look at a job from being one."""
        self.told_limits: dict[str, float] = {}
        """Node-seconds that the nodes of each job were told. Others may not know their last grant: who ran the fleet
        before died, perhaps just then."""
        for job_id in source.resume([entry.job for entry in self.entries.values()]):
            entry = self.entries[job_id]
            if entry.kept.state.is_final:
                self._tell_end(entry)
            elif entry.job.problem:
                self._settle(entry, FleetState.FAILED, entry.job.problem)

    def run(self, watch: Callable[[], object] = lambda: None) -> None:
        """Look and act until the fleet is over. ``watch`` is called after each look."""
        while not self.look(time.time()):
            watch()
            if not self.has_begun:  # else the source may have more for the nodes that are left
                time.sleep(LOOK_SECONDS)
        watch()

    def look(self, now: float) -> bool:
        """Look once, and act; return whether the fleet is over."""
        observed = [self._look_at(entry, now) for entry in list(self.entries.values()) if entry.kept.state.has_nodes]
        standings = {item.job.job_id: item for item in observed if item is not None}
        if self.records.is_cancelled():
            decisions: tuple[Decision, ...] = self._all_to_end()
            self.source_is_dry = True
        else:
            self._judge()
            self._ask_source()
            self.records.note_source(not self.source_is_dry)
            look = Look(self._facts(standings), now)
            decisions = tuple(look.decisions)
            self.records.note_waits(look.waits)
        self._act(decisions, standings, now)
        return self.source_is_dry and all(entry.kept.state.is_final for entry in self.entries.values())

    @property
    def paid_usd(self) -> float:
        """Return what all jobs have cost, as far as it was known at the last look."""
        return usd(
            sum(max(entry.kept.paid_units, self.paid_units.get(name, 0)) for name, entry in self.entries.items())
        )

    def _facts(self, standings: Mapping[str, Standing]) -> FleetFacts:
        live = [entry for entry in self.entries.values() if not entry.kept.state.is_final]
        settled = sum(entry.kept.paid_units for entry in self.entries.values() if entry.kept.state.is_final)
        return FleetFacts(
            limits=self.limits,
            jobs=tuple(
                replace(standings.get(entry.job.job_id, entry.standing()), state=entry.kept.state) for entry in live
            ),
            settled_units=settled,
            more_may_come=not self.source_is_dry,
        )

    def _all_to_end(self) -> tuple[Decision, ...]:
        return tuple(
            End(job_id=entry.job.job_id, reason=CANCELLED)
            for entry in self.entries.values()
            if not entry.kept.state.is_final and entry.kept.state is not FleetState.ENDING
        )

    # What jobs say

    def _look_at(self, entry: Entry, now: float) -> Standing | None:
        """Return how a job with nodes stands; None where its launch has ended, which is noted. One that cannot be
        looked at now keeps its nodes and its grant."""
        job_id = entry.job.job_id
        try:
            found = self._observe(entry, now)
            self.trouble.pop(job_id, None)
        except (ClusterError, DamagedError, OSError) as error:
            if self.trouble.get(job_id) != str(error):
                self.trouble[job_id] = str(error)
                self.told(f"{job_id}: cannot be checked now: {error}")
            return self.entries[job_id].standing()
        return found

    def _observe(self, entry: Entry, now: float) -> Standing | None:
        job_id, mark = entry.job.job_id, launch_mark(rundir_of(entry.job))
        if mark == entry.kept.before:  # it was noted, and then who did died
            if entry.kept.state is FleetState.RUNNING:
                self._note_start(entry, self._start(entry), now)
            else:
                self._settle(entry, _RESTS[entry.kept.state], entry.kept.reason)
            kept = self.entries[job_id].kept
            return self.entries[job_id].standing() if kept.state.has_nodes else None
        if not mark:
            self._settle(entry, FleetState.FAILED, "its run directory is gone")
            return None
        status = self.manager.job_status(job_id)
        followed = self._follow(entry)
        if status.state.is_final:
            self._note_end(entry, status, now)
            return None
        self._tell_limit(entry)
        paid_units = self.paid_units[job_id] = max(self._bill(job_id)[0], entry.kept.paid_units)
        standing = replace(entry.standing(), paid_units=paid_units, usd_per_node_hour=self._price_of(entry.job))
        return followed.stands(standing, now)

    def _follow(self, entry: Entry) -> Followed:
        followed = self.followed.setdefault(entry.job.job_id, Followed(rundir_of(entry.job)))
        followed.look()
        note_job(entry.job.job_id)
        return followed

    def _bill(self, job_id: str) -> tuple[int, float]:
        """Return the dollars, in units, and the node-seconds of a job's nodes up to now."""
        tracker = CostTracker("", self.manager.node_usage(job_id), self.terms.tier)
        return tracker.total_units, sum(node.microseconds for node in tracker.nodes) / SECOND

    def _price_of(self, job: FleetJob) -> float | None:
        """Return what a node of the job's last launch costs in an hour; None where its cluster does not say, or not in
        a way that can be read: then it counts as the dearest."""
        try:
            return launch_price(rundir_of(job), self.terms.tier)
        except (DamagedError, OSError):
            return None

    def _note_end(self, entry: Entry, status: JobStatus, now: float) -> None:
        """Note that a launch has ended, and what that means for its job."""
        end = explain_launch_end(rundir_of(entry.job), status, entry.kept, now)
        kept = replace(entry.kept, failures=end.failures, not_before=end.not_before)
        followed = self.followed[entry.job.job_id]
        left = followed.work_left(entry.job, entry.kept.nodes, now)
        if left is not None and followed.trains_since(entry.kept.launched_at):
            kept = replace(kept, left_node_seconds=left, left_spread=MEASURED_SPREAD)
        self._settle(replace(entry, kept=kept), end.state, end.reason)

    def _settle(self, entry: Entry, state: FleetState, reason: str) -> None:
        """Write the bill of a job that has no nodes now, and take back what it did not use."""
        job_id, (paid_units, node_seconds) = entry.job.job_id, (entry.kept.paid_units, entry.kept.node_seconds)
        if entry.kept.launches and launch_mark(rundir_of(entry.job)):
            paid_units, node_seconds = self._bill(job_id)
        kept = entry.kept.settled(state, reason, paid_units, node_seconds)
        self.entries[job_id] = self.records.keep(entry, kept)
        self.told(f"{job_id}: {state}" + (f", {reason}" if reason else ""))
        if state.is_final:
            self._tell_end(self.entries[job_id])

    # The source

    def _ask_source(self) -> None:
        """Take jobs from the source as long as fewer wait than it says."""
        while self._waiting() < self.source.waiting_ahead:
            job = self.source.next_job()
            self.source_is_dry = job is None
            if job is None:
                return
            if job.job_id in self.entries:
                raise FleetError(f"job {job.job_id!r} was given twice: each needs a job_id of its own")
            entry = self.entries[job.job_id] = self.records.add(job, len(self.entries))
            if job.problem:
                self._settle(entry, FleetState.FAILED, job.problem)

    def _waiting(self) -> int:
        return sum(entry.kept.state is FleetState.WAITING for entry in self.entries.values())

    def _judge(self) -> None:
        """Ask the source for its verdict on each running job that was evaluated since."""
        for job_id, entry in list(self.entries.items()):
            if entry.kept.state is not FleetState.RUNNING or job_id not in self.followed:
                continue
            evaluations = self.followed[job_id].evaluations
            if evaluations and evaluations != self.judged.get(job_id):
                self.judged[job_id] = evaluations
                if reason := self.source.judge(job_id, evaluations):
                    self._leave(entry, FleetState.ENDING, reason)

    def _tell_end(self, entry: Entry) -> None:
        kept = entry.kept
        evaluations: Sequence[EvaluationEvent] = self._follow(entry).evaluations if kept.launches else ()
        outcome = Outcome(
            state=kept.state,
            reason=kept.reason,
            paid_units=kept.paid_units,
            node_seconds=kept.node_seconds,
            evaluations=tuple(evaluations),
        )
        self.source.on_end(entry.job.job_id, outcome)
        self.source_is_dry = False  # it may give more for what it has learned

    # What is done

    def _act(self, decisions: Sequence[Decision], standings: Mapping[str, Standing], now: float) -> None:
        """Carry out the decisions: first what gives back, then what takes."""
        for item in decisions:
            entry = self.entries[item.job_id]
            if isinstance(item, End) and not entry.kept.state.has_nodes:
                self._settle(entry, FleetState.ENDED, item.reason)
            elif isinstance(item, End | Pause) and entry.kept.state is not FleetState.ENDING:
                state = FleetState.ENDING if isinstance(item, End) else FleetState.PAUSING
                self._leave(entry, state, item.reason)
        for job_id, standing in standings.items():
            entry = self.entries[job_id]
            if entry.kept.state is FleetState.RUNNING and standing.paid_units > standing.grant_units:
                self._leave(entry, FleetState.PAUSING, "its nodes did not stop at its limit")
        for item in decisions:
            if isinstance(item, RaiseGrant) and self.entries[item.job_id].kept.state is FleetState.RUNNING:
                self._raise(self.entries[item.job_id], item.grant_units)
        starts = [item for item in decisions if isinstance(item, Start)]
        for start in starts:
            entry = self.entries[start.job_id]
            kept = replace(
                entry.kept,
                state=FleetState.RUNNING,
                nodes=start.nodes,
                grant_units=start.grant_units,
                reason="",
                launches=entry.kept.launches + 1,
                before=launch_mark(rundir_of(entry.job)),
                launched_at=now,
            )
            self.entries[start.job_id] = self.records.keep(entry, kept)
            nodes = f"{start.nodes} node{'s' if start.nodes > 1 else ''}"
            self.told(f"{start.job_id}: {start.reason} on {nodes}")
        leaving = [entry for entry in self.entries.values() if entry.kept.state in _RESTS]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            started = [(start.job_id, pool.submit(self._start, self.entries[start.job_id])) for start in starts]
            left = [pool.submit(self._cancel, entry) for entry in leaving]
        for job in left:
            job.result()
        for job_id, answer in started:
            self._note_start(self.entries[job_id], answer.result(), now)
        self.has_begun = bool(starts)

    def _leave(self, entry: Entry, state: FleetState, reason: str) -> None:
        """Note that a job is to leave its nodes; it is asked to at the end of the look."""
        self.entries[entry.job.job_id] = self.records.keep(entry, replace(entry.kept, state=state, reason=reason))
        self.told(f"{entry.job.job_id}: {state}, {reason}")

    def _cancel(self, entry: Entry) -> None:
        """Have a job save a checkpoint and leave its nodes."""
        with suppress(ClusterError):  # it was not started: the next look says so
            self.manager.cancel_job(entry.job.job_id)

    def _raise(self, entry: Entry, grant_units: int) -> None:
        """Promise a running job more, first here and then to its nodes."""
        entry = self.records.keep(entry, replace(entry.kept, grant_units=grant_units))
        self.entries[entry.job.job_id] = entry
        self._tell_limit(entry)

    def _tell_limit(self, entry: Entry) -> None:
        """Tell the nodes of a job their limit, if it is not what they were told."""
        limit, dollars = self._limit(entry, self._price_of(entry.job))
        if abs(limit - self.told_limits.get(entry.job.job_id, -math.inf)) > LIMIT_CHANGE_SECONDS:
            write_limit(rundir_of(entry.job), limit, dollars)
            self.told_limits[entry.job.job_id] = limit

    def _limit(self, entry: Entry, usd_per_node_hour: float | None) -> tuple[float, float]:
        """Return the node-seconds at which the nodes of a job stop, which cost that much, and what all cost then."""
        paid_units, node_seconds = entry.kept.paid_units, entry.kept.node_seconds
        if entry.kept.launches > 1 or launch_mark(rundir_of(entry.job)) != entry.kept.before:
            with suppress(ClusterError):
                paid_units, node_seconds = self._bill(entry.job.job_id)
        standing = replace(entry.standing(), paid_units=paid_units, usd_per_node_hour=usd_per_node_hour)
        dollars = usd(entry.kept.grant_units - margin_units(entry.kept.nodes, self.limits))
        return node_limit(standing, node_seconds, self.limits), dollars

    def _start(self, entry: Entry) -> str:
        """Start the launch that was noted, and return why it could not be started; "" where it was."""
        order = order_of(entry.job)
        limit, dollars = self._limit(entry, None)  # on cheaper nodes it is raised as soon as these are known
        job = replace(order.job, training=replace(order.job.training, max_node_seconds=limit))
        try:
            start_job(
                self.manager,
                job,
                entry.kept.nodes,
                self.terms.processes_per_node,
                dict(self.terms.env),
                stop_at_usd=dollars,
                command=order.command,
                part_of=self.records.name,
            )
        except (ClusterError, DamagedError, ConfigError) as error:
            return str(error)
        return ""

    def _note_start(self, entry: Entry, problem: str, now: float) -> None:
        """Note that a launch could not be started: a failure of its job, after several tries."""
        if problem and launch_mark(rundir_of(entry.job)) == entry.kept.before:  # else the next look says how it stands
            kept = entry.kept
            end = judge_launch_end(JobState.FAILED, kept.state, kept.reason, kept.failures, now, message=problem)
            kept = replace(kept, failures=end.failures, not_before=end.not_before)
            self._settle(replace(entry, kept=kept), end.state, end.reason)


_RESTS = {FleetState.PAUSING: FleetState.PAUSED, FleetState.ENDING: FleetState.ENDED}
"""The state that follows, once the nodes have gone."""


def order_of(job: FleetJob) -> JobOrder:
    """Return the order of a job. Raise `FleetError` where it has none."""
    if job.order is None:
        raise FleetError(f"job {job.job_id!r} has no order: it can be simulated, but not run")
    return job.order


def rundir_of(job: FleetJob) -> RunDir:
    """Return the run directory of a job."""
    return RunDir(order_of(job).job.run_dir)


def launch_mark(rundir: RunDir) -> str:
    """Return what tells launches of a job apart: a digest of how the cluster started the last one; "" before any."""
    try:
        return hashlib.sha256(rundir.storage.read(LAUNCH)).hexdigest()[:16]
    except FileNotFoundError:
        return ""
