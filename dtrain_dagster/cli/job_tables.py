"""Jobs and nodes in a terminal: the table of all jobs, how one stands, its nodes, and the cluster's health."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from dtrain_dagster.cli.common import Refusal, cluster_of, console, run_dir, say
from dtrain_dagster.cli.facts import JobCourse, NodeFacts, format_progress, read_nodes, so_far, time_of
from dtrain_dagster.cli.json_output import print_json
from dtrain_dagster.cli.screen import Column, print_fitted, state_text
from dtrain_dagster.jobs.facts import JobFacts
from dtrain_dagster.monitoring.hangs import hang_verdict
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.printable import visible
from trainer.rundir import LAUNCH, RunDir

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
NODE_COLUMNS = (
    Column("JOB", rank=5),
    Column("LAUNCH", right=True, rank=4),
    Column("NODE"),
    Column("HOST", rank=1),
    Column("FROM", rank=3),
    Column("FOR", right=True),
    Column("STATE"),
    Column("NOTE", rank=2),
)
HOST_COLUMNS = (Column("EXCLUDED HOST"), Column("UNTIL"), Column("WHY"))


def print_status(console: Console, facts: JobFacts, rundir: RunDir, now: float, course: JobCourse) -> None:
    """Print the state of a job, what it took and cost so far, and when each of its nodes was present."""
    status = facts.status
    console.print(f"job {status.job_id}: ", state_text(facts.state), sep="", soft_wrap=True)
    if facts.began_at is not None:
        console.print(f"started {time_of(facts.began_at)}, {so_far(facts)}", highlight=False, soft_wrap=True)
    if course.has_events:
        text = format_progress(course.view, course.view.total_steps, course.left, status.state)
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        if course.view.hang:
            text = f"! {hang_verdict(course.view.hang)}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if nodes := read_nodes(rundir, now):
        print_nodes(console, nodes)
    studio = (rundir.read_json(LAUNCH) or {}).get("studio_url")
    why = status.message if status.message != status.state.value else ""
    for line in filter(None, (why, *status.kept, studio)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_nodes(console: Console, nodes: Sequence[NodeFacts]) -> None:
    """Print a row for each incarnation of a node: on which host and when it was present, and how it stands or left."""
    rows = []
    for node in nodes:
        number = f"{node.node}" if node.incarnation == 1 else f"{node.node} (incarnation {node.incarnation})"
        began, took = time_of(node.started_at), format_duration(node.seconds)
        rows.append((node.job, str(node.launch), number, node.host or "", began, took, node.state, node.note or ""))
    print_fitted(console, NODE_COLUMNS, rows)


def show_nodes(settings: Settings, as_json: bool) -> None:
    """Print the nodes that are there, of all jobs that run, and the excluded hosts."""
    manager, now = cluster_of(settings)[0].manager(), time.time()
    record = manager.host_record()
    names = [each.job_id for each in manager.active_jobs()]
    found = [node for name in names for node in read_nodes(run_dir(settings, name), now, skip_damaged=True)]
    nodes = [node for node in found if node.ended_at is None]
    excluded = [] if record is None else record.excluded(now)
    if as_json:
        hosts = [{"host": each.host, "until": each.until, "why": each.why} for each in excluded]
        print_json({"nodes": [asdict(node) for node in nodes], "excluded_hosts": hosts})
        return
    if nodes:
        print_nodes(console(), nodes)
    else:
        say("no job runs")
    if excluded:
        say("")
        print_fitted(console(), HOST_COLUMNS, [(each.host, time_of(each.until), each.why) for each in excluded])
        say("`dtrain status --lift HOST` lifts it")


def lift_exclusion(settings: Settings, host: str) -> None:
    """Let nodes be placed on a host again. Raise `Refusal` for one that is not excluded."""
    record, now = cluster_of(settings)[0].manager().host_record(), time.time()
    known = [] if record is None else record.excluded(now)
    if record is None or host not in {each.host for each in known}:
        others = f"; excluded are {', '.join(each.host for each in known)}" if known else "; none is"
        raise Refusal(f"host {host} is not excluded on this cluster{others}")
    record.lift(host, now)
    say(f"nodes may be placed on {host} again")


def print_jobs(console: Console, jobs: Sequence[JobFacts]) -> None:
    """Print a row for each job, and below why those that are damaged cannot be read."""
    print_fitted(console, JOB_COLUMNS, [_job_row(job) for job in jobs])
    for job in jobs:
        if job.status.damage:
            text = f"! {visible(job.status.job_id)} is damaged: {visible(job.status.damage)}"
            console.print(text, style="yellow", soft_wrap=True, highlight=False)


def _job_row(job: JobFacts) -> list[Any]:
    return [
        job.status.job_id,
        state_text(job.state),
        str(job.nodes or ""),
        time_of(job.began_at, with_seconds=False),
        "" if job.seconds is None else format_duration(job.seconds),
        "" if job.usd is None else dollars(job.usd),
        "" if job.step is None else str(job.step),
        "" if job.loss is None else f"{job.loss:.4f}",
    ]
