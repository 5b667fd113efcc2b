"""A model registry: MLflow by default (`local`), an Azure ML workspace in production (`azure`).

What both do alike is here: one job becomes one version, the version is served and asked, and the champion is judged on
the same samples. Where versions are kept, and how an alias is given, is each registry's own.

MLflow's client and plain artifacts are used rather than ``mlflow.pyfunc.log_model``: that one needs the server's
logged-models API, which Azure ML's MLflow endpoint does not have, sets global state, and loads the model once more to
validate it, which the serving check does on a real server.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.endpoint import (
    EndpointCheck,
    Finding,
    ScoringEndpoint,
    ServingError,
    check_endpoint,
    scoring_server,
)
from dtrain_dagster.registry.promotion import AliasDecision, Comparison, compare
from dtrain_dagster.registry.smoke_test import SAME_WEIGHTS_TOLERANCE, AnswerError, Candidate
from dtrain_dagster.registry.versions import (
    CARD,
    MODEL_PATH,
    PACKED_TAG,
    PackedError,
    RegisteredModel,
    RegistryError,
    folder_digest,
    job_tags,
    open_client,
    read_succeeded,
    tracking_run,
)
from dtrain_dagster.support.secrets import redact
from dtrain_dagster.support.user_code import stage_for_serving
from trainer.rundir import EVALUATION, RESULT
from trainer.runtime.scratch import scratch_folder
from trainer.spec import DataSpec, RawColumn, RowSpec

if TYPE_CHECKING:
    from mlflow.models import ModelSignature


class Registry(ABC):
    """A registry that takes the run directory of a succeeded job to a version that serves, and to its alias."""

    @property
    @abstractmethod
    def tracking_uri(self) -> str:
        """The address to which trainings report, for ``tracking.mlflow_tracking_uri`` of a job."""

    @abstractmethod
    def try_out(self, model_name: str, experiment: str) -> None:
        """Try what registration will need, but for a version. Raise `RegistryError` where it would fail."""

    @abstractmethod
    def promote(self, model: RegisteredModel, decision: AliasDecision) -> str | None:
        """Give the version its alias, with the reason as a tag; return the former champion's version where this one
        takes its place, else None."""

    @abstractmethod
    def champion_version(self, model_name: str) -> str | None:
        """Return the champion's version, or None."""

    @abstractmethod
    def files(self, name: str, version: str) -> AbstractContextManager[Path]:
        """Return a context with the folder of a version's MLflow model, as the registry gives it out. Raise
        `PackedError` where the files are not those that were registered, `RegistryError` where there are none."""

    @abstractmethod
    def find(self, model_name: str, job_id: str, weights: str | None) -> RegisteredModel | None:
        """Return the first version of this job with these weights, or None."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of MLflow's server, for its client."""

    @abstractmethod
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
        """Make a version of the MLflow model in ``folder``; return it, or the older one of the same training where
        another process has made that at the same time."""

    def register_model(
        self,
        trained: Candidate,
        model_name: str,
        tags: Mapping[str, str],
        card: str,
        experiment: str = "dtrain",
    ) -> RegisteredModel:
        """Register the model of a succeeded job; return its version. Where the same weights of the job were registered
        before, or are at this moment (of two versions the older one stays), return that version.

        ``tags`` (node-hours, dollars, code version, Dagster run…) are added to those of the run directory, see
        `versions.job_tags`; ``card`` is the model card in Markdown. The version belongs to the MLflow run that the
        trainer reported to, or to a new one in ``experiment``.

        Everything up to the version can be repeated after a kill. Raise `RegistryError` if the job has no result or no
        model, or the service refuses.
        """
        rundir, job = trained.rundir, trained.job
        weights = (rundir.read_json(RESULT) or {}).get("weights_sha256")
        if (known := self.find(model_name, job.job_id, weights)) is not None:
            return known
        result, evaluation = read_succeeded(rundir)
        texts = {name: str(value) for name, value in tags.items()}
        all_tags = redact({**job_tags(rundir, result, evaluation, job), **trained.own.digests, **texts})
        run_id = tracking_run(open_client(self.address), rundir, self.address, experiment, job.job_id)
        with scratch_folder("register") as scratch:
            folder = scratch / MODEL_PATH
            save_pyfunc(trained, folder, scratch, run_id)
            (folder / CARD).write_text(redact(card))
            (folder / EVALUATION).write_text(json.dumps(evaluation, indent=2, sort_keys=True))
            all_tags[PACKED_TAG] = folder_digest(folder)
            return self.publish(model_name, run_id, folder, all_tags, redact(card), result, evaluation)

    @contextmanager
    def served(self, model: RegisteredModel) -> Iterator[ScoringEndpoint]:
        """Yield a scoring server of the version on this machine; see `endpoint.scoring_server`."""
        with self.files(model.name, model.version) as folder, scoring_server(folder) as endpoint:
            yield endpoint

    def check_serving(self, trained: Candidate, model: RegisteredModel) -> EndpointCheck:
        """Serve the version, as the registry gives it out, on this machine, and return `check_endpoint` of it. A server
        that does not start, and files that are not the registered ones, give a failed check, not an exception."""
        try:
            with self.served(model) as endpoint:
                return check_endpoint(endpoint, trained, SAME_WEIGHTS_TOLERANCE)
        except (ServingError, AnswerError, PackedError, RegistryError, OSError) as error:
            return EndpointCheck(url=model.uri, findings=(Finding(name="answers", passed=False, message=str(error)),))

    def judge_champion(self, trained: Candidate, model: RegisteredModel) -> Comparison | None:
        """Score the current champion on the test windows or rows of this version's job; return None if there is no
        champion, or it is this version. The champion answers with the code it was registered with, in a process of its
        own."""
        version = self.champion_version(model.name)
        if version is None or version == model.version:
            return None
        with ExitStack() as stack:
            own, its = (stack.enter_context(self.files(model.name, each)) for each in (model.version, version))
            return compare(trained, version, own, its)


def save_pyfunc(trained: Candidate, folder: Path, scratch: Path, run_id: str) -> None:
    """Write the MLflow model: `trainer/model/mlflow_model.py` as code, the job's two files as artifacts, real
    inputs as the example. Of a script, see `trainer.observability.program_registry.pack_program`."""
    own, files = trained.own, scratch / "files"
    files.mkdir()
    own.write(files)
    if own.found is not None:
        from trainer.observability.program_registry import pack_program, program_metadata

        pack_program(files, folder, scratch, own.found, program_metadata(own.job), run_id)
        return
    import mlflow.pyfunc
    from mlflow.models import Model

    import trainer

    sample = trained.sample
    (scratch / "code").mkdir()
    code = stage_for_serving(own.factories(), scratch / "code")
    mlflow.pyfunc.save_model(
        path=str(folder),
        python_model=str(Path(trainer.__file__).parent / "model" / "mlflow_model.py"),
        artifacts={"model": str(files)},
        code_paths=list(code.paths),
        pip_requirements=list(code.requirements),  # given, so that nothing is imported to find out
        signature=_signature(own.spec, sample.expected),
        input_example=sample.windows[:3],
        metadata=_metadata(own.spec, trained.data.manifest),
        mlflow_model=Model(artifact_path=MODEL_PATH, run_id=run_id),
    )


_TYPES = {"number": "double", "integer": "long", "string": "string", "datetime": "datetime"}
"""MLflow's names for the types of a table's columns."""


def _signature(spec: DataSpec | RowSpec, columns: Iterable[str]) -> ModelSignature:
    """Return the signature: named columns out; a tensor in, or the columns of a table by name."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    taken: list[Any]
    if isinstance(spec, RowSpec):
        taken = [ColSpec(_type_of(column), column.name, required=not column.missing) for column in spec.raw]
    else:
        taken = [TensorSpec(np.dtype("float32"), (-1, spec.window, len(spec.features)))]
    return ModelSignature(inputs=Schema(taken), outputs=Schema([ColSpec("double", name) for name in columns]))


def _type_of(column: RawColumn) -> Any:
    """Return MLflow's type of a column. A whole number that may be missing is a double, as pandas reads it. A boolean
    is any value, which the model checks itself: of a null in a request MLflow's server would make False."""
    from mlflow.types.schema import AnyType

    if column.type == "boolean":
        return AnyType()
    return "double" if column.missing and column.type == "integer" else _TYPES[column.type]


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
            "inputs": [asdict(column) for column in spec.raw],
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
