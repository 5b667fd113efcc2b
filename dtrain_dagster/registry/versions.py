"""Registration: a finished job becomes a version of a registered model, once.

MLflow's client and plain artifacts are used rather than ``mlflow.pyfunc.log_model``: that one needs the server's
logged-models API, which Azure ML's MLflow endpoint does not have, sets global state, and loads the model once more to
validate it, which the serving check does on a real server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.client import open_client
from dtrain_dagster.registry.inputs import open_inputs
from dtrain_dagster.registry.once import JOB_TAG, WEIGHTS_TAG, is_same, older, registering
from dtrain_dagster.registry.packed import PACKED_TAG, folder_digest
from dtrain_dagster.registry.run_model import RunModel, load_run_model, ordered_job
from dtrain_dagster.support.user_code import stage_for_serving
from trainer.config import JobConfig
from trainer.data.manifest import load_manifest
from trainer.elastic.generation_record import generations
from trainer.observability.mlflow_sink import GATE_TAG, ensure_experiment
from trainer.observability.mlflow_sqlite import artifact_location
from trainer.rundir import EVALUATION, RESULT, RunDir
from trainer.runtime.scratch import scratch_folder
from trainer.spec import DataSpec, RowSpec
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.models import ModelSignature
    from numpy.typing import NDArray

MODEL_PATH = "model"
CARD = "model_card.md"
DESCRIPTION_LIMIT = 5000
"""The number of characters that a registry keeps of a description; the whole card is an artifact of the run."""


class RegistryError(ValueError):
    """A refusal of a job's model that cannot be registered. The message says what is missing and the remedy."""


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


def register_model(
    run_dir: str,
    tracking_uri: str,
    model_name: str,
    tags: Mapping[str, str],
    card: str,
    *,
    experiment: str = "dtrain",
    cache_dir: str | None = None,
    order: Order | None = None,
) -> RegisteredModel:
    """Register the model of a succeeded job; return its version. Where the same weights of the job were registered
    before, or are at this moment, return that version.

    ``order``: the job as ordered (`dtrain_dagster.jobs.orders`); the run directory must agree with it. Without one,
    only a model of stock parts is registered.

    ``tags`` (node-hours, dollars, code version, Dagster run…) are added to those of the run directory, see `job_tags`;
    ``card`` is the model card in Markdown. The version belongs to the MLflow run that the trainer reported to, or to a
    new one in ``experiment``. ``cache_dir`` is the node-local cache of shards.

    Raise `RegistryError` if the job has no result or no model, and MLflow's own error where the server refuses.
    """
    rundir = RunDir(run_dir)
    job = ordered_job(rundir, order)
    with registering(rundir):
        client = open_client(tracking_uri)
        return _register(client, rundir, job, tracking_uri, model_name, tags, card, experiment, cache_dir, order)


def _register(
    client: MlflowClient,
    rundir: RunDir,
    job: JobConfig,
    tracking_uri: str,
    model_name: str,
    tags: Mapping[str, str],
    card: str,
    experiment: str,
    cache_dir: str | None,
    order: Order | None,
) -> RegisteredModel:
    """Do the work of `register_model`. Everything up to the version can be repeated after a kill, and is then written
    over."""
    weights = (rundir.read_json(RESULT) or {}).get("weights_sha256")
    known = find_version(client, model_name, job.job_id, weights)
    if known is not None:
        return known
    result, evaluation = read_succeeded(rundir)
    own = load_run_model(rundir, order)
    all_tags = {
        **job_tags(rundir, result, evaluation, job),
        **own.digests,
        **{name: str(value) for name, value in tags.items()},
    }
    run_id = tracking_run(client, rundir, tracking_uri, experiment, job.job_id, weights)
    with scratch_folder("register") as scratch:
        folder = scratch / MODEL_PATH
        save_pyfunc(own, folder, scratch, run_id, cache_dir)
        all_tags[PACKED_TAG] = folder_digest(folder)
        _clear(client, run_id, tracking_uri)
        client.log_artifacts(run_id, str(folder), MODEL_PATH)
    client.log_text(run_id, card, CARD)
    client.log_dict(run_id, evaluation, EVALUATION)
    for name, value in tags_of_run(all_tags).items():
        client.set_tag(run_id, name, value)
    ensure_registered_model(client, model_name)
    source = f"{client.get_run(run_id).info.artifact_uri}/{MODEL_PATH}"
    version = client.create_model_version(
        model_name, source, run_id=run_id, tags=all_tags, description=description(card)
    )
    made = str(version.version)
    if older(client, model_name, made, job.job_id, weights) is not None:  # made elsewhere, where the lock is not seen
        known = find_version(client, model_name, job.job_id, weights)
        if known is not None:
            return known
    return RegisteredModel(name=model_name, version=made, run_id=run_id, created=True, tags=all_tags)


def read_succeeded(rundir: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``result.json`` and ``evaluation.json``. Raise `RegistryError` for a training that did not succeed."""
    result, evaluation = rundir.read_json(RESULT), rundir.read_json(EVALUATION)
    if result is None or evaluation is None or result.get("status") != "succeeded":
        status = f"status {result.get('status')!r}" if result else f"no {RESULT}"
        raise RegistryError(f"{rundir.uri} has {status}: only a training that succeeded can be registered")
    return result, evaluation


def find_version(
    client: MlflowClient, model_name: str, job_id: str, weights: str | None = None
) -> RegisteredModel | None:
    """Return the first version of this job, with these weights where they are given, or None. The filter is applied
    here: not every registry can search by tag."""
    same = [
        version
        for version in client.search_model_versions(f"name = '{model_name}'")
        if is_same(dict(version.tags), job_id, weights)
    ]
    first = min(same, key=lambda version: int(version.version), default=None)
    if first is None:
        return None
    return RegisteredModel(
        name=model_name,
        version=str(first.version),
        run_id=first.run_id or "",
        created=False,
        tags=dict(first.tags),
    )


RUN_TAGS = (
    JOB_TAG, "dataset_id", "run_dir", "code_version", "dagster_run_id", GATE_TAG, "sku", "nodes", WEIGHTS_TAG,
    PACKED_TAG,
)  # fmt: skip
"""The tags of a version that its run has, too: by which runs are found and compared, and the digests by which the model
in it is known."""


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


def tracking_run(
    client: MlflowClient, rundir: RunDir, tracking_uri: str, experiment: str, job_id: str, weights: str | None = None
) -> str:
    """Return the id of the MLflow run for a version: the trainer's where it still exists, else one that an earlier
    registration of these weights has made, else a new one that is finished at once. A run that other weights were
    registered from is never used: its model would be written over, and that version would then hold these weights."""
    from mlflow.exceptions import MlflowException

    run_id = (rundir.read_json("tracking.json") or {}).get("mlflow_run_id")
    if run_id:
        try:
            run = client.get_run(run_id)
            is_own = run.data.tags.get(JOB_TAG) == job_id  # nodes name the run, and may name another job's
            if run.info.lifecycle_stage == "active" and is_own and _is_free(client, run, weights):
                return run_id
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # or is no run's name
                raise
    experiment_id = ensure_experiment(client, experiment, tracking_uri)
    tags = {JOB_TAG: job_id} | ({WEIGHTS_TAG: weights} if weights else {})
    named = client.search_runs([experiment_id], f"tags.{JOB_TAG} = '{job_id}'")
    same = [run for run in named if weights and run.data.tags.get(WEIGHTS_TAG) == weights]
    made = [run for run in same if _is_free(client, run, weights)]
    run = made[0] if made else client.create_run(experiment_id, run_name=job_id, tags=tags)
    client.set_terminated(run.info.run_id)
    return run.info.run_id


def _is_free(client: MlflowClient, run: Run, weights: str | None) -> bool:
    """Return whether no model lies in this run yet, neither another one nor the same under another name, whose version
    records the digest of its files. Such files would be written over, and that version be refused from then on. Files
    of a registration that was killed before it had made its version may be written over."""
    tags = run.data.tags
    if weights is not None and tags.get(WEIGHTS_TAG, weights) != weights:
        return False
    return PACKED_TAG not in tags or not client.search_model_versions(f"run_id = '{run.info.run_id}'")


def _clear(client: MlflowClient, run_id: str, tracking_uri: str) -> None:
    """Remove the model files of a registration that was killed: where the code has changed since, some of them would
    not be overwritten, and the version would be refused for them."""
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if not client.list_artifacts(run_id, MODEL_PATH):
        return
    place = str(client.get_run(run_id).info.artifact_uri).removeprefix("file://")
    by_server = place.startswith("mlflow-artifacts:/") and not place.startswith("mlflow-artifacts://")
    if not by_server and place != f"{artifact_location(tracking_uri)}/{run_id}/artifacts":
        return  # the run's maker may have named any folder
    with suppress(MlflowException, OSError):  # a store that deletes nothing: most files are written over
        get_artifact_repository(place, tracking_uri=tracking_uri).delete_artifacts(MODEL_PATH)


DESCRIPTION_OF_ALL = (
    "Models that dtrain has trained and judged. The alias `champion` is the version that passed its gate and beat the "
    "champion before it on the same samples; `challenger` is the latest one that did not. Each version has a model "
    "card with its data, its code, its scores beside those of baselines, and its cost."
)


def ensure_registered_model(client: MlflowClient, name: str) -> None:
    """Make the registered model of this name, where it is missing. One that is there keeps its description."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=DESCRIPTION_OF_ALL)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def save_pyfunc(own: RunModel, folder: Path, scratch: Path, run_id: str, cache_dir: str | None) -> None:
    """Write the MLflow model: `trainer/model/mlflow_model.py` as code, the job's two files as artifacts, real
    inputs as the example."""
    import mlflow.pyfunc
    import numpy as np
    from mlflow.models import Model

    import trainer

    stored = open_inputs(own, cache_dir)
    inputs = stored.inputs(np.unique(np.linspace(0, stored.count - 1, 3).astype(np.int64)))
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
        metadata=_metadata(own.spec, stored.manifest),
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
    note = f"\n\n… the whole card is the artifact `{CARD}` of the run."
    return card[: DESCRIPTION_LIMIT - len(note)].rsplit("\n", 1)[0] + note
