"""`dtrain nodes`: the nodes that are there, on which hosts, and the hosts that get no nodes for now."""

from __future__ import annotations

import time
from typing import Any

import click

from dtrain_dagster.cli import json_fields
from dtrain_dagster.cli.common import Refusal, cluster_of, console, read_settings, refuses, run_dir, say
from dtrain_dagster.cli.job_names import complete_jobs, find_job
from dtrain_dagster.cli.job_tables import time_of
from dtrain_dagster.cli.json_output import json_option, print_json
from dtrain_dagster.cli.screen import Column, print_fitted
from dtrain_dagster.clusters.exit_policy import describe_exit
from dtrain_dagster.clusters.hosts import HostRecord
from dtrain_dagster.support.formatting import format_duration
from trainer.documents.presences import NodePresence, stale_seconds

NODE_COLUMNS = (
    Column("JOB"),
    Column("NODE", right=True),
    Column("HOST", rank=1),
    Column("STATE"),
    Column("FOR", right=True),
    Column("NOTE", rank=2),
)
HOST_COLUMNS = (Column("EXCLUDED HOST"), Column("UNTIL"), Column("WHY"))


@click.command()
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("--lift", metavar="HOST", help="End the exclusion of a host: nodes may be placed there again.")
@json_option(json_fields.NODES)
@refuses
def nodes(job: str | None, lift: str | None, as_json: bool) -> None:
    """Show the nodes that are there, and the hosts that get none.

    They are those of all jobs that run, or all that a job has had. A host is excluded for an hour once it has failed
    the pre-flight of a node, has lost two nodes soon after they began, or three in all, while the rest of their jobs
    went on; at most a fifth of the hosts at once, and a node that finds no other place is placed there again.
    Preemption, time limits and failures of the program do not count.

    \b
    Examples:
      dtrain nodes
      dtrain nodes latest --json
      dtrain nodes --lift gpu-17
    """
    settings = read_settings()
    manager = cluster_of(settings)[0].manager()
    record, now = manager.host_record(), time.time()
    if lift is not None:
        _lift(record, lift, now)
        return
    names = [find_job(settings, job)] if job is not None else [each.job_id for each in manager.active_jobs()]
    rows: list[tuple[str, NodePresence, str]] = []
    for name in names:
        rundir = run_dir(settings, name)
        stale = stale_seconds(rundir.storage)
        found = [node for node in rundir.nodes(skip_damaged=True) if job is not None or node.ended_at is None]
        rows += [(name, node, state_of(node, now, stale)) for node in found]
    excluded = [] if record is None else record.excluded(now)
    if as_json:
        document = [
            {
                "job": name,
                "launch": node.launch,
                "node": node.node_id,
                "incarnation": node.incarnation,
                "host": node.host or None,
                "state": state,
                "seconds": node.seconds(now),
                "note": note_of(node) or None,
            }
            for name, node, state in rows
        ]
        hosts = [{"host": each.host, "until": each.until, "why": each.why} for each in excluded]
        print_json({"nodes": document, "excluded_hosts": hosts})
        return
    if rows:
        print_fitted(console(), NODE_COLUMNS, [_row(name, node, state, now) for name, node, state in rows])
    else:
        say("no job runs" if job is None else f"job {names[0]} has had no nodes yet")
    if excluded:
        say("")
        print_fitted(console(), HOST_COLUMNS, [(each.host, time_of(each.until), each.why) for each in excluded])
        say("`dtrain nodes --lift HOST` lifts it")


def state_of(node: NodePresence, now: float, stale: float) -> str:
    """Return how a node stands, in a word or two. ``stale``: the seconds of silence after which that is not known."""
    if node.ended_at is None:
        return "there" if now - node.heard_at(now) <= stale else "silent"
    return ", ".join(map(describe_exit, dict.fromkeys(node.exit_codes))) or "ended"


def note_of(node: NodePresence) -> str:
    """Return what else there is to say of a node; "" where there is nothing."""
    if node.preflight:
        return f"failed its pre-flight: {node.preflight}"
    if node.kept_until is not None:
        return f"kept until {time_of(node.kept_until)}"
    return "" if node.leaves_at is None else f"leaves by {time_of(node.leaves_at)}: {node.leaves_because}"


def _row(name: str, node: NodePresence, state: str, now: float) -> tuple[str, ...]:
    number = f"{node.node_id}" if node.incarnation == 1 else f"{node.node_id} (incarnation {node.incarnation})"
    return name, number, node.host, state, format_duration(node.seconds(now)), note_of(node)


def _lift(record: HostRecord | None, host: str, now: float) -> None:
    known: list[Any] = [] if record is None else record.excluded(now)
    if record is None or host not in {each.host for each in known}:
        others = f"; excluded are {', '.join(each.host for each in known)}" if known else "; none is"
        raise Refusal(f"host {host} is not excluded on this cluster{others}")
    record.lift(host, now)
    say(f"nodes may be placed on {host} again")
