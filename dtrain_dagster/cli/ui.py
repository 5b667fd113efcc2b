"""`dtrain ui`: Dagster's pages, the dashboard of jobs and MLflow's, each behind the guard."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import click

from dtrain_dagster.cli.common import EXIT_INTERRUPTED, Refusal, manager_of, read_settings, refuses, run_dir, say
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_facts import places_of
from dtrain_dagster.dashboard.log_pages import ClusterLogs, LogFiles, LogSource
from dtrain_dagster.dashboard.orders import OrderDesk
from dtrain_dagster.dashboard.server import build_app
from dtrain_dagster.settings.environment import Settings, suggest_option
from dtrain_dagster.settings.home import make_home
from dtrain_dagster.support.secrets import resolve
from dtrain_dagster.web.guard import LOOPBACK, Guard, rules_for
from dtrain_dagster.web.server import address, listener, serve, server
from dtrain_dagster.web.third_party_uis import LEAVE_WITH_PARENT, mlflow_app, run_ui, running, runs_page
from trainer.rundir import LOGS

HOST = "127.0.0.1"
PORTS = {"dagster": 3000, "jobs": 8060, "mlflow": 5000}
"""The pages, and their usual ports."""
ADDRESSES = {"jobs": "dashboard_url", "mlflow": "mlflow_url"}
"""The pages that --all serves as well, and the settings that tell their addresses."""
OWN = {"dagster": {"users", "workspace", "serves_all"}, "jobs": {"host", "read_only"}, "mlflow": {"users"}}
"""The options of each page besides those of all."""


@click.command()
@click.argument("page", type=click.Choice(list(PORTS)), default="dagster")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port to listen on; 0 takes a free one.  [default: 3000, of jobs 8060, of mlflow 5000]",
)
@click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="A further host name that browsers may use for it."
)
@click.option(
    "--allow-user",
    "users",
    multiple=True,
    metavar="USER",
    help="A further user of this machine who may connect, such as that of a proxy; any: every user. Not of jobs.",
)
@click.option(
    "--workspace",
    "-w",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Code locations that Dagster loads.  [default: workspace.yaml]",
)
@click.option("--all", "serves_all", is_flag=True, help="Beside Dagster, serve jobs and mlflow, too.")
@click.option(
    "--host", metavar="ADDRESS", help="Address to listen on, of jobs. There is no password.  [default: 127.0.0.1]"
)
@click.option("--read-only", is_flag=True, help="Take no orders, of jobs.")
@refuses
def ui(page: str, port: int | None, names: tuple[str, ...], **options: Any) -> None:
    """Serve pages in a browser, for this machine alone.

    dagster: Dagster's UI and daemon, as under `dagster dev`, but behind a guard that refuses other websites. Links
    between the pages follow their ports; with --all, a port that is taken gives way to a free one.

    jobs: the dashboard of all jobs, live. Metrics for Prometheus are under /metrics. The page of a job cancels and
    resumes it, for you on this machine.

    mlflow: MLflow's pages over the project's models and runs.

    All listen on 127.0.0.1 only: anyone who reaches them runs commands as you. From elsewhere: ssh -L
    3000:127.0.0.1:3000, or a proxy that asks for a password, whose name goes to --allow-host, and its user to
    --allow-user. Ctrl-C ends it.

    \b
    Examples:
      dtrain ui --all
      dtrain ui --port 3001
      dtrain ui jobs
      dtrain ui mlflow
    """
    given = {name: value for name, value in options.items() if value}
    context = click.get_current_context()
    if foreign := [each.opts[0] for each in context.command.params if each.name in given.keys() - OWN[page]]:
        raise click.UsageError(f"the page {page} has no {', '.join(foreign)}", context)
    pages: dict[str, Callable[..., None]] = {"dagster": _serve_dagster, "jobs": _serve_jobs, "mlflow": _serve_mlflow}
    pages[page](read_settings(), PORTS[page] if port is None else port, names, **given)


def user_ids(users: tuple[str, ...]) -> frozenset[int] | None:
    """Return the numbers of these users; None for any. Raise `Refusal` for a user that this machine does not know."""
    try:
        return None if "any" in users else frozenset(pwd.getpwnam(user).pw_uid for user in users)
    except KeyError as error:
        raise Refusal(f"--allow-user: {error.args[0]}; give the name of a user of this machine") from None


@contextmanager
def listening(host: str, port: int) -> Iterator[socket]:
    """Yield a bound socket. Raise `Refusal` if the address is taken."""
    try:
        bound = listener(host, port)
    except OSError as error:
        raise Refusal(f"--host {host} --port {port}: {error.strerror}; choose another --port") from None
    with bound:
        yield bound


def _serve_dagster(
    settings: Settings,
    port: int,
    names: tuple[str, ...],
    users: tuple[str, ...] = (),
    workspace: Path | None = None,
    serves_all: bool = False,
) -> None:
    workspace = workspace or Path("workspace.yaml")
    if not workspace.is_file():
        raise Refusal(f"--workspace {workspace}: there is no such file")
    if not os.environ.get("DAGSTER_HOME"):
        home = settings.home / "dagster"
        if not (home / "dagster.yaml").exists():
            raise Refusal(
                f"DAGSTER_HOME is not set and {home} has no dagster.yaml: `python -m dtrain_dagster setup` makes it"
            )
        os.environ["DAGSTER_HOME"] = str(home)
    allowed = user_ids(users)
    with listening(HOST, port) as bound, ExitStack() as stack:
        if settings.dagster_url == Settings.model_fields["dagster_url"].default:
            suggest_option("dagster_url", address(bound))
        for page, setting in ADDRESSES.items() if serves_all else ():
            if page != "mlflow" or _has_database(settings):
                stack.enter_context(_served_beside(page, PORTS[page], setting))
        try:
            code = run_ui(workspace, bound, names, allowed)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    raise SystemExit(code)


def _has_database(settings: Settings) -> bool:
    """Return whether MLflow's runs are in a database, and not in a server that has pages of its own."""
    return resolve(settings.tracking_uri).startswith(("sqlite:", "postgresql"))


@contextmanager
def _served_beside(page: str, usual: int, setting: str) -> Iterator[None]:
    """Serve a page in a process that ends with the block. ``usual``: its port, unless that is taken; ``setting``: the
    one that tells its address to whoever makes links."""
    try:
        bound = listener(HOST, usual)
    except OSError:
        bound = listener(HOST, 0)
    with bound:  # until here nobody else takes it
        url, port = address(bound), bound.getsockname()[1]
    suggest_option(setting, url)
    program = f"{LEAVE_WITH_PARENT}from dtrain_dagster.cli.main import main\nmain(sys.argv[1:])"
    with running(program, "ui", page, "--port", str(port)):
        yield


def _serve_jobs(
    settings: Settings, port: int, names: tuple[str, ...], host: str = HOST, read_only: bool = False
) -> None:
    logs: LogSource = ClusterLogs(lambda job_id: manager_of(settings).job_logs(job_id))
    if settings.kind.shares_home and "://" not in settings.jobs_uri:
        logs = LogFiles(lambda job_id: Path(run_dir(settings, job_id).storage.local_path(LOGS)))
    desk = None if read_only or host not in LOOPBACK else OrderDesk(settings.home)
    board = JobBoard(settings.jobs_uri, settings.tiers[0])
    app = build_app(board, (host, *names), places_of(settings), logs, desk)
    with listening(host, port) as bound:

        def tell() -> None:
            say(f"dashboard: {address(bound)}/")
            if host not in LOOPBACK:
                say("anyone who can reach this address can read it: there is no password", err=True)

        serve(server(app), bound, tell)


def _serve_mlflow(settings: Settings, port: int, names: tuple[str, ...], users: tuple[str, ...] = ()) -> None:
    tracking_uri = resolve(settings.tracking_uri)
    if not _has_database(settings):
        raise Refusal(
            "DTRAIN_MLFLOW_TRACKING_URI names a server, which has pages of its own: open those, or unset it for the "
            "database under DTRAIN_HOME"
        )
    make_home(settings.home)
    allowed = user_ids(users)
    with listening(HOST, port) as bound:
        app = mlflow_app(tracking_uri, settings.home / "mlartifacts", names)
        page = runs_page(tracking_uri, settings.experiment)
        rules = rules_for(HOST, names, most_body_bytes=None)  # artifacts are long
        web = server(Guard(app, rules), users=allowed)
        serve(web, bound, lambda: say(f"MLflow: {address(bound)}{page}"))
