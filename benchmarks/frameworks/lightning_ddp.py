"""The loop of Lightning: its Trainer with DDP, «barebones», without everything that its documentation calls slow."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor

from benchmarks.frameworks.protocol import Case, Turns
from benchmarks.frameworks.workload import Workload


class Module(lightning.LightningModule):
    """The workload as a LightningModule."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.model, self.criterion = workload.module, workload.criterion

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the mean loss of a batch."""
        windows, target = batch
        return self.criterion(self.model(windows).float(), target).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that all frameworks use."""
        return self.workload.optimizer()


class InTurns(lightning.Callback):
    """A callback that lets a step begin only when it is the framework's turn."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> int | None:
        """Wait for the turn; return -1, which ends the epoch, when the case is over."""
        if self.turns.step():
            return None
        trainer.should_stop = True
        return -1  # the rest of the epoch is left out


def train(case: Case, turns: Turns) -> None:
    """Train the case in turns, until it is over."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    workload = Workload(case)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo", **case.ddp),
        barebones=True,
        max_epochs=-1,
        gradient_clip_val=case.clip_norm,
        callbacks=[InTurns(turns)],
    )
    assert trainer.world_size == case.ranks
    trainer.fit(Module(workload), workload.loader())
