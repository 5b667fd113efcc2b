"""The code that runs on the nodes: a data-parallel trainer that knows a run directory, but neither Dagster nor clusters
nor dollars. Of clouds it knows how their storage, secrets and MLflow servers are reached.

Each package's docstring says what belongs in it. This one itself holds what belongs to none: the entry points
(`__main__`, `run`, `fit`, `loop`), the public names for a user's own parts (`losses`, `task`, `spec`), and the contract
with the orchestrator (`config`, `errors`, `exit_codes`, `rundir`). Importing a package is cheap: torch is imported by
the modules that compute, never by the contract, `documents`, `secrets` or `storage`, which the orchestrator reads too.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

# Before any module imports MLflow, which reads it then: a training tells nobody's makers that it runs.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

_HOMES = {
    **dict.fromkeys(("DistributedConfig", "FitResult", "Trainer", "TrainingFailedError"), "trainer.fit"),
    "Loop": "trainer.loop",
    **dict.fromkeys(("HorovodTrainer", "PyTorchDDPTrainer"), "trainer.adapters.torch_trainers"),
    **dict.fromkeys(("Callback", "Run"), "trainer.engine.callbacks"),
    "Stream": "trainer.data.stream",
    "RayTrainer": "trainer.adapters.ray_trainer",
    "TensorFlowDistributedTrainer": "trainer.adapters.keras_trainer",
}
"""The public names, and the modules that they are of."""
__all__ = [
    "Callback",
    "DistributedConfig",
    "FitResult",
    "HorovodTrainer",
    "Loop",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "Run",
    "Stream",
    "TensorFlowDistributedTrainer",
    "Trainer",
    "TrainingFailedError",
    "__version__",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a public name, whose module imports torch: only where it is asked for. A serving image has no such module,
    so none of its imports may lead there."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
