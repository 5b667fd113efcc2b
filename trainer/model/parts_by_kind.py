"""How a model and a loss are built for each kind of dataset that has a description (`trainer.spec`).

For those who build them without the data: a rehearsal, and a saved model. A rank builds them with its data, see
`trainer.engine.problem`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.config import FactoryConfig
from trainer.model.losses import build_loss
from trainer.model.rows import build_row_loss, build_row_model
from trainer.model.sizes import model_bytes, sample_bytes
from trainer.model.stock import build_model
from trainer.performance.memory import ModelBytes
from trainer.spec import ROWS, WINDOWS, DataSpec, RowSpec

QUICK_SECONDS = 8.0
"""What a pass may take so that two more are made to measure a sample: a rehearsal has a minute."""


@dataclass(frozen=True, slots=True)
class KindParts:
    """The parts of one kind."""

    spec: Any
    """The class of its description."""
    build_loss: Callable[[FactoryConfig, Any, tuple[str, ...] | None], nn.Module]
    build_model: Callable[[FactoryConfig, Any, int, tuple[str, ...] | None], nn.Module]
    target: Callable[[Any, Tensor], Tensor]
    """A target for a batch of inputs."""


def _mean_target(spec: DataSpec | RowSpec, inputs: Tensor) -> Tensor:
    return torch.full((len(inputs),), spec.target_mean, dtype=torch.float64)


PARTS: Mapping[str, KindParts] = {
    WINDOWS: KindParts(DataSpec, build_loss, build_model, lambda spec, x: _mean_target(spec, x).float()),
    ROWS: KindParts(
        RowSpec,
        build_row_loss,
        build_row_model,
        lambda spec, x: torch.zeros(len(x), dtype=torch.int64) if spec.classes else _mean_target(spec, x),
    ),
}


def training_step(
    kind: str, model: FactoryConfig, loss: FactoryConfig, spec: Any, inputs: NDArray[Any], modules: tuple[str, ...]
) -> tuple[Tensor, ModelBytes]:
    """Build the loss and the model as a rank does, do a pass forward and backward, and return the losses (B,) and the
    bytes of the model, with those of a sample where it does a pass quickly and can do one of half as many."""
    parts = PARTS[kind]
    criterion: Any = parts.build_loss(loss, spec, modules)
    module = parts.build_model(model, spec, int(criterion.outputs), modules)
    given = torch.from_numpy(np.array(inputs)).float()

    def run(samples: int) -> Tensor:
        some = given[:samples]
        losses: Tensor = criterion(module(some).float(), parts.target(spec, some))
        losses.sum().backward()
        return losses.detach()

    began = time.monotonic()
    losses = run(len(given))
    sample = None
    if time.monotonic() - began < QUICK_SECONDS:
        with suppress(Exception):  # such as of a layer that wants a batch of a certain size
            sample = sample_bytes(run, len(given) // 2, len(given))
    return losses, model_bytes(module, sample)


def count_bytes(
    kind: str, model: FactoryConfig, loss: FactoryConfig, spec: Any, modules: tuple[str, ...]
) -> ModelBytes:  # fmt: skip
    """Return the bytes of the model that a rank would build, which takes no memory here. What a factory raises where
    it cannot build without numbers is raised."""
    parts = PARTS[kind]
    criterion: Any = parts.build_loss(loss, spec, modules)
    with torch.device("meta"):
        module = parts.build_model(model, spec, int(criterion.outputs), modules)
    return model_bytes(module)
