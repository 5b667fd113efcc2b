"""Which Dagster runs are of a graph of ours, and whether they live. An instance has runs of other code locations, too:
they are never touched, and keep nothing waiting.

Dagster does not mark a run that died with its machine as failed: it stays "started". Its own tool for that, which sees
the runs of all code locations, is `run_monitoring` of the instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import dagster as dg

from dtrain_dagster.clusters.base import OWNER, ClusterError
from dtrain_dagster.resources import GPUClusterResource
from dtrain_dagster.support.graph_names import GraphNames
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.rundir import RunDir

LIVE = [status for status in dg.DagsterRunStatus if status.name not in ("SUCCESS", "FAILURE", "CANCELED")]
"""The states of a run that has not ended."""
AT_WORK = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
"""The states of a run that has a process, or is about to."""
ON_NODES = ("cost_estimate", "trained_checkpoint", "hyperparameter_search", "program_run")
"""The assets of a graph that use the cluster's nodes."""
ALIVE_SECONDS = 1800.0
"""The longest silence of a live Dagster run. One that never ended and is silent for longer is not at work."""


def is_heard(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """Return whether the run has written an event lately."""
    latest = instance.get_records_for_run(record.dagster_run.run_id, limit=1, ascending=False).records
    heard_at = latest[0].timestamp if latest else record.create_timestamp.timestamp()
    return now - heard_at < ALIVE_SECONDS


def has_died(
    instance: dg.DagsterInstance, record: dg.RunRecord, cluster: GPUClusterResource, jobs_uri: str, now: float
) -> bool:
    """Return whether a run was started, has gone silent and has no job that goes on: a run that follows a job which
    waits for nodes has nothing to write. A run in the queue is silent and alive."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.STARTED or is_heard(instance, record, now):
        return False
    try:
        owners = [read_owning_run(RunDir(f"{jobs_uri}/{job.job_id}")) for job in cluster.manager().active_jobs()]
    except (ClusterError, OSError):  # the cluster cannot be asked now: the run counts as alive
        return False
    return run.run_id not in owners


def read_owning_run(rundir: RunDir) -> str | None:
    """Return the id of the Dagster run that follows a job; None where there is none, or the job's file is damaged."""
    try:
        found = rundir.read_json(OWNER)
        return found["dagster_run_id"] if found else None
    except DamagedError as error:
        warn_once(f"the run that owns a job cannot be determined: {error}")
        return None


def planned_assets(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Set[dg.AssetKey]:
    """Return the assets that a run makes, also those that it has made: none for a run of ops."""
    if run.asset_selection is not None:
        return run.asset_selection
    # Dagster writes these when it makes the run: a job of assets that runs as a whole has no selection.
    planned = instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    events = [record.event_log_entry.dagster_event for record in planned.records]
    return {event.asset_key for event in events if event and event.asset_key}


def run_at_work(instance: dg.DagsterInstance, clusters: Iterable[dg.AssetKey], now: float) -> str:
    """Return the id of a run that may be about to use the nodes, between getting them and submitting its job; "" for
    none. ``clusters``: the assets `gpu_cluster` of the graphs that train on them (`watched_clusters`). Runs of others,
    and those that wait in Dagster's queue, do not count."""
    graphs = [GraphNames("".join(key.path[:-1])) for key in clusters]
    mine = {names.key(asset) for names in graphs for asset in ON_NODES}
    for record in instance.get_run_records(dg.RunsFilter(statuses=AT_WORK)):
        if mine & planned_assets(instance, record.dagster_run) and is_heard(instance, record, now):
            return record.dagster_run.run_id
    return ""
