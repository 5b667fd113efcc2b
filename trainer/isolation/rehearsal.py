"""A rehearsal: before nodes are bought, a model and a loss are built in a process of their own and do a training step.

What a training's own data and nodes do is not seen here; a probe on the cluster shows that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trainer.isolation.child import UNSURE
from trainer.isolation.runner import Isolated, IsolationError
from trainer.runtime.scratch import scratch_folder
from trainer.spec import DataSpec

WINDOWS = 8
"""Samples of the step."""
SECONDS = 60.0
"""Seconds after which a rehearsal is given up without a verdict."""
_GIVEN_UP = ("the model took longer", "it was killed", "too much processor time")


class RehearsalError(ValueError):
    """A model or a loss that no rank could train. The message names the field and the remedy."""


class UnsureRehearsalError(RuntimeError):
    """A rehearsal that failed for a reason which nodes need not share: memory, files, networks, packages, time."""


def rehearse(
    model: Mapping[str, Any],
    loss: Mapping[str, Any],
    spec: DataSpec,
    modules: tuple[str, ...] = (),
    path: Sequence[Path] = (),
) -> None:
    """Build the loss and the model, and do one training step on random samples of the dataset's scale.

    ``model``, ``loss``: the sections of ``job.json``. ``modules``: those that their factories may be of; ``path``: the
    folders in which they are found. Raise `RehearsalError` where the training could not work on any node, and
    `UnsureRehearsalError` where that cannot be said from here.
    """
    scale = np.asarray(spec.feature_std, dtype=np.float32)
    noise = np.random.default_rng(0).standard_normal((WINDOWS, spec.window, len(spec.features)), dtype=np.float32)
    windows = np.asarray(spec.feature_mean, dtype=np.float32) + scale * noise
    with scratch_folder("rehearsal") as folder:
        document = {"model": dict(model), "loss": dict(loss), "spec": asdict(spec)}
        (folder / "rehearsal.json").write_text(json.dumps(document))
        isolated = Isolated(folder=folder, kind="rehearsal", modules=modules, path=tuple(path), seconds=SECONDS)
        try:
            isolated.predict(windows)
        except IsolationError as error:
            said = str(error).removeprefix("the model could not be asked: ")
            if said.startswith(UNSURE) or any(words in said for words in _GIVEN_UP):
                raise UnsureRehearsalError(said) from None
            name, _, rest = said.partition("ConfigError: ")
            raise RehearsalError(
                rest if rest and not name else f"one training step of this model failed: {said}"
            ) from None
