"""An MLflow server, or its SQLite file, as the `Registry`."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.base import Registry
from dtrain_dagster.registry.promotion import AliasDecision
from dtrain_dagster.registry.versions import (
    JOB_TAG,
    MODEL_PATH,
    PACKED_TAG,
    WEIGHTS_TAG,
    RegisteredModel,
    RegistryError,
    description,
    explained,
    open_client,
    refuse_changed_files,
    tags_of_run,
)
from dtrain_dagster.support.secrets import redact
from trainer.observability.mlflow_sink import KIND, KIND_TAG, ensure_experiment
from trainer.observability.mlflow_sqlite import authorised
from trainer.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

DESCRIPTION_OF_ALL = (
    "Models that dtrain has trained and judged. The alias `champion` is the version that passed its gate and beat the "
    "champion before it on the same samples; `challenger` is the latest one that did not. Each version has a model "
    "card with its data, its code, its scores beside those of baselines, and its cost."
)
_TRIED = "dtrain.tried"
"""A tag of the registered model that is set and taken away again."""


@dataclass(frozen=True, slots=True)
class MLflowRegistry(Registry):
    """The registry at one MLflow address."""

    uri: str
    """The address as it was set; a reference to a secret is resolved in each call, and stored as a reference."""

    @property
    def tracking_uri(self) -> str:
        """See `Registry`."""
        return self.uri

    @property
    def address(self) -> str:
        """The address without a password."""
        return authorised(self.uri)

    def try_out(self, model_name: str, experiment: str) -> None:
        """Write to the experiment, to its artifacts and to the registered model, which is made where it is missing, and
        ask for an alias. Raise `RegistryError` for the first of them that fails, with the setting to look at.

        Everything is tried as it will be done at the end, but for a version: its number would be missing from those of
        real ones.
        """
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # by default a dead server costs four minutes
        address = self.address
        with explained(f"MLflow at {redact(address)} cannot be used", "DTRAIN_MLFLOW_TRACKING_URI"):
            client = open_client(address)
            client.get_experiment_by_name(experiment)
        with explained(f"the MLflow experiment {experiment!r} cannot be written to", "experiment in DTRAIN_OPTIONS"):
            experiment_id = ensure_experiment(client, experiment, address)
            found = client.get_experiment(experiment_id)
            client.set_experiment_tag(experiment_id, KIND_TAG, found.tags.get(KIND_TAG, KIND))
        place = str(found.artifact_location)
        where = f"{redact(place)}, where the MLflow experiment {experiment!r} keeps files,"
        with explained(f"{where} cannot be written to", "experiment in DTRAIN_OPTIONS"):
            _try_artifacts(place, address)
        with explained(f"the registered model {model_name!r} cannot be written to", "DTRAIN_MODEL_NAME"):
            _ensure_registered_model(client, model_name)
            client.set_registered_model_tag(model_name, _TRIED, "")
            client.delete_registered_model_tag(model_name, _TRIED)
        with explained(f"the registry has no aliases, which {model_name!r} needs", "DTRAIN_MLFLOW_TRACKING_URI"):
            self.champion_version(model_name)

    def find(self, model_name: str, job_id: str, weights: str | None) -> RegisteredModel | None:
        """See `Registry`. A call without weights matches on the job alone. The filter is applied here: not every
        registry can search by tag."""
        first = min(
            (
                version
                for version in open_client(self.address).search_model_versions(f"name = '{model_name}'")
                if version.tags.get(JOB_TAG) == job_id and (weights is None or version.tags.get(WEIGHTS_TAG) == weights)
            ),
            key=lambda version: int(version.version),
            default=None,
        )
        return None if first is None else _registered(first)

    def publish(
        self,
        model_name: str,
        run_id: str,
        folder: Path,
        tags: Mapping[str, str],
        card: str,
        result: Mapping[str, Any],
        evaluation: Mapping[str, Any],
    ) -> RegisteredModel:
        """See `Registry`. The files lie in the run, in a folder of their own: those of another version of this run, or
        of a registration that was killed, are never written over."""
        client = open_client(self.address)
        where = f"{MODEL_PATH}-{tags[PACKED_TAG][:12]}"
        client.log_artifacts(run_id, str(folder), where)
        for name, value in tags_of_run(tags).items():
            client.set_tag(run_id, name, value)
        _ensure_registered_model(client, model_name)
        source = f"{client.get_run(run_id).info.artifact_uri}/{where}"
        made = client.create_model_version(
            model_name, source, run_id=run_id, tags=dict(tags), description=description(card)
        )
        first = self.find(model_name, tags[JOB_TAG], tags[WEIGHTS_TAG])
        if first is not None and int(first.version) < int(made.version):  # made elsewhere at the same time
            client.delete_model_version(model_name, str(made.version))
            return first
        return _registered(made, created=True)

    @contextmanager
    def files(self, name: str, version: str) -> Iterator[Path]:
        """See `Registry`."""
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        address = self.address
        client = open_client(address)
        with scratch_folder("model") as scratch:
            try:
                tags = client.get_model_version(name, version).tags
                # A ``models:/`` address would be looked up in the process's global registry, whatever is asked here.
                source = client.get_model_version_download_uri(name, version)
                folder = Path(download_artifacts(source, dst_path=str(scratch), tracking_uri=address))
            except MlflowException as error:
                raise RegistryError(f"{name} version {version} cannot be fetched: {error}") from error
            refuse_changed_files(f"{name} version {version}", folder, tags.get(PACKED_TAG))
            yield folder

    def champion_version(self, model_name: str) -> str | None:
        """Return the version with the alias ``champion``, or None."""
        from mlflow.exceptions import MlflowException

        try:
            found = open_client(self.address).get_model_version_by_alias(model_name, "champion")
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return str(found.version)

    def promote(self, model: RegisteredModel, decision: AliasDecision) -> str | None:
        """See `Registry`. The other alias is taken from the version."""
        client = open_client(self.address)
        before = self.champion_version(model.name)
        other = "challenger" if decision.alias == "champion" else "champion"
        if other in client.get_model_version(model.name, model.version).aliases:
            client.delete_registered_model_alias(model.name, other)
        client.set_registered_model_alias(model.name, decision.alias, model.version)
        client.set_model_version_tag(model.name, model.version, "alias_reason", decision.reason)
        return before if decision.alias == "champion" and before != model.version else None


def _registered(version: ModelVersion, created: bool = False) -> RegisteredModel:
    return RegisteredModel(
        name=version.name,
        version=str(version.version),
        run_id=version.run_id or "",
        created=created,
        tags=dict(version.tags),
    )


def _ensure_registered_model(client: MlflowClient, name: str) -> None:
    """Make the registered model of this name, where it is missing. One that is there keeps its description."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=DESCRIPTION_OF_ALL)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


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
