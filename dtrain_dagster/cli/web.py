"""`dtrain ui`, `mlflow` and `tensorboard`: web pages of other projects, each behind the guard.

Each command imports what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import EXIT_INTERRUPTED, Refusal, read_settings, refuses

if TYPE_CHECKING:
    from socket import socket

HOST = "127.0.0.1"
NAMES = click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="A further name that browsers ask it by."
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
@refuses
def ui(port: int, names: tuple[str, ...], users: tuple[str, ...], workspace: Path) -> None:
    """Run Dagster's UI and daemon, for this machine alone.

    They run as under `dagster dev`, but behind a guard that refuses other websites. Ctrl-C ends it.

    It listens on 127.0.0.1 only: anyone who reaches it runs commands as you. From elsewhere: ssh -L
    3000:127.0.0.1:3000, or a proxy that asks for a password, whose name goes to --allow-host, and its user to
    --allow-user.

    \b
    Examples:
      dtrain ui
      dtrain ui --port 3001
    """
    from dtrain_dagster.web.dagster_ui import run_ui

    settings = read_settings()
    if not os.environ.get("DAGSTER_HOME"):
        home = settings.home / "dagster"
        if not (home / "dagster.yaml").exists():
            raise Refusal(f"DAGSTER_HOME is not set and {home} has no dagster.yaml: `dtrain setup` makes it")
        os.environ["DAGSTER_HOME"] = str(home)
    allowed = user_ids(users)
    with listening(HOST, port) as bound:
        try:
            code = run_ui(workspace, bound, names, allowed)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    raise SystemExit(code)


@click.command()
@port_option(5000)
@NAMES
@USERS
@refuses
def mlflow(port: int, names: tuple[str, ...], users: tuple[str, ...]) -> None:
    """Serve MLflow's pages over the project's models and runs.

    They are behind the guard. Ctrl-C ends it.

    \b
    Examples:
      dtrain mlflow
    """
    from dtrain_dagster.settings.home import make_home
    from dtrain_dagster.support.secrets import resolve
    from dtrain_dagster.web.guard import rules_for
    from dtrain_dagster.web.other_pages import mlflow_app

    settings = read_settings()
    tracking_uri = resolve(settings.tracking_uri)
    if not tracking_uri.startswith(("sqlite:", "postgresql")):
        raise Refusal(
            "DTRAIN_MLFLOW_TRACKING_URI names a server, which has pages of its own: open those, or unset it for the "
            "database under DTRAIN_HOME"
        )
    make_home(settings.home)
    allowed = user_ids(users)
    with listening(HOST, port) as bound:
        app = mlflow_app(tracking_uri, settings.home / "mlartifacts", names)
        _serve("MLflow", app, rules_for(HOST, names, most_body_bytes=None), allowed, bound)


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


def _serve(name: str, app: Any, rules: Any, users: frozenset[int] | None, bound: socket) -> None:
    from dtrain_dagster.web.guard import Guard
    from dtrain_dagster.web.server import address, server

    click.echo(f"{name}: {address(bound)}")
    server(Guard(app, rules), users=users).run(sockets=[bound])
