"""Retraining: the causes, and what a cause waits for. That one cause starts one run is Dagster's: it is the run's key.

What is known comes from places that outlive a daemon: the instance (what was trained and registered) and the manifests
of datasets. A sensor's cursor only holds since when something is as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from dtrain_dagster.automation.capacity_queue import WaitingList
from dtrain_dagster.automation.run_liveness import ALIVE_SECONDS, LIVE, is_silent, planned_assets
from dtrain_dagster.clusters.base import OWNER, ClusterError
from dtrain_dagster.clusters.notices import send_once
from dtrain_dagster.resources import GPUClusterResource, cluster_resource, project_resource
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.page_entries import read_entries
from trainer.data.manifest import NoDatasetError, load_manifest
from trainer.documents.places import PlaceError, checked_id
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.rundir import RunDir
from trainer.storage.open import open_storage

TRAIN_JOB = "train"
"""The job of a graph that a person, the schedule and the sensors start: all but the studies."""
CAUSE_TAG = "dtrain/cause"
TRAINED = "trained_checkpoint"
STALE_DAYS = 30.0
"""The age, since the last registration, at which a model is stale."""
DAY = 86400.0


def weekly(when: datetime) -> str:
    """Return the cause of the weekly schedule at this time."""
    return f"weekly-{when.astimezone(UTC):%Y%m%dT%H%MZ}"


def new_data(sha256: str) -> str:
    """Return the cause of prices with this content."""
    return f"data-{sha256[:16]}"


def staleness(version: str, registered_at: float, now: float) -> str:
    """Return the cause for training again after the model that was registered last, whether or not it became champion:
    "" before it is stale. A cause has one run, which may fail: each further period is a cause of its own. Pure."""
    periods = int((now - registered_at) // (STALE_DAYS * DAY))
    return f"age-v{version}-{int(registered_at)}-{periods}" if periods else ""


def ask(
    context: dg.SensorEvaluationContext | dg.ScheduleEvaluationContext,
    cause: str,
    budget_usd: float,
    names: GraphNames = STOCK_NAMES,
) -> dg.RunRequest | dg.SkipReason:
    """Return the run of this cause in this graph, which Dagster starts once, or the reason to skip: a training of the
    graph is under way. Of a run that seems dead, and keeps all causes waiting, people are told once."""
    trained, instance, project = names.key(TRAINED), context.instance, project_resource(context, names)
    key = names.mark(cause)
    records = instance.get_run_records(dg.RunsFilter(statuses=LIVE))
    live = [record for record in records if trained in planned_assets(instance, record.dagster_run)]
    if dead := find_dead(instance, live, cluster_resource(context, names), project.jobs_uri, time.time()):
        said = (
            f"run {dead} has been silent for {format_duration(ALIVE_SECONDS)} and follows no job: it seems to have "
            "died with its machine, and keeps others waiting. Terminate it in Dagster's UI, then launch the job "
            f"{names.unique(TRAIN_JOB)}"
        )
        text = f"{said}\n{project.run_url(dead)}"
        own = RunDir(names.below(f"{project.shared_uri}/retraining"))
        send_once(own, lambda: (f"silent-{dead}", "dtrain: retraining waits for a silent run", text))
        return dg.SkipReason(f"{key}: {said}")
    for item in WaitingList(project.shared_uri).tickets():
        if not item.assets or trained.to_user_string() in item.assets:  # its run has failed, but is tried again
            return dg.SkipReason(f"{key} waits for run {item.run_id[:8]}, which waits for capacity")
    if live:  # the oldest: others wait behind it
        run_id = live[-1].dagster_run.run_id
        return dg.SkipReason(f"{key} waits for run {run_id[:8]}, which is training or about to train")
    return dg.RunRequest(run_key=key, run_config=run_config(budget_usd, names), tags={CAUSE_TAG: key})


def find_dead(
    instance: dg.DagsterInstance, live: Sequence[dg.RunRecord], cluster: GPUClusterResource, jobs_uri: str, now: float
) -> str:
    """Return the id of the oldest of the ``live`` runs (newest first) that is started, is silent, and follows no active
    job; "" for none, and where the jobs cannot be seen."""
    started = [record for record in live if record.dagster_run.status is dg.DagsterRunStatus.STARTED]
    silent = [record.dagster_run.run_id for record in started if is_silent(instance, record, now)]
    if not silent:
        return ""
    try:
        jobs = [RunDir(f"{jobs_uri}/{job.job_id}") for job in cluster.manager().active_jobs()]
        owners = {(rundir.read_json(OWNER) or {}).get("dagster_run_id") for rundir in jobs}
    except (ClusterError, DamagedError, OSError) as error:
        warn_once(f"whether run {silent[-1]} still follows a job cannot be determined: {error}")
        return ""
    return next((run_id for run_id in reversed(silent) if run_id not in owners), "")


def run_config(budget_usd: float, names: GraphNames = STOCK_NAMES) -> dict[str, Any]:
    """Return the launchpad of a run that starts unattended: a plan over the budget is refused."""
    return {"ops": {names.step("cost_estimate"): {"config": {"budget_usd": budget_usd}}}} if budget_usd else {}


def budget_words(budget_usd: float) -> str:
    """Return a sentence that tells the budget of an unattended run."""
    if not budget_usd:
        return "No budget is set (DTRAIN_RETRAIN_BUDGET_USD): a run costs what its plan says."
    return f"A plan above {dollars(budget_usd)} (DTRAIN_RETRAIN_BUDGET_USD) is refused, and a person is told."


def trained_prices(instance: dg.DagsterInstance, shared_uri: str, names: GraphNames = STOCK_NAMES) -> str | None:
    """Return the sha256 of the prices of the latest training; None where nothing was trained, or its dataset is gone.
    Raise as `prices_of`."""
    event = instance.get_latest_materialization_event(names.key(TRAINED))
    trained = read_entries(event.asset_materialization.metadata) if event and event.asset_materialization else {}
    return prices_of(shared_uri, trained["dataset_id"]) if "dataset_id" in trained else None


def prices_of(shared_uri: str, dataset_id: str) -> str | None:
    """Return the sha256 of the prices that a dataset was made of; None where it is gone. Raise `DatasetError` where it
    is damaged."""
    try:
        folder = open_storage(f"{shared_uri}/datasets/{checked_id(dataset_id, 'the dataset')}")
        return load_manifest(folder)["source"]["sha256"]
    except (NoDatasetError, PlaceError):
        return None
