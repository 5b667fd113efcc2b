"""Jobs that nobody waits for any more still cost money: say so, or stop them."""

from __future__ import annotations

import json
import time

import dagster as dg

from dtrain_dagster.assets.common import duration
from dtrain_dagster.jobs import OWNER
from dtrain_dagster.notify import notify
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.settings import Settings
from trainer.rundir import RunDir


def build_orphan_sensor(settings: Settings) -> dg.SensorDefinition:
    grace, cancels = settings.orphan_minutes * 60, settings.orphan_policy == "cancel"
    what = "cancels" if cancels else "reports"

    @dg.sensor(
        name="orphans",
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Finds jobs whose Dagster run has ended; {what} them after {settings.orphan_minutes:g} minutes.",
    )
    def orphans(
        context: dg.SensorEvaluationContext, cluster: GPUClusterResource, project: ProjectResource
    ) -> dg.SensorResult:
        manager, now = cluster.manager(), time.time()
        cursor = json.loads(context.cursor) if context.cursor else {"since": {}, "told": []}
        running = [status.job_id for status in manager.list_jobs() if not status.state.is_final]
        alone = [job_id for job_id in running if _is_alone(context.instance, project, job_id)]
        since: dict[str, float] = {job_id: cursor["since"].get(job_id, now) for job_id in alone}
        told: list[str] = [job_id for job_id in cursor["told"] if job_id in alone]
        events = []
        for job_id in alone:
            if job_id in told or now - since[job_id] < grace:
                continue
            alone_for = duration(now - since[job_id])
            if cancels:
                manager.cancel_job(job_id)
            told.append(job_id)
            done = "cancelled" if cancels else "still running"
            message = f"job {job_id} has no live Dagster run for {alone_for}: {done}"
            context.log.warning(message)
            lost = notify(project.notify_urls(), "dtrain: a job that nobody waits for", message)
            if lost:
                context.log.warning(f"nobody could be told by {', '.join(lost)}; see DTRAIN_NOTIFY")
            events.append(
                dg.AssetCheckEvaluation(
                    asset_key=dg.AssetKey("gpu_cluster"),
                    check_name="no_orphans",
                    passed=False,
                    severity=dg.AssetCheckSeverity.WARN,
                    metadata={
                        "job_id": job_id,
                        "alone_for": alone_for,
                        "what_was_done": done,
                        "remedy": "materialize trained_checkpoint again to take it over, or `dtrain cancel` it",
                    },
                )
            )
        return dg.SensorResult(
            asset_events=events,
            skip_reason=None if events else f"{len(running)} running job(s), {len(alone)} without a live run",
            cursor=json.dumps({"since": since, "told": told}),
        )

    return orphans


def _is_alone(instance: dg.DagsterInstance, project: ProjectResource, job_id: str) -> bool:
    """Did a Dagster run start it, and has that run ended? Jobs of the command line are a person's own."""
    owner = RunDir(f"{project.jobs_uri}/{job_id}").read_json(OWNER)
    if owner is None:
        return False
    run = instance.get_run_by_id(owner["dagster_run_id"])
    return run is None or run.is_finished
