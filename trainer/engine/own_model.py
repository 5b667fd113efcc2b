"""`OwnModel`: a caller's own model, trained data-parallel from a script, without the machinery of a job.

Summing gradients, and a plain epoch over pairs of inputs and targets, belong here. A job's own training, which survives
lost nodes and writes checkpoints, is `trainer.engine.session` and `trainer.engine.trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.comm.world import World
from trainer.config import ConfigError, JobConfig
from trainer.data.shards import DataShardManager
from trainer.engine.lr_schedule import peak_learning_rate
from trainer.engine.precision import AUTOCAST, refuse_precision, tf32_products
from trainer.engine.problem import refuse_without_script
from trainer.engine.step_result import NonFiniteError
from trainer.model.build import build_loss
from trainer.model.compile import compiled
from trainer.parallel.synchronizer import GradientSynchronizer
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer


class OwnModel:
    """A model whose gradients are summed over ranks in each backward pass through its outputs; in a world of one it is
    left unchanged. Every rank begins with the weights and buffers of rank 0."""

    def __init__(self, module: nn.Module, job: JobConfig, world: World, faults: Faults) -> None:
        """Share the weights of rank 0 and wrap the module; a collective."""
        self.job, self.config, self.world, self.device = job, job.training, world, world.device
        if self.config.strategy != "ddp":
            raise ConfigError(
                f"training.strategy = {self.config.strategy!r} is for a job's own training: set it to 'ddp' for a loop "
                "of your own, or train with trainer.Trainer(…).fit"
            )
        self.module = module.to(self.device)
        self.model = cast(nn.Module, compiled(self.module, self.config.compile, self.device))
        """The callable model: the module, or its compiled form."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self._take_from_first(tensor.detach())
        timer = StepTimer(False, self.device)  # its marks would never be collected
        config = replace(self.config, timing=False)
        self._sync = GradientSynchronizer(world, faults, timer, config=config)
        self._sync.wrap(self.module)
        self._sync.sum_each_pass(self.model, self.module)
        self._optimizer: torch.optim.Optimizer | None = None
        self._criterion: nn.Module | None = None

    def train_epoch(self, dataloader: Iterable[Any]) -> dict[str, float]:
        """Train on pairs (inputs, target) of this rank, of which all ranks must have equally many, with the job's loss,
        clipping, precision and peak learning rate, which stays constant. Return ``loss_sum`` and ``samples`` of this
        rank. Raise `NonFiniteError` on all ranks before a gradient that is not finite touches the weights."""
        optimizer, criterion = self._prepare()
        self.module.train()
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        limit, totals = self.config.clip_norm, {"loss_sum": 0.0, "samples": 0.0}
        for inputs, target in dataloader:
            windows, wanted = inputs.to(self.device), target.to(self.device)
            samples = self.world.all_reduce(torch.tensor([len(wanted)])).item()
            optimizer.zero_grad()
            with tf32_products() if self.config.precision == "tf32" else nullcontext():
                losses = criterion(self._forward(windows).float(), wanted).sum()
                (losses / samples).backward()  # summed over ranks: the gradient of the mean over the global batch
            norm = nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
            if not math.isfinite(norm.item()):
                raise NonFiniteError("the gradient is not finite: lower training.learning_rate, or set clip_norm")
            optimizer.step()
            totals["loss_sum"] += losses.item()
            totals["samples"] += len(wanted)
        return totals

    def _forward(self, inputs: Tensor) -> Any:
        kind = AUTOCAST[self.config.precision]
        if kind is None:
            return self.model(inputs)
        with torch.autocast(self.device.type, dtype=kind):
            return self.model(inputs)

    def _prepare(self) -> tuple[torch.optim.Optimizer, nn.Module]:
        """Return the optimizer and the loss of the job, made once: a caller's own loop needs neither, nor the dataset
        whose description the loss is made for. Raise `ConfigError` for a precision that only a job's own training
        has."""
        if self._optimizer is None or self._criterion is None:
            if self.config.precision == "fp16":
                raise ConfigError(
                    "training.precision = 'fp16' needs a scaled loss, as a job's own training has it: use 'bf16' or "
                    "'fp32' with train_epoch, or write the loop yourself"
                )
            refuse_precision(self.config.precision, self.device)
            refuse_without_script(self.job)
            shards = DataShardManager(self.job.dataset.uri, expected_id=self.job.dataset.dataset_id)
            self._criterion = build_loss(self.job.loss, shards.spec).to(self.device)
            self._optimizer = torch.optim.AdamW(
                self.module.parameters(),
                lr=peak_learning_rate(self.config),
                weight_decay=self.config.weight_decay,
                fused=True,
            )
        return self._optimizer, self._criterion

    def _take_from_first(self, tensor: Tensor) -> None:
        if tensor.is_contiguous():
            self.world.broadcast(tensor)
            return
        copy = tensor.contiguous()
        self.world.broadcast(copy)
        tensor.copy_(copy)
