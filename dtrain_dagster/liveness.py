"""Is a Dagster run at work, or has it died with its machine? Nobody marks it as failed then: it is started for ever."""

from __future__ import annotations

import dagster as dg

from dtrain_dagster.clusters.base import OWNER, ClusterError
from dtrain_dagster.resources import GPUClusterResource
from trainer.documents import warn_once
from trainer.errors import DamagedError
from trainer.rundir import RunDir

ALIVE_SECONDS = 1800.0
"""A Dagster run that has said nothing for longer, though it never ended, is not at work."""


def is_heard(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """Has it said something lately?"""
    latest = instance.get_records_for_run(record.dagster_run.run_id, limit=1, ascending=False).records
    heard_at = latest[0].timestamp if latest else record.create_timestamp.timestamp()
    return abs(now - heard_at) < ALIVE_SECONDS


def has_died(
    instance: dg.DagsterInstance, record: dg.RunRecord, cluster: GPUClusterResource, jobs_uri: str, now: float
) -> bool:
    """A run that was started, has gone silent and has no job that goes on: who follows one that waits for nodes has
    nothing to say. A run in the queue is silent, and alive."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.STARTED or is_heard(instance, record, now):
        return False
    try:
        owners = [owner_of(RunDir(f"{jobs_uri}/{job.job_id}")) for job in cluster.manager().active_jobs()]
    except (ClusterError, OSError):  # not now: it counts as alive
        return False
    return run.run_id not in owners


def owner_of(rundir: RunDir) -> str | None:
    """The Dagster run that follows a job; None where none does, or none can be told: a damaged job is nobody's."""
    try:
        found = rundir.read_json(OWNER)
        return found["dagster_run_id"] if found else None
    except DamagedError as error:
        warn_once(f"whose job it is cannot be told: {error}")
        return None
