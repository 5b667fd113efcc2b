"""`dtrain dashboard`, `dtrain report` and `dtrain watch`: to look at jobs. Each imports what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

LOOPBACK = "127.0.0.1"


def _refuses(command: Callable[..., None]) -> Callable[..., None]:
    """Errors that a user can cause end the command with their message and exit code 2."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        from dtrain_dagster.clusters.base import ClusterError
        from dtrain_dagster.settings import SettingsError
        from trainer.config import ConfigError

        try:
            command(*args, **options)
        except (ClusterError, ConfigError, SettingsError) as error:
            refusal = click.ClickException(str(error))
            refusal.exit_code = 2
            raise refusal from None

    return run


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8060, show_default=True, help="0 takes a free one.")
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on. There is no password.")
@click.option("--allow", "names", multiple=True, metavar="NAME", help="A further name that browsers may ask it by.")
@click.option("--job", "job_id", metavar="JOB", help="The job to show first.  [default: the newest]")
@_refuses
def dashboard(port: int, host: str, names: tuple[str, ...], job_id: str | None) -> None:
    """Show jobs live in a browser, and as metrics for Prometheus under /metrics. Ctrl-C ends it.

    It reads run directories, of this machine or of DTRAIN_STORAGE, and changes nothing.
    """
    import socket

    import uvicorn

    from dtrain_dagster.clusters.base import ClusterError
    from dtrain_dagster.monitoring.dashboard_server import build_app
    from dtrain_dagster.monitoring.job_board import JobBoard
    from dtrain_dagster.settings import load_settings

    settings = load_settings()
    board = JobBoard(settings.jobs_uri, settings.tier)
    if job_id is not None:
        _rundir(settings.jobs_uri, job_id)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ClusterError(f"--host {host} --port {port}: {error.strerror}; choose another --port") from None
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"http://{shown}:{listener.getsockname()[1]}/" + (f"#{job_id}" if job_id else ""))
        if host not in (LOOPBACK, "localhost", "::1"):
            click.echo("whoever can reach this address can read it: there is no password", err=True)
        config = uvicorn.Config(build_app(board, (host, *names)), log_level="warning", access_log=False, ws="none")
        uvicorn.Server(config).run(sockets=[listener])


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-o", "--output", metavar="FILE", help="Where to write it.  [default: JOB.html]")
@_refuses
def report(job_id: str, output: str | None) -> None:
    """Save the dashboard of a job as one HTML file that needs no network (about 5 MB)."""
    from dtrain_dagster.monitoring.page import report_page
    from dtrain_dagster.settings import load_settings
    from trainer.config import ConfigError

    settings = load_settings()
    path = Path(output or f"{job_id}.html")
    try:
        path.write_text(report_page(_rundir(settings.jobs_uri, job_id), settings.tier))
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror}") from None
    click.echo(path)


@click.command()
@click.argument("job_id", metavar="JOB")
@_refuses
def watch(job_id: str) -> None:
    """Follow a running job as `dtrain train` shows it. Ctrl-C ends the following, not the job."""
    from rich.console import Console

    from dtrain_dagster.settings import load_settings
    from dtrain_dagster.terminal import watch_training

    settings = load_settings()
    rundir = _rundir(settings.jobs_uri, job_id)
    from dtrain_dagster.resources import build_resources

    manager = build_resources(settings)["cluster"].manager()
    console = Console()
    try:
        status = watch_training(
            console if console.is_terminal else Console(width=160), manager, rundir, job_id, total_steps=None
        )
    except KeyboardInterrupt:
        sys.exit(130)
    if status.state != "succeeded":
        click.echo(f"job {job_id} {status.state}: {status.message}", err=True)
        sys.exit(1)


def _rundir(jobs_uri: str, job_id: str) -> Any:
    """The run directory of a training. `ClusterError` where there is none."""
    from dtrain_dagster.clusters.base import ClusterError
    from dtrain_dagster.monitoring.job_board import JOB_ID
    from trainer.rundir import JOB, RunDir

    if JOB_ID.fullmatch(job_id):
        rundir = RunDir(f"{jobs_uri}/{job_id}")
        if rundir.storage.exists(JOB):
            return rundir
    raise ClusterError(f"no training {job_id!r} in {jobs_uri}; `dtrain jobs` lists them")


COMMANDS = (dashboard, report, watch)
