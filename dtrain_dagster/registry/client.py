"""MLflow's client for code that reads or writes versions; that code is in `dtrain_dagster.registry.versions`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainer.observability.mlflow_sqlite import make_tables

if TYPE_CHECKING:
    from mlflow import MlflowClient


def open_client(tracking_uri: str) -> MlflowClient:
    """Return a client of the tracking server, which is the registry too."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a progress bar is noise in a log
    from mlflow import MlflowClient

    make_tables(tracking_uri)
    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
