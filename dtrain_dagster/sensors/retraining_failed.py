"""The sensor ``retraining_failed``: it reports a failed retraining, which no person started and so none watches."""

from __future__ import annotations

import dagster as dg

from dtrain_dagster.automation.capacity_queue import WaitingList
from dtrain_dagster.automation.retraining import CAUSE_TAG
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.resources import ProjectResource
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log
from dtrain_dagster.support.secrets import redact
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, RunDir


def build_retraining_failed_sensor(project: ProjectResource, names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that notifies people of a failed run with a retraining's cause. ``project``: given here, since
    Dagster's decorator takes resources of fixed names only."""

    @dg.run_failure_sensor(
        name=names.unique("retraining_failed"),
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Notifies once when a run that the schedule or a sensor asked for has failed and its job did not "
        "report it.",
    )
    def retraining_failed(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        run = context.dagster_run
        cause = run.tags.get(CAUSE_TAG)
        if cause is None:
            return dg.SkipReason("a person started it")
        if names.pipeline and not cause.startswith(names.mark("")):
            return dg.SkipReason("it is a retraining of another graph, whose sensor reports it")
        [latest] = context.instance.get_runs(dg.RunsFilter(tags={CAUSE_TAG: cause}), limit=1)
        tickets = WaitingList(project.shared_uri).tickets()
        if latest.run_id != run.run_id or any(item.tags.get(CAUSE_TAG) == cause for item in tickets):
            return dg.SkipReason("it found no capacity: the sensor `queue` reports what happens to it")
        if _was_told(run.tags.get(JOB_TAG), project):
            return dg.SkipReason("its job has failed, and its cluster has sent a notice")
        message = redact(f"{cause}: {context.failure_event.message}\n{project.run_url(run.run_id)}")
        notify_and_log(project.notify_urls(), "dtrain: a retraining has failed", message, context.log)
        return None

    return retraining_failed


def _was_told(job_id: str | None, project: ProjectResource) -> bool:
    """Return whether people have been told of the end of the job that the run followed, if it got so far."""
    if job_id is None:
        return False
    rundir = RunDir(f"{project.jobs_uri}/{job_id}")
    try:
        from dtrain_dagster.clusters.job_notices import was_told_of_end  # not above: few runs fail

        return was_told_of_end(rundir, int((rundir.read_json(LAUNCH) or {}).get("launch") or 1))
    except (DamagedError, OSError):
        return False
