"""Is a Dagster run at work, or has it died with its machine? Nobody marks it as failed then: it is started for ever."""

from __future__ import annotations

import json
import math
from typing import Any

import dagster as dg

from dtrain_dagster.automation import clock
from dtrain_dagster.clusters.base import OWNER, ClusterError
from dtrain_dagster.resources import GPUClusterResource
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.rundir import RunDir

LIVE = [status for status in dg.DagsterRunStatus if status.name not in ("SUCCESS", "FAILURE", "CANCELED")]
"""The states of a run that has not ended."""
ALIVE_SECONDS = 1800.0
"""A Dagster run that has said nothing for longer, though it never ended, is not at work."""
CLOCK = "dtrain/clock"
"""In the instance's store of cursors: how the clock stood, and when it was noticed that it had been set."""


def is_heard(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """Has it said something lately? Times before a clock was set tell nothing of times after: silence counts from when
    the setting was noticed, then."""
    latest = instance.get_records_for_run(record.dagster_run.run_id, limit=1, ascending=False).records
    heard_at = latest[0].timestamp if latest else record.create_timestamp.timestamp()
    is_ahead = heard_at > now + clock.NOTICEABLE_SECONDS
    since_set = seconds_since_setting(instance, is_ahead)
    return abs(now - heard_at) < ALIVE_SECONDS or since_set < ALIVE_SECONDS


def seconds_since_setting(instance: dg.DagsterInstance, is_ahead: bool = False) -> float:
    """By the kernel's count, since it was noticed that the machine's clock had been set; infinite where it was not,
    since the machine was started. ``is_ahead``: something was written by a clock that was set back since, perhaps
    between two looks."""
    store, reading = instance.daemon_cursor_storage, clock.reading()
    known: dict[str, Any] = json.loads(store.get_cursor_values({CLOCK}).get(CLOCK) or "{}")
    if known.get("boot") != reading["boot"] or not reading["boot"]:
        known = {}
    set_at = known.get("set_at")
    if clock.set_by(known, reading) or (is_ahead and set_at is None):
        set_at, known = clock.count(), {}
    if not known:
        store.set_cursor_values({CLOCK: json.dumps(reading | {"set_at": set_at})})
    return math.inf if set_at is None else clock.count() - set_at


def has_died(
    instance: dg.DagsterInstance, record: dg.RunRecord, cluster: GPUClusterResource, jobs_uri: str, now: float
) -> bool:
    """A run that was started, has gone silent and has no job that goes on: who follows one that waits for nodes has
    nothing to say. A run in the queue is silent, and alive."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.STARTED or is_heard(instance, record, now):
        return False
    try:
        owners = [read_owning_run(RunDir(f"{jobs_uri}/{job.job_id}")) for job in cluster.manager().active_jobs()]
    except (ClusterError, OSError):  # not now: it counts as alive
        return False
    return run.run_id not in owners


def read_owning_run(rundir: RunDir) -> str | None:
    """The Dagster run that follows a job; None where none does, or none can be told: a damaged job is nobody's."""
    try:
        found = rundir.read_json(OWNER)
        return found["dagster_run_id"] if found else None
    except DamagedError as error:
        warn_once(f"whose job it is cannot be told: {error}")
        return None


def run_at_work(instance: dg.DagsterInstance, now: float) -> str:
    """A run that may be about to use the nodes, between getting them and submitting its job; "" for none."""
    for record in instance.get_run_records(dg.RunsFilter(statuses=LIVE)):
        if is_heard(instance, record, now):
            return record.dagster_run.run_id
    return ""
