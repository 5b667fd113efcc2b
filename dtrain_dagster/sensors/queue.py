"""The sensor ``queue``: it starts runs that wait for capacity when they are due, and tells people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from dtrain_dagster.automation.capacity_queue import (
    ATTEMPT_TAG,
    TICKET_TAG,
    Ticket,
    WaitingList,
    decide_turns,
    refused_again,
)
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.sensors.watched_clusters import ELSEWHERE, watched_clusters
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log
from trainer.errors import DamagedError
from trainer.rundir import STATUS, RunDir


def build_queue_sensor(settings: Settings, names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that starts due runs, and removes expired ones from the queue."""

    @dg.sensor(
        name=names.unique("queue"),
        required_resource_keys=names.resources,
        asset_selection=dg.AssetSelection.all(),  # no target: for one Dagster makes a job, and it has one partitioning
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Starts runs that wait for capacity; gives up after {settings.queue_deadline_hours:g} hours.",
    )
    def queue(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        if not watched_clusters(context, names):
            return dg.SensorResult(skip_reason=ELSEWHERE)
        project = project_resource(context, names)
        waiting, now = WaitingList(project.shared_uri, cluster_resource(context, names).cluster_key), time.time()
        tickets = [item for item in waiting.tickets() if _is_of(context.repository_def, item)]
        known = [item.ticket for item in tickets]
        runs = context.instance.get_runs(filters=dg.RunsFilter(tags={TICKET_TAG: known})) if known else []
        tickets = [_after_death(item, runs, waiting, project.jobs_uri, now, context.log) for item in tickets]
        due = decide_turns(
            tickets,
            running=frozenset(run.tags[TICKET_TAG] for run in runs if not run.is_finished),
            finished=frozenset((run.tags[TICKET_TAG], int(run.tags[ATTEMPT_TAG])) for run in runs if run.is_finished),
            now=now,
        )
        for item, why in [(item, "its deadline has passed") for item in due.expired] + [
            (item, "its last run ended for another reason") for item in due.ended
        ]:
            waiting.remove(item.ticket)
            if item in due.ended and _has_succeeded(item, runs):
                context.log.info(f"ticket {item.ticket} is given back: its run has succeeded")
                continue
            context.log.warning(f"ticket {item.ticket} is taken out of the queue: {why}")
            notify_and_log(
                project.notify_urls(),
                "dtrain: a run no longer waits for capacity",
                f"{why} after {format_duration(now - item.queued_at)} and {item.attempt - 1} tries; the last refusal: "
                f"{item.reason}\n{project.run_url(item.run_id)}",
                context.log,
            )
        left = [item for item in tickets if item not in due.expired + due.ended]
        places = [f"{place}. {describe_ticket(item)}" for place, item in enumerate(left, 1)]
        return dg.SensorResult(
            run_requests=[_request(due.start)] if due.start else [],
            skip_reason=None if due.start else "\n".join(places) or "no run waits for capacity",
        )

    return queue


def _is_of(repository: dg.RepositoryDefinition | None, ticket: Ticket) -> bool:
    """Return whether this code location has the assets that a ticket's run makes: another one starts the run else."""
    if repository is None:  # in a test
        return True
    known = repository.asset_graph.get_all_asset_keys()
    return all(dg.AssetKey.from_user_string(name) in known for name in ticket.assets)


def _last_run(ticket: Ticket, runs: Sequence[dg.DagsterRun]) -> dg.DagsterRun | None:
    """Return the run of this ticket's present try; None where there is none yet."""
    mine = (TICKET_TAG, ticket.ticket), (ATTEMPT_TAG, str(ticket.attempt))
    return next((run for run in runs if all(run.tags.get(name) == value for name, value in mine)), None)


def _has_succeeded(ticket: Ticket, runs: Sequence[dg.DagsterRun]) -> bool:
    run = _last_run(ticket, runs)
    return run is not None and run.is_success


def _after_death(
    ticket: Ticket, runs: Sequence[dg.DagsterRun], waiting: WaitingList, jobs_uri: str, now: float, log: Any
) -> Ticket:
    """Return the ticket; with its next try, at the same place, where its run died while its job waited for nodes."""
    run = _last_run(ticket, runs)
    if run is None or run.status is not dg.DagsterRunStatus.FAILURE or JOB_TAG not in run.tags:
        return ticket
    try:
        status = RunDir(f"{jobs_uri}/{run.tags[JOB_TAG]}").read_json(STATUS) or {}
    except (DamagedError, OSError) as error:
        log.warning(f"ticket {ticket.ticket}: the state of its job cannot be read: {error}")
        return ticket
    if not waits_for_nodes(status):
        return ticket
    log.warning(f"ticket {ticket.ticket}: its run ended while job {run.tags[JOB_TAG]} waited for nodes: it stays")
    reason = f"{status.get('message') or 'its job waits for nodes'}; run {run.run_id} ended meanwhile"
    kept = refused_again(ticket, run.run_id, reason, now)
    waiting.put(kept)
    return kept


def waits_for_nodes(status: Mapping[str, Any]) -> bool:
    """Return whether a job with this ``status.json`` waits for nodes, or has ended because none came. Pure."""
    return bool(status.get("starved")) or status.get("state") == JobState.QUEUED


def _request(ticket: Ticket) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=f"{ticket.ticket}-{ticket.attempt}",
        run_config=dict(ticket.run_config),
        asset_selection=[dg.AssetKey.from_user_string(name) for name in ticket.assets] or None,
        tags={**ticket.tags, TICKET_TAG: ticket.ticket, ATTEMPT_TAG: str(ticket.attempt)},
    )


def describe_ticket(ticket: Ticket) -> str:
    """Return since when a run waits, its next try, and why."""
    queued, following, ends = map(_moment, (ticket.queued_at, ticket.retry_at, ticket.deadline_at))
    why = ticket.reason.partition("\n")[0]
    tries = f"tries: {ticket.attempt - 1}, the next at {following}"
    return f"run {ticket.run_id[:8]} waits since {queued} ({tries}; gives up at {ends}): {why}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
