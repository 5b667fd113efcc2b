"""The web applications of MLflow and TensorBoard without their own servers, for `dtrain ui`.

The commands put the guard around them. MLflow's own guard takes requests from pages of any port of this machine, and
MLflow has an assistant that runs shell commands; TensorBoard has no guard.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from dtrain_dagster.web.guard import LOOPBACK
from trainer.observability.mlflow_sink import VIEW, prepare_list
from trainer.observability.mlflow_sqlite import make_tables

WSGI_IS_DEPRECATED = r"starlette\.middleware\.wsgi is deprecated"


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


def tensorboard_app(folder: Path) -> ASGIApp:
    """Return TensorBoard over a folder of runs, which may still be missing. Runs are read in this process: its faster
    reader is a process that listens on a port without any guard."""
    from tensorboard import default, program

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=WSGI_IS_DEPRECATED)  # with no date
        from starlette.middleware.wsgi import WSGIMiddleware

    found: list[Any] = []

    def take(app: Any, flags: Any) -> Any:
        found.append(app)
        raise _Taken

    board = program.TensorBoard(plugins=default.get_plugins(), server_class=take)
    board.configure(argv=["tensorboard", "--logdir", str(folder), "--load_fast", "false"])
    with suppress(_Taken):
        board.launch()
    return WSGIMiddleware(found[0])


class _Taken(Exception):
    """The signal that TensorBoard's application is made; this project serves it."""
