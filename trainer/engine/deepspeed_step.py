"""`ZeroStep`: an optimizer step whose gradients and optimizer are DeepSpeed's.

The module of the training is a whole on every rank where it is read: for evaluations, checkpoints and the end. With
stage 3, of which ranks hold parts, the weights of a copy are copied into it then
(`trainer.parallel.deepspeed_engine`). So a checkpoint is that of any other strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.group import is_communication_error, shorten_error
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch
from trainer.engine.out_of_memory import MicroBatchLimit
from trainer.engine.step import StepFlags, StepResult, TrainingStep, explain_non_finite
from trainer.model.blocks import checkpoint_activations
from trainer.model.task import Task
from trainer.parallel.deepspeed_engine import ZeroEngine, ZeroSynchronizer, form_default_group
from trainer.runtime.fault_injection import Faults


class ZeroStep(TrainingStep):
    """An optimizer step by DeepSpeed. It stays in the world that `adopt` gives it first."""

    is_divided, can_regroup = True, False

    def __init__(
        self, module: nn.Module, task: Task, config: DistributedTrainingConfig, device: torch.device, faults: Faults
    ) -> None:
        self._engine: ZeroEngine | None = None
        self._norm = math.nan
        super().__init__(module, task, config, device, faults)
        if scalars := [name for name, item in module.named_parameters() if not item.dim()]:
            raise ConfigError(
                f"training.strategy = 'deepspeed' cannot divide {', '.join(scalars)}, which has no dimension: make it "
                "a tensor of one element, or set training.strategy = 'ddp'"
            )

    def adopt(self, world: World) -> None:
        """Give the model and the state of the optimizer to DeepSpeed, with the ranks of this world."""
        if self._engine is not None:
            raise RuntimeError("DeepSpeed's ranks cannot change within a process")
        self.world = world
        with self._communicating():
            form_default_group(world, self.config.collective_timeout_seconds)
            self._engine = ZeroEngine(self.module, self.config, world.rank, world.world_size, self.device)
        self._engine.set_moments(self.optimizer.state_dict()["state"])
        self.optimizer.state.clear()
        self.model = self._engine.model
        self.sync = ZeroSynchronizer(world, self._engine, self.faults, self.timer)

    def __call__(self, batch: Batch, step: int, learning_rate: float, flags: StepFlags) -> StepResult:
        """Train on one global batch, as `TrainingStep` does. Where a gradient is not finite, DeepSpeed has left the
        weights as they were."""
        engine = self._require_engine()
        engine.set_learning_rate(learning_rate)
        engine.model.train()
        result = super().__call__(batch, step, learning_rate, flags)
        if not math.isfinite(self._norm):
            raise explain_non_finite(step, learning_rate, self._norm)
        return replace(result, grad_norm=self._norm)

    def update(self) -> None:
        """Clip the gradient and update the weights of a step that is committed. A collective."""
        with self._communicating():
            self._norm = self._require_engine().update()

    def take_whole(self) -> None:
        """Copy the present weights into the module, on every rank. A collective."""
        if self._engine is not None:
            with self._communicating():
                self._engine.take_weights(self.module)

    def apply_limit(self, fit: MicroBatchLimit) -> None:
        """Limit the samples that go through the model at once."""
        was_checkpointed = self._is_checkpointed
        super().apply_limit(fit)
        is_copy = self._engine is not None and self._engine.module is not self.module
        if is_copy and self._is_checkpointed and not was_checkpointed:
            checkpoint_activations(self._require_engine().module)

    def release(self) -> None:
        """Leave the model as any other."""
        super().release()
        if self._engine is not None:
            self._engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, as `TrainingStep` has it. A collective."""
        state = super().state_dict()
        if self._engine is not None:
            with self._communicating():
                state["optimizer"]["state"] = self._engine.moments()
        return state

    def _backward(self, loss: Tensor, share: Tensor) -> None:
        self._require_engine().backward(loss * share)

    def _clip(self, losses: list[Tensor]) -> tuple[float, float]:
        """Return the sum of the losses; the norm is known after the update, which clips."""
        return sum(loss.item() for loss in losses), 0.0

    def _require_engine(self) -> ZeroEngine:
        if self._engine is None:
            raise RuntimeError("no world was entered yet")
        return self._engine

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Let failures of DeepSpeed's communication fail the group of the world."""
        try:
            yield
        except Exception as error:
            peers = self.world.group
            if peers is None or not is_communication_error(error):
                raise
            peers.fail(shorten_error(error))
            assert peers.error is not None
            raise peers.error from error
