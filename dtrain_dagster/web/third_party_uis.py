"""The pages of Dagster and MLflow for `dtrain ui`, without their own servers and behind the guard.

``dagster dev`` starts a webserver that takes mutations from any website. Here the command ``dagster-webserver`` runs in
this process, with daemon and code servers beside it, and its application is served with `guard.Guard` around it, so no
unguarded port exists, not even on loopback. Code servers are asked over Unix sockets that only this user may open.

MLflow's own guard takes requests from pages of any port of this machine, and MLflow has an assistant that runs shell
commands. The command puts the guard around it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import yaml
from starlette.types import ASGIApp

from dtrain_dagster.web.guard import LOOPBACK, Guard, Rules, rules_for
from dtrain_dagster.web.server import address, serve, server
from dtrain_dagster.web.stored_secrets import secret_posted
from trainer.observability.mlflow_sink import VIEW, prepare_list
from trainer.observability.mlflow_sqlite import make_tables

GRACE_SECONDS = 30.0
GRAPHQL = "/graphql"
LEAVE_WITH_PARENT = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: never outlive a killed parent
"""
"""The beginning of a program that ends with the process that has started it."""
_COMMAND = f"""{LEAVE_WITH_PARENT}
from importlib.metadata import entry_points
sys.argv = sys.argv[1:]
next(iter(entry_points(group="console_scripts", name=sys.argv[0]))).load()()
"""
"""A program that is one of Dagster's commands."""
_NOWHERE = "served-behind-a-guard.invalid"
"""A host on which nothing can listen."""
_TARGETS = {
    "python_module": ("module_name", "--module-name"),
    "python_file": ("relative_path", "--python-file"),
    "python_package": ("package_name", "--package-name"),
    "autoload_defs_module": ("module_name", "--autoload-defs-module-name"),
}
"""The kinds of code locations in a workspace file that need a code server: the field that names the code, and its
option of ``dagster code-server start``."""
WSGI_IS_DEPRECATED = r"starlette\.middleware\.wsgi is deprecated"


def ui_rules(names: Sequence[str] = ()) -> Rules:
    """Return the guard's rules for Dagster's UI. It starts runs: every POST is JSON, and ``/graphql`` takes nothing by
    GET. It stores the inputs of runs, so a request with a secret does not reach it. (Over its websocket nothing can be
    changed.)"""
    pages = frozenset({GRAPHQL})
    return rules_for("127.0.0.1", names, json_only=True, pages=pages, look_through=secret_posted)


def run_ui(workspace: Path, bound: socket, names: Sequence[str], users: frozenset[int] | None) -> int:
    """Serve Dagster's UI on this socket until SIGINT or SIGTERM; return the exit code, 1 where the daemon or a code
    server ends first. ``DAGSTER_HOME`` is set. ``names``: further names in the ``Host`` of requests; ``users``: as for
    `web.server.server`."""
    from dagster import DagsterInstance

    signal.signal(signal.SIGTERM, _end)
    os.umask(os.umask(0o022) | 0o022)  # of the sockets of code servers: a user who may write to one may run code
    os.environ["DAGSTER_IS_DEV_CLI"] = "1"  # as `dagster dev` does: errors of user code are shortened
    with DagsterInstance.get():  # it makes the databases: several processes at once would get in each other's way
        pass
    lost = threading.Event()

    def serve_dagster(app: ASGIApp) -> None:
        signal.signal(signal.SIGTERM, _end)  # in place of the handler that the command has set
        web = server(Guard(app, ui_rules(names)), websockets=True, users=users)
        for process in processes:
            threading.Thread(target=_stop_after, args=(process, web, lost), daemon=True).start()
        told = f"Dagster's UI: {address(bound)}"
        serve(web, bound, lambda: print(told, flush=True))  # noqa: T201 - what the command is started for

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dtrain-ui-")))
        shared, processes = _start_code_servers(workspace, folder, stack)
        processes.append(stack.enter_context(running(_COMMAND, "dagster-daemon", "run", "--workspace", str(shared))))
        run_webserver(shared, serve_dagster)
        return 1 if lost.is_set() else 0


def run_webserver(workspace: Path, serve: Callable[[ASGIApp], None]) -> None:
    """Run ``dagster-webserver`` over the code locations of a workspace file, until ``serve`` has served its
    application. It makes that for `uvicorn.run` and has no option for another server, so that function is replaced
    meanwhile. Should another one be called some day, it would find no address to listen on."""
    import uvicorn
    from dagster_webserver.cli import create_dagster_webserver_cli

    command, run = create_dagster_webserver_cli(), uvicorn.run
    quiet = ["--dagster-log-level", "warning", "--code-server-log-level", "warning"]
    options = ["--host", _NOWHERE, "--port", "1", *quiet, "--workspace", str(workspace)]
    uvicorn.run = lambda app, **_: serve(app)
    try:
        with command.make_context("dagster-webserver", options) as context:
            command.invoke(context)
    finally:
        uvicorn.run = run


def _start_code_servers(workspace: Path, folder: Path, stack: ExitStack) -> tuple[Path, list[subprocess.Popen[bytes]]]:
    """Start what webserver and daemon share; return a workspace file with the sockets, and the processes."""
    locations = (yaml.safe_load(workspace.read_text()) or {}).get("load_from") or []
    shared, waiting = folder / "workspace.yaml", {}
    for number, location in enumerate(locations):
        [(kind, fields)] = location.items()
        if kind in _TARGETS:
            path = folder / f"{number}.sock"
            name, options = code_server_options(kind, fields, workspace.resolve().parent)
            arguments = ("code-server", "start", "--socket", str(path), "--location-name", name, *options)
            python = None if isinstance(fields, str) else fields.get("executable_path")
            waiting[path] = stack.enter_context(running(_COMMAND, "dagster", *arguments, python=python))
            locations[number] = {"grpc_server": {"socket": str(path), "location_name": name}}
    shared.write_text(yaml.safe_dump({"load_from": locations}))
    for path, process in waiting.items():
        _wait_for_server(path, process)
    return shared, list(waiting.values())


def code_server_options(kind: str, fields: str | Mapping[str, str], folder: Path) -> tuple[str, list[str]]:
    """Return the name of a code location in a workspace file of this folder, and the options of its code server.
    ``fields``: the code's name alone, or the fields of such a location in Dagster's documentation."""
    field, option = _TARGETS[kind]
    given = {field: fields} if isinstance(fields, str) else dict(fields)
    name, attribute = Path(given[field]).name, given.get("attribute")
    if kind == "python_file":
        given[field] = str(folder / given[field])
        if not isinstance(fields, str):
            given["working_directory"] = str(folder / given.get("working_directory", "."))
    options = [option, given[field], "--log-level", "warning", "--inject-env-vars-from-instance"]
    for key, more in (("attribute", "--attribute"), ("working_directory", "--working-directory")):
        options += [more, given[key]] if key in given else []
    options += ["--use-python-environment-entry-point"] if "executable_path" in given else []
    return given.get("location_name") or (f"{name}:{attribute}" if attribute else name), options


def _wait_for_server(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Return once a code server listens, which it does when its code is loaded, or its process has ended."""
    while process.poll() is None:
        with socket(AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.1)


@contextmanager
def running(program: str, *arguments: str, python: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a Python program as a process, which ends with the block. ``python``: None for this interpreter."""
    interpreter = os.path.expanduser(python) if python else sys.executable
    process = subprocess.Popen([interpreter, "-c", program, *arguments])
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _stop_after(process: subprocess.Popen[bytes], web: Any, lost: threading.Event) -> None:
    """Stop the server when one of its processes has ended: the UI would show runs that nothing starts."""
    process.wait()
    lost.set()
    web.should_exit = True


def _end(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def mlflow_app(tracking_uri: str, artifacts: Path, names: Sequence[str] = ()) -> ASGIApp:
    """Return MLflow's tracking server over a database. ``artifacts``: the folder for files that clients send;
    ``names``: as for the guard, since MLflow has one of its own, which stays on. Only one fits in a process: MLflow
    reads its settings from the environment, some of them when it is imported, so nothing of its server may have been
    imported before."""
    if names:
        hosts = [name + port for name in (*LOOPBACK[:2], *names) for port in ("", ":*")]
        origins = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
        os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(hosts)
        os.environ["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = ",".join(origins)
    from mlflow.server import constants

    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: tracking_uri,
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(artifacts),
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=WSGI_IS_DEPRECATED)  # MLflow's own import, with no date
        from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    make_tables(tracking_uri)
    initialize_backend_stores(tracking_uri, tracking_uri, "mlflow-artifacts:/")
    return app


def runs_page(tracking_uri: str, experiment: str) -> str:
    """Return the path of an experiment's list of runs with the columns by which trainings are compared; "" where there
    is no such experiment, so that MLflow's first page opens. The database has its tables (`mlflow_app`)."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None or found.lifecycle_stage != "active":
        return ""
    prepare_list(client, found.experiment_id, found.tags)
    return f"/#/experiments/{found.experiment_id}/runs?viewStateShareKey={VIEW}"
