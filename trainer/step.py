"""One optimizer step: this rank's micro-batches, one all-reduce, agree that all is finite, clip, update (F2)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.sampler import MicroBatch, Sampler, micro_batch_seed
from trainer.shards import DataShardManager
from trainer.world import World

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class NonFiniteError(RuntimeError):
    """The loss or its gradient is not a finite number. The message names the step and the remedies."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global batch, on its way to the device."""

    samples: int
    """In the global batch, over all ranks."""
    micro_batches: tuple[tuple[int, Tensor, Tensor], ...]
    """(number, raw windows (b, W, F), targets (b,)) of this rank."""

    @property
    def local_samples(self) -> int:
        return sum(len(target) for _, _, target in self.micro_batches)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to. ``loss_sum`` is this rank's part: the sum of its samples' losses."""

    loss_sum: float
    grad_norm: float
    stop: bool
    """Some rank was asked to stop."""


class BatchLoader:
    """Gathers batches on a thread of its own, one step ahead of the step that computes.

    On a GPU the batch is copied from pinned memory without waiting.
    """

    def __init__(self, shards: DataShardManager, sampler: Sampler, world: World) -> None:
        self.shards, self.sampler, self.world = shards, sampler, world
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gather", initializer=self._choose_gpu)

    def batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """The batches of an epoch from ``first_step`` (within the epoch) on."""
        steps = range(first_step, self.sampler.steps_per_epoch)
        ahead: Future[Batch] | None = None
        for step in steps:
            ready = ahead.result() if ahead is not None else self._gather(epoch, step)
            ahead = self._pool.submit(self._gather, epoch, step + 1) if step + 1 in steps else None
            yield ready

    def close(self) -> None:
        self._pool.shutdown()

    def _choose_gpu(self) -> None:
        """The current GPU is each thread's own: without this, pinning would open a context on the first one."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)

    def _gather(self, epoch: int, step: int) -> Batch:
        samples, dealt = self.sampler.step(epoch, step)
        return Batch(samples, tuple(self._fetch(micro_batch) for micro_batch in dealt))

    def _fetch(self, micro_batch: MicroBatch) -> tuple[int, Tensor, Tensor]:
        rows = self.shards.end_rows("train", micro_batch.positions)
        windows, target = self.shards.gather(rows)
        if self.world.device.type == "cuda":
            windows, target = (tensor.pin_memory() for tensor in (windows, target))
        device = self.world.device
        return micro_batch.number, windows.to(device, non_blocking=True), target.to(device, non_blocking=True)


class Step:
    """Carries out optimizer steps on one model."""

    def __init__(self, model: nn.Module, criterion: nn.Module, config: DistributedTrainingConfig, world: World) -> None:
        if config.precision == "fp16" and world.device.type != "cuda":
            raise ConfigError("training.precision = 'fp16' needs a GPU; use 'bf16' or 'fp32' on the CPU")
        self.model, self.criterion, self.config, self.world = model, criterion, config, world
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.scaler = torch.amp.GradScaler(enabled=config.precision == "fp16")
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def __call__(self, batch: Batch, step: int, learning_rate: float, stop: bool) -> StepResult:
        """Train on one global batch. All ranks must call it for the same step.

        ``stop`` is this rank's wish to end; the result's ``stop`` is that of any rank, so that all end at one step.
        Raises `NonFiniteError` on all ranks, before the weights are touched, if any rank's loss or gradient is not.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # Not to zero: DDP scales a gradient that is new by 1/n and one that it knows by division, which is not the same
        # to the last bit, and a resumed process would differ from one that went on.
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = self._forward_backward(batch, step)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        limit = self.config.clip_norm if self.config.clip_norm is not None else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit, foreach=True)
        grad_norm = float(norm)
        # With a scaler an overflow is usual: the scaler leaves that step out and lowers its scale.
        finite = math.isfinite(loss_sum) and (math.isfinite(grad_norm) or self.scaler.is_enabled())
        broken, stop = self.world.any(not finite, stop)
        if broken:
            raise NonFiniteError(
                f"the loss or its gradient is not finite at step {step + 1} (learning rate {learning_rate:.3g}, "
                f"gradient norm {grad_norm:.3g}): lower training.learning_rate, raise training.warmup_steps, "
                "set training.clip_norm, or look for extreme values in the data; the last checkpoint is untouched"
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return StepResult(loss_sum, grad_norm, stop)

    def _forward_backward(self, batch: Batch, step: int) -> float:
        """Sum of this rank's losses; leaves the gradient of the *global* mean in the parameters, on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        last = len(batch.micro_batches) - 1
        kind = _AUTOCAST[self.config.precision]
        for index, (number, windows, target) in enumerate(batch.micro_batches):
            torch.manual_seed(micro_batch_seed(self.config.seed, step, number))
            wait = index < last and isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]
                with torch.autocast(self.world.device.type, dtype=kind, enabled=kind is not None):
                    outputs = self.model(windows)
                losses = self.criterion(outputs.float(), target)
                # DDP averages over ranks; times world size over the global count makes that the mean over samples.
                scaled = losses.sum() * (self.world.world_size / batch.samples)
                self.scaler.scale(scaled).backward()
            total += losses.detach().double().sum()
        return float(total)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def digest(parameters: Sequence[tuple[str, Tensor]]) -> str:
    """sha256 over names, shapes and bytes of tensors, in their order."""
    import hashlib

    result = hashlib.sha256()
    for name, tensor in parameters:
        flat = tensor.detach().cpu().contiguous()
        result.update(f"{name}{tuple(flat.shape)}{flat.dtype}".encode())
        result.update(flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return result.hexdigest()
