"""Retraining: the causes, and the rule that one cause starts one run, however often and by whom it is noticed.

What is known comes from places that outlive a daemon: the instance (which runs were asked for, which models were
registered) and the manifests of datasets. A sensor's cursor only holds since when something is as it is.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
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
from trainer.documents import schemas
from trainer.documents.places import PlaceError, checked_id
from trainer.documents.reader import MARK_BYTES, parse_document, warn_once
from trainer.errors import DamagedError
from trainer.rundir import RunDir
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

TRAIN_JOB = "train"
"""The job of a graph that a person, the schedule and the sensors start: all but the studies."""
CAUSE_TAG = "dtrain/cause"
TRAINED = "trained_checkpoint"
_REGISTRATIONS = 200
"""The number of materializations of ``registered_model`` that are searched for the champion."""
DAY = 86400.0
_HELD = schemas.record({"key": schemas.text, "at": schemas.moment})
CLAIM, CLAIM_SECONDS = "claim.json", 180.0
"""The file that names the latest requester of a run, and its lifetime. A sensor has a minute, and seconds more pass
until the run can be seen."""


@dataclass(frozen=True, slots=True)
class RetrainingCause:
    """A reason to train again. The same cause has the same key, whichever sensor or schedule finds it."""

    key: str
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A materialization of ``registered_model``."""

    version: str
    alias: str
    dataset_id: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """A price file's content and its last day."""

    sha256: str
    last_date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """A sensor's record of a file between two looks. Times are Unix seconds; 0 means never."""

    version: str = ""
    since: float = 0.0
    """The time at which it first had this version."""
    digest: str = ""
    """The sha256 of its content, once that was read."""
    unreadable_since: float = 0.0
    told: bool = False
    """Whether a person was told that it cannot be read."""


def seen(watch: Watch, version: str, now: float) -> Watch:
    """Return the watch after one more look: another version counts from now."""
    return watch if watch.version == version else replace(watch, version=version, since=now, digest="")


def unreadable(watch: Watch, now: float) -> Watch:
    """Return the watch after a look that failed. What was known stays: the file may come back as it was."""
    return replace(watch, unreadable_since=watch.unreadable_since or now)


def read_watch(cursor: str | None) -> Watch:
    """Return the watch in a sensor's cursor; an empty one where the cursor is empty or of another form."""
    try:
        return Watch(**json.loads(cursor or "{}"))
    except (ValueError, TypeError):
        return Watch()


def new_data(sha256: str) -> RetrainingCause:
    """Return the cause "the prices have changed", with a key made of their sha256."""
    return RetrainingCause(f"data-{sha256[:16]}", f"the prices have changed (sha256 {sha256[:12]}…)")


def staleness(
    champion: Registered | None,
    latest: Registered | None,
    trained_on: Prices | None,
    newest: Prices | None,
    now: float,
    max_age_days: float,
) -> list[RetrainingCause] | str:
    """Return every cause for training the champion again, or one sentence that says why there is none.

    ``latest`` is the model that was registered last, under any alias, and ``trained_on`` its prices: a challenger shows
    that retraining was tried, and a further try with the same data ends alike. ``newest``: the prices that were read
    last.
    """
    if champion is None or latest is None:
        return "no champion was registered yet: nothing can be stale"
    name, found = f"the champion, version {champion.version},", []
    if trained_on and newest and trained_on.sha256 != newest.sha256:
        lag = (date.fromisoformat(newest.last_date) - date.fromisoformat(trained_on.last_date)).days
        if lag >= max_age_days:
            words = f"the latest training had prices up to {trained_on.last_date}, {lag} days before the newest"
            found.append(RetrainingCause(new_data(newest.sha256).key, words))
    age, rest = now - champion.at, max_age_days * DAY - (now - latest.at)
    if rest <= 0:  # a cause has one run, which may fail: each further period is a cause of its own
        period = int((now - latest.at) // (max_age_days * DAY))
        key = f"age-v{latest.version}-{int(latest.at)}-{period}"
        found.append(RetrainingCause(key, f"{name} is {age / DAY:.1f} days old"))
    if found:
        return found
    tried = "" if latest.version == champion.version else f", and version {latest.version} was trained since"
    return f"{name} is {age / DAY:.1f} days old{tried}: not stale before {format_duration(rest)} have passed"


def weekly(when: datetime) -> RetrainingCause:
    """Return the cause of the weekly schedule at this time."""
    return RetrainingCause(f"weekly-{when.astimezone(UTC):%Y%m%dT%H%MZ}", "it is time for the weekly retraining")


def ask(
    context: dg.SensorEvaluationContext | dg.ScheduleEvaluationContext,
    cause: RetrainingCause,
    budget_usd: float,
    names: GraphNames = STOCK_NAMES,
) -> dg.RunRequest | dg.SkipReason:
    """Return the one run of this cause in this graph, or the reason to skip: it had its run, or a training of the graph
    is under way, or another cause has the claim (`claim_retraining`): sensors are evaluated one after the other,
    schedules beside them. Of a run that seems dead, and keeps all causes waiting, people are told once.
    """
    now, trained, instance = time.time(), names.key(TRAINED), context.instance
    project = project_resource(context, names)
    own, job = names.below(f"{project.shared_uri}/retraining"), names.unique(TRAIN_JOB)
    cause = replace(cause, key=names.mark(cause.key))
    records = instance.get_run_records(dg.RunsFilter(statuses=LIVE))
    live = [record for record in records if trained in planned_assets(instance, record.dagster_run)]
    if dead := find_dead(instance, live, cluster_resource(context, names), project.jobs_uri, now):
        said = (
            f"run {dead} has been silent for {format_duration(ALIVE_SECONDS)} and follows no job: it seems to have "
            f"died with its machine, and keeps others waiting. Terminate it in Dagster's UI, then launch the job {job}"
        )
        text = f"{said}\n{project.run_url(dead)}"
        send_once(RunDir(own), lambda: (f"silent-{dead}", "dtrain: retraining waits for a silent run", text))
        return dg.SkipReason(f"{cause.words}; {said}")
    queued = [
        item
        for item in WaitingList(project.shared_uri).tickets()
        if not item.assets or trained.to_user_string() in item.assets
    ]
    if queued:  # its run ended as a failure, but only waits for capacity
        return dg.SkipReason(f"{cause.words}; waits for run {queued[0].run_id[:8]}, which waits for capacity")
    if had := instance.get_runs(dg.RunsFilter(tags={CAUSE_TAG: cause.key}), limit=1):
        said = f"run {had[0].run_id[:8]} was started for that ({had[0].status.value.lower()})"
        return dg.SkipReason(f"{cause.words}: {said}; to train once more, launch the job {job} by hand")
    if live:  # the oldest: others wait behind it
        run_id = live[-1].dagster_run.run_id
        return dg.SkipReason(f"{cause.words}; waits for run {run_id[:8]}, which is training or about to train")
    if holder := claim_retraining(open_storage(own), cause.key, now):
        return dg.SkipReason(f"{cause.words}; waits for the run that was just asked for ({holder})")
    return dg.RunRequest(run_key=cause.key, run_config=run_config(budget_usd, names), tags={CAUSE_TAG: cause.key})


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


def claim_retraining(storage: Storage, key: str, now: float) -> str:
    """Take the exclusive right to ask for a run until that run can be seen; return "" or the present holder.

    The claim lasts longer than a tick. A process that looked at the runs before it was taken, and asks after, finds it
    held.
    """
    try:
        known = storage.read_bounded(CLAIM, MARK_BYTES)
    except FileNotFoundError:
        known = None
    held: dict[str, Any] = {"key": key, "at": 0.0}
    if known is not None:
        try:
            held = parse_document(known, CLAIM, _HELD)
        except DamagedError as error:  # its holder cannot be told: it is taken
            warn_once(str(error))
    if held["key"] != key and abs(now - held["at"]) < CLAIM_SECONDS:
        return str(held["key"])
    mine = json.dumps({"key": key, "at": now}).encode()
    return "" if storage.compare_and_swap(CLAIM, known, mine) else "another cause"


def run_config(budget_usd: float, names: GraphNames = STOCK_NAMES) -> dict[str, Any]:
    """Return the launchpad of a run that starts unattended: a plan over the budget is refused."""
    return {"ops": {names.step("cost_estimate"): {"config": {"budget_usd": budget_usd}}}} if budget_usd else {}


def budget_words(budget_usd: float) -> str:
    """Return a sentence that tells the budget of an unattended run."""
    if not budget_usd:
        return "No budget is set (DTRAIN_RETRAIN_BUDGET_USD): a run costs what its plan says."
    return f"A plan above {dollars(budget_usd)} (DTRAIN_RETRAIN_BUDGET_USD) is refused, and a person is told."


def registrations(
    instance: dg.DagsterInstance, names: GraphNames = STOCK_NAMES
) -> tuple[Registered | None, Registered | None]:
    """Return the champion and the model that was registered last; None if none."""
    latest = None
    for record in itertools.islice(_records(instance, names.key("registered_model")), _REGISTRATIONS):
        values, tags = _metadata(record.asset_materialization), {}
        if isinstance(values.get("tags"), dict):
            tags = values["tags"]
        found = Registered(
            version=str(values.get("version")),
            alias=str(values.get("alias")),
            dataset_id=tags.get("dataset_id", ""),
            at=record.timestamp,
        )
        latest = latest or found
        if found.alias == "champion":
            return found, latest
    return None, latest


def _records(instance: dg.DagsterInstance, asset: dg.AssetKey) -> Iterator[dg.EventLogRecord]:
    """Yield materializations, newest first, a few at a time: each holds a whole model card."""
    page = instance.fetch_materializations(asset, limit=10)
    yield from page.records
    while page.has_more:
        page = instance.fetch_materializations(asset, limit=10, cursor=page.cursor)
        yield from page.records


def newest_prices(instance: dg.DagsterInstance, names: GraphNames = STOCK_NAMES) -> Prices | None:
    """Return the prices that were read last, whether or not a model was trained on them; None where none were read."""
    values = _latest(instance, names.key("stock_prices"))
    return Prices(sha256=str(values["sha256"]), last_date=str(values["last_date"])) if "sha256" in values else None


def trained_dataset(instance: dg.DagsterInstance, names: GraphNames = STOCK_NAMES) -> str | None:
    """Return the id of the dataset of the latest training; None where there was none."""
    return _latest(instance, names.key(TRAINED)).get("dataset_id")


def prices_of(shared_uri: str, dataset_id: str) -> Prices | None:
    """Return the prices that a dataset was made of; None where it is gone. Raise `DatasetError` where it is damaged."""
    try:
        folder = open_storage(f"{shared_uri}/datasets/{checked_id(dataset_id, 'the dataset')}")
        source = load_manifest(folder)["source"]
    except (NoDatasetError, PlaceError):
        return None
    return Prices(sha256=source["sha256"], last_date=source["last_date"])


def _latest(instance: dg.DagsterInstance, asset: dg.AssetKey) -> dict[str, Any]:
    """Return the metadata of an asset's latest materialization; empty where there is none."""
    event = instance.get_latest_materialization_event(asset)
    return _metadata(event.asset_materialization if event else None)


def _metadata(event: dg.AssetMaterialization | None) -> dict[str, Any]:
    return read_entries(event.metadata) if event else {}
