"""A training of the command line in MLflow: where its nodes write to, and what is added once it has ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain_dagster.cli.common import say
from trainer.config import TrackingConfig

if TYPE_CHECKING:
    from dtrain_dagster.resources import GPUClusterResource, ProjectResource
    from dtrain_dagster.settings.environment import Settings
    from trainer.config import JobConfig
    from trainer.rundir import RunDir


def with_tracking(
    job: JobConfig, asked: Collection[str], settings: Settings, cluster: GPUClusterResource, project: ProjectResource
) -> JobConfig:
    """Return the job, reporting to the MLflow of the settings; unchanged if it says itself where to, if ``asked`` (the
    overrides) do, or if the settings switch it off."""
    from dtrain_dagster.jobs.progress import code_version
    from dtrain_dagster.jobs.source_tags import source_tags

    is_stated = job.tracking.mlflow_tracking_uri is not None or any(
        item.startswith(("tracking=", "tracking.mlflow_tracking_uri=")) for item in asked
    )
    if is_stated or settings.command_tracking == "off":
        return job
    stated = job.tracking.mlflow_experiment
    source = {} if project.tracks_in_workspace else source_tags("dtrain train", Path.cwd())
    tracking = replace(
        job.tracking,
        mlflow_tracking_uri=cluster.registry(project).tracking_uri,
        mlflow_experiment=project.experiment if stated == TrackingConfig().mlflow_experiment else stated,
        mlflow_run_name=job.tracking.mlflow_run_name or job.job_id,
        tags={**source, "code_version": code_version(), **job.tracking.tags},
    )
    return replace(job, tracking=tracking)


def as_tracked_before(job: JobConfig, rundir: RunDir) -> JobConfig:
    """Return a job that says nothing of tracking with that of its earlier start, so that it goes on in the same run."""
    if job.tracking != TrackingConfig() or not rundir.storage.exists("job.json"):
        return job
    return replace(job, tracking=rundir.read_job().tracking)


def record_end(
    settings: Settings, cluster: GPUClusterResource, project: ProjectResource, job: JobConfig, rundir: RunDir
) -> None:
    """Add dollars, report and description to the run of a training that has ended, and say where it is."""
    from dtrain_dagster.costs.prices import PriceError, tier_of
    from dtrain_dagster.costs.tracker import CostTracker
    from dtrain_dagster.costs.worth import worth_line
    from dtrain_dagster.dashboard.page import write_report
    from dtrain_dagster.registry.run_record import add_to_run, cost_metrics, note_of
    from trainer.rundir import EVALUATION, RESULT

    if job.tracking.mlflow_tracking_uri is None:
        return
    tier, result = tier_of(settings.tiers[0]), rundir.read_json(RESULT) or {}
    figures: dict[str, float] = {}
    try:
        tracker = CostTracker(settings.cluster_name, cluster.manager().node_usage(job.job_id), tier)
        figures = {
            "total_usd": tracker.total_usd,
            "node_hours": tracker.node_hours,
            "usd_per_1000_samples": 1000 * tracker.total_usd / max(1, result.get("samples_seen") or 1),
        }
    except PriceError as error:
        say(f"the dollars of {job.job_id} are not known: {error}", err=True)
    evaluation = rundir.read_json(EVALUATION)
    worth = worth_line(evaluation, figures.get("total_usd")) if evaluation else None
    write_report(rundir, tier)
    note = note_of(result.get("status", ""), worth, job.run_dir)
    uri = job.tracking.mlflow_tracking_uri
    why = add_to_run(uri, rundir, job.job_id, metrics=cost_metrics(figures), note=note)
    say(why or f"in MLflow: experiment {job.tracking.mlflow_experiment}, run {job.job_id} (`dtrain mlflow`)", err=True)
