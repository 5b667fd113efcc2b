"""The parts of a registration: what a version is, what it says of its training, and the MLflow model that is packed.

MLflow's client and plain artifacts are used rather than ``mlflow.pyfunc.log_model``: that one needs the server's
logged-models API, which Azure ML's MLflow endpoint does not have, sets global state, and loads the model once more to
validate it, which the serving check does on a real server.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.run_model import RunModel
from dtrain_dagster.registry.smoke_test import inputs_at, open_data
from dtrain_dagster.support.secrets import redact
from dtrain_dagster.support.user_code import stage_for_serving
from trainer.config import JobConfig
from trainer.data.manifest import load_manifest
from trainer.elastic.generation_record import generations
from trainer.observability.mlflow_sink import GATE_TAG, ensure_experiment
from trainer.observability.mlflow_sqlite import make_tables
from trainer.rundir import EVALUATION, RESULT, RunDir
from trainer.runtime.file_lock import hold_lock
from trainer.spec import DataSpec, RowSpec
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature
    from numpy.typing import NDArray

JOB_TAG, WEIGHTS_TAG = "job_id", "weights_sha256"
LOCK = "registration.lock"
PATIENCE_SECONDS = 600.0
"""The longest wait for another registration. One that takes longer is frozen; of two versions, the older one stays."""
MODEL_PATH = "model"
CARD = "model_card.md"
DESCRIPTION_LIMIT = 5000
"""The number of characters that a registry keeps of a description; the whole card is an artifact of the run."""


class RegistryError(ValueError):
    """A refusal of a job's model that cannot be registered. The message says what is missing and the remedy."""


@contextmanager
def explained(what: str, setting: str) -> Iterator[None]:
    """Within the block, turn any error of MLflow, a database, a network or a disk into `RegistryError`."""
    try:
        yield
    except Exception as error:  # each store of artifacts has errors of its own
        said = redact(str(error)).strip().splitlines() or [type(error).__name__]
        raise RegistryError(f"{what} ({said[0][:500]}): a model could not be registered; see {setting}") from error


@contextmanager
def registering(rundir: RunDir) -> Iterator[None]:
    """Keep other processes of this machine from registering the job within the block. The lock ends with its process,
    however that ends. A run directory in the cloud has no lock: there the older of two versions stays."""
    if not rundir.storage.is_local:
        yield
        return
    with hold_lock(rundir.storage.local_path(LOCK), PATIENCE_SECONDS):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredModel:
    """A version in the registry."""

    name: str
    version: str
    run_id: str
    """The MLflow run that trained it."""
    created: bool
    """False where the job had been registered before: nothing was written then."""
    tags: Mapping[str, str] = field(default_factory=dict)
    asset_uri: str | None = None
    """Its address, where the registry is not MLflow's own."""

    @property
    def uri(self) -> str:
        """The version's address; in MLflow's registry one that ``mlflow models serve -m`` and
        ``mlflow.pyfunc.load_model`` take."""
        return self.asset_uri or f"models:/{self.name}/{self.version}"


def read_succeeded(rundir: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``result.json`` and ``evaluation.json``. Raise `RegistryError` for a training that did not succeed."""
    result, evaluation = rundir.read_json(RESULT), rundir.read_json(EVALUATION)
    if result is None or evaluation is None or result.get("status") != "succeeded":
        status = f"status {result.get('status')!r}" if result else f"no {RESULT}"
        raise RegistryError(f"{rundir.uri} has {status}: only a training that succeeded can be registered")
    return result, evaluation


RUN_TAGS = (JOB_TAG, "dataset_id", "run_dir", "code_version", "dagster_run_id", GATE_TAG, "sku", "nodes", WEIGHTS_TAG)
"""The tags of a version that its run has, too: by which runs are found and compared."""


def tags_of_run(tags: Mapping[str, str]) -> dict[str, str]:
    """Return those tags of a version that its run gets. Pure."""
    return {name: tags[name] for name in RUN_TAGS if name in tags}


def job_tags(
    rundir: RunDir, result: Mapping[str, Any], evaluation: Mapping[str, Any], job: JobConfig
) -> dict[str, str]:
    """Return the facts of a run directory as tags of the version. ``job``: as it was ordered."""
    manifest = load_manifest(open_storage(job.dataset.uri))
    history = generations(rundir.storage)
    sizes = [len(item.members) for item in history] or [result["world_size"]]
    modes = dict.fromkeys("parameter server" if item.topology == "star" else "all-reduce" for item in history)
    training, how = job.training, ", ".join(modes) or "all-reduce"
    values = {
        JOB_TAG: job.job_id,
        "dataset_id": manifest["dataset_id"],
        "model": job.model.factory,
        "loss": job.loss.factory,
        "world_size": result["world_size"],
        "world_size_history": " → ".join(map(str, sizes)),
        "strategy": f"{training.strategy}, {how} ({result['backend']}, {training.precision})",
        "steps": result["steps"],
        "weights_sha256": result["weights_sha256"],
        "checkpoint": result.get("checkpoint"),
        "checkpoint_uri": f"{rundir.uri}/{result['checkpoint']}" if result.get("checkpoint") else None,
        "run_dir": rundir.uri,
        "best_valid_loss": result.get("best_valid_loss"),
        "test_nll": evaluation["model"].get("nll"),
        "test_loss": evaluation["model"]["loss"],
    }
    return {name: f"{value:.6f}" if isinstance(value, float) else str(value) for name, value in values.items() if value}


def tracking_run(client: MlflowClient, rundir: RunDir, tracking_uri: str, experiment: str, job_id: str) -> str:
    """Return the id of the MLflow run for a version: the trainer's where it still exists, else the job's that an
    earlier registration has made, else a new one that is finished at once."""
    from mlflow.exceptions import MlflowException

    run_id = (rundir.read_json("tracking.json") or {}).get("mlflow_run_id")
    if run_id:
        try:
            run = client.get_run(run_id)
            # Nodes name the run, and may name another job's.
            if run.info.lifecycle_stage == "active" and run.data.tags.get(JOB_TAG) == job_id:
                return run_id
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # or is no run's name
                raise
    experiment_id = ensure_experiment(client, experiment, tracking_uri)
    known = client.search_runs([experiment_id], f"tags.{JOB_TAG} = '{job_id}'")
    run = known[0] if known else client.create_run(experiment_id, run_name=job_id, tags={JOB_TAG: job_id})
    client.set_terminated(run.info.run_id)
    return run.info.run_id


def save_pyfunc(own: RunModel, folder: Path, scratch: Path, run_id: str, cache_dir: str | None) -> None:
    """Write the MLflow model: `trainer/model/mlflow_model.py` as code, the job's two files as artifacts, real
    inputs as the example."""
    import mlflow.pyfunc
    import numpy as np
    from mlflow.models import Model

    import trainer

    data = open_data(own, cache_dir)
    _, inputs = inputs_at(data, np.unique(np.linspace(0, data.count("test") - 1, 3).astype(np.int64)))
    files = scratch / "files"
    files.mkdir()
    own.write(files)
    (scratch / "code").mkdir()
    code = stage_for_serving(own.factories(), scratch / "code")
    mlflow.pyfunc.save_model(
        path=str(folder),
        python_model=str(Path(trainer.__file__).parent / "model" / "mlflow_model.py"),
        artifacts={"model": str(files)},
        code_paths=list(code.paths),
        pip_requirements=list(code.requirements),  # given, so that nothing is imported to find out
        signature=_signature(inputs, own.predict(inputs)),
        input_example=inputs,
        metadata=_metadata(own.spec, data.manifest),
        mlflow_model=Model(artifact_path=MODEL_PATH, run_id=run_id),
    )


def _signature(inputs: NDArray[Any], columns: Iterable[str]) -> ModelSignature:
    """Return the signature: a tensor in, named columns out."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    shape = (-1, *inputs.shape[1:])
    return ModelSignature(
        inputs=Schema([TensorSpec(inputs.dtype, shape)]),
        outputs=Schema([ColSpec("double", name) for name in columns]),
    )


def _metadata(spec: DataSpec | RowSpec, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of the model's ``MLmodel`` file: the meaning of its input, and the data of its training."""
    if isinstance(spec, RowSpec):
        return {
            "dataset_id": spec.dataset_id,
            "features": list(spec.features),
            "categories": {
                name: list(values) for name, values in zip(spec.features, spec.categories, strict=True) if values
            },
            "units": {column["name"]: column["unit"] for column in manifest["columns"] if "unit" in column},
            "target": spec.target,
            "task": spec.task,
            "classes": list(spec.classes),
        }
    return {
        "dataset_id": spec.dataset_id,
        "features": list(spec.features),
        "window": spec.window,
        "horizon": spec.horizon,
        "target": spec.target,
        "train_last": manifest["splits"]["train"]["last"],
        "valid_last": manifest["splits"]["valid"]["last"],
    }


def description(card: str) -> str:
    """Return the card, cut at a line's end to `DESCRIPTION_LIMIT` with a note on where the whole card is."""
    if len(card) <= DESCRIPTION_LIMIT:
        return card
    note = f"\n\n… the whole card is `{CARD}` beside the model."
    return card[: DESCRIPTION_LIMIT - len(note)].rsplit("\n", 1)[0] + note


def open_client(tracking_uri: str) -> MlflowClient:
    """Return a client of the tracking server, which is the registry too."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a progress bar is noise in a log
    from mlflow import MlflowClient

    make_tables(tracking_uri)
    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
