"""`dtrain jobs`, `status`, `logs` and `cancel`: what runs, and how it stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dtrain_dagster.cli.common import (
    EXIT_INTERRUPTED,
    Refusal,
    console,
    json_option,
    manager_of,
    print_json,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.facts import (
    JobCourse,
    describe_job,
    facts_of,
    has_result,
    price_of_cluster,
    priced_summary,
    read_course,
    read_nodes,
    status_document,
    summary_document,
    time_of,
)
from dtrain_dagster.cli.follow import (
    fleet_table,
    follow_training,
    headline,
    print_json_lines,
    print_lines,
    stream_job,
    warn,
)
from dtrain_dagster.cli.job_names import (
    LATEST,
    complete_jobs,
    find_job,
    find_job_or_fleet,
    find_training,
    named_argument,
)
from dtrain_dagster.cli.screen import pairs_table, print_fitted, state_text
from dtrain_dagster.cli.start import describe_outcome, say_that_it_runs_on
from dtrain_dagster.fleet.jobs import FleetError
from dtrain_dagster.fleet.records import FleetRecords, fleet_names
from dtrain_dagster.fleet.view import FleetView, FleetWatch
from dtrain_dagster.jobs.facts import JobFacts
from dtrain_dagster.jobs.log_follower import follow_logs
from dtrain_dagster.monitoring.hangs import hang_verdict
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, RunDir

READERS = 16
"""The number of run directories that are read in parallel."""
JOB_COLUMNS = ("JOB", "STATE", "COST", "TOOK", "STARTED", "LOSS", "STEP", "NODES")
NODE_COLUMNS = ("NODE", "STATE", "FOR", "HOST", "NOTE", "FROM", "LAUNCH", "JOB")
HOST_COLUMNS = ("EXCLUDED HOST", "UNTIL", "WHY")


@click.command()
@click.option("--fleets", "of_fleets", is_flag=True, help="List the fleets instead.")
@json_option()
@refuses
def jobs(of_fleets: bool, as_json: bool) -> None:
    """List the jobs of the cluster, newest first.

    Times and dollars cover all launches of a job. A probe, which an estimate rests on, is a job of its own.

    \b
    Examples:
      dtrain jobs
      dtrain jobs --json | jq -r '.[] | select(.state == "failed").job'
      dtrain jobs --fleets
    """
    settings = read_settings()
    if of_fleets:
        views = list(_fleets(settings))
        if as_json:
            print_json([asdict(view) for view in views])
        else:
            say(*(map(headline, views) if views else ["no fleets yet: `dtrain fleet FILE` begins one"]))
        return
    with ThreadPoolExecutor(READERS) as pool:
        rows = list(pool.map(partial(facts_of, settings), manager_of(settings).list_jobs()))
    if as_json:
        print_json([row.document() for row in rows])
    elif rows:
        _print_jobs(rows)
    else:
        say(f"no jobs in {settings.jobs_uri} yet; `dtrain train --dataset latest` starts one")


def _fleets(settings: Settings) -> Iterator[FleetView]:
    """Yield all fleets as they are now; of those that cannot be read it is said why: they hide no other."""
    for name in fleet_names(settings.home):
        try:
            yield FleetWatch(FleetRecords(settings.home, name)).view()
        except (FleetError, DamagedError) as error:
            say(str(error), err=True)


def _print_jobs(rows: Sequence[JobFacts]) -> None:
    """Print a row for each job, and below why those that are damaged cannot be read."""
    cells = [
        (
            job.job_id,
            state_text(job.state),
            "" if job.usd is None else dollars(job.usd),
            "" if job.seconds is None else format_duration(job.seconds),
            time_of(job.began_at, with_seconds=False),
            "" if job.loss is None else f"{job.loss:.4f}",
            "" if job.step is None else str(job.step),
            str(job.nodes or ""),
        )
        for job in rows
    ]
    shown = console()
    print_fitted(shown, JOB_COLUMNS, cells, right=("COST", "TOOK", *JOB_COLUMNS[5:]), always=3)
    for job in rows:
        if job.status.damage:
            warn(shown, f"{job.job_id} is damaged: {job.status.damage}")


@click.command()
@named_argument(required=False)
@click.option("--follow", "-f", is_flag=True, help="Follow a training until it ends, as `dtrain train` does.")
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(),
    help="Save the page of a training as one file, which needs no network and takes about 5 MB.",
)
@click.option("--trace", is_flag=True, help="Have the next steps of a training's rank 0 traced.")
@click.option("--nodes", is_flag=True, help="Show the nodes of all jobs that run, and excluded hosts.")
@click.option("--lift", metavar="HOST", help="End the exclusion of a host: nodes may be placed there again.")
@json_option()
@refuses
def status(
    name: str | None, follow: bool, html: str | None, trace: bool, nodes: bool, lift: str | None, as_json: bool
) -> None:
    """Show the state of a job or a fleet, and the result of a training.

    Without a name it shows the job that was started last. Ctrl-C ends --follow, not the job. A trace
    shows which operations take the time; it opens in Perfetto (ui.perfetto.dev), and the steps that are traced are
    slower.

    A host is excluded for an hour once it has failed the pre-flight of a node, has lost two nodes soon after they
    began, or three in all, while the rest of their jobs went on; at most a fifth of the hosts at once, and a node that
    finds no other place is placed there again. Preemption, time limits and failures of the program do not count.

    \b
    Examples:
      dtrain status
      dtrain status latest --follow
      dtrain status train-6f66 --json
      dtrain status latest --html training.html
      dtrain status --nodes
      dtrain status --lift gpu-17
    """
    settings = read_settings()
    if sum((follow, bool(html), trace, as_json or nodes, lift is not None)) > 1:
        raise Refusal("--follow, --html, --trace, --lift, --json or --nodes: give one of them; --nodes has --json")
    if nodes and name is not None:
        raise Refusal(f"--nodes shows the nodes of all jobs that run: `dtrain status {name}` has those of a job")
    if lift is not None:
        _lift_exclusion(settings, lift)
    elif nodes:
        _show_nodes(settings, as_json)
    elif html:
        _save_page(settings, find_training(settings, name or LATEST), html)
    elif trace:
        _ask_for_trace(settings, find_training(settings, name or LATEST))
    elif follow:
        _follow(settings, find_training(settings, name or LATEST))
    else:
        name, is_fleet = find_job_or_fleet(settings, name or LATEST)
        (_show_fleet if is_fleet else _show_job)(settings, name, as_json)


def _lift_exclusion(settings: Settings, host: str) -> None:
    """Let nodes be placed on a host again. Raise `Refusal` for one that is not excluded."""
    record, now = manager_of(settings).host_record(), time.time()
    known = [] if record is None else [each.host for each in record.excluded(now)]
    if record is None or host not in known:
        others = f"; excluded are {', '.join(known)}" if known else "; none is"
        raise Refusal(f"host {host} is not excluded on this cluster{others}")
    record.lift(host, now)
    say(f"nodes may be placed on {host} again")


def _show_nodes(settings: Settings, as_json: bool) -> None:
    """Print the nodes that are there, of all jobs that run, and the excluded hosts."""
    manager, now = manager_of(settings), time.time()
    record = manager.host_record()
    names = [each.job_id for each in manager.active_jobs()]
    found = [node for name in names for node in read_nodes(run_dir(settings, name), now, skip_damaged=True)]
    nodes = [node for node in found if node["ended_at"] is None]
    excluded = [] if record is None else record.excluded(now)
    if as_json:
        hosts = [{"host": each.host, "until": each.until, "why": each.why} for each in excluded]
        print_json({"nodes": nodes, "excluded_hosts": hosts})
        return
    if nodes:
        print_nodes(console(), nodes)
    else:
        say("no job runs")
    if excluded:
        say("")
        rows = [(each.host, time_of(each.until), each.why) for each in excluded]
        print_fitted(console(), HOST_COLUMNS, rows, always=3)
        say("`dtrain status --lift HOST` lifts it")


def _save_page(settings: Settings, job_id: str, file: str) -> None:
    from dtrain_dagster.dashboard.job_facts import places_of  # not above: who lists jobs does not wait for them
    from dtrain_dagster.dashboard.page import report_page

    page = report_page(run_dir(settings, job_id), settings.tiers[0], places_of(settings))
    try:
        Path(file).write_text(page)
    except OSError as error:
        raise Refusal(f"--html {file}: {error.strerror}; give another file") from None
    say(file)


def _ask_for_trace(settings: Settings, job_id: str) -> None:
    rundir = run_dir(settings, job_id)
    if (state := manager_of(settings).job_status(job_id).state).is_final:
        raise Refusal(f"job {job_id} has {state}: only a running job can be traced; `dtrain jobs` lists them")
    try:
        rundir.request_trace()
    except FileExistsError:
        raise Refusal(f"a request for a trace of {job_id} is still waiting: try again soon") from None
    say(f"the trace will be in {rundir.uri}/profile; open it in ui.perfetto.dev")


def _follow(settings: Settings, job_id: str) -> None:
    with _running_on(settings, job_id):
        ended = follow_training(settings, job_id)
    if ended.state != "succeeded":
        say(describe_outcome(ended), err=True)
        sys.exit(1)


@contextmanager
def _running_on(settings: Settings, job_id: str) -> Iterator[None]:
    """On Ctrl-C within the block, say that the job goes on, and end the command."""
    try:
        yield
    except KeyboardInterrupt:
        say_that_it_runs_on(settings, job_id)
        sys.exit(EXIT_INTERRUPTED)


def _show_fleet(settings: Settings, name: str, as_json: bool) -> None:
    view = FleetWatch(FleetRecords(settings.home, name)).view()
    if as_json:
        print_json(asdict(view))
        return
    say(headline(view))
    console().print(fleet_table(view, console().width), highlight=False)


def _show_job(settings: Settings, job_id: str, as_json: bool) -> None:
    rundir = run_dir(settings, job_id)
    facts = facts_of(settings, manager_of(settings).job_status(job_id))
    if facts.status.damage and not as_json:
        raise Refusal(facts.status.damage)
    course = read_course(facts.status, rundir)
    is_over = not facts.status.damage and has_result(rundir)
    if as_json:
        document = summary_document(settings, rundir) if is_over else {}
        print_json({**status_document(facts, rundir, course), **document})
        return
    print_status(console(), facts, rundir, course, price_of_cluster(settings))
    if is_over:
        result = [pair for pair in priced_summary(settings, rundir) if pair[0] != "job"]
        console().print(pairs_table(result), highlight=False)


def print_status(console: Console, facts: JobFacts, rundir: RunDir, course: JobCourse, price: str) -> None:
    """Print the state of a job, what it took and cost so far, and when each of its nodes was present."""

    def show(*lines: str) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    show(*describe_job(facts, course, rundir.latest_checkpoint(), price))
    if facts.began_at is not None:
        show(f"started {time_of(facts.began_at)}")
    if course.view.hang:
        warn(console, hang_verdict(course.view.hang))
    if nodes := read_nodes(rundir, time.time()):
        print_nodes(console, nodes)
    status = facts.status
    why = status.message if status.message != status.state.value else ""
    show(*filter(None, (why, *status.kept, (rundir.read_json(LAUNCH) or {}).get("studio_url"))))


def print_nodes(console: Console, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each incarnation of a node: on which host and when it was present, and how it stands or left."""
    rows = []
    for node in nodes:
        number = f"{node['node']}" + (f" (incarnation {node['incarnation']})" if node["incarnation"] > 1 else "")
        times = format_duration(node["seconds"]), node["host"] or "", node["note"] or "", time_of(node["started_at"])
        rows.append((number, node["state"], *times, str(node["launch"]), node["job"]))
    print_fitted(console, NODE_COLUMNS, rows, right=("FOR", "LAUNCH"), always=3)


@click.command()
@click.argument("job_id", metavar="JOB", shell_complete=complete_jobs)
@click.option("--node", type=click.IntRange(min=0), metavar="K", help="Only this node, counted from 0.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the job has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each node.")
@json_option("Print one JSON document for each line instead.")
@refuses
def logs(job_id: str, node: int | None, follow: bool, tail: int | None, as_json: bool) -> None:
    """Print the output of a job's processes.

    Ctrl-C ends --follow, not the job.

    \b
    Examples:
      dtrain logs latest --tail 20
      dtrain logs latest --follow --node 1
      dtrain logs latest --json | jq -r 'select(.node == 1).text'
    """
    settings = read_settings()
    manager = manager_of(settings)
    job_id = find_job(settings, job_id)
    if not follow and not as_json:
        say(manager.job_logs(job_id, node_id=node, tail=tail))
        return
    manager.job_status(job_id)
    follower = follow_logs(manager, run_dir(settings, job_id), settings.kind.shares_home)
    if tail is not None:
        follower.skip_to_end(keep_lines=tail)
    if not follow:
        if node is not None:
            manager.job_logs(job_id, node_id=node, tail=0)  # refuses a node that has no log
        print_json_lines(follower.read(node, to_the_end=True))
        return
    with _running_on(settings, job_id):
        stream_job(print_json_lines if as_json else partial(print_lines, console()), manager, job_id, follower, node)


@click.command()
@named_argument()
@refuses
def cancel(name: str) -> None:
    """Stop a job or a fleet after it has written a checkpoint.

    A job that does not stop in time is killed. The command returns when no process is left, or when Azure ML says
    that the job has ended. Of a fleet, or of the trials of a search, no further job starts.

    On the local cluster it is killed after 8 seconds, or after DTRAIN_STOP_GRACE_SECONDS as it was set when the job
    started.

    \b
    Examples:
      dtrain cancel latest
      dtrain cancel train-20261126-1425
      dtrain cancel night
    """
    settings = read_settings()
    name, is_fleet = find_job_or_fleet(settings, name)
    if is_fleet:
        from dtrain_dagster.cli.fleet import cancel_fleet  # not above: it is all that starts trainings

        cancel_fleet(settings, name)
        return
    manager = manager_of(settings)
    before = manager.job_status(name).state
    manager.cancel_job(name)
    after = manager.job_status(name).state
    say(f"job {name}: {after}" + (" already" if before.is_final else ""))
