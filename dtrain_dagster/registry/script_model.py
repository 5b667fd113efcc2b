"""The model of a script's run directory: a program of torch and some samples, checked against their digests.

Its class is in the script, so nothing of it is imported: the program is run in a process of its own
(`trainer.model.program`). What a dataset's model is belongs to `run_model`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.run_model import RunModelError, keep, read, refuse_change
from dtrain_dagster.registry.smoke_test import Sample
from trainer.config import JobConfig
from trainer.documents.arrays import ArraysError, read_arrays
from trainer.isolation.runner import Isolated, IsolationError
from trainer.rundir import RunDir
from trainer.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dtrain_dagster.registry.run_model import KeptFile
    from trainer.observability.program_registry import ProgramFiles

PROGRAM, EXAMPLE, DESCRIPTION = "program.pt2", "example.npz", "program.json"
_DIGESTS = {PROGRAM: "program_sha256", EXAMPLE: "example_sha256"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptModel:
    """A script's model that was read once, and checked."""

    job: JobConfig
    """The job as it was ordered."""
    description: bytes
    program: KeptFile
    example: bytes
    found: ProgramFiles
    digests: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """Write its files into a folder."""
        (folder / DESCRIPTION).write_bytes(self.description)
        (folder / EXAMPLE).write_bytes(self.example)
        self.program.write(folder / PROGRAM)

    def predict(self, samples: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
        """Return named columns (n,) for samples (n, …), from a process of its own. Raise `RunModelError` where it does
        not answer, or not with just that."""
        with scratch_folder("program") as folder:
            self.write(folder)
            try:
                return Isolated(folder=folder, kind="program").predict(samples)
            except IsolationError as error:
                raise RunModelError(f"{self.job.run_dir}: {error}") from error


def load_script_model(rundir: RunDir, order: Order | None) -> ScriptModel:
    """Return the model of a script's run directory, undamaged and unchanged since it was registered. Nothing of it is
    loaded. Raise `RunModelError` where there is none, with the reason that the nodes gave."""
    from trainer.observability.program_registry import ProgramFiles  # not above: MLflow

    if order is None:
        raise RunModelError(
            f"{rundir.uri}: no such job was ordered from this DTRAIN_HOME, so its program is not run: train from here"
        )
    text = read(rundir.storage, DESCRIPTION)
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunModelError(f"{rundir.uri}/model/{DESCRIPTION} is not JSON: {error}") from None
    if not isinstance(description, dict) or not isinstance(description.get("shape"), list):
        said = description.get("error") if isinstance(description, dict) else None
        raise RunModelError(f"{rundir.uri}: the model could not be exported ({str(said)[:500]}): train again")
    program, example = keep(rundir.storage, PROGRAM), read(rundir.storage, EXAMPLE)
    found = {_DIGESTS[PROGRAM]: program.sha256, _DIGESTS[EXAMPLE]: hashlib.sha256(example).hexdigest()}
    for name, digest in found.items():
        if description.get(name) != digest:
            raise RunModelError(
                f"{rundir.uri}/model: {name} is {digest[:12]}…, {DESCRIPTION} says {str(description.get(name))[:12]}…: "
                "it is damaged or was changed; do not use it, train again"
            )
    refuse_change(rundir.uri, found, order.registered)
    try:
        arrays = read_arrays(example, ("inputs", "outputs"))
    except ArraysError as error:
        raise RunModelError(f"{rundir.uri}/model/{EXAMPLE} {error}") from None
    inputs, outputs = arrays["inputs"], arrays["outputs"]
    fits = outputs.ndim == 2 and len(inputs) == len(outputs) > 0
    if not fits or [*inputs.shape[1:]] != description["shape"] or str(inputs.dtype) != description.get("dtype"):
        raise RunModelError(f"{rundir.uri}/model/{EXAMPLE} is not of the shape that {DESCRIPTION} says: train again")
    return ScriptModel(
        job=order.job,
        description=text,
        program=program,
        example=example,
        found=ProgramFiles(description, inputs, outputs),
        digests=found,
    )


def script_sample(own: ScriptModel) -> Sample:
    """Return the samples that lie beside the program, with the answers that a server must give."""
    import numpy as np

    found = own.found
    trained = dict(zip(found.columns, found.outputs.T, strict=True))
    known = {name: values for name, values in trained.items() if np.isfinite(values).all()}
    return Sample(windows=found.inputs, expected=own.predict(found.inputs), trained=known, takes_infinite=True)
