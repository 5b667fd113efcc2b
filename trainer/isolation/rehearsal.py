"""A rehearsal: before nodes are bought, a model and a loss are built in a process of their own and do a training step.

What a training's own data and nodes do is not seen here; a probe on the cluster shows that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.isolation.child import UNSURE
from trainer.isolation.runner import Isolated, IsolationError
from trainer.performance.memory import ModelBytes
from trainer.runtime.scratch import scratch_folder
from trainer.spec import ROWS, TOKENS, WINDOWS, DataSpec, RowSpec, TokenSpec

SAMPLES = 8
"""Samples of the step."""
SECONDS = 60.0
"""Seconds after which a rehearsal is given up without a verdict."""
_GIVEN_UP = ("the model took longer", "it was killed", "too much processor time")


class RehearsalError(ValueError):
    """A model or a loss that no rank could train. The message names the field and the remedy."""


class UnsureRehearsalError(RuntimeError):
    """A rehearsal that failed for a reason which nodes need not share: memory, files, networks, packages, time."""

    model: ModelBytes | None = None
    """The bytes of the model, where they could be counted nevertheless."""


def rehearse(
    model: Mapping[str, Any],
    loss: Mapping[str, Any],
    spec: DataSpec | RowSpec | TokenSpec,
    modules: tuple[str, ...] = (),
    path: Sequence[Path] = (),
) -> ModelBytes:
    """Build the loss and the model, do one training step on random samples of the dataset's scale, and return the bytes
    of the model.

    ``model``, ``loss``: the sections of ``job.json``. ``modules``: those that their factories may be of; ``path``: the
    folders in which they are found. Raise `RehearsalError` where the training could not work on any node, and
    `UnsureRehearsalError` where that cannot be said from here.
    """
    kind, inputs = random_inputs(spec)
    document = {"kind": kind, "model": dict(model), "loss": dict(loss), "spec": asdict(spec)}
    try:
        return _ask("rehearsal", document, inputs, modules, path)
    except IsolationError as error:
        said = str(error).removeprefix("the model could not be called: ")
        if said.startswith(UNSURE) or any(words in said for words in _GIVEN_UP):
            unsure = UnsureRehearsalError(said)
            with suppress(IsolationError):
                unsure.model = _ask("count", document, inputs, modules, path)
            raise unsure from None
        name, _, rest = said.partition("ConfigError: ")
        raise RehearsalError(rest if rest and not name else f"one training step of this model failed: {said}") from None


def _ask(
    kind: Literal["rehearsal", "count"],
    document: Mapping[str, Any],
    inputs: NDArray[np.float32],
    modules: tuple[str, ...],
    path: Sequence[Path],
) -> ModelBytes:
    with scratch_folder("rehearsal") as folder:
        (folder / "rehearsal.json").write_text(json.dumps(document))
        isolated = Isolated(folder=folder, kind=kind, modules=modules, path=tuple(path), seconds=SECONDS)
        answers = isolated.predict(inputs)
    figures = {name: max(0.0, float(values[0])) for name, values in answers.items()}
    whole = {name: int(figures.get(name, 0)) for name in ("parameters", "trained", "block", "rest")}
    return ModelBytes(**whole, sample=figures.get("sample"))


def random_inputs(spec: DataSpec | RowSpec | TokenSpec) -> tuple[str, NDArray[np.float32]]:
    """Return the kind of data, and the inputs of `SAMPLES` random samples of the dataset's scale; ids as numbers that
    are whole. Pure."""
    random = np.random.default_rng(0)
    if isinstance(spec, TokenSpec):
        return TOKENS, random.integers(0, spec.vocabulary, (SAMPLES, spec.context)).astype(np.float32)
    if isinstance(spec, DataSpec):
        mean, scale = (np.asarray(figures, dtype=np.float32) for figures in (spec.feature_mean, spec.feature_std))
        noise = random.standard_normal((SAMPLES, spec.window, len(spec.features)), dtype=np.float32)
        return WINDOWS, mean + scale * noise
    rows = random.standard_normal((SAMPLES, len(spec.features)), dtype=np.float32)  # as they are stored
    for place, values in enumerate(spec.categories):
        if values:
            rows[:, place] = random.integers(0, len(values) + 1, SAMPLES)
    return ROWS, rows
