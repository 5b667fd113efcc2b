"""One optimizer step: this rank's micro-batches, one all-reduce, agree that all is finite, clip, update (F2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.consumed import digest as digest_of
from trainer.faults import Faults
from trainer.group import in_short, is_communication
from trainer.memory import Fit, checkpoint_activations, chunks
from trainer.sampler import MicroBatch, Sampler, micro_batch_seed
from trainer.shards import DataShardManager
from trainer.sync import GradientSynchronizer
from trainer.timing import StepTimer
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
    digest: int
    """Of this rank's samples, see `trainer.consumed`."""

    @property
    def local_samples(self) -> int:
        return sum(len(target) for _, _, target in self.micro_batches)


@dataclass(frozen=True, slots=True)
class Votes:
    """What ranks tell each other when they commit a step: one small all-reduce. Counts over ranks."""

    leaving: int = 0
    """Ranks that were asked to end (SIGTERM)."""
    regroup: int = 0
    """Ranks that want another generation after this step."""
    cut_off: int = 0
    """Ranks that do not reach all others."""
    budget: int = 0
    """Ranks that see the budget spent; rank 0 looks."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to. ``loss_sum`` is this rank's part: the sum of its samples' losses."""

    loss_sum: float
    grad_norm: float
    votes: Votes
    digest: int
    """Of all samples of the global batch, see `trainer.consumed`."""


class BatchLoader:
    """Gathers batches on a thread of its own, one step ahead of the step that computes.

    On a GPU the batch is copied from pinned memory without waiting.
    """

    def __init__(
        self, shards: DataShardManager, sampler: Sampler, world: World, faults: Faults, timer: StepTimer
    ) -> None:  # fmt: skip
        self.shards, self.sampler, self.world, self.faults, self.timer = shards, sampler, world, faults, timer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gather", initializer=self._choose_gpu)

    def batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """The batches of an epoch from ``first_step`` (within the epoch) on."""
        steps = range(first_step, self.sampler.steps_per_epoch)
        ahead: Future[Batch] | None = None
        for step in steps:
            self.timer.mark("other")
            self.faults.reach("input", epoch * self.sampler.steps_per_epoch + step)
            ready = ahead.result() if ahead is not None else self._gather(epoch, step, is_first=True)
            ahead = self._pool.submit(self._gather, epoch, step + 1) if step + 1 in steps else None
            yield ready

    def close(self) -> None:
        self._pool.shutdown()

    def _choose_gpu(self) -> None:
        """The current GPU is each thread's own: without this, pinning would open a context on the first one."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)

    def _gather(self, epoch: int, step: int, is_first: bool = False) -> Batch:
        for first, last in self.sampler.ahead(epoch, step, is_first):
            self.shards.will_need("train", first, last)
        samples, dealt = self.sampler.step(epoch, step)
        used = digest_of(np.concatenate([micro_batch.positions for micro_batch in dealt]))
        return Batch(samples, tuple(self._fetch(micro_batch) for micro_batch in dealt), used)

    def _fetch(self, micro_batch: MicroBatch) -> tuple[int, Tensor, Tensor]:
        rows = self.shards.end_rows("train", micro_batch.positions)
        windows, target = self.shards.gather(rows)
        if self.world.device.type == "cuda":
            windows, target = (tensor.pin_memory() for tensor in (windows, target))
        device = self.world.device
        return micro_batch.number, windows.to(device, non_blocking=True), target.to(device, non_blocking=True)


class Step:
    """Carries out optimizer steps on one model. `adopt` gives it a world, and a new one after each regroup."""

    def __init__(
        self, module: nn.Module, criterion: nn.Module, config: DistributedTrainingConfig, device: torch.device,
        faults: Faults,
    ) -> None:  # fmt: skip
        if config.precision == "fp16" and device.type != "cuda":
            raise ConfigError("training.precision = 'fp16' needs a GPU; use 'bf16' or 'fp32' on the CPU")
        self.module, self.criterion, self.config, self.device, self.faults = module, criterion, config, device, faults
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.scaler = torch.amp.GradScaler(enabled=config.precision == "fp16")
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.fit = Fit(config.batch_size_per_gpu, False)
        self.timer = StepTimer(config.timing, device)

    def adopt(self, world: World) -> None:
        """Work in this world from now on; waits for its group. All state must be equal on all its ranks already."""
        self.optimizer.zero_grad(set_to_none=True)  # the old ones are views into the buckets of the old group
        self.world = world
        self.sync = GradientSynchronizer(world, self.faults, self.timer)
        self.model = self.sync.wrap(self.module)

    def limit(self, fit: Fit) -> None:
        """Let no more samples through the model at once than this (D4)."""
        self.fit = fit
        if fit.activation_checkpointing:
            checkpoint_activations(self.module)

    def __call__(self, batch: Batch, step: int, learning_rate: float, votes: Votes) -> StepResult:
        """Train on one global batch. All ranks must call it for the same step; it is done on all or on none of those
        that return.

        Raises `NonFiniteError` on all ranks, before the weights are touched, if any rank's loss or gradient is not;
        `trainer.group.GroupError` where communication fails, and what the model raises: the step is not done then,
        and can be done again.
        """
        self.timer.mark("input")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        self.sync.step = step
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        try:
            loss_sum = self._forward_backward(batch, step)
            self.sync.finish(self.model)
            if self.scaler.is_enabled():
                self.scaler.unscale_(self.optimizer)
            limit = self.config.clip_norm if self.config.clip_norm is not None else math.inf
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit, foreach=True)
            grad_norm = float(norm)
            # With a scaler an overflow is usual: the scaler leaves that step out and lowers its scale.
            finite = math.isfinite(loss_sum) and (math.isfinite(grad_norm) or self.scaler.is_enabled())
            self.timer.mark("optimizer")
            result = self._agree(batch, votes, not finite, loss_sum, grad_norm)
            self.timer.mark("exposed")
        except BaseException as error:
            peers = self.world.group
            if peers is not None and is_communication(error):  # DDP has a group of its own for what it says
                peers.fail(in_short(error))  # before all that a broken GPU may refuse
            for buffer, before in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(before)  # running statistics must not count a step twice
            self.timer.drop()
            if peers is not None and peers.error is not None:
                raise peers.error from error  # whatever DDP made of it
            raise
        if result is None:
            raise NonFiniteError(
                f"the loss or its gradient is not finite at step {step + 1} (learning rate {learning_rate:.3g}, "
                f"gradient norm {grad_norm:.3g}): lower training.learning_rate, raise training.warmup_steps, "
                "set training.clip_norm, or look for extreme values in the data; the last checkpoint is untouched"
            )
        self.faults.reach("optimizer", step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.timer.mark("optimizer")
        return result

    def _agree(self, batch: Batch, votes: Votes, broken: bool, loss_sum: float, grad_norm: float) -> StepResult | None:
        """The one small all-reduce with which a step is committed; None if any rank's numbers are broken."""
        mine = [broken, *astuple(votes), batch.local_samples, batch.digest]
        counts = torch.tensor([int(value) for value in mine], dtype=torch.int64)
        total = self.world.sum(counts, "commit of the step").tolist()
        *counted, samples, digest = total[1:]
        if total[0]:
            return None
        if samples != batch.samples:
            raise RuntimeError(f"the ranks used {samples} samples of a batch of {batch.samples}: they disagree")
        return StepResult(loss_sum, grad_norm, Votes(*counted), digest)

    def _forward_backward(self, batch: Batch, step: int) -> float:
        """Sum of this rank's losses; leaves the gradient of the *global* mean in the parameters, on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        kind = _AUTOCAST[self.config.precision]
        work = [
            (number, part, windows[rows], target[rows])
            for number, windows, target in batch.micro_batches
            for part, rows in enumerate(chunks(len(target), self.fit.chunk))
        ]
        self.timer.mark("other")
        for place, (number, part, windows, target) in enumerate(work):
            torch.manual_seed(micro_batch_seed(self.config.seed, step, number, part))
            is_last = place == len(work) - 1
            with self.sync.only_the_last(self.model, is_last):
                self.faults.reach("forward", step)
                with torch.autocast(self.device.type, dtype=kind, enabled=kind is not None):
                    outputs = self.model(windows)
                losses = self.criterion(outputs.float(), target)
                # Summed over ranks, not averaged: that makes it the gradient of the mean over the global batch.
                scaled = losses.sum() * (1.0 / batch.samples)
                self.timer.mark("forward")
                self.faults.reach("backward", step)
                self.scaler.scale(scaled).backward()
            self.timer.mark(self.sync.after_backward(self.model, is_last))
            total += losses.detach().double().sum()
        loss_sum = float(total)
        self.timer.mark("other")
        return loss_sum

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
