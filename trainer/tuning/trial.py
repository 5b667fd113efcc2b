"""`TuningTrial`: the training of one candidate, some steps at a time, beside others in the same processes.

How a candidate's steps and its validation loss are computed belongs here. `trainer.tuning.tuner` decides which
candidates there are and when each of them goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from trainer.comm.world import World
from trainer.config import JobConfig
from trainer.data.loader import Batch
from trainer.engine.lr_schedule import learning_rate
from trainer.engine.problem import make_window_problem, open_shards
from trainer.engine.step import StepFlags
from trainer.engine.workload import Workload, make_sampler
from trainer.runtime.fault_injection import Faults
from trainer.strategies import PLAIN
from trainer.tuning.search_space import TrialSettings

JUDGED_SAMPLES, JUDGED_AT_ONCE = 8192, 1024
"""The number of samples of the validation split, evenly spread over it, and of these in one batch. Two trainings are
compared on the same ones."""


class TuningTrial:
    """A candidate's training, which has its own data, model and optimizer."""

    def __init__(self, job: JobConfig, candidate: TrialSettings, world: World, faults: Faults) -> None:
        """Build the candidate's data, model and optimizer. ``world``: that of all ranks, which `enter_world` joins."""
        job = replace(job, training=replace(job.training, **PLAIN, **dict(candidate.settings)))
        self.config, self.device = job.training, world.device
        # Each trial has its own shards, because their place is a setting too; nodes map the same memory.
        shards = open_shards(job, self.device)
        sampler = make_sampler(self.config, shards.count("train"), world.rank, world.world_size)
        torch.manual_seed(self.config.seed)
        problem = make_window_problem(job, shards, self.device)
        self.workload = Workload(self.config, problem, sampler, self.device, faults)
        self.state = self.workload.state
        self.total_steps = self.workload.total_steps
        """The steps that the schedule of the learning rate is for."""
        self._batches: Iterator[Batch] = iter(())

    def enter_world(self, world: World) -> None:
        """Work in this world from now on, from the weights of rank 0. A collective."""
        self.workload.enter_world(world, source=None if world.group is None else 0)
        self.state.module.train()
        self._batches = self._batches_forever()

    def train_steps(self, steps: int) -> int:
        """Do ``steps`` more steps; return the number of samples in them, over all ranks."""
        torch.set_num_threads(self.config.threads_per_rank or 1)
        workload, state = self.workload, self.state
        before = state.progress.samples_seen
        for batch in itertools.islice(self._batches, steps):
            if workload.step.world.group is None:  # nobody else has a part in it
                batch = replace(batch, samples=batch.local_samples)
            done = state.progress.step
            result = workload.step(batch, done, learning_rate(self.config, done, self.total_steps), StepFlags())
            state.progress.commit(done // workload.sampler.steps_per_epoch, batch.samples, result.digest)
            workload.communication.add(batch.local_samples)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return state.progress.samples_seen - before

    def validation_loss(self) -> float:
        """Return the mean loss on a part of the validation split. A collective."""
        workload, world = self.workload, self.workload.step.world
        workload.settle_buffers()
        module, problem = self.state.module, workload.problem
        count = problem.data.count("valid")
        positions = np.unique(np.linspace(0, count - 1, min(count, JUDGED_SAMPLES)).astype(np.int64))
        mine = positions[world.rank :: world.world_size]
        total = torch.zeros(1, dtype=torch.float64)
        module.eval()
        with torch.no_grad():
            for first in range(0, len(mine), JUDGED_AT_ONCE):
                batch = problem.data.read("valid", mine[first : first + JUDGED_AT_ONCE], self.device)
                total += problem.task.loss(module, batch).double().sum().cpu()
        module.train()
        return float(world.all_reduce(total)) / len(positions)

    def close(self) -> None:
        """Free the data, the model and the optimizer."""
        self._batches = iter(())
        self.workload.close()

    def _batches_forever(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self.workload.loader.batches(epoch, 0, epoch * self.workload.sampler.steps_per_epoch)
