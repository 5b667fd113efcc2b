"""What the command line writes to MLflow. Of a training: where its nodes write to, and what is added once it has ended.
Of a fleet: a run of its own, and one nested in it for each of its jobs.

The nodes of a fleet's job write its run while they train, as those of `dtrain train` do. What they do not know is added
here: the run above it, how the job has ended, and what it has cost. This is done on a thread of its own, since MLflow
takes seconds to import and to write, and a fleet decides in every second. Another process that goes on with the fleet
adds what is missing, and makes no second run of a job (`RunGroup`).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain_dagster.cli.common import run_dir, say
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.money import usd
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.dashboard.page import write_report
from dtrain_dagster.fleet.jobs import FleetLimits, FleetState, Standing
from dtrain_dagster.jobs.orders import source_tags
from dtrain_dagster.jobs.progress import code_version
from dtrain_dagster.registry.run_record import (
    RunGroup,
    add_to_run,
    cost_metrics,
    is_workspace,
    lost_metric,
    note_of,
    run_of,
    write_to_run,
)
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.tiers import Tier, tier_of
from dtrain_dagster.support.formatting import dollars
from trainer.config import JobConfig, TrackingConfig
from trainer.errors import DamagedError
from trainer.observability.mlflow_sink import NOTE_TAG, TRACKING, begin_run, figures_of_test
from trainer.observability.mlflow_sqlite import authorised
from trainer.observability.reporter import OFF, TRACKING_OF_LAUNCH
from trainer.rundir import EVALUATION, JOB, RESULT, RunDir
from trainer.secrets.redaction import redact

if TYPE_CHECKING:
    from dtrain_dagster.fleet.records import FleetRecords
    from dtrain_dagster.resources import GPUClusterResource, ProjectResource

FLEET_TAG, RECORD_TAG = "dtrain.fleet", "dtrain.fleet_record"
"""Tags: of a job's run the name of its fleet; of a fleet's run also a digest of where its record is, since fleets of
other homes may have the same name."""
STATE_TAG, REASON_TAG = "state", "reason"
"""Tags of a job's run, as of a trial's: how it has ended in the fleet, and why."""
STATUS_OF = {FleetState.SUCCEEDED: "FINISHED", FleetState.FAILED: "FAILED", FleetState.ENDED: "KILLED"}
MOST_FAILURES = 3
"""Jobs that could not be written, after which the others are left for later."""
PATIENCE_SECONDS = 60.0
"""Seconds until these are tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracked:
    """A job as it is written to MLflow from this start on."""

    job: JobConfig
    is_on: bool
    """Whether this start of it is."""

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of its nodes: ``job.json`` stays as it was begun, so a launch says that it is not
        tracked."""
        return {} if self.is_on else {TRACKING_OF_LAUNCH: OFF}


def track(
    job: JobConfig,
    asked: Collection[str],
    settings: Settings,
    cluster: GPUClusterResource,
    project: ProjectResource,
    entry: str = "dtrain train",
    more: Mapping[str, str] | None = None,
) -> Tracked:
    """Return how a training is tracked. A new one is in the MLflow of the settings, or where it says itself; one that
    goes on is in the run in which it began. ``asked``: the overrides, which may switch it off, as the settings do;
    ``entry``: what MLflow names as its source; ``more``: tags of its run besides those that say where it comes from."""
    is_new = not run_dir(settings, job.job_id).storage.exists("job.json")
    is_off = job.tracking.mlflow_tracking_uri is None and (is_stated(asked) or settings.command_tracking == OFF)
    if not is_new:
        job = as_tracked_before(job, run_dir(settings, job.job_id))
    elif job.tracking.mlflow_tracking_uri is None and not is_off:
        source = {} if project.tracks_in_workspace else _source(entry, Path.cwd())
        job = with_tracking(job, cluster, project, {**source, **(more or {})})
    return Tracked(job=job, is_on=not is_off and job.tracking.mlflow_tracking_uri is not None)


def is_stated(asked: Collection[str]) -> bool:
    """Return whether overrides say where a training is tracked. Pure."""
    return any(item.startswith(("tracking=", "tracking.mlflow_tracking_uri=")) for item in asked)


def with_tracking(
    job: JobConfig, cluster: GPUClusterResource, project: ProjectResource, tags: Mapping[str, str]
) -> JobConfig:
    """Return the job, reporting to the MLflow of the settings, in a run with these tags."""
    stated = job.tracking.mlflow_experiment
    tracking = replace(
        job.tracking,
        mlflow_tracking_uri=cluster.registry(project).tracking_uri,
        mlflow_experiment=project.experiment if stated == TrackingConfig().mlflow_experiment else stated,
        mlflow_run_name=job.tracking.mlflow_run_name or job.job_id,
        tags={**tags, "code_version": code_version(), **job.tracking.tags},
    )
    return replace(job, tracking=tracking)


@cache
def _source(entry: str, folder: Path) -> dict[str, str]:
    """Return where a training comes from. A command asks git once, however many trainings it starts."""
    return source_tags(entry, folder)


def as_tracked_before(job: JobConfig, rundir: RunDir) -> JobConfig:
    """Return a job that does not say where it is tracked with the tracking of its earlier start, so that it goes on in
    the same run. What else it says of tracking stays, and has to be what it was."""
    if job.tracking.mlflow_tracking_uri is not None:
        return job
    before, usual = rundir.read_job().tracking, TrackingConfig()
    stated = {
        item.name: getattr(job.tracking, item.name)
        for item in fields(TrackingConfig)
        if item.name != "tags" and getattr(job.tracking, item.name) != getattr(usual, item.name)
    }
    return replace(job, tracking=replace(before, **stated, tags={**before.tags, **job.tracking.tags}))


def try_to_record_end(
    settings: Settings, cluster: GPUClusterResource, project: ProjectResource, tracked: Tracked, rundir: RunDir
) -> None:
    """Add to the run of a training that has ended what its nodes do not know, and say where the run is, or why that was
    impossible: the job's own end is what counts."""
    if not tracked.is_on:
        return
    try:
        record_end(settings, cluster, project, tracked.job, rundir)
    except (ValueError, RuntimeError, OSError) as error:
        say(f"MLflow does not have all of {tracked.job.job_id}: {redact(str(error))}", err=True)


def record_end(
    settings: Settings, cluster: GPUClusterResource, project: ProjectResource, job: JobConfig, rundir: RunDir
) -> None:
    """Add dollars, report and description to the run of a training that has ended, and say where it is. Raise
    ValueError, RuntimeError or OSError where the cluster or the run directory cannot be read."""
    assert job.tracking.mlflow_tracking_uri is not None
    tier, bill = tier_of(settings.tiers[0]), None
    try:
        tracker = CostTracker(settings.cluster_name, cluster.manager().node_usage(job.job_id), tier)
        lost = ledger(tracker.nodes, rundir.events()).causes().get(CostCause.LOST)
        bill = Bill(
            usd=tracker.total_usd, node_hours=tracker.node_hours, lost_node_seconds=lost.seconds if lost else 0.0
        )
    except PriceError as error:
        say(f"the cost of {job.job_id} is not known: {error}", err=True)
    metrics, note = describe_end(rundir, tier, bill, (rundir.read_json(RESULT) or {}).get("status", ""))
    uri = job.tracking.mlflow_tracking_uri
    why = add_to_run(uri, rundir, job.job_id, metrics=metrics, note=note)
    say(
        why or f"in MLflow: experiment {job.tracking.mlflow_experiment}, run {job.job_id} (`dtrain ui mlflow`)",
        err=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """What a training has cost."""

    usd: float
    node_hours: float
    lost_node_seconds: float | None = None
    """Node-seconds that went to failures; None where that is not known."""

    def metrics(self) -> dict[str, float]:
        """Return it as metrics of a run."""
        found = cost_metrics({"total_usd": self.usd, "node_hours": self.node_hours})
        return found | ({} if self.lost_node_seconds is None else lost_metric(self.lost_node_seconds))


def describe_end(rundir: RunDir, tier: Tier, bill: Bill | None, verdict: str) -> tuple[dict[str, float], str]:
    """Return the metrics and the description of a training that has ended, and write its report. ``bill``: None where
    its dollars are not known; ``verdict``: how it ended. Raise as the run directory does where it cannot be read."""

    evaluation = rundir.read_json(EVALUATION)
    worth = worth_line(evaluation, bill.usd if bill else None) if evaluation else None
    write_report(rundir, tier)
    return bill.metrics() if bill else {}, note_of(verdict, worth, rundir.uri)


class FleetTracker:
    """Writes one fleet to MLflow while it is run.

    ``told`` is called with a sentence for each thing that a person should know, from the thread that writes. Tracking
    that fails fails no fleet: what is missing is written when MLflow answers, at the latest by who goes on with it.
    """

    def __init__(self, records: FleetRecords, tier: Tier, told: Callable[[str], object]) -> None:
        self._records, self._tier, self._told = records, tier, told
        self._jobs: Sequence[Standing] = ()
        self._thread: threading.Thread | None = None
        self._next_at = 0.0
        self._runs: dict[tuple[str, str], _FleetRuns | None] = {}
        self._said: set[str] = set()

    def update(self, jobs: Sequence[Standing]) -> None:
        """Take the state of all jobs, and return at once. Those of which none is tracked load no MLflow."""
        self._jobs = tuple(item for item in jobs if _place_of(item) is not None)
        is_free = self._thread is None or not self._thread.is_alive()
        if self._jobs and is_free and time.monotonic() >= self._next_at:
            self._thread = threading.Thread(
                target=self._write, args=(self._jobs, False), name="fleet-tracking", daemon=True
            )
            self._thread.start()

    def finish(self) -> Sequence[str]:
        """Write what is left of a fleet that is over, and return where its runs are, in sentences."""
        if self._thread is not None:
            self._thread.join()
        return self._write(self._jobs, True)

    def _write(self, jobs: Sequence[Standing], is_over: bool) -> Sequence[str]:
        """Write what has changed since, for each experiment of a server that jobs name."""
        where: list[str] = []
        for key in dict.fromkeys(map(_place_of, jobs)):
            assert key is not None
            mine = [item for item in jobs if _place_of(item) == key]
            try:
                if key not in self._runs:
                    self._runs[key] = self._open(*key)
                if (runs := self._runs[key]) is None:
                    continue
                problems = runs.write(mine, self._tier)
                if is_over:
                    runs.finish(mine, self._records.limits(), self._records.is_cancelled())
                    where.append(f"in MLflow: experiment {key[1]}, run {self._records.name} (`dtrain ui mlflow`)")
            except _errors() as error:
                problems = [str(error)]
            for problem in problems:
                self._next_at = time.monotonic() + PATIENCE_SECONDS
                sentence = f"MLflow does not have all of fleet {self._records.name}: {redact(problem)}"
                if sentence not in self._said:
                    self._said.add(sentence)
                    self._told(sentence)
        return where

    def _open(self, tracking_uri: str, experiment: str) -> _FleetRuns | None:
        """Return the runs of the fleet there; None in a workspace, which has pages of its own for what is written."""
        address, name = authorised(tracking_uri), self._records.name
        if is_workspace(address):
            return None
        mark = hashlib.sha256(self._records.storage.uri.encode()).hexdigest()[:16]
        return _FleetRuns(RunGroup(address, experiment, name, (RECORD_TAG, mark), "job_id"), name)


class _FleetRuns:
    """The runs of a fleet in one experiment."""

    def __init__(self, group: RunGroup, fleet: str) -> None:
        self.group, self.fleet = group, fleet
        group.client.set_tag(group.run_id, FLEET_TAG, fleet)
        self.nested: set[str] = set()
        self.ended = {
            job_id
            for job_id, run in group.nested.items()
            if STATE_TAG in run.data.tags and run.info.status != "RUNNING"
        }
        """Jobs whose end is written."""
        self.failed: set[str] = set()
        """Jobs that could not be written. They are tried last, so that they keep no other one out."""

    def write(self, jobs: Sequence[Standing], tier: Tier) -> list[str]:
        """Write what is new of these jobs, and return why that was impossible for some."""
        problems: list[str] = []
        in_a_row = 0
        for item in sorted(jobs, key=lambda item: item.job_id in self.failed):
            job_id, is_final = item.job_id, item.state.is_final
            if job_id in self.ended or not (is_final or item.launches) or in_a_row == MOST_FAILURES:
                continue
            try:
                if is_final:
                    self._write_end(item, tier)
                    self.ended.add(job_id)
                elif job_id not in self.nested and (run_id := run_of(self.group.client, item.job.rundir, job_id)):
                    self.group.nest(run_id, {FLEET_TAG: self.fleet})
                    self.nested.add(job_id)
                in_a_row = 0
            except _errors() as error:
                in_a_row += 1
                self.failed.add(job_id)
                problems.append(f"{job_id}: {error}")
        return problems

    def _write_end(self, ended: Standing, tier: Tier) -> None:
        """Write how a job has ended. The run's status comes last: by it another process sees that all is there."""
        rundir, client = ended.job.rundir, self.group.client
        verdict = f"{ended.state}: {ended.reason}" if ended.reason else str(ended.state)
        was_begun, note = rundir.storage.exists(JOB), note_of(verdict, None, ended.job.trained.run_dir)
        metrics: dict[str, float] = {}
        if was_begun:
            bill = Bill(usd=ended.usd, node_hours=ended.node_seconds / 3600)
            metrics = bill.metrics()
            with suppress(DamagedError):  # nodes write these files, and the end is told without them
                metrics, note = describe_end(rundir, tier, bill, verdict)
        run_id = run_of(client, rundir, ended.job_id)
        if run_id is None:  # it was never begun, or its nodes did not come as far as MLflow
            run_id = begin_run(client, self.group.address, ended.job.trained)
            if was_begun:
                rundir.write_json(TRACKING, {"mlflow_run_id": run_id})
                with suppress(DamagedError):
                    metrics |= figures_of_test(rundir.read_json(EVALUATION) or {})
        write_to_run(client, run_id, rundir, metrics=metrics, note=note)
        why = {REASON_TAG: redact(ended.reason)} if ended.reason else {}
        self.group.nest(run_id, {FLEET_TAG: self.fleet, STATE_TAG: str(ended.state), **why})
        status = STATUS_OF[ended.state]
        if client.get_run(run_id).info.status != status:  # else its nodes have said when it ended
            client.set_terminated(run_id, status=status)

    def finish(self, jobs: Sequence[Standing], limits: FleetLimits, is_cancelled: bool) -> None:
        """Write what all jobs have cost and how many have succeeded, and end the run of the fleet."""
        counts = Counter(item.state for item in jobs)
        paid = usd(sum(item.paid_units for item in jobs))
        metrics = {
            "cost/total_usd": paid,
            "cost/node_hours": sum(item.node_seconds for item in jobs) / 3600,
            "cost/budget_usd": limits.budget_usd,
            **{f"jobs/{state}": float(counts[state]) for state in STATUS_OF},
        }
        done = f"{counts[FleetState.SUCCEEDED]} of {len(jobs)} jobs succeeded"
        note = f"**{done}**, for {dollars(paid)} of {dollars(limits.budget_usd)}"
        succeeded = counts[FleetState.SUCCEEDED] == len(jobs)
        self.group.end("FINISHED" if succeeded else "KILLED" if is_cancelled else "FAILED", metrics, {NOTE_TAG: note})


def _errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    return (MlflowException, OSError, ValueError, RuntimeError)


def _place_of(standing: Standing) -> tuple[str, str] | None:
    """Return the address and the experiment of a job; None for one that is not tracked, or cannot be a training."""
    config = standing.job.config
    if config is None or config.tracking.mlflow_tracking_uri is None:
        return None
    return config.tracking.mlflow_tracking_uri, config.tracking.mlflow_experiment
