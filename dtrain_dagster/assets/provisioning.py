"""Provisioning for an asset: it gets the cluster's nodes, or its run gets a place in the queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import dagster as dg

from dtrain_dagster.automation.capacity_queue import (
    ATTEMPT_TAG,
    TICKET_TAG,
    Ticket,
    WaitingList,
    new_ticket,
    refused_again,
)
from dtrain_dagster.automation.retraining import CAUSE_TAG
from dtrain_dagster.clusters.base import ClusterConfig, GPUClusterManager, NoCapacityError
from dtrain_dagster.clusters.job_notices import was_told
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.support.formatting import format_duration
from dtrain_dagster.support.notify import notify_and_log
from trainer.rundir import RunDir


def provision(
    context: dg.AssetExecutionContext,
    manager: GPUClusterManager,
    cluster: GPUClusterResource,
    project: ProjectResource,
    sku: str,
    node_count: int,
) -> ClusterConfig:
    """Get the cluster's nodes ready, or the cloud's word that they may come, and return them. Raise `dagster.Failure`
    where there is no capacity: the run gets a place in the queue, and the sensor ``queue`` starts it again."""
    with queueing(context, project, cluster):
        config = manager.provision_cluster(node_count, sku)
    if not manager.brings_nodes_later:
        leave_queue(context, project, config)
    return config


@contextmanager
def queueing(
    context: dg.AssetExecutionContext, project: ProjectResource, cluster: GPUClusterResource
) -> Iterator[None]:
    """Let a lack of capacity within the block give the run a place in the queue, which is its old one if it has had
    one. Raise `dagster.Failure`, which names the place, instead of `NoCapacityError`."""
    try:
        yield
    except NoCapacityError as error:
        waiting = WaitingList(project.shared_uri, cluster.cluster_key)
        raise _queued(context, project, waiting, _ticket_of(context, waiting), error) from error


def leave_queue(context: dg.AssetExecutionContext, project: ProjectResource, config: ClusterConfig) -> None:
    """Give the run's ticket back, now that its nodes are there, and tell people that it starts; once."""
    waiting = WaitingList(project.shared_uri)
    mine = _ticket_of(context, waiting)
    if mine is None:
        return
    waiting.remove(mine.ticket)
    waited = format_duration(time.time() - mine.queued_at)
    context.log.info(f"capacity is available after {waited}: ticket {mine.ticket} is given back")
    notify_and_log(
        project.notify_urls(),
        "dtrain: a run that waited for capacity starts",
        f"{config.node_count} x {config.gpu_type} after {waited}: {project.run_url(context.run.run_id)}",
        context.log,
    )


def _ticket_of(context: dg.AssetExecutionContext, waiting: WaitingList) -> Ticket | None:
    return waiting.find(context.run.tags[TICKET_TAG]) if TICKET_TAG in context.run.tags else None


def attempts_metadata(manager: GPUClusterManager) -> dict[str, dg.MetadataValue]:
    """Return metadata of an asset: the tries to get nodes, with the cloud's codes and messages; empty if there were
    none."""
    tried = [asdict(attempt) for attempt in manager.attempts]
    return {"provisioning": dg.JsonMetadataValue(tried)} if tried else {}


def _queued(
    context: dg.AssetExecutionContext,
    project: ProjectResource,
    waiting: WaitingList,
    mine: Ticket | None,
    error: NoCapacityError,
) -> dg.Failure:
    run, now = context.run, time.time()
    if mine is None:
        # A run of a whole job names no assets: the job does.
        selection = run.asset_selection or context.job_def.asset_layer.selected_asset_keys
        ticket = new_ticket(
            run.run_id,
            sorted(key.to_user_string() for key in selection),
            run.run_config,
            str(error),
            now,
            project.queue_deadline_hours * 3600,
            error.retry_at,
            tags={CAUSE_TAG: run.tags[CAUSE_TAG]} if CAUSE_TAG in run.tags else {},
            since=error.since,
            cluster=waiting.cluster,
        )
        if TICKET_TAG in run.tags:  # it had left the queue when its first nodes came: its place is kept
            ticket = replace(ticket, ticket=run.tags[TICKET_TAG], attempt=int(run.tags[ATTEMPT_TAG]) + 1)
    else:
        ticket = refused_again(mine, run.run_id, str(error), now, error.retry_at)
    position = waiting.put(ticket)
    pause = format_duration(ticket.retry_at - now)
    # Later places are in the queue's table.
    job = run.tags.get(JOB_TAG)
    is_told = job is not None and was_told(RunDir(f"{project.jobs_uri}/{job}"), "waits")  # by its cluster
    if mine is None and error.since is not None and not is_told:
        notify_and_log(
            project.notify_urls(),
            "dtrain: a run waits for capacity",
            f"position {position}; it is tried again in {pause}; why: {error}\n{project.run_url(run.run_id)}",
            context.log,
        )
    return dg.Failure(
        description=(
            f"no capacity: {error}\nThis run waits in the queue at position {position} (ticket {ticket.ticket}). The "
            f"sensor `queue` tries again in {pause} and says when it starts; it gives up after "
            f"{format_duration(ticket.deadline_at - now)} (DTRAIN_QUEUE_DEADLINE_HOURS)."
        ),
        metadata={
            "ticket": ticket.ticket,
            "position": position,
            "tries": ticket.attempt - 1,
            "attempts": dg.JsonMetadataValue(list(error.attempts)),
        },
        allow_retries=False,
    )
