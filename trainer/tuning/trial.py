"""`TuningTrial`: the training of one candidate, some steps at a time, beside others in the same processes.

How a candidate's steps and its validation loss are computed belongs here. `trainer.tuning.tuner` decides which
candidates there are and when each of them goes on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.comm.world import World
from trainer.config import ConfigError, JobConfig
from trainer.data.loader import Batch, TrainingData
from trainer.engine.lr_schedule import learning_rate
from trainer.engine.problem import maker_of
from trainer.engine.steps import StepFlags
from trainer.engine.workload import Workload, make_sampler
from trainer.evaluation.evaluate import JudgeRequest
from trainer.evaluation.judge import evaluate_task
from trainer.model.losses import gives_predictive
from trainer.runtime.fault_injection import Faults
from trainer.strategies import PLAIN
from trainer.tuning.search_space import TrialSettings

JUDGED_SAMPLES, JUDGED_AT_ONCE = 8192, 1024
"""The most samples of the validation split, evenly spread over it, and of these in one batch. Two trainings are
compared on the same ones."""


class _SpreadSamples:
    """At most `JUDGED_SAMPLES` of each split of some data, evenly spread."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def count(self, split: str) -> int:
        return min(self._data.count(split), JUDGED_SAMPLES)

    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        return self._data.read(split, self._spread(split, positions), device)

    def read_each(self, split: str, parts: Sequence[NDArray[np.int64]], device: torch.device) -> Iterator[Any]:
        return self._data.read_each(split, [self._spread(split, positions) for positions in parts], device)

    def _spread(self, split: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions * self._data.count(split) // self.count(split)


class TuningTrial:
    """A candidate's training, which has its own data, model and optimizer."""

    def __init__(self, job: JobConfig, candidate: TrialSettings, world: World, faults: Faults) -> None:
        """Build the candidate's data, model and optimizer. ``world``: that of all ranks, which `enter_world` joins."""
        if job.optimizer is not None or job.lr_scheduler is not None:
            raise ConfigError(
                "tuning compares settings of AdamW and its schedule: leave optimizer and lr_scheduler out of the job "
                "that is tuned, and use what it finds of the batch and of the machine"
            )
        job = replace(job, training=replace(job.training, **PLAIN, **dict(candidate.settings)))
        self.config, self.device = job.training, world.device
        maker = maker_of(job)
        # Each trial has its own data, because their place is a setting too; nodes map the same memory.
        data = maker.open_data(job, self.device)
        if data.substreams:
            raise ConfigError(
                "tuning reads the same samples with each setting, and the dataset is a stream: tune on a map-style "
                "dataset of some of its samples"
            )
        sampler = make_sampler(self.config, data, world.rank, world.world_size)
        torch.manual_seed(self.config.seed)
        problem = maker.make(job, data, self.device)
        self.workload = Workload(self.config, problem, sampler, self.device, faults)
        self.is_likelihood = gives_predictive(getattr(problem.task, "criterion", None))
        self.state = self.workload.state
        self.total_steps = self.workload.total_steps
        """The steps that the schedule of the learning rate is for."""
        self._batches: Iterator[Batch] = iter(())

    def enter_world(self, world: World) -> None:
        """Work in this world from now on, from the weights of rank 0. A collective."""
        self.workload.enter_world(world)
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
            state.progress.commit(done // workload.sampler.steps_per_epoch, batch.samples, result.digest, batch.kind)
            workload.communication.add(batch.local_samples)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return state.progress.samples_seen - before

    def validation_loss(self) -> float:
        """Return the mean loss on a part of the validation split; NaN where there is none. A collective."""
        self.workload.settle_buffers()
        problem, world = self.workload.problem, self.workload.step.world
        batch_size = min(JUDGED_AT_ONCE, problem.evaluation_batch)
        request = JudgeRequest(model=self.state.module, world=world, device=self.device, batch_size=batch_size)
        part = cast("TrainingData", _SpreadSamples(problem.data))  # which is counted and read, and no more
        return evaluate_task(problem.task, part, "valid", request).loss if part.count("valid") else math.nan

    def close(self) -> None:
        """Free the data, the model and the optimizer."""
        self._batches = iter(())
        self.workload.close()

    def _batches_forever(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self.workload.loader.batches(epoch, 0, epoch * self.workload.sampler.steps_per_epoch)
