"""The model of a run directory, of a dataset or a script, checked against its order, and run in a process of its own.

Nodes have written it: its description must be that of the order, its weights must be those that were registered, and no
code of it runs in this process (`trainer.isolation.runner`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dtrain_dagster.jobs.orders import MODEL_DIGESTS, Order, plain_order
from dtrain_dagster.support.user_code import stage_for_serving
from trainer.config import JobConfig
from trainer.data.manifest import DatasetError, describe, read_dataset_manifest
from trainer.documents.arrays import ArraysError, read_arrays
from trainer.documents.factory_arguments import is_correction
from trainer.errors import DamagedError
from trainer.isolation.runner import Isolated, IsolationError
from trainer.model.allowed_factories import STOCK, modules_of_settings, refuse_foreign_factories
from trainer.rundir import RunDir
from trainer.runtime.scratch import scratch_folder
from trainer.storage.open import open_storage
from trainer.storage.regular_files import too_large

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.observability.program_registry import ProgramFiles

DESCRIPTION, WEIGHTS = "model.json", "weights.pt"
FACTORIES = "factories.json"
"""The file beside a packed model that lists the modules its factories may come from (`trainer.model.mlflow_model`)."""
PROGRAM, EXAMPLE, FACTS = "program.pt2", "example.npz", "program.json"
"""The files of a script's model: a program of torch and some samples, with their digests."""
MOST_BYTES = {
    DESCRIPTION: 1 << 20,
    WEIGHTS: 16 << 30,
    FACTS: 1 << 20,
    EXAMPLE: 1 << 30,
    PROGRAM: 16 << 30,
}
ASK_SECONDS = 300.0
_FOLDER = "model"
_BLOCK = 1 << 20


class RunModelError(ValueError):
    """A refusal of a run directory's model that cannot be used. The message says which file, what is wrong, and the
    remedy."""


class KeptFile:
    """A nameless copy of a file, on disk, which no other process can change. It vanishes with this object."""

    def __init__(self, source: IO[bytes], where: str, most_bytes: int) -> None:
        """Copy ``source``. Raise `DamagedError` for more than ``most_bytes``, OSError where the disk is full."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __del__
        digest, size = hashlib.sha256(), 0
        while piece := source.read(_BLOCK):
            size += len(piece)
            if size > most_bytes:
                raise too_large(where, size, most_bytes)
            digest.update(piece)
            self._file.write(piece)
        self.sha256 = digest.hexdigest()

    def __del__(self) -> None:
        self._file.close()

    def read(self) -> bytes:
        """Return the content."""
        self._file.seek(0)
        return self._file.read()

    def write(self, path: Path) -> None:
        """Copy the content to ``path``."""
        self._file.seek(0)
        with open(path, "wb") as file:
            shutil.copyfileobj(self._file, file, _BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunModel:
    """A model, of a dataset or of a script, that was read once and checked."""

    job: JobConfig
    """The job as it was ordered; for a run directory that was never ordered here, its own record."""
    spec: Any
    """A `trainer.spec.DataSpec` or `RowSpec`; None of a script's model, which is a program: nothing of the script is
    imported (`trainer.model.program`)."""
    files: Mapping[str, KeptFile]
    """Its files by their names."""
    digests: Mapping[str, str]
    """The digests of those files by which it is known again."""
    found: ProgramFiles | None = None
    """Of a script: what its program is, and some samples with its answers."""

    def factories(self) -> tuple[str, str]:
        """Return the factories of the model and of the loss."""
        return self.job.model.factory, self.job.loss.factory

    def write(self, folder: Path) -> None:
        """Write its files into a folder; those of a dataset's with the list of modules for its factories."""
        for name, kept in self.files.items():
            kept.write(folder / name)
        if self.spec is not None:
            (folder / FACTORIES).write_text(json.dumps({"modules": list(_modules(self.job))}))

    def predict(self, samples: NDArray[Any], seconds: float = ASK_SECONDS) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for windows (n, window, features), rows (n, columns), or samples of a script, from
        a process of its own. Raise `RunModelError` where it does not answer, or not with just that."""
        with scratch_folder("model") as scratch:
            folder, code = scratch / "model", scratch / "code"
            folder.mkdir()
            code.mkdir()
            self.write(folder)
            model = Isolated(folder=folder, kind="program", seconds=seconds)
            if self.spec is not None:
                if is_own(self.job):
                    stage_for_serving(self.factories(), code)
                model = Isolated(folder=folder, modules=_modules(self.job), path=(code,), seconds=seconds)
            try:
                return model.predict(samples)
            except IsolationError as error:
                raise RunModelError(f"{self.job.run_dir}: {error}") from error


def _modules(job: JobConfig) -> tuple[str, ...]:
    """Return the modules that may be imported for a model or loss of the user's own; none for stock parts."""
    return modules_of_settings() if is_own(job) else ()


def is_own(job: JobConfig) -> bool:
    """Return whether the model or the loss is a user's own."""
    return job.model.factory not in STOCK["model"] or job.loss.factory not in STOCK["loss"]


def ordered_job(rundir: RunDir, order: Order | None) -> JobConfig:
    """Return the job of a run directory: as ordered, or, where it was never ordered from here, by its own record. Raise
    `RunModelError` for such a record that names other than stock parts."""
    if order is not None:
        refuse_foreign_factories(order.job)
        return order.job
    job = rundir.read_job()
    if is_own(job):
        raise RunModelError(
            f"{rundir.uri} names a model or loss of your own ({job.model.factory}, {job.loss.factory}), but no such "
            "job was ordered from this DTRAIN_HOME: nothing of it is imported; train it from here"
        )
    return job


def load_run_model(rundir: RunDir, order: Order | None = None) -> RunModel:
    """Return the model of a run directory, checked: of the ordered factories, arguments and data, undamaged, and
    unchanged since it was registered. Nothing of it is imported or unpickled. Raise `RunModelError` for a model that
    fails a check, and for a script's that there is none of, with the reason that the nodes gave."""
    job = ordered_job(rundir, order)
    model = _load_program(rundir, order) if job.is_of_script else _load_weights(rundir, job)
    refuse_change(rundir.uri, model.digests, order.registered if order else {})
    return model


def _load_weights(rundir: RunDir, job: JobConfig) -> RunModel:
    text, description = _read_description(rundir, DESCRIPTION)
    if job.dataset.factory is not None:
        raise RunModelError(
            f"{job.run_dir}: models of datasets of your own are neither registered nor served; use "
            f"{_FOLDER}/{WEIGHTS} of the run directory"
        )
    try:
        spec = describe(read_dataset_manifest(open_storage(job.dataset.uri), job.dataset.dataset_id))
    except DatasetError as error:
        raise RunModelError(str(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise RunModelError(f"{job.dataset.uri}/manifest.json is damaged: {error!r}") from None
    for name, part in (("model", job.model), ("loss", job.loss), ("spec", spec)):
        if description.get(name) != (wanted := plain_order(part)):
            raise RunModelError(
                f"{rundir.uri}/{_FOLDER}/{DESCRIPTION} says {name} = {_shown(description.get(name))}, but "
                f"{_shown(wanted)} was ordered: it was changed after the training, or written by another or an older "
                "version; it is not used. Train again, and check who can write there"
            )
    if not is_correction(description.get("correction", {})):
        raise RunModelError(
            f"{rundir.uri}/{_FOLDER}/{DESCRIPTION} says correction = {_shown(description['correction'])}, which is "
            "not a set of finite numbers; it is not used. Train again, and check who can write there"
        )
    weights = _keep_stated(rundir, WEIGHTS, description.get("file_sha256"), DESCRIPTION)
    return RunModel(
        job=job,
        spec=spec,
        files={DESCRIPTION: text, WEIGHTS: weights},
        digests=dict(zip(MODEL_DIGESTS, (text.sha256, weights.sha256), strict=True)),
    )


def _load_program(rundir: RunDir, order: Order | None) -> RunModel:
    from trainer.observability.program_registry import ProgramFiles  # not above: MLflow

    if order is None:
        raise RunModelError(
            f"{rundir.uri}: no such job was ordered from this DTRAIN_HOME, so its program is not run: train from here"
        )
    text, description = _read_description(rundir, FACTS)
    if not isinstance(description.get("shape"), list):
        said = str(description.get("error"))[:500]
        raise RunModelError(f"{rundir.uri}: the model could not be exported ({said}): train again")
    program = _keep_stated(rundir, PROGRAM, description.get("program_sha256"), FACTS)
    example = _keep_stated(rundir, EXAMPLE, description.get("example_sha256"), FACTS)
    try:
        arrays = read_arrays(example.read(), ("inputs", "outputs"))
    except ArraysError as error:
        raise RunModelError(f"{rundir.uri}/{_FOLDER}/{EXAMPLE} {error}") from None
    inputs, outputs = arrays["inputs"], arrays["outputs"]
    fits = outputs.ndim == 2 and len(inputs) == len(outputs) > 0
    if not fits or [*inputs.shape[1:]] != description["shape"] or str(inputs.dtype) != description.get("dtype"):
        raise RunModelError(f"{rundir.uri}/{_FOLDER}/{EXAMPLE} is not of the shape that {FACTS} says: train again")
    return RunModel(
        job=order.job,
        spec=None,
        files={FACTS: text, EXAMPLE: example, PROGRAM: program},
        digests={"program_sha256": program.sha256, "example_sha256": example.sha256},
        found=ProgramFiles(description, inputs, outputs),
    )


def refuse_change(where: str, found: Mapping[str, str], registered: Mapping[str, str]) -> None:
    """Raise `RunModelError` where files differ from the registered ones. Pure."""
    for name, digest in found.items():
        if name in registered and registered[name] != digest:
            raise RunModelError(
                f"{where}: {name} is {digest[:12]}…, but {registered[name][:12]}… was registered: the model was "
                "changed since; it is not used"
            )


def _keep(rundir: RunDir, name: str) -> KeptFile:
    """Return a file of the model. Raise `RunModelError` where it is missing or is no regular file."""
    path, storage = f"{_FOLDER}/{name}", rundir.storage
    try:
        with storage.open(path) as file:
            return KeptFile(file, f"{storage.uri}/{path}", MOST_BYTES[name])
    except DamagedError as error:  # a pipe, which would be waited for; a link to a device, which never ends
        raise RunModelError(f"{error.where}: {error.what}; the saved model is not used: train again") from None
    except FileNotFoundError:
        raise RunModelError(f"{storage.uri}/{path} is missing: the saved model is incomplete; train again") from None


def _keep_stated(rundir: RunDir, name: str, sha256: object, said_by: str) -> KeptFile:
    """Return a file of the model. Raise `RunModelError` as well where it has not the digest that another states."""
    kept = _keep(rundir, name)
    if sha256 != kept.sha256:
        raise RunModelError(
            f"{rundir.uri}/{_FOLDER}/{name} has sha256 {kept.sha256[:12]}…, {said_by} says {str(sha256)[:12]}…: it is "
            "damaged or was changed; do not use it, train again"
        )
    return kept


def _read_description(rundir: RunDir, name: str) -> tuple[KeptFile, dict[str, Any]]:
    """Return a file of JSON, and its content. Raise `RunModelError` where that is no object."""
    kept = _keep(rundir, name)
    try:
        description = json.loads(kept.read())
    except (ValueError, RecursionError) as error:
        raise RunModelError(f"{rundir.uri}/{_FOLDER}/{name} is not JSON: {error}") from None
    if not isinstance(description, dict):
        raise RunModelError(f"{rundir.uri}/{_FOLDER}/{name} holds a {type(description).__name__}, no object")
    return kept, description


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:199] + "…"
