"""The MLflow model of a script: packed from its run directory, and registered by a training that nobody orchestrates.

Where `dtrain` has started a training, it registers itself (`dtrain_dagster.registry`), with dollars, a card and a check
by a server, and takes the packing alone from here.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import trainer
from trainer.config import JobConfig
from trainer.model.program import DESCRIPTION, EXAMPLE, PROGRAM
from trainer.observability.mlflow_sink import ensure_experiment
from trainer.observability.mlflow_sqlite import authorised, make_tables
from trainer.rundir import RESULT, TRACKING, RunDir
from trainer.runtime.packages import pinned
from trainer.runtime.scratch import scratch_folder
from trainer.secrets.azure_token import tracking_address

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

FOLDER = "model"
REGISTRATION = "registration.json"
REQUIREMENTS = ("mlflow", "numpy", "pandas", "torch")
"""The packages that `trainer.model.mlflow_program` imports."""
_RESULTS = ("world_size", "steps", "weights_sha256", "best_valid_loss", "checkpoint", "train_seconds")
"""Entries of ``result.json`` that are tags of a version."""
EXAMPLES = 3
"""Samples of the input example."""


class NotRegisteredError(ValueError):
    """A refusal of a script's model that cannot be registered. The message says why, and the remedy."""


@dataclass(frozen=True, slots=True)
class ProgramFiles:
    """The files of a program, and its samples."""

    description: Mapping[str, Any]
    inputs: NDArray[Any]
    """Some samples (n, …)."""
    outputs: NDArray[Any]
    """What the trained model said to them (n, columns)."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns of an answer."""
        count = self.outputs.shape[1]
        return ["prediction"] if count == 1 else [f"prediction_{number}" for number in range(1, count + 1)]


def read_example(description: Mapping[str, Any], example: bytes) -> ProgramFiles:
    """Return the samples that lie beside a program."""
    with np.load(io.BytesIO(example), allow_pickle=False) as found:
        return ProgramFiles(description, found["inputs"], found["outputs"])


def pack_program(
    files: Path, folder: Path, scratch: Path, found: ProgramFiles, metadata: Mapping[str, Any], run_id: str
) -> None:
    """Write the MLflow model of a program into ``folder``: with a signature, real samples as the example, and the code
    that loads it. ``files``: the folder of the program's own files. Nothing of it is loaded here."""
    import mlflow.pyfunc
    from mlflow.models import Model

    code = scratch / "packed" / "trainer"
    shutil.copytree(Path(trainer.__file__).parent, code, ignore=shutil.ignore_patterns("__pycache__"))
    mlflow.pyfunc.save_model(
        path=str(folder),
        python_model=str(code / "model" / "mlflow_program.py"),
        artifacts={"program": str(files)},
        code_paths=[str(code)],
        pip_requirements=pinned(REQUIREMENTS),
        signature=_signature(found),
        input_example=found.inputs[:EXAMPLES],
        metadata=dict(metadata),
        mlflow_model=Model(artifact_path=FOLDER, run_id=run_id),
    )


def register_here(job: JobConfig, rundir: RunDir) -> str:
    """Register the model of a training that ended well in this process, and return ``name version N``. Dollars and
    node-hours are not known here. Raise `NotRegisteredError` where there is no program or MLflow refuses."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    name, uri = job.tracking.registered_model, job.tracking.mlflow_tracking_uri
    assert name is not None
    assert uri is not None
    description = rundir.read_json(f"{FOLDER}/{DESCRIPTION}") or {}
    if "program_sha256" not in description:
        raise NotRegisteredError(description.get("error") or f"{rundir.uri}/{FOLDER}/{PROGRAM} is missing: train again")
    result = rundir.read_json(RESULT) or {}
    contents = {each: rundir.storage.read(f"{FOLDER}/{each}") for each in (PROGRAM, EXAMPLE, DESCRIPTION)}
    try:
        address = tracking_address(authorised(uri))
        make_tables(address)
        client = MlflowClient(tracking_uri=address, registry_uri=address)
        run_id = _run_of(client, job, rundir, address)
        with scratch_folder("register") as scratch:
            files, folder = scratch / "files", scratch / FOLDER
            files.mkdir()
            for each, content in contents.items():
                (files / each).write_bytes(content)
            found = read_example(description, contents[EXAMPLE])
            pack_program(files, folder, scratch, found, program_metadata(job), run_id)
            client.log_artifacts(run_id, str(folder), FOLDER)
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{client.get_run(run_id).info.artifact_uri}/{FOLDER}"
        made = client.create_model_version(name, source, run_id=run_id, tags=program_tags(job, rundir, result))
        client.set_registered_model_alias(name, "challenger", str(made.version))
    except (MlflowException, OSError) as error:
        raise NotRegisteredError(f"MLflow refused ({str(error).partition(chr(10))[0]})") from error
    rundir.write_json(REGISTRATION, {"name": name, "version": str(made.version), "alias": "challenger"})
    return f"{name} version {made.version}"


def program_metadata(job: JobConfig) -> dict[str, Any]:
    """Return the metadata of the model's ``MLmodel`` file. Pure."""
    return {"dataset_id": job.dataset.dataset_id, "script": job.dataset.uri.partition(":")[2], **job.model.args}


def program_tags(job: JobConfig, rundir: RunDir, result: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run directory says of its training, as tags of the version. Pure."""
    values = {
        "job_id": job.job_id,
        "run_dir": rundir.uri,
        "dataset_id": job.dataset.dataset_id,
        "script": job.dataset.uri.partition(":")[2],
        "model": job.model.args.get("class"),
        "loss": job.loss.args.get("class") or job.loss.args.get("name"),
        "test_loss": (result.get("test") or {}).get("loss"),
        **{name: result.get(name) for name in _RESULTS},
    }
    known = {name: value for name, value in values.items() if value is not None}
    return {name: f"{value:.6f}" if isinstance(value, float) else str(value) for name, value in known.items()}


def _run_of(client: Any, job: JobConfig, rundir: RunDir, address: str) -> str:
    """Return the MLflow run of the training, or a new one that is finished."""
    if run_id := (rundir.read_json(TRACKING) or {}).get("mlflow_run_id"):
        return str(run_id)
    experiment = ensure_experiment(client, job.tracking.mlflow_experiment, address)
    run_id = client.create_run(experiment, run_name=job.job_id, tags={"job_id": job.job_id}).info.run_id
    client.set_terminated(run_id)
    return str(run_id)


def _signature(found: ProgramFiles) -> ModelSignature:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    taken = TensorSpec(found.inputs.dtype, (-1, *found.inputs.shape[1:]))
    return ModelSignature(inputs=Schema([taken]), outputs=Schema([ColSpec("double", name) for name in found.columns]))
