"""A training of a tuning job: it goes on a stretch at a time, beside others in the same processes
(`trainer.tuning.tuner`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.comm.world import World
from trainer.data.loader import Batch, keep_on_gpu
from trainer.data.shards import DataShardManager
from trainer.engine.lr_schedule import learning_rate
from trainer.engine.recovery import deal, enter
from trainer.engine.state import TrainingState
from trainer.engine.step import Step, Votes
from trainer.engine.trainer import DistributedTrainer
from trainer.model.losses import build_loss
from trainer.model.stock import build_model
from trainer.tuning.search_space import Candidate

if TYPE_CHECKING:
    from trainer.tuning.tuner import Tuner

JUDGED_SAMPLES, JUDGED_AT_ONCE = 8192, 1024
"""Of the validation split, evenly spread over it; two trainings are compared on the same ones."""


class Contestant(DistributedTrainer):
    """A training that goes on a stretch at a time, in the world of its process."""

    def __init__(self, tuner: Tuner, candidate: Candidate) -> None:
        super().__init__(replace(tuner.job, training=replace(tuner.job.training, **dict(candidate.settings))))
        self.facts, self.faults, self.device = tuner.facts, tuner.faults, tuner.device
        # Its own: where they are kept is a setting too. They are the same memory of the node.
        self.shards = DataShardManager(self.job.dataset.uri, expected_id=self.job.dataset.dataset_id)
        if self.config.data_on_device:
            keep_on_gpu(self.shards, self.device)
        deal(self, tuner.world.rank, tuner.world.world_size)
        steps = self.config.epochs * self.sampler.steps_per_epoch
        self.total_steps = min(steps, self.config.max_steps or steps)
        torch.manual_seed(self.config.seed)
        self.criterion = build_loss(self.job.loss, self.shards.spec).to(self.device)
        module = build_model(self.job.model, self.shards.spec, int(self.criterion.outputs)).to(self.device)  # type: ignore[arg-type]
        self.step = Step(module, self.criterion, self.config, self.device, self.faults)
        self.state: TrainingState = TrainingState(module, self.step)
        self._batches: Iterator[Batch] = iter(())

    def enter(self, world: World) -> None:
        """Work in this world from now on, from the weights of rank 0."""
        self.world = world
        enter(self, source=None if world.group is None else 0, from_checkpoint=False)
        self.step.module.train()
        self._batches = self._forever()

    def go(self, steps: int) -> int:
        """So many steps more; the samples in them, over all ranks."""
        torch.set_num_threads(self.config.threads_per_rank or 1)
        before = self.progress.samples_seen
        for batch in itertools.islice(self._batches, steps):
            if self.world.group is None:  # nobody else has a part in it
                batch = replace(batch, samples=batch.local_samples)
            done = self.progress.step
            result = self.step(batch, done, learning_rate(self.config, done, self.total_steps), Votes())
            self.progress.commit(done // self.sampler.steps_per_epoch, batch.samples, result.digest)
            self.communication.add(batch.local_samples)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.progress.samples_seen - before

    def validation_loss(self) -> float:
        """On a part of the validation split; a collective."""
        self.settle_buffers()
        module, count = self.step.module, self.shards.count("valid")
        positions = np.unique(np.linspace(0, count - 1, min(count, JUDGED_SAMPLES)).astype(np.int64))
        mine = positions[self.world.rank :: self.world.world_size]
        total = torch.zeros(1, dtype=torch.float64)
        module.eval()
        with torch.no_grad():
            for first in range(0, len(mine), JUDGED_AT_ONCE):
                rows = self.shards.end_rows("valid", mine[first : first + JUDGED_AT_ONCE])
                windows, target = (part.to(self.device) for part in self.shards.gather(rows))
                total += self.criterion(module(windows).float(), target).double().sum().cpu()
        module.train()
        return float(self.world.sum(total)) / len(positions)

    def end(self) -> None:
        """Give back what it takes."""
        self._batches = iter(())
        if self.loader is not None:
            self.loader.close()

    def _forever(self) -> Iterator[Batch]:
        assert self.loader is not None
        for epoch in itertools.count():
            yield from self.loader.batches(epoch, 0)
