"""Jobs in a terminal: the table of all, how one stands with the presence of its nodes, and the cluster's health."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain_dagster.cli.facts import JobCourse, JobFacts, format_progress, so_far
from dtrain_dagster.cli.screen import Column, plain_table, print_fitted
from dtrain_dagster.clusters.base import ClusterHealth, JobState, NodeHealth
from dtrain_dagster.monitoring.hangs import hang_verdict
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.printable import visible
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
    for line in filter(None, (why, *status.kept, studio)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def nodes_table(presences: Iterable[NodePresence], now: float, stale: float) -> Table:
    """Return a row for each incarnation of a node: when it was present, and how it left. A node that is silent for more
    than ``stale`` seconds is not known to be present."""
    table = plain_table("LAUNCH", "NODE", "INCARNATION", "FROM", "FOR", "EXIT CODES")
    for node in presences:
        silent = now - node.heard_at(now)
        if node.ended_at is not None:
            codes = ", ".join(map(str, node.exit_codes))
        else:
            here = "there" if node.kept_since is None else "kept"
            codes = f"silent for {format_duration(silent)}" if silent > stale else here
        span = format_duration(node.seconds(now - node.clock_jump_seconds))
        numbers = (str(number) for number in (node.launch, node.node_id, node.incarnation))
        table.add_row(*numbers, time_of(node.started_at), span, codes)
    return table


def health_table(nodes: Iterable[NodeHealth]) -> Table:
    """Return a row for each node, with its state."""
    table = plain_table("NODE", "HEALTH", "")
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


JOB_COLUMNS = (
    Column("JOB"),
    Column("STATE"),
    Column("NODES", right=True, rank=5),
    Column("STARTED", rank=2),
    Column("TOOK", right=True, rank=1),
    Column("COST", right=True),
    Column("STEP", right=True, rank=4),
    Column("LOSS", right=True, rank=3),
)


def print_jobs(console: Console, jobs: Sequence[JobFacts]) -> None:
    """Print a row for each job, and below why those that are damaged cannot be read."""
    print_fitted(console, JOB_COLUMNS, [job_row(job) for job in jobs])
    for job in jobs:
        if job.status.damage:
            text = f"! {visible(job.status.job_id)} is damaged: {visible(job.status.damage)}"
            console.print(text, style="yellow", soft_wrap=True, highlight=False)


def job_row(job: JobFacts) -> list[str | Text]:
    """Return the cells of a job. Pure."""
    return [
        job.status.job_id,
        Text(job.state, style="red") if job.status.damage else state_text(job.status.state),
        str(job.nodes or ""),
        time_of(job.began_at, with_seconds=False),
        "" if job.seconds is None else format_duration(job.seconds),
        "" if job.usd is None else dollars(job.usd),
        *(("", "") if job.step is None else (str(job.step[0]), f"{job.step[1]:.4f}")),
    ]
