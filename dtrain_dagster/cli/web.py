"""`dtrain ui`, `mlflow` and `tensorboard`: web pages of other projects, each behind the guard.

Each command imports what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import EXIT_INTERRUPTED, Refusal, read_settings, refuses

if TYPE_CHECKING:
    from socket import socket

    from dtrain_dagster.settings.environment import Settings

HOST = "127.0.0.1"
PAGES = {"dashboard": (8060, "DTRAIN_DASHBOARD_URL"), "mlflow": (5000, "DTRAIN_MLFLOW_URL")}
"""The commands that serve further pages, their usual ports, and the variables that tell their addresses."""
NAMES = click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="A further host name that browsers may use for it."
)


USERS = click.option(
    "--allow-user", "users", multiple=True, metavar="USER",
    help="A further user of this machine who may connect, such as that of a proxy; any: every user.",
)  # fmt: skip


def user_ids(users: tuple[str, ...]) -> frozenset[int] | None:
    """Return the numbers of these users; None for any. Raise `Refusal` for a user that this machine does not know."""
    import pwd

    try:
        return None if "any" in users else frozenset(pwd.getpwnam(user).pw_uid for user in users)
    except KeyError as error:
        raise Refusal(f"--allow-user: {error.args[0]}; give the name of a user of this machine") from None


def port_option(default: int) -> Callable[..., Any]:
    """Return the option ``--port`` with this default."""
    return click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=default,
        show_default=True,
        metavar="PORT",
        help="Port to listen on; 0 takes a free one.",
    )


@contextmanager
def listening(host: str, port: int) -> Iterator[socket]:
    """Yield a bound socket. Raise `Refusal` if the address is taken."""
    from dtrain_dagster.web.server import listener

    try:
        bound = listener(host, port)
    except OSError as error:
        raise Refusal(f"--host {host} --port {port}: {error.strerror}; choose another --port") from None
    with bound:
        yield bound


@click.command()
@port_option(3000)
@NAMES
@USERS
@click.option(
    "--workspace", "-w", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=Path("workspace.yaml"),
    show_default=True, metavar="FILE", help="Code locations to load.",
)  # fmt: skip
@click.option("--all", "serves_all", is_flag=True, help="Serve the dashboard and MLflow's pages, too.")
@refuses
def ui(port: int, names: tuple[str, ...], users: tuple[str, ...], workspace: Path, serves_all: bool) -> None:
    """Run Dagster's UI and daemon, for this machine alone.

    They run as under `dagster dev`, but behind a guard that refuses other websites. Ctrl-C ends it. Links between the
    pages follow their ports; with --all, a port that is taken gives way to a free one.

    It listens on 127.0.0.1 only: anyone who reaches it runs commands as you. From elsewhere: ssh -L
    3000:127.0.0.1:3000, or a proxy that asks for a password, whose name goes to --allow-host, and its user to
    --allow-user.

    \b
    Examples:
      dtrain ui --all
      dtrain ui --port 3001
    """
    from dtrain_dagster.settings.environment import Settings
    from dtrain_dagster.web.dagster_ui import run_ui
    from dtrain_dagster.web.server import address

    settings = read_settings()
    if not os.environ.get("DAGSTER_HOME"):
        home = settings.home / "dagster"
        if not (home / "dagster.yaml").exists():
            raise Refusal(f"DAGSTER_HOME is not set and {home} has no dagster.yaml: `dtrain setup` makes it")
        os.environ["DAGSTER_HOME"] = str(home)
    allowed = user_ids(users)
    with listening(HOST, port) as bound, ExitStack() as stack:
        if settings.dagster_url == Settings.model_fields["dagster_url"].default:
            os.environ["DTRAIN_DAGSTER_URL"] = address(bound)
        for name, (usual, variable) in PAGES.items() if serves_all else ():
            if name != "mlflow" or _has_database(settings):
                stack.enter_context(_served_beside(name, usual, variable))
        try:
            code = run_ui(workspace, bound, names, allowed)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    raise SystemExit(code)


def _has_database(settings: Settings) -> bool:
    """Return whether MLflow's runs are in a database, and not in a server that has pages of its own."""
    from dtrain_dagster.support.secrets import resolve

    return resolve(settings.tracking_uri).startswith(("sqlite:", "postgresql"))


@contextmanager
def _served_beside(name: str, usual: int, variable: str) -> Iterator[None]:
    """Run a command of this module's kind as a process that ends with the block. ``usual``: its port, unless that is
    taken; ``variable``: the one that tells its address to whoever makes links."""
    from dtrain_dagster.web.dagster_ui import LEAVE_WITH_PARENT, running
    from dtrain_dagster.web.server import address, listener

    try:
        bound = listener(HOST, usual)
    except OSError:
        bound = listener(HOST, 0)
    with bound:  # until here nobody else takes it
        url, port = address(bound), bound.getsockname()[1]
    os.environ.setdefault(variable, url)
    program = f"{LEAVE_WITH_PARENT}from dtrain_dagster.cli.main import main\nmain(sys.argv[1:])"
    with running(program, name, "--port", str(port)):
        yield


@click.command()
@port_option(5000)
@NAMES
@USERS
@refuses
def mlflow(port: int, names: tuple[str, ...], users: tuple[str, ...]) -> None:
    """Serve MLflow's pages over the project's models and runs.

    The link that it prints opens the list of runs of DTRAIN_EXPERIMENT, with columns for their losses, their gate and
    their dollars. They are behind the guard. Ctrl-C ends it.

    \b
    Examples:
      dtrain mlflow
    """
    from dtrain_dagster.settings.home import make_home
    from dtrain_dagster.support.secrets import resolve
    from dtrain_dagster.web.guard import rules_for
    from dtrain_dagster.web.other_pages import mlflow_app, runs_page

    settings = read_settings()
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
        _serve("MLflow", app, rules_for(HOST, names, most_body_bytes=None), allowed, bound, page)


@click.command()
@port_option(6006)
@NAMES
@USERS
@refuses
def tensorboard(port: int, names: tuple[str, ...], users: tuple[str, ...]) -> None:
    """Serve TensorBoard for all jobs on this machine.

    It is behind the guard. Ctrl-C ends it.

    \b
    Examples:
      dtrain tensorboard
    """
    from dtrain_dagster.web.guard import rules_for
    from dtrain_dagster.web.other_pages import tensorboard_app

    settings = read_settings()
    if settings.storage:
        raise Refusal("the jobs are in DTRAIN_STORAGE, which TensorBoard is not given here: use `dtrain dashboard`")
    allowed = user_ids(users)
    with listening(HOST, port) as bound:
        app = tensorboard_app(Path(settings.jobs_uri))
        _serve("TensorBoard", app, rules_for(HOST, names), allowed, bound)


def _serve(name: str, app: Any, rules: Any, users: frozenset[int] | None, bound: socket, page: str = "") -> None:
    from dtrain_dagster.web.guard import Guard
    from dtrain_dagster.web.server import address, server

    click.echo(f"{name}: {address(bound)}{page}")
    server(Guard(app, rules), users=users).run(sockets=[bound])
