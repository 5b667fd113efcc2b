"""The orchestrator of a fleet: it looks at the jobs, lets `scheduling.decide` decide, and does what that says.

It may be killed at any moment and started again. Before it acts, it writes down what it is about to do; a job that was
given nodes is known by the launch that its run directory held before, so it is started again only where nothing was
started. Nodes keep their limits while nobody looks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobState, JobStatus
from dtrain_dagster.costs.money import SECOND, usd
from dtrain_dagster.costs.plan import write_limit
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.scheduling import Decision, decide, margin_units, node_limit
from dtrain_dagster.fleet.source import JobSource
from dtrain_dagster.fleet.view import Followed
from dtrain_dagster.jobs.start import ran_out, start_job
from dtrain_dagster.planning.projection import count_nodes
from dtrain_dagster.settings.cluster_kinds import Tier
from trainer.errors import ConfigError, DamagedError
from trainer.rundir import LAUNCH, RESULT, RunDir

AT_ONCE = 8
"""Jobs that are started or asked to leave their nodes at the same time: each takes seconds."""
LOOK_SECONDS = 1.0
"""Seconds between two looks."""
LIMIT_CHANGE_SHARE = 0.05
"""Share of what its nodes may still go on by which a limit must differ from the one that they were told: on nodes that
cost less than the dearest it moves at each look."""
CANCELLED = "the fleet was cancelled"
RESTS = {FleetState.PAUSING: FleetState.PAUSED, FleetState.ENDING: FleetState.ENDED}
"""The state that follows, once the nodes have gone."""


class FleetRunner:
    """Runs one fleet. Make it, and use it, within `FleetRecords.sole_orchestrator`.

    ``told`` is called with a sentence for each thing that a person should know. The limits are those of the records;
    all jobs are started with these processes on each node, ``env`` and tier.
    """

    def __init__(
        self,
        manager: GPUClusterManager,
        records: FleetRecords,
        source: JobSource,
        told: Callable[[str], object] = lambda sentence: None,
        *,
        processes_per_node: int = 1,
        env: Mapping[str, str],
        tier: Tier = "dedicated",
    ) -> None:
        self.manager, self.records, self.source, self.told = manager, records, source, told
        self.processes_per_node, self.env, self.tier = processes_per_node, env, tier
        self.limits: FleetLimits = records.limits()
        self.jobs: dict[str, Standing] = {standing.job_id: standing for standing in records.standings()}
        """How each job stands; of one with nodes as it was at the last look."""
        self.followed: dict[str, Followed] = {}
        self.source_is_dry = False
        self.trouble: dict[str, str] = {}
        """What kept the last look at a job from being one."""
        self.told_limits: dict[str, float] = {}
        """Node-seconds that the nodes of each job were told. Others may not know their last grant: who ran the fleet
        before died, perhaps just then."""
        for job_id in source.resume([standing.job for standing in self.jobs.values()]):
            standing = self.jobs[job_id]
            if standing.state.is_final:
                self._tell_end(standing)
            elif standing.job.problem:
                self._settle(standing, FleetState.FAILED, standing.job.problem)

    def run(self, watch: Callable[[], object] = lambda: None) -> None:
        """Look and act until the fleet is over. ``watch`` is called after each look."""
        while not self.look(time.time()):
            watch()
            time.sleep(LOOK_SECONDS)
        watch()

    def look(self, now: float) -> bool:
        """Look once, and act; return whether the fleet is over."""
        for standing in self._with_nodes():
            self._look_at(standing, now)
        if self.records.is_cancelled():
            self.source_is_dry = True
            decisions: Sequence[Decision] = [
                Decision(job_id=job_id, kind="end", reason=CANCELLED)
                for job_id, item in self.jobs.items()
                if not item.state.is_final and item.state is not FleetState.ENDING
            ]
        else:
            self._ask_source()
            decisions = decide(self.limits, tuple(self.jobs.values()), now, not self.source_is_dry)
        self._act(decisions, now)
        return self.source_is_dry and all(item.state.is_final for item in self.jobs.values())

    def _with_nodes(self) -> list[Standing]:
        return [standing for standing in self.jobs.values() if standing.state.has_nodes]

    def _keep(self, standing: Standing, **changes: Any) -> Standing:
        """Note how a job stands now, and return it so."""
        standing = self.jobs[standing.job_id] = replace(standing, **changes)
        self.records.keep(standing)
        return standing

    # What jobs say

    def _look_at(self, standing: Standing, now: float) -> None:
        """Look how a job with nodes stands. One that cannot be looked at now keeps its nodes and its grant."""
        job_id = standing.job_id
        try:
            self._observe(standing, now)
            self.trouble.pop(job_id, None)
        except (ClusterError, DamagedError, OSError) as error:
            if self.trouble.get(job_id) != str(error):
                self.trouble[job_id] = str(error)
                self.told(f"{job_id}: cannot be checked now: {error}")

    def _observe(self, standing: Standing, now: float) -> None:
        mark = launch_mark(standing.job)
        if mark == standing.before:  # it was noted, and then who did died
            if standing.state is FleetState.RUNNING:
                self._note_start(standing, self._start(standing), now)
            else:
                self._settle(standing, RESTS[standing.state], standing.reason)
            return
        if not mark:
            self._settle(standing, FleetState.FAILED, "its run directory is gone")
            return
        status = self.manager.job_status(standing.job_id)
        standing = self._follow(standing).stands(standing, now)
        if status.state.is_final:
            ended = explain_launch_end(standing, standing.job.rundir, status, now)
            self._settle(ended, ended.state, ended.reason)
            return
        self._tell_limit(standing)
        billed = self._billed(standing)
        if billed.paid_units > standing.paid_units:
            standing = billed
        self.jobs[standing.job_id] = standing
        if standing.state is FleetState.RUNNING and standing.paid_units > standing.grant_units:
            self._leave(standing, FleetState.PAUSING, "its nodes did not stop at its limit")

    def _follow(self, standing: Standing) -> Followed:
        followed = self.followed.setdefault(standing.job_id, Followed(standing.job.rundir))
        followed.look()
        return followed

    def _billed(self, standing: Standing) -> Standing:
        """Return the job with the bill of its nodes up to now."""
        tracker = CostTracker("", self.manager.node_usage(standing.job_id), self.tier)
        seconds = sum(node.microseconds for node in tracker.nodes) / SECOND
        return replace(standing, paid_units=tracker.total_units, node_seconds=seconds)

    def _settle(self, standing: Standing, state: FleetState, reason: str) -> None:
        """Write the bill of a job that has no nodes now, and take back what it did not use."""
        if standing.launches and launch_mark(standing.job):
            standing = self._billed(standing)
        standing = self._keep(
            standing, state=state, reason=reason, nodes=0, grant_units=standing.paid_units, is_training=False
        )
        self.told(f"{standing.job_id}: {state}" + (f", {reason}" if reason else ""))
        if state.is_final:
            self._tell_end(standing)

    # The source

    def _ask_source(self) -> None:
        """Ask the source for its verdict on each job that runs, and take the jobs that it has."""
        for standing in self._with_nodes():
            followed = self.followed.get(standing.job_id)
            evaluations = followed.evaluations if followed and standing.state is FleetState.RUNNING else ()
            if evaluations and (reason := self.source.judge(standing.job_id, evaluations)):
                self._leave(standing, FleetState.ENDING, reason)
        self.source_is_dry = False
        while job := self.source.next_job():
            if job.job_id in self.jobs:
                raise FleetError(f"job {job.job_id!r} was given twice: each needs a job_id of its own")
            standing = self.jobs[job.job_id] = self.records.add(job, len(self.jobs))
            if job.problem:
                self._settle(standing, FleetState.FAILED, job.problem)
        self.source_is_dry = True

    def _tell_end(self, standing: Standing) -> None:
        self.source.on_end(standing, self._follow(standing).evaluations if standing.launches else ())
        self.source_is_dry = False  # it may give more for what it has learned

    # What is done

    def _act(self, decisions: Sequence[Decision], now: float) -> None:
        """Carry out the decisions: first what gives back, then what takes."""
        starts = []
        for item in decisions:
            standing = self.jobs[item.job_id]
            if item.kind == "end" and standing.state.has_nodes:
                self._leave(standing, FleetState.ENDING, item.reason)
            elif item.kind == "end":
                self._settle(standing, FleetState.ENDED, item.reason)
            elif item.kind == "raise":
                self._tell_limit(self._keep(standing, grant_units=item.grant_units))  # first here, then its nodes
            else:
                started = self._keep(
                    standing,
                    state=FleetState.RUNNING,
                    nodes=standing.job.nodes,
                    grant_units=item.grant_units,
                    reason="",
                    launches=standing.launches + 1,
                    before=launch_mark(standing.job),
                    launched_at=now,
                )
                starts.append(started)
                self.told(f"{item.job_id}: {item.reason} on {count_nodes(standing.job.nodes)}")
        leaving = [standing for standing in self.jobs.values() if standing.state in RESTS]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = [(started, pool.submit(self._start, started)) for started in starts]
            left = [pool.submit(self._cancel, standing) for standing in leaving]
        for job in left:
            job.result()
        for started, answer in answers:
            self._note_start(started, answer.result(), now)

    def _leave(self, standing: Standing, state: FleetState, reason: str) -> None:
        """Note that a job is to leave its nodes; it is asked to at the end of the look."""
        self._keep(standing, state=state, reason=reason)
        self.told(f"{standing.job_id}: {state}, {reason}")

    def _cancel(self, standing: Standing) -> None:
        """Have a job save a checkpoint and leave its nodes."""
        with suppress(ClusterError):  # it was not started: the next look says so
            self.manager.cancel_job(standing.job_id)

    def _tell_limit(self, standing: Standing) -> None:
        """Tell the nodes of a job their limit, if it is not what they were told."""
        limit, dollars = self._limit(standing)
        told = self.told_limits.get(standing.job_id)
        if told is None or abs(limit - told) > LIMIT_CHANGE_SHARE * (limit - standing.node_seconds):
            write_limit(standing.job.rundir, limit, dollars)
            self.told_limits[standing.job_id] = limit

    def _limit(self, standing: Standing) -> tuple[float, float]:
        """Return the node-seconds at which the nodes of a job stop, and what all cost then."""
        if standing.launches > 1 or launch_mark(standing.job) != standing.before:
            with suppress(ClusterError):
                standing = self._billed(standing)
        dollars = usd(standing.grant_units - margin_units(standing.nodes, self.limits))
        return node_limit(standing, self.limits), dollars

    def _start(self, standing: Standing) -> str:
        """Start the launch that was noted, and return why it could not be started; "" where it was."""
        job = standing.job.trained
        limit, dollars = self._limit(standing)
        job = replace(job, training=replace(job.training, max_node_seconds=limit))
        try:
            start_job(
                self.manager,
                job,
                standing.nodes,
                self.processes_per_node,
                dict(self.env),
                stop_at_usd=dollars,
                command=standing.job.command,
                part_of=self.records.name,
            )
        except (ClusterError, DamagedError, ConfigError) as error:
            return str(error)
        return ""

    def _note_start(self, standing: Standing, problem: str, now: float) -> None:
        """Note that a launch could not be started: a failure of its job, after several tries."""
        if problem and launch_mark(standing.job) == standing.before:  # else the next look says how it stands
            ended = judge_launch_end(standing, JobState.FAILED, now, message=problem)
            self._settle(ended, ended.state, ended.reason)


def launch_mark(job: FleetJob) -> str:
    """Return what tells launches of a job apart: a digest of how the cluster started the last one; "" before any."""
    try:
        return hashlib.sha256(job.rundir.storage.read(LAUNCH)).hexdigest()[:16]
    except FileNotFoundError:
        return ""


MOST_FAILURES = 3
"""Launches in a row without a result of their own, after which a job is given up."""
PATIENCE_SECONDS = 5.0
"""Seconds until the next try after the first of them; doubled with each."""
CAME_TO_LIMIT = "it reached its limit, and saved a checkpoint"


def judge_launch_end(
    standing: Standing, ended: JobState, now: float, message: str = "",
    has_own_result: bool = False, came_to_limit: bool = False, retry_at: float | None = None,
) -> Standing:  # fmt: skip
    """Return how a job stands after its launch has ended so. ``message``: the reason, in the words of the cluster;
    ``has_own_result``: whether the training itself says how this launch ended; ``retry_at``: Unix time at which nodes
    may be had, None where some were. Pure.

    A launch that ended by a failure of the training is the end of the job. One that ended by a failure of something
    else (its supervisor was killed, no node came) is tried again, a few times.
    """

    def means(state: FleetState, reason: str, failures: int = 0, not_before: float = 0.0) -> Standing:
        return replace(standing, state=state, reason=reason, failures=failures, not_before=not_before)

    failures = standing.failures
    if ended is JobState.SUCCEEDED:
        return means(FleetState.SUCCEEDED, "")
    if standing.state is FleetState.ENDING:
        return means(FleetState.ENDED, standing.reason)
    if came_to_limit:
        return means(FleetState.PAUSED, CAME_TO_LIMIT)
    if ended is JobState.CANCELLED:
        if standing.state is FleetState.PAUSING:
            return means(FleetState.PAUSED, standing.reason)
        return means(FleetState.ENDED, "a person cancelled it")
    if retry_at is not None:
        return means(FleetState.PAUSED, message, failures, retry_at)
    if has_own_result or failures + 1 >= MOST_FAILURES:
        return means(FleetState.FAILED, message, failures + 1)
    return means(FleetState.PAUSED, message, failures + 1, now + PATIENCE_SECONDS * 2**failures)


def explain_launch_end(standing: Standing, rundir: RunDir, status: JobStatus, now: float) -> Standing:
    """Return how a job stands after its last launch, as `judge_launch_end` does."""
    try:
        result, launch = rundir.read_json(RESULT) or {}, rundir.read_json(LAUNCH) or {}
        is_its = result.get("launch") in (None, launch.get("launch"))
        own, spent = result.get("status") == "failed" and is_its, ran_out(rundir)
    except DamagedError as error:
        return replace(standing, state=FleetState.FAILED, reason=str(error), failures=0, not_before=0.0)
    return judge_launch_end(
        standing,
        status.state,
        now,
        message=str(result.get("error") or status.message) if own else status.message,
        has_own_result=own,
        came_to_limit=spent,
        retry_at=status.starved.retry_at if status.starved else None,
    )
