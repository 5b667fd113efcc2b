"""A training of the command line in MLflow: where its nodes write to, and what is added once it has ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain_dagster.cli.common import run_dir, say
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.dashboard.page import write_report
from dtrain_dagster.jobs.orders import source_tags
from dtrain_dagster.jobs.progress import code_version
from dtrain_dagster.registry.run_record import add_to_run, cost_metrics, lost_metric, note_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.tiers import Tier, tier_of
from trainer.config import JobConfig, TrackingConfig
from trainer.observability.reporter import OFF, TRACKING_OF_LAUNCH
from trainer.rundir import EVALUATION, RESULT, RunDir
from trainer.secrets.redaction import redact

if TYPE_CHECKING:
    from dtrain_dagster.resources import GPUClusterResource, ProjectResource


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
        lost = ledger(tracker.nodes, rundir.events(), periods=1).causes().get(CostCause.LOST)
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
