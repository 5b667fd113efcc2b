"""The files of a trained Keras model in a run directory: its weights as Keras writes them, and what they are of.

model/model.weights.h5   for ``keras.Model.load_weights``
model/model.json         the class of the model, its layers as Keras' JSON where they can be, and the file's sha256
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import JobConfig
from trainer.errors import DamagedError
from trainer.rundir import MODEL, RunDir

WEIGHTS = "model/model.weights.h5"


def write_model(rundir: RunDir, model: Any, job: JobConfig, weights_sha256: str) -> None:
    """Write the model's weights and their description."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        model.save_weights(path)
        data = path.read_bytes()
    rundir.storage.write(WEIGHTS, data)
    try:
        layers = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):  # of a class that does not say how it is made
        layers = None
    description = {
        "model": asdict(job.model), "loss": asdict(job.loss), "keras": layers, "weights_sha256": weights_sha256,
        "file_sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    rundir.write_json(MODEL, description)


def load_weights(rundir: RunDir, model: Any) -> None:
    """Load the weights of a run directory into a model that is made as it was. Raise `DamagedError` where they are not
    those of their description."""
    data, described = rundir.storage.read(WEIGHTS), rundir.read_json(MODEL) or {}
    if hashlib.sha256(data).hexdigest() != described.get("file_sha256"):
        raise DamagedError(f"{rundir.uri}/{WEIGHTS}", "it does not match its description")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        path.write_bytes(data)
        model.load_weights(path)
