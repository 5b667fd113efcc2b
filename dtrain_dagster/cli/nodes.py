"""`dtrain status --nodes`: the nodes that are there, on which hosts, and the hosts that get no nodes for now."""

from __future__ import annotations

import time

from dtrain_dagster.cli.common import Refusal, cluster_of, console, run_dir, say
from dtrain_dagster.cli.job_names import find_job
from dtrain_dagster.cli.job_tables import time_of
from dtrain_dagster.cli.json_output import print_json
from dtrain_dagster.cli.screen import Column, print_fitted
from dtrain_dagster.clusters.exit_policy import describe_exit
from dtrain_dagster.settings.environment import Settings
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


def show_nodes(settings: Settings, job: str | None, as_json: bool) -> None:
    """Print the nodes that are there, of all jobs that run, or all that ``job`` has had, and the excluded hosts."""
    manager = cluster_of(settings)[0].manager()
    record, now = manager.host_record(), time.time()
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
        say("`dtrain status --lift HOST` lifts it")


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


def lift_exclusion(settings: Settings, host: str) -> None:
    """Let nodes be placed on a host again. Raise `Refusal` for one that is not excluded."""
    record, now = cluster_of(settings)[0].manager().host_record(), time.time()
    known = [] if record is None else record.excluded(now)
    if record is None or host not in {each.host for each in known}:
        others = f"; excluded are {', '.join(each.host for each in known)}" if known else "; none is"
        raise Refusal(f"host {host} is not excluded on this cluster{others}")
    record.lift(host, now)
    say(f"nodes may be placed on {host} again")
