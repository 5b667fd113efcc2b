"""What a caller's model, loss and data are held against before anything is trained: tried on the first samples.

A mistake is told here with its remedy, on the machine of its author. What a task is belongs to `trainer.model.task`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer.config import ConfigError
from trainer.data.batches import move_to
from trainer.data.training_data import TrainingData
from trainer.model.task import SupervisedTask, Task, per_sample

RESERVED = ("loss", "samples")
"""Names of figures in reports that no metric may have."""
_TRIED = 2
"""Samples on which a task is tried."""
_log = logging.getLogger(__name__)


def check_model(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that cannot be trained: wrapped by torch already, or without parameters to
    train."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ConfigError(
            f"the model is wrapped in {type(model).__name__}: give the module itself (model.module); gradients are "
            "summed over ranks by the trainer"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no parameter that needs a gradient, so there is nothing to train: leave some "
            "of them unfrozen (requires_grad)"
        )


def check_task(task: Task) -> None:
    """Raise `ConfigError` for a task that has parameters of its own to train, which no optimizer would know."""
    for part in (task, *([task.criterion] if isinstance(task, SupervisedTask) else [])):
        if isinstance(part, nn.Module) and any(parameter.requires_grad for parameter in part.parameters()):
            raise ConfigError(
                f"{type(part).__name__} has parameters of its own, which would not be trained: make them a part of the "
                "model, or freeze them (requires_grad_(False))"
            )


def try_task(model: nn.Module, task: Task, data: TrainingData) -> None:
    """Try the task on the first samples, without gradients. Raise `ConfigError` for a loss or a metric that is not one
    figure per sample; errors of the caller's own code are raised as they are."""
    positions = _first_positions(data)
    with _trial_of(model) as device:
        batch = data.read("train", positions, device)
        per_sample(task.loss(model, batch), len(positions), "the loss")
        metrics = getattr(task, "metrics", None)
        found: Mapping[str, Any] = metrics(model, batch) if metrics is not None else {}
        for name, values in found.items():
            if name in RESERVED:
                raise ConfigError(f"a metric is named {name!r}, as a figure of every report is: give it another name")
            per_sample(values, len(positions), f"the metric {name!r}")


def choose_usual_loss(model: nn.Module, data: TrainingData) -> nn.Module:
    """Return the usual loss for the targets of the first samples. Raise `ConfigError` where none is usual."""
    remedy = "give Trainer(…, loss=…), such as torch.nn.CrossEntropyLoss(), or a task for batches of another structure"
    with _trial_of(model) as device:
        batch = data.read("train", _first_positions(data), torch.device("cpu"))
        if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise ConfigError(f"batches are no pairs (inputs, target), so there is no usual loss for them: {remedy}")
        target = batch[1]
        outputs = model(move_to(batch[0], device))
    if isinstance(outputs, Tensor) and not target.is_floating_point() and outputs.dim() == target.dim() + 1:
        _log.info("the loss is the cross entropy: targets are classes")
        return nn.CrossEntropyLoss(reduction="none")
    if isinstance(outputs, Tensor) and target.is_floating_point() and outputs.shape == target.shape:
        _log.info("the loss is the squared error: targets are numbers")
        return nn.MSELoss(reduction="none")
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ConfigError(
        f"no loss is usual for outputs of {shape} and targets of {tuple(target.shape)}, {target.dtype}: {remedy}"
    )


@contextmanager
def _trial_of(model: nn.Module) -> Iterator[torch.device]:
    """Let the model be tried in the block, without gradients and as in an evaluation; yield its device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    finally:
        model.train(was_training)


def _first_positions(data: TrainingData) -> NDArray[np.int64]:
    return np.arange(min(_TRIED, data.count("train")), dtype=np.int64)
