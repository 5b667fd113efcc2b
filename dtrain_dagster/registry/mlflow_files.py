"""The MLflow model that is packed of a run directory's model: its code, files, signature, example and metadata.

MLflow's client and plain artifacts are used rather than ``mlflow.pyfunc.log_model``: that one needs the server's
logged-models API, which Azure ML's MLflow endpoint does not have, sets global state, and loads the model once more to
validate it, which the serving check does on a real server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.run_model import RunModel
from dtrain_dagster.registry.script_model import ScriptModel
from dtrain_dagster.registry.smoke_test import as_registered, inputs_at, open_data
from dtrain_dagster.registry.versions import MODEL_PATH
from dtrain_dagster.support.user_code import stage_for_serving
from trainer.spec import DataSpec, RawColumn, RowSpec

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from numpy.typing import NDArray


def save_pyfunc(own: RunModel | ScriptModel, folder: Path, scratch: Path, run_id: str, cache_dir: str | None) -> None:
    """Write the MLflow model: `trainer/model/mlflow_model.py` as code, the job's two files as artifacts, real
    inputs as the example. Of a script, see `trainer.observability.program_registry.pack_program`."""
    if isinstance(own, ScriptModel):
        _save_program(own, folder, scratch, run_id)
        return
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
        signature=_signature(own.spec, inputs, own.predict(inputs)),
        input_example=as_registered(own.spec, inputs),
        metadata=_metadata(own.spec, data.manifest),
        mlflow_model=Model(artifact_path=MODEL_PATH, run_id=run_id),
    )


def _save_program(own: ScriptModel, folder: Path, scratch: Path, run_id: str) -> None:
    from trainer.observability.program_registry import pack_program, program_metadata

    files = scratch / "files"
    files.mkdir()
    own.write(files)
    pack_program(files, folder, scratch, own.found, program_metadata(own.job), run_id)


_TYPES = {"number": "double", "integer": "long", "string": "string", "datetime": "datetime"}
"""MLflow's names for the types of a table's columns."""


def _signature(spec: DataSpec | RowSpec, inputs: NDArray[Any], columns: Iterable[str]) -> ModelSignature:
    """Return the signature: named columns out; a tensor in, or the columns of a table by name."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    taken: list[Any] = [TensorSpec(inputs.dtype, (-1, *inputs.shape[1:]))]
    if isinstance(spec, RowSpec) and spec.raw:
        taken = [ColSpec(_type_of(column), column.name, required=not column.missing) for column in spec.raw]
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
