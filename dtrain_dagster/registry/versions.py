"""Registration: a finished job becomes a version of a registered model, once (R6.1).

MLflow's client and plain artifacts are used rather than ``mlflow.pyfunc.log_model``: that one needs the server's
logged-models API, which Azure ML's MLflow endpoint does not have, sets global state, and loads the model once more to
validate what the serving check proves on a real server.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.staging import ensure_importable, stage_code
from trainer.membership import generations
from trainer.rundir import EVALUATION, RESULT, RunDir
from trainer.storage import Storage
from trainer.tracking import artifact_location, opening

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

    from trainer.saved_model import SavedModel

JOB_TAG = "job_id"
MODEL_PATH = "model"
CARD = "model_card.md"
DESCRIPTION_LIMIT = 5000
"""Characters that a registry keeps of a description; the whole card is an artifact of the run."""


class RegistryError(ValueError):
    """The job's model cannot be registered. The message says what is missing and the remedy."""


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
        """Of MLflow's registry, what ``mlflow models serve -m`` and ``mlflow.pyfunc.load_model`` take."""
        return self.asset_uri or f"models:/{self.name}/{self.version}"


def open_client(tracking_uri: str, registry_uri: str | None = None) -> MlflowClient:
    """A client of the tracking server and of the registry (the same server where none is named)."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # nobody watches a bar in a log
    from mlflow import MlflowClient

    with opening(tracking_uri):
        return MlflowClient(tracking_uri=tracking_uri, registry_uri=registry_uri or tracking_uri)


def register_model(
    run_dir: str,
    tracking_uri: str,
    model_name: str,
    tags: Mapping[str, str],
    card: str,
    *,
    experiment: str = "dtrain",
    registry_uri: str | None = None,
    cache_dir: str | None = None,
) -> RegisteredModel:
    """Register the model of a succeeded job; the existing version where the job was registered before.

    ``tags`` (node-hours, dollars, code version, Dagster run…) are added to those that the run directory tells, see
    `job_tags`; ``card`` is the model card in Markdown. The version belongs to the MLflow run that the trainer reported
    to, or to a new one in ``experiment``. ``cache_dir`` is the node-local cache of shards.

    Raises `RegistryError` if the job has no result or no model, and whatever MLflow raises for a server that refuses.
    """
    rundir = RunDir(run_dir)
    job = rundir.read_job()
    client = open_client(tracking_uri, registry_uri)
    known = find_version(client, model_name, job.job_id)
    if known is not None:
        return known
    result, evaluation = read_succeeded(rundir)
    all_tags = {**job_tags(rundir, result, evaluation), **{name: str(value) for name, value in tags.items()}}
    run_id = tracking_run(client, rundir, tracking_uri, experiment, job.job_id)
    with tempfile.TemporaryDirectory(prefix="dtrain-register-") as scratch:
        folder = Path(scratch) / MODEL_PATH
        save_pyfunc(rundir, folder, Path(scratch), run_id, cache_dir)
        client.log_artifacts(run_id, str(folder), MODEL_PATH)
    client.log_text(run_id, card, CARD)
    client.log_dict(run_id, evaluation, EVALUATION)
    for name, value in all_tags.items():
        client.set_tag(run_id, name, value)
    _ensure_registered_model(client, model_name)
    source = f"{client.get_run(run_id).info.artifact_uri}/{MODEL_PATH}"
    version = client.create_model_version(
        model_name, source, run_id=run_id, tags=all_tags, description=description(card)
    )
    return RegisteredModel(name=model_name, version=str(version.version), run_id=run_id, created=True, tags=all_tags)


def read_succeeded(rundir: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """``result.json`` and ``evaluation.json``; `RegistryError` for a training that did not succeed."""
    result, evaluation = rundir.read_json(RESULT), rundir.read_json(EVALUATION)
    if result is None or evaluation is None or result.get("status") != "succeeded":
        status = f"status {result.get('status')!r}" if result else f"no {RESULT}"
        raise RegistryError(f"{rundir.uri} has {status}: only a training that succeeded can be registered")
    return result, evaluation


def find_version(client: MlflowClient, model_name: str, job_id: str) -> RegisteredModel | None:
    """The version that this job became, or None. Filtered here: not every registry can search by tag."""
    for version in client.search_model_versions(f"name = '{model_name}'"):
        if version.tags.get(JOB_TAG) == job_id:
            return RegisteredModel(
                name=model_name,
                version=str(version.version),
                run_id=version.run_id or "",
                created=False,
                tags=dict(version.tags),
            )
    return None


def job_tags(rundir: RunDir, result: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, str]:
    """What a run directory tells about its model, as tags of the version."""
    job = rundir.read_job()
    manifest = json.loads(Storage(job.dataset.uri).read("manifest.json"))
    history = generations(rundir.storage)
    sizes = [len(item.members) for item in history] or [result["world_size"]]
    modes = dict.fromkeys("parameter server" if item.topology == "star" else "all-reduce" for item in history)
    values = {
        JOB_TAG: job.job_id,
        "dataset_id": manifest["dataset_id"],
        "model": job.model.factory,
        "loss": job.loss.factory,
        "world_size": result["world_size"],
        "world_size_history": " → ".join(map(str, sizes)),
        "strategy": f"ddp, {', '.join(modes) or 'all-reduce'} ({result['backend']}, {job.training.precision})",
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


def load_run_model(rundir: RunDir) -> SavedModel:
    """The model of a run directory, in this process."""
    from trainer.saved_model import FOLDER, load_saved_model

    ensure_importable()
    return load_saved_model(lambda name: rundir.storage.read(f"{FOLDER}/{name}"))


def tracking_run(client: MlflowClient, rundir: RunDir, tracking_uri: str, experiment: str, job_id: str) -> str:
    """The trainer's run where it is still there, else a new one that is finished at once."""
    from mlflow.exceptions import MlflowException

    run_id = (rundir.read_json("tracking.json") or {}).get("mlflow_run_id")
    if run_id:
        try:
            if client.get_run(run_id).info.lifecycle_stage == "active":
                return run_id
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    known = client.get_experiment_by_name(experiment)
    location = artifact_location(tracking_uri)
    experiment_id = known.experiment_id if known else client.create_experiment(experiment, location)
    run = client.create_run(experiment_id, run_name=job_id)
    client.set_terminated(run.info.run_id)
    return run.info.run_id


def _ensure_registered_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def save_pyfunc(rundir: RunDir, folder: Path, scratch: Path, run_id: str, cache_dir: str | None) -> None:
    """Write the MLflow model: `trainer/serving.py` as code, the job's two files as artifacts, real windows."""
    import mlflow.pyfunc
    import numpy as np
    from mlflow.models import Model

    import trainer
    from trainer.saved_model import DESCRIPTION, FOLDER, WEIGHTS
    from trainer.shards import DataShardManager

    job = rundir.read_job()
    saved = load_run_model(rundir)
    shards = DataShardManager(job.dataset.uri, cache_dir, saved.spec.dataset_id)
    count = shards.count("test")
    windows, _ = shards.gather(shards.end_rows("test", np.unique(np.linspace(0, count - 1, 3).astype(np.int64))))
    files = scratch / "files"
    files.mkdir()
    for name in (DESCRIPTION, WEIGHTS):
        (files / name).write_bytes(rundir.storage.read(f"{FOLDER}/{name}"))
    (scratch / "code").mkdir()
    code = stage_code((job.model.factory, job.loss.factory), scratch / "code")
    mlflow.pyfunc.save_model(
        path=str(folder),
        python_model=str(Path(trainer.__file__).parent / "serving.py"),
        artifacts={"model": str(files)},
        code_paths=list(code.paths),
        pip_requirements=list(code.requirements),  # given, so that nothing is imported to find out
        signature=_signature(saved),
        input_example=windows.numpy(),
        metadata=_metadata(saved, shards.manifest),
        mlflow_model=Model(artifact_path=MODEL_PATH, run_id=run_id),
    )


def _signature(saved: SavedModel) -> ModelSignature:
    """Tensor in, named columns out."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    shape = (-1, saved.spec.window, len(saved.spec.features))
    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype(np.float32), shape)]),
        outputs=Schema([ColSpec("double", name) for name in saved.columns]),
    )


def _metadata(saved: SavedModel, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """In the model's ``MLmodel`` file: what its input means, and on what it was trained."""
    spec = saved.spec
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
    if len(card) <= DESCRIPTION_LIMIT:
        return card
    note = f"\n\n… the whole card is the artifact `{CARD}` of the run."
    return card[: DESCRIPTION_LIMIT - len(note)].rsplit("\n", 1)[0] + note
