"""`dtrain dashboard`, `dtrain report` and `dtrain watch`: to look at jobs. Each imports what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtrain_dagster.cli_common import EXIT_INTERRUPTED, Refusal, cluster_of, console, read_settings, refuses, run_dir

if TYPE_CHECKING:
    from dtrain_dagster.settings import Settings
    from trainer.rundir import RunDir

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8060, show_default=True, help="0 takes a free one.")
@click.option("--host", default=LOOPBACK[0], show_default=True, help="Address to listen on. There is no password.")
@click.option("--allow", "names", multiple=True, metavar="NAME", help="A further name that it may be asked by.")
@click.option("--job", "job_id", metavar="JOB", help="The job to show first.  [default: the newest]")
@refuses
def dashboard(port: int, host: str, names: tuple[str, ...], job_id: str | None) -> None:
    """Show jobs live in a browser, and as metrics for Prometheus under /metrics. Ctrl-C ends it.

    It reads run directories, of this machine or of DTRAIN_STORAGE, and changes nothing.
    """
    import socket

    import uvicorn

    from dtrain_dagster.monitoring.dashboard_server import build_app
    from dtrain_dagster.monitoring.job_board import JobBoard

    settings = read_settings()
    if job_id is not None:
        _training(settings, job_id)
    app = build_app(JobBoard(settings.jobs_uri, settings.tier), (host, *names))
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise Refusal(f"--host {host} --port {port}: {error.strerror}; choose another --port") from None
        place = f"[{host}]" if ":" in host else host
        click.echo(f"http://{place}:{listener.getsockname()[1]}/" + (f"#{job_id}" if job_id else ""))
        if host not in LOOPBACK:
            click.echo("whoever can reach this address can read it: there is no password", err=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none")).run(sockets=[listener])


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-o", "--output", metavar="FILE", help="Where to write it.  [default: JOB.html]")
@refuses
def report(job_id: str, output: str | None) -> None:
    """Save the dashboard of a job as one HTML file that needs no network (about 5 MB)."""
    from dtrain_dagster.monitoring.page import report_page

    settings = read_settings()
    path = Path(output or f"{job_id}.html")
    html = report_page(_training(settings, job_id), settings.tier)
    try:
        path.write_text(html)
    except OSError as error:
        raise Refusal(f"-o {path}: {error.strerror}; give another -o") from None
    click.echo(path)


@click.command()
@click.argument("job_id", metavar="JOB")
@refuses
def watch(job_id: str) -> None:
    """Follow a job as `dtrain train` shows it. Ctrl-C ends the following, not the job."""
    from dtrain_dagster.terminal import watch_training

    settings = read_settings()
    rundir = _training(settings, job_id)
    cluster, _ = cluster_of(settings)
    try:
        status = watch_training(console(), cluster.manager(), rundir, job_id, total_steps=None)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if status.state != "succeeded":
        click.echo(f"job {job_id} {status.state}: {status.message}", err=True)
        sys.exit(1)


def _training(settings: Settings, job_id: str) -> RunDir:
    """The run directory of a training. `Refusal` where there is none."""
    from dtrain_dagster.monitoring.job_board import JOB_ID
    from trainer.rundir import JOB

    if JOB_ID.fullmatch(job_id) and run_dir(settings, job_id).storage.exists(JOB):
        return run_dir(settings, job_id)
    raise Refusal(f"no training {job_id!r} in {settings.jobs_uri}; `dtrain jobs` lists them")
