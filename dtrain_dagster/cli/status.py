"""How a job, or the nodes of the cluster, stand now: in a terminal and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain_dagster.cli.job_facts import JobFacts
from dtrain_dagster.cli.terminal import format_progress
from dtrain_dagster.cli.time_left import LeftClock
from dtrain_dagster.clusters.base import ClusterHealth, JobState, JobStatus, NodeHealth
from dtrain_dagster.jobs.view import JobFollower, JobView
from dtrain_dagster.monitoring.hangs import hang_verdict
from dtrain_dagster.planning.projection import TimeLeft, describe_training
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.rundir import LAUNCH, RunDir

STATE_COLOURS = {
    JobState.QUEUED: "yellow",
    JobState.RUNNING: "cyan",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "yellow",
}


def print_health(console: Console, health: ClusterHealth) -> None:
    """Print the state of the cluster and of its nodes."""
    state = "healthy" if health.healthy else "unhealthy"
    console.print(f"cluster {health.cluster_name}: {health.message or state}", markup=False, highlight=False)
    if health.nodes:
        console.print(health_table(health.nodes))
    elif not health.message:
        console.print("no nodes: it is at rest")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCourse:
    """How far a job has come, as one look at its events tells it."""

    view: JobView
    left: TimeLeft | None
    has_events: bool


def read_course(status: JobStatus, rundir: RunDir, clock: LeftClock) -> JobCourse:
    """Return how far a job of this status has come. Of one that is damaged nothing is known."""
    follower, heard = JobFollower(rundir, JobView(nodes_alive=status.nodes_alive)), 0
    if status.damage:
        return JobCourse(view=follower.view, left=None, has_events=False)
    for events in follower.read():
        heard += len(events)
    return JobCourse(view=follower.view, left=clock.left(status, follower.view), has_events=heard > 0)


def print_status(console: Console, facts: JobFacts, rundir: RunDir, now: float, course: JobCourse) -> None:
    """Print the state of a job, what it took and cost so far, and when each of its nodes was present."""
    status, stale = facts.status, stale_seconds(rundir.storage)
    console.print(f"job {status.job_id}: ", state_text(status.state), sep="", soft_wrap=True)
    if facts.began_at is not None:
        console.print(f"started {time_of(facts.began_at)}, {so_far(facts)}", highlight=False, soft_wrap=True)
    if course.has_events:
        text = format_progress(course.view, course.view.total_steps, course.left, status.state)
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        if course.view.hang:
            text = f"! {hang_verdict(course.view.hang)}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if presences := rundir.nodes():
        console.print(nodes_table(presences, now, stale))
    studio = (rundir.read_json(LAUNCH) or {}).get("studio_url")
    why = status.message if status.message != status.state.value else ""
    for line in filter(None, (why, studio)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def so_far(facts: JobFacts) -> str:
    """Return what a job took and cost over all launches, in a line: ``12 s; 0.0066 node-hours; $0.0203``. Pure."""
    totals = facts.totals
    if totals is None or not totals.launches:
        return "" if facts.seconds is None else format_duration(facts.seconds)
    return f"{totals.words}; {totals.node_hours_words}" + ("" if facts.usd is None else f"; {dollars(facts.usd)}")


def health_document(health: ClusterHealth) -> dict[str, Any]:
    """Return the state of the cluster for JSON, with the fields of `dtrain_dagster.cli.json_fields.HEALTH`. Pure."""
    nodes = [{"node": node.node_id, "healthy": node.healthy, "message": node.message} for node in health.nodes]
    return {
        "cluster": health.cluster_name,
        "healthy": health.healthy,
        "message": health.message,
        "running_jobs": list(health.running_jobs),
        "nodes": nodes,
    }


def status_document(facts: JobFacts, rundir: RunDir, course: JobCourse) -> dict[str, Any]:
    """Return how a job stands for JSON, with the fields of `dtrain_dagster.cli.json_fields.STATUS`."""
    view, left = course.view, course.left
    presences = [] if facts.status.damage else rundir.nodes()
    return {
        **facts.document(),
        "phase": describe_training(view, view.total_steps, None, facts.status.state)[0],
        "total_steps": view.total_steps,
        "epoch": view.epoch or None,
        "valid_loss": view.valid_loss,
        "samples_per_second": None if facts.status.state.is_final else view.samples_per_second,
        "eta_seconds": left.seconds if left else None,
        "eta_has_finish": left.has_finish if left else None,
        "presences": [
            {
                "launch": node.launch,
                "node": node.node_id,
                "incarnation": node.incarnation,
                "started_at": node.started_at,
                "ended_at": node.ended_at,
                "exit_codes": list(node.exit_codes),
            }
            for node in presences
        ],
        "studio_url": None if facts.status.damage else (rundir.read_json(LAUNCH) or {}).get("studio_url"),
    }


def nodes_table(presences: Iterable[NodePresence], now: float, stale: float) -> Table:
    """Return a row for each incarnation of a node: when it was present, and how it left. A node that is silent for more
    than ``stale`` seconds is not known to be present."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("LAUNCH", "NODE", "INCARNATION", "FROM", "FOR", "EXIT CODES"):
        table.add_column(title)
    for node in presences:
        silent = now - node.heard_at(now)
        if node.ended_at is not None:
            codes = ", ".join(map(str, node.exit_codes))
        else:
            codes = f"silent for {format_duration(silent)}" if silent > stale else "there"
        span = format_duration(node.seconds(now - node.clock_jump_seconds))
        numbers = (str(number) for number in (node.launch, node.node_id, node.incarnation))
        table.add_row(*numbers, time_of(node.started_at), span, codes)
    return table


def health_table(nodes: Iterable[NodeHealth]) -> Table:
    """Return a row for each node, with its state."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NODE", "HEALTH", ""):
        table.add_column(title)
    for node in nodes:
        mark = Text("healthy", style="green") if node.healthy else Text("unhealthy", style="red")
        table.add_row(str(node.node_id), mark, Text(node.message))
    return table


def state_text(state: JobState) -> Text:
    """Return the state of a job in its colour."""
    return Text(state.value, style=STATE_COLOURS[state])


def time_of(seconds: float | None, with_seconds: bool = True) -> str:
    """Return the local time of Unix ``seconds``, "" for None."""
    form = "%m-%d %H:%M:%S" if with_seconds else "%m-%d %H:%M"
    return "" if seconds is None else time.strftime(form, time.localtime(seconds))
