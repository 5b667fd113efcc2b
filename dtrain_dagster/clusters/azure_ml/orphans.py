"""Which jobs that run in the service nobody follows any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dtrain_dagster.clusters.azure_ml.jobs import JOB_TAG, LAUNCH_TAG, RUN_DIR_TAG, RUN_TAG
from dtrain_dagster.clusters.azure_ml.launch_record import Launches, job_name
from dtrain_dagster.clusters.azure_ml.states import ServiceJob
from dtrain_dagster.clusters.base import OWNER, JobState, Orphan
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.rundir import STATUS, RunDir


def why_orphaned(
    name: str, record: Mapping[str, Any] | None, is_settled: bool, owner: str | None, live_runs: Collection[str]
) -> str:
    """Return why a job that runs in the service has no owner; "" if it has one. Pure.

    ``record``: ``launch.json`` of its run directory, None if there is none; ``is_settled``: the run directory says that
    the job has ended; ``owner``: the Dagster run that followed it last, None for a job without one, which a person
    owns.
    """
    if record is None:
        return "its run directory is gone"
    if record.get("job_name") != name:
        return f"launch {record.get('launch')} ({record.get('job_name')}) has taken its place"
    if is_settled:
        return "its run directory says that it has ended"
    if record.get("cancel_asked_at"):
        return "it should have been cancelled"
    if owner is not None and owner not in live_runs:
        return f"no live Dagster run follows it; the last was {owner}"
    return ""


def judge_job(job: ServiceJob, jobs_uri: str, live_runs: Collection[str]) -> Orphan | None:
    """Return a job that runs in the service as an orphan, by its run directory; None where it has an owner, or was not
    submitted by an orchestrator that keeps its run directories at ``jobs_uri``.

    The tags alone do not tell the latter: a copy that a person makes of a job in the Studio has its tags, and a name of
    its own.
    """
    job_id, launch = job.tags.get(JOB_TAG, ""), job.tags.get(LAUNCH_TAG, "")
    is_ours = job_id and launch.isdecimal() and job.tags.get(RUN_DIR_TAG) == f"{jobs_uri}/{job_id}"
    if not is_ours or job.name != job_name(job_id, int(launch)):
        return None
    rundir = RunDir(f"{jobs_uri}/{job_id}")
    try:
        record = Launches(rundir).read()[1]
        status = rundir.read_json(STATUS) or {}
        owner = (rundir.read_json(OWNER) or {"dagster_run_id": job.tags.get(RUN_TAG)})["dagster_run_id"]
    except DamagedError as error:  # it may have an owner, so it is not ended: a person has to look
        warn_once(f"{job.name} runs, and its owner cannot be determined: {error}")
        return None
    known = record or {}
    settled = status.get("launch") == known.get("launch", 0) and JobState(status["state"]).is_final
    reason = why_orphaned(job.name, record, settled, owner, live_runs)
    if not reason:
        return None
    return Orphan(
        name=job.name, reason=reason, job_id=job_id, dagster_run_id=owner, state=job.status,
        since=job.created_at, node_count=known.get("node_count", 0), sku=known.get("sku", ""),
        tier=known.get("tier", ""), studio_url=job.studio_url,
    )  # fmt: skip
