"""`Workload`: the objects of a training in this process: data, loss, model, optimizer, and this rank's samples.

A training has one, and so has each trial of tuning. Checkpoints, reports and the budget are `trainer.engine.session`.
"""

from __future__ import annotations

import torch

from trainer.comm.world import World
from trainer.config import JobConfig
from trainer.data.loader import BatchLoader, keep_on_gpu
from trainer.data.sampler import Sampler
from trainer.data.shards import DatasetError, DataShardManager
from trainer.engine.state import TrainingState
from trainer.engine.step import TrainingStep
from trainer.model.losses import build_loss
from trainer.model.stock import build_model
from trainer.observability.comm_profiler import CommunicationProfiler
from trainer.runtime.fault_injection import Faults


def open_dataset(job: JobConfig, splits: tuple[str, ...] = ()) -> DataShardManager:
    """Return the dataset of a job. Raise `DatasetError` where one of ``splits`` is empty."""
    shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
    for split in splits:
        if shards.count(split) == 0:
            raise DatasetError(f"{job.dataset.uri}: the {split} split has no samples; choose other split dates")
    return shards


def open_shards(job: JobConfig, device: torch.device, splits: tuple[str, ...] = ()) -> DataShardManager:
    """Return the dataset of a job as `open_dataset` does, on the device where that is configured."""
    shards = open_dataset(job, splits)
    if job.training.data_on_device:
        keep_on_gpu(shards, device)
    return shards


def make_sampler(job: JobConfig, shards: DataShardManager, rank: int, world_size: int) -> Sampler:
    """Return the sampler of a rank in a world of this size. Raise `trainer.config.ConfigError` where none is
    possible."""
    config = job.training
    return Sampler(
        samples=shards.count("train"),
        global_batch_size=config.global_batch_size,
        micro_batches=config.micro_batches,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        shuffle_block=config.shuffle_block,
    )


class Workload:
    """The data, loss, model, optimizer and sampler of a training. It works in a world of its own process until
    `enter_world` gives it another one."""

    def __init__(
        self, job: JobConfig, shards: DataShardManager, sampler: Sampler, device: torch.device, faults: Faults
    ) -> None:  # fmt: skip
        """``sampler`` may be of any world, since all have equally many steps."""
        self.job, self.config, self.device, self.faults = job, job.training, device, faults
        self.shards, self.sampler = shards, sampler
        steps = self.config.epochs * sampler.steps_per_epoch
        self.total_steps = steps if self.config.max_steps is None else min(steps, self.config.max_steps)
        torch.manual_seed(self.config.seed)
        self.criterion = build_loss(job.loss, shards.spec).to(self.device)
        module = build_model(job.model, shards.spec, int(self.criterion.outputs)).to(self.device)  # type: ignore[arg-type]
        self.step = TrainingStep(module, self.criterion, self.config, self.device, faults)
        self.state = TrainingState(module, self.step)
        self.communication = CommunicationProfiler(self.step.world, self.step.timer)
        self._loader: BatchLoader | None = None  # made with the first world: it may hold much of a GPU's memory

    @property
    def loader(self) -> BatchLoader:
        """Return the loader of this rank's batches in the present world. Raise RuntimeError before the first one."""
        if self._loader is None:
            raise RuntimeError("no world was entered yet")
        return self._loader

    def enter_world(self, world: World, source: int | None) -> None:
        """Work in this world from now on, with the state of rank ``source`` (None: all have it already). A
        collective."""
        if source is not None:
            self.state.share(world, source)
        self.sampler = make_sampler(self.job, self.shards, world.rank, world.world_size)
        self.close()
        timer, prefetch = self.step.timer, self.config.prefetch_batches
        self._loader = BatchLoader(self.shards, self.sampler, world, self.faults, timer, prefetch)
        self.step.adopt(world)
        probe_at = max(world.all_gather_object(self.communication.probe_at))  # a newcomer knows of no probe
        self.communication = CommunicationProfiler(world, timer, probe_at)

    def settle_buffers(self) -> None:
        """Take over the running statistics of rank 0, which differ between ranks during training. A collective."""
        for buffer in self.state.module.buffers():
            self.step.world.broadcast(buffer)

    def close(self) -> None:
        """End the thread that loads batches."""
        if self._loader is not None:
            self._loader.close()
