"""Optimizer steps of small models, as a training does them."""

from __future__ import annotations

from typing import Any

from thread_worlds import ALONE, CPU
from torch import Tensor, nn

from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.engine.step import TrainingStep
from trainer.model.task import SupervisedTask
from trainer.runtime.fault_injection import Faults


class Squared(nn.Module):
    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - target) ** 2


def step_of(
    net: nn.Module, world: World = ALONE, loss: Any = None, faults: str = "[]", **settings: Any
) -> TrainingStep:
    """A step in this world; ``loss``: or a task."""
    task = loss if hasattr(loss, "loss") else SupervisedTask(loss or Squared())
    config = DistributedTrainingConfig(**settings)
    step = TrainingStep(net, task, config, CPU, Faults({"DTRAIN_FAULTS": faults}, 0))
    step.adopt(world)
    return step
