"""`dtrain dashboard`, `report`, `watch` and `profile`: to look at jobs. Each imports what it needs."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import (
    EXIT_INTERRUPTED,
    Refusal,
    cluster_of,
    console,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.job_names import complete_files, complete_jobs, find_training, job_argument

if TYPE_CHECKING:
    from dtrain_dagster.dashboard.job_links import Places
    from dtrain_dagster.dashboard.job_routes import JobServices
    from dtrain_dagster.settings.environment import Settings


@click.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8060, show_default=True, metavar="PORT",
    help="Port to listen on; 0 takes a free one.",
)  # fmt: skip
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on. There is no password.",
)
@click.option(
    "--allow-host",
    "--allow",
    "names",
    multiple=True,
    metavar="NAME",
    help="A further host name that clients may use for it.",
)
@click.option(
    "--job", "job_id", metavar="JOB", shell_complete=complete_jobs,
    help="Print the address of this job.  [default: that of all jobs]",
)  # fmt: skip
@click.option(
    "--token", metavar="env:NAME", help="Take orders (cancel, resume, trace) with this token only; where it is found."
)
@click.option("--read-only", is_flag=True, help="Take no orders.")
@refuses
def dashboard(
    port: int, host: str, names: tuple[str, ...], job_id: str | None, token: str | None, read_only: bool
) -> None:
    """Show all jobs live in a browser.

    Fleets have a page of their own, /fleets, and metrics for Prometheus are under /metrics. Ctrl-C ends it. It reads
    run directories, of this machine or of DTRAIN_STORAGE. The page of a job cancels, resumes and traces it, as the
    commands `dtrain cancel`, `train` and `profile` do: for you on this machine, or for whoever has the --token.

    \b
    Examples:
      dtrain dashboard
      dtrain dashboard --port 0 --job latest
    """
    from dtrain_dagster.cli.web import listening
    from dtrain_dagster.dashboard.fleets import FleetBoard
    from dtrain_dagster.dashboard.job_board import JobBoard
    from dtrain_dagster.dashboard.server import build_app
    from dtrain_dagster.web.guard import LOOPBACK
    from dtrain_dagster.web.server import address, server

    settings = read_settings()
    if job_id is not None:
        job_id = find_training(settings, job_id)
    services = _services(settings, token, read_only or (host not in LOOPBACK and token is None))
    board = JobBoard(settings.jobs_uri, settings.tiers[0])
    app = build_app(board, (host, *names), FleetBoard(settings.home), services)
    with listening(host, port) as bound:
        click.echo(f"dashboard: {address(bound)}/" + (f"jobs/{job_id}" if job_id else ""))
        if host not in LOOPBACK:
            click.echo("anyone who can reach this address can read it: there is no password", err=True)
        server(app).run(sockets=[bound])


@click.command()
@job_argument()
@click.option(
    "-o", "--output", metavar="FILE", shell_complete=complete_files, help="Where to write it.  [default: JOB.html]"
)
@refuses
def report(job_id: str, output: str | None) -> None:
    """Save the dashboard of a job as one HTML file.

    It needs no network, and takes about 5 MB.

    \b
    Examples:
      dtrain report latest -o training.html
    """
    from dtrain_dagster.dashboard.page import report_page

    settings = read_settings()
    job_id = find_training(settings, job_id)
    path = Path(output or f"{job_id}.html")
    html = report_page(run_dir(settings, job_id), settings.tiers[0], _places(settings))
    try:
        path.write_text(html)
    except OSError as error:
        raise Refusal(f"-o {path}: {error.strerror}; give another -o") from None
    say(path)


@click.command()
@job_argument()
@refuses
def watch(job_id: str) -> None:
    """Follow one job until it ends, as `dtrain train` does.

    Ctrl-C stops watching; the job continues.

    \b
    Examples:
      dtrain watch latest
    """
    from dtrain_dagster.cli.going_on import say_that_it_runs_on
    from dtrain_dagster.cli.job_life import describe_outcome
    from dtrain_dagster.cli.terminal import watch_training
    from dtrain_dagster.cli.time_left import LeftClock, expect_finish

    settings = read_settings()
    job_id = find_training(settings, job_id)
    rundir = run_dir(settings, job_id)
    cluster, _ = cluster_of(settings)
    clock = LeftClock(rundir, lambda: expect_finish(settings, rundir))
    try:
        status = watch_training(console(), cluster.manager(), rundir, job_id, None, clock)
    except KeyboardInterrupt:
        say_that_it_runs_on(settings, job_id)
        sys.exit(EXIT_INTERRUPTED)
    if status.state != "succeeded":
        say(describe_outcome(status), err=True)
        sys.exit(1)


def refuse_absent_ranks(asked: Collection[int], launch: Mapping[str, Any]) -> None:
    """Raise `Refusal` if a launch never has one of these ranks. ``launch``: its ``launch.json``. Pure."""
    nodes, processes = launch.get("node_count"), launch.get("processes_per_node")
    if not isinstance(nodes, int) or not isinstance(processes, int):
        return
    if absent := sorted(rank for rank in asked if rank >= nodes * processes):
        there = f"0 to {nodes * processes - 1}" if nodes * processes > 1 else "0 only"
        raise Refusal(f"--rank {', '.join(map(str, absent))}: this job has rank {there}")


@click.command()
@job_argument()
@click.option(
    "--steps",
    type=click.IntRange(1, 50),
    default=5,
    show_default=True,
    metavar="N",
    help="Optimizer steps to trace.",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Rank to trace. May be repeated.  [default: 0]",
)
@click.option(
    "--python/--no-python",
    default=True,
    show_default=True,
    help="Whether the trace has the Python functions that call operations (default); they double its size.",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to wait for the trace.",
)
@refuses
def profile(job_id: str, steps: int, ranks: tuple[int, ...], python: bool, wait: float) -> None:
    """Show which operations of a running job take the time.

    The job's next steps are traced.

    The trace opens in Perfetto (ui.perfetto.dev) or chrome://tracing. The job goes on; these steps are slower.

    \b
    Examples:
      dtrain profile latest
      dtrain profile latest --steps 10 --rank 0 --rank 2
      dtrain profile latest --no-python
    """
    from dtrain_dagster.cli.terminal import operations_table
    from trainer.documents.events import ProfileEvent, read_events
    from trainer.rundir import EVENTS, LAUNCH, SeenFiles

    settings = read_settings()
    job_id = find_training(settings, job_id)
    rundir = run_dir(settings, job_id)
    manager = cluster_of(settings)[0].manager()
    if (state := manager.job_status(job_id).state).is_final:
        raise Refusal(f"job {job_id} has {state}: only a running job can be traced; `dtrain jobs` lists them")
    seen = SeenFiles(rundir.storage.list(EVENTS))
    asked = sorted(set(ranks)) or [0]
    refuse_absent_ranks(asked, rundir.read_json(LAUNCH) or {})
    try:
        rundir.request_trace(steps, asked, python)
    except FileExistsError:
        raise Refusal(f"somebody else's request for a trace of {job_id} is still waiting: try again soon") from None
    left, deadline = set(asked), time.monotonic() + wait
    while left and time.monotonic() < deadline and not manager.job_status(job_id).state.is_final:
        for item in read_events(ProfileEvent, rundir.follow(seen)):
            if item.rank in left:
                left.remove(item.rank)
                console().print(operations_table(item))
                say(f"{rundir.uri}/{item.path}")
        time.sleep(manager.poll_seconds)
    if left:
        raise Refusal(f"no trace came from rank(s) {', '.join(map(str, sorted(left)))} within {wait:g} s")


def _services(settings: Settings, token: str | None, read_only: bool) -> JobServices:
    """Return what the page of a job offers under these settings. Raise `Refusal` for a token that is no reference."""
    from dtrain_dagster.dashboard.job_routes import JobServices
    from dtrain_dagster.dashboard.log_pages import ClusterLogs, LogFiles, LogSource
    from dtrain_dagster.dashboard.orders import OrderDesk
    from dtrain_dagster.support.secrets import SecretError, check_reference, is_reference, resolve
    from trainer.rundir import LOGS

    if token is not None:
        try:
            if not is_reference(token):
                raise SecretError("say where the token is (env:NAME, keyvault://VAULT/SECRET), not what it is")
            check_reference(token)
        except SecretError as error:
            raise Refusal(f"--token: {error}") from None
    here = settings.kind.shares_home and "://" not in settings.jobs_uri
    logs: LogSource = (
        LogFiles(lambda job_id: Path(run_dir(settings, job_id).storage.local_path(LOGS)))
        if here
        else ClusterLogs(lambda job_id: cluster_of(settings)[0].manager().job_logs(job_id))
    )
    desk = None if read_only else OrderDesk(settings.home, None if token is None else resolve(token))
    return JobServices(places=_places(settings), logs=logs, desk=desk)


def _places(settings: Settings) -> Places:
    from dtrain_dagster.dashboard.cluster_views import ClusterPlace, place_of_options
    from dtrain_dagster.dashboard.job_links import Places
    from dtrain_dagster.settings.engines import read_engine_options
    from dtrain_dagster.settings.environment import SettingsError

    cluster = ClusterPlace()
    with suppress(SettingsError):  # pages of jobs that have ended need no cluster
        if settings.kind.has_engine:
            cluster = place_of_options(settings.cluster, read_engine_options(settings.cluster))
    tracking = settings.tracking_uri
    served = tracking if tracking.startswith(("http://", "https://")) else "http://127.0.0.1:5000"
    return Places(
        dagster_url=settings.dagster_url.rstrip("/"), mlflow_url=served.rstrip("/"), tracking_uri=settings.tracking_uri,
        cluster=cluster,
    )  # fmt: skip
