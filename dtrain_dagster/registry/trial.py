"""The trial of a registry before a training is paid for: whether what registers its model at the end would be let.

Everything is tried as it will be done then, but for a version: its number would be missing from those of real ones.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtrain_dagster.registry.client import open_client
from dtrain_dagster.registry.promotion import champion_version
from dtrain_dagster.registry.versions import RegistryError, ensure_registered_model
from dtrain_dagster.support.secrets import redact
from trainer.observability.mlflow_sink import KIND, KIND_TAG, ensure_experiment

_TRIED = "dtrain.tried"
"""A tag of the registered model that is set and taken away again."""


def try_registry(tracking_uri: str, model_name: str, experiment: str) -> None:
    """Write to the experiment, to its artifacts and to the registered model, which is made where it is missing, and ask
    for an alias. Raise `RegistryError` for the first of them that fails, with the setting to look at."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # by default a dead server costs four minutes
    with explained(f"MLflow at {redact(tracking_uri)} cannot be used", "DTRAIN_MLFLOW_TRACKING_URI"):
        client = open_client(tracking_uri)
        client.get_experiment_by_name(experiment)
    with explained(f"the MLflow experiment {experiment!r} cannot be written to", "DTRAIN_EXPERIMENT"):
        experiment_id = ensure_experiment(client, experiment, tracking_uri)
        found = client.get_experiment(experiment_id)
        client.set_experiment_tag(experiment_id, KIND_TAG, found.tags.get(KIND_TAG, KIND))
    with explained(f"{redact(str(found.artifact_location))}, where the MLflow experiment {experiment!r} keeps files, "
                    "cannot be written to", "DTRAIN_EXPERIMENT"):  # fmt: skip
        _try_artifacts(str(found.artifact_location), tracking_uri)
    with explained(f"the registered model {model_name!r} cannot be written to", "DTRAIN_MODEL_NAME"):
        ensure_registered_model(client, model_name)
        client.set_registered_model_tag(model_name, _TRIED, "")
        client.delete_registered_model_tag(model_name, _TRIED)
    with explained(f"the registry has no aliases, which {model_name!r} needs", "DTRAIN_MLFLOW_TRACKING_URI"):
        champion_version(model_name, tracking_uri)


def _try_artifacts(location: str, tracking_uri: str) -> None:
    """Write a file where an experiment keeps those of its runs, and remove it."""
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    name = f"dtrain-tried-{uuid.uuid4().hex[:8]}"
    repository = get_artifact_repository(f"{location.rstrip('/')}/{name}", tracking_uri=tracking_uri)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tried.txt").write_text("dtrain tries whether a model can be registered")
        repository.log_artifact(str(Path(folder, "tried.txt")))
    with suppress(MlflowException, OSError, NotImplementedError):  # a store that deletes nothing
        repository.delete_artifacts()


@contextmanager
def explained(what: str, setting: str) -> Iterator[None]:
    """Within the block, turn any error of MLflow, a database, a network or a disk into `RegistryError`."""
    try:
        yield
    except Exception as error:  # each store of artifacts has errors of its own
        said = redact(str(error)).strip().splitlines() or [type(error).__name__]
        raise RegistryError(f"{what} ({said[0][:500]}): a model could not be registered; see {setting}") from error
