"""`Workload`: the objects of a training in this process: its problem, the optimizer, and this rank's samples.

A training has one, and so has each trial of tuning. Checkpoints, reports and the budget are `trainer.engine.session`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.loader import BatchLoader, Loader, TrainingData
from trainer.data.sampler import SMALLEST, Sampler
from trainer.data.stream_sampler import StreamSampler, longest_stream
from trainer.engine.callbacks import name_stateful
from trainer.engine.module_state import share_module_state
from trainer.engine.problem import Problem, refuse_differences
from trainer.engine.state import Entry, Loaded, Progress, TrainingState
from trainer.engine.step import TrainingStep, class_of
from trainer.observability.comm_profiler import CommunicationProfiler
from trainer.runtime.fault_injection import Faults
from trainer.runtime.packages import load
from trainer.strategies import PACKAGES, require_package

STREAM_LOADER = "trainer.data.stream_data:StreamLoader"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def make_sampler(
    config: DistributedTrainingConfig,
    data: TrainingData,
    rank: int,
    world_size: int,
    at_most: int | None = None,
    at_least: int = 1,
) -> Sampler:
    """Return the sampler of a rank in a world of this size, for the training samples of this data, of which ``at_most``
    and ``at_least`` so many go through the model at once. Raise `trainer.config.ConfigError` where none is possible."""
    if data.substreams:
        if config.strategy == "deepspeed":
            raise ConfigError(
                "training.strategy = 'deepspeed' does not train on streams, whose ranks end at different times: set it "
                "to 'ddp', 'fsdp' or 'hsdp'"
            )
        make: Callable[..., Sampler] = partial(StreamSampler, substreams=data.substreams)
    else:
        make = partial(Sampler, drawing=data.drawing)
    return make(
        samples=most_samples(config, data),
        global_batch_size=config.global_batch_size,
        micro_batches=config.micro_batches,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        shuffle_block=config.shuffle_block,
        at_most=at_most,
        at_least=at_least,
    )


def most_samples(config: DistributedTrainingConfig, data: TrainingData) -> int:
    """Return the number of training samples; of a stream those that a training draws at most. Raise `ConfigError` for a
    stream of which nothing says when training ends."""
    return longest_stream(config) if data.substreams else data.count("train")


def count_steps(config: DistributedTrainingConfig, sampler: Sampler, progress: Progress) -> int:
    """Return the number of optimizer steps that a training will have done at its end, from its progress. Pure."""
    steps = progress.step + sampler.steps_to_do(*progress.position(sampler.samples), config.epochs)
    return steps if config.max_steps is None else max(progress.step, min(steps, config.max_steps))


def needs_evaluation(config: DistributedTrainingConfig, samples: int, progress: Progress, total_steps: int) -> bool:
    """Return whether the validation split is to be evaluated after the steps done so far: every ``eval_frequency``
    steps, else at the end of each epoch of ``samples`` samples, and at the end. Pure."""
    step, frequency = progress.step, config.eval_frequency
    is_due = step % frequency == 0 if frequency else progress.position(samples)[1] == 0
    return step > progress.evaluated_step and (is_due or step == total_steps or progress.early_stopped)


def load_package(strategy: str, device: torch.device) -> None:
    """Import the package that a strategy needs, if it needs one, before its peers wait for this process. Raise
    `ConfigError` if it is not installed."""
    require_package(strategy)
    if strategy == "deepspeed":  # which reads them once
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("DS_BUILD_OPS", "0")
    if strategy in PACKAGES:
        importlib.import_module(PACKAGES[strategy])


def kinds_of(strategy: str) -> tuple[type[TrainingStep], type[TrainingState]]:
    """Return the classes of step and state of a strategy."""
    return class_of(strategy, "step", TrainingStep), class_of(strategy, "state", TrainingState)


class Workload:
    """The data, loss, model, optimizer and sampler of a training. It works in a world of its own process until
    `enter_world` gives it another one."""

    def __init__(
        self,
        config: DistributedTrainingConfig,
        problem: Problem,
        sampler: Sampler,
        device: torch.device,
        faults: Faults,
    ) -> None:
        """``sampler`` may be of any world, since all have equally many steps."""
        self.config, self.problem, self.device, self.faults = config, problem, device, faults
        self.data, self.sampler = problem.data, sampler
        load_package(config.strategy, device)
        usual_step, make_state = kinds_of(config.strategy)
        make_step = problem.make_step or usual_step
        steps = count_steps(config, sampler, Progress())
        self.step = make_step(problem.module, problem.task, config, device, faults, problem.recipe, steps)
        self.state = make_state(self.step)
        self.state.attached = {**name_stateful(problem.callbacks), **problem.attached, **self.data.attached}
        self.communication = CommunicationProfiler(self.step.world, self.step.timer)
        self._loader: Loader | None = None  # made with the first world: it may hold much of a GPU's memory

    @property
    def total_steps(self) -> int:
        """The steps at the end of the training: those that are done, and those that are left from there."""
        return count_steps(self.config, self.sampler, self.state.progress)

    @property
    def loader(self) -> Loader:
        """Return the loader of this rank's batches in the present world. Raise RuntimeError before the first one."""
        if self._loader is None:
            raise RuntimeError("no world was entered yet")
        return self._loader

    def enter_world(
        self, world: World, entry: Entry | None = None, read: Callable[[bool], Loaded | None] = lambda _: None
    ) -> Any:
        """Work in this world from now on; see `TrainingState.enter`, whose result is returned. A collective. Raise
        `trainer.config.ConfigError` if its ranks do not train the same."""
        problem = self.problem
        # A newcomer knows of no probe.
        samples = most_samples(self.config, self.data)
        own = problem.data.dataset_id, samples, problem.fingerprint, self.step.scheduled.digest
        mine = self.communication.probe_at, own
        found = world.all_gather_object(mine)
        refuse_differences([identity for _, identity in found])
        taken = self.state.enter(world, entry or Entry(), read)
        self.load_for(world)
        self.step.adopt(world)
        self.communication = CommunicationProfiler(world, self.step.timer, max(probe_at for probe_at, _ in found))
        return taken

    def load_for(self, world: World) -> None:
        """Load this rank's batches of a world from now on, in parts as large as memory allows."""
        at_most = self.step.limit.max_samples
        at_least = SMALLEST if any(isinstance(part, BATCH_NORMS) for part in self.state.module.modules()) else 1
        self.sampler = make_sampler(self.config, self.data, world.rank, world.world_size, at_most, at_least)
        self._end_loader()
        if isinstance(self.sampler, StreamSampler):
            make = load(STREAM_LOADER)
            self._loader = make(self.data, self.config, self.sampler, world, self.state, self.faults, self.step.timer)
            return
        reader = self.data.make_reader(self.device, self.config.prefetch_batches)
        self._loader = BatchLoader(reader, self.sampler, self.device, self.faults, self.step.timer)

    def settle_buffers(self) -> None:
        """Take over the buffers of rank 0, such as running statistics, which differ between ranks during training. A
        collective."""
        share_module_state(self.state.module, self.step.world, source=0)

    def close(self) -> None:
        """End what loads batches, and let go of the model."""
        self._end_loader()
        self.data.close()
        self.step.release()

    def _end_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()
