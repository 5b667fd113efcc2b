"""Dagster's UI as `dtrain ui` runs it: webserver, daemon and code server, like ``dagster dev``, behind the guard.

``dagster dev`` starts a webserver that takes mutations from any website. Here the same web application runs in this
process with `guard.Guard` around it, so no unguarded port exists, not even on loopback. Code servers are asked over
Unix sockets that only this user may open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import yaml
from starlette.types import ASGIApp

from dtrain_dagster.web.guard import Guard, Rules, rules_for
from dtrain_dagster.web.server import address, server
from dtrain_dagster.web.stored_secrets import secret_posted

POLL_MILLISECONDS = 2000
"""The interval at which the page asks for news."""
GRACE_SECONDS = 30.0
GRAPHQL = "/graphql"
LEAVE_WITH_PARENT = """
import ctypes, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: never outlive a killed parent
"""
"""The beginning of a program that ends with the process that has started it."""
_DAEMON = f"""{LEAVE_WITH_PARENT}
sys.argv[0] = "dagster-daemon"
runpy.run_module("dagster._daemon", run_name="__main__")
"""


def ui_rules(names: Sequence[str] = ()) -> Rules:
    """Return the guard's rules for Dagster's UI. It starts runs: every POST is JSON, and ``/graphql`` takes nothing by
    GET. It stores the inputs of runs, so a request with a secret does not reach it. (Over its websocket nothing can be
    changed.)"""
    pages = frozenset({GRAPHQL})
    return rules_for("127.0.0.1", names, json_only=True, pages=pages, look_through=secret_posted)


def run_ui(workspace: Path, bound: socket, names: Sequence[str], users: frozenset[int] | None) -> int:
    """Serve Dagster's UI on this socket until SIGINT or SIGTERM; return the exit code, 1 where the daemon ends first.
    ``DAGSTER_HOME`` is set. ``names``: further names in the ``Host`` of requests; ``users``: as for
    `web.server.server`."""
    from dagster import DagsterInstance
    from dagster._cli.proxy_server_manager import ProxyServerManager
    from dagster._core.workspace.load_target import WorkspaceFileTarget

    signal.signal(signal.SIGTERM, _end)
    # The sockets of code servers lie in the folder for temporary files, and a user who may write to one may run code.
    os.umask(os.umask(0o022) | 0o022)
    os.environ["DAGSTER_IS_DEV_CLI"] = "1"  # as `dagster dev` does: errors of user code are shortened
    with ExitStack() as stack:
        # First of all, since it makes the databases: several processes at once would get in each other's way.
        instance = stack.enter_context(DagsterInstance.get())
        target = WorkspaceFileTarget([str(workspace)])
        code = stack.enter_context(ProxyServerManager(instance, target, code_server_log_level="warning"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dtrain-ui-")))
        shared = _write_workspace(folder, code.get_code_server_specs())
        daemon = stack.enter_context(running(_DAEMON, "run", "--workspace", str(shared)))
        app = stack.enter_context(web_app(instance, shared))
        web = server(Guard(app, ui_rules(names)), websockets=True, users=users)
        threading.Thread(target=_stop_after, args=(daemon, web), daemon=True).start()
        print(f"Dagster's UI: {address(bound)}", flush=True)  # noqa: T201 - what the command is started for
        web.run(sockets=[bound])
        return 0 if daemon.poll() is None else 1


@contextmanager
def web_app(instance: Any, workspace: Path) -> Iterator[ASGIApp]:
    """Yield Dagster's web application over the code locations of a workspace file, without any guard."""
    from dagster import __version__
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.webserver import DagsterWebserver

    instance.optimize_for_webserver(statement_timeout=15_000, pool_recycle=3600, max_overflow=20)
    target = WorkspaceFileTarget([str(workspace)])
    with WorkspaceProcessContext(
        instance,
        version=__version__,
        read_only=False,
        workspace_load_target=target,
        code_server_log_level="warning",
    ) as context:
        yield DagsterWebserver(context, live_data_poll_rate=POLL_MILLISECONDS).create_asgi_app()


def _write_workspace(folder: Path, specs: Sequence[Any]) -> Path:
    """Write a workspace file that names the running code servers; return its path."""
    path = folder / "workspace.yaml"
    path.write_text(yaml.safe_dump({"load_from": [dict(spec) for spec in specs]}))
    return path


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a Python program as a process, which ends in order with the block."""
    process = subprocess.Popen([sys.executable, "-c", program, *arguments])
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _stop_after(daemon: subprocess.Popen[bytes], web: Any) -> None:
    """Stop the server when the daemon has ended: the UI would show runs that nothing starts."""
    daemon.wait()
    web.should_exit = True


def _end(number: int, frame: Any) -> None:
    sys.exit(128 + number)
