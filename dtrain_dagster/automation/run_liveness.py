"""Which Dagster runs are of a graph of ours. An instance has runs of other code locations, too: they keep nothing
waiting. A run whose process was killed is marked as failed by the code server that started it. Nothing marks a run that
died with its machine (`settings/dagster.yaml`): it stays silent until a person ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import dagster as dg

from dtrain_dagster.support.graph_names import GraphNames

LIVE = [status for status in dg.DagsterRunStatus if status.name not in ("SUCCESS", "FAILURE", "CANCELED")]
"""The states of a run that has not ended."""
AT_WORK = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
"""The states of a run that has a process, or is about to."""
ON_NODES = ("cost_estimate", "trained_checkpoint", "hyperparameter_search", "program_run")
"""The assets of a graph that use the cluster's nodes."""
ALIVE_SECONDS = 1800.0
"""The longest silence of a run that is about to use nodes: one that died with its machine must not keep them."""


def is_silent(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """Return whether nothing was heard of a run for `ALIVE_SECONDS`."""
    latest = instance.get_records_for_run(record.dagster_run.run_id, limit=1, ascending=False).records
    heard_at = latest[0].timestamp if latest else record.create_timestamp.timestamp()
    return now - heard_at >= ALIVE_SECONDS


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
        run = record.dagster_run
        if mine & planned_assets(instance, run) and not is_silent(instance, record, now):
            return run.run_id
    return ""
