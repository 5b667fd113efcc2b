"""The problem of a training whose model and data a caller gives as objects: by `trainer.fit`, or to
`trainer.engine.trainer.DistributedTrainer` in a process of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer.checkpoint.manager import CheckpointManager
from trainer.config import SCRIPT, ConfigError, FactoryConfig, JobConfig, OptimizerConfig
from trainer.data.dataset_data import DatasetData
from trainer.data.loader import TrainingData
from trainer.data.sampler import steps_left
from trainer.data.shards import DataShardManager
from trainer.data.stream_data import data_of_requests
from trainer.data.torch_loader import read_request
from trainer.engine.problem import Problem, refuse_without_script
from trainer.engine.task_check import check_model, check_task, try_task
from trainer.evaluation.judge import Judge, TaskJudge
from trainer.model.build import build_loss
from trainer.model.optimizers import USUAL, OptimizerRecipe
from trainer.model.task import SupervisedTask, Task
from trainer.rundir import RunDir
from trainer.runtime.packages import load


def problem_of_loader(job: JobConfig, model: nn.Module, loader: DataLoader) -> GivenProblem:
    """Return the problem of a caller's model on the pairs (inputs, target) of a loader, with the loss of a job. Raise
    `ConfigError` for what cannot be used."""
    check_model(model)
    refuse_without_script(job)
    request = read_request(loader, "train")
    size = job.training.batch_size_per_gpu
    if request.batch_size not in (None, size):
        raise ConfigError(f"the loader has batch_size={request.batch_size}, and training.batch_size_per_gpu = {size}")
    data = data_of_requests({"train": request})
    shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
    task = SupervisedTask(build_loss(job.loss, shards.spec))
    check_task(task)
    try_task(model, task, data, job.training)
    return GivenProblem(model, data, task)


@dataclass(frozen=True, slots=True)
class GivenProblem:
    """Makes the problem that a caller has given as objects."""

    model: nn.Module
    data: DatasetData
    task: Task
    recipe: OptimizerRecipe = USUAL
    callbacks: Sequence[Any] = ()

    @property
    def recipe_names(self) -> dict[str, Any]:
        """What a job says of the optimizer and the scheduler: that they are the script's."""
        made = self.recipe
        names: dict[str, Any] = {}
        if made.optimizer is not None:
            names["optimizer"] = OptimizerConfig(factory=SCRIPT, args=_name_of(made.optimizer))
        if made.lr_scheduler is not None:
            names["lr_scheduler"] = FactoryConfig(factory=SCRIPT, args=_name_of(made.lr_scheduler))
        return names

    @property
    def model_name(self) -> dict[str, str]:
        """The class of the model."""
        return {"class": type(self.model).__qualname__}

    @property
    def task_name(self) -> dict[str, str]:
        """The class of the task; of a loss, its class or its name."""
        part = self.task.given if isinstance(self.task, SupervisedTask) else self.task
        return _name_of(part)

    def refuse_other_checkpoints(self, job: JobConfig) -> None:
        """Raise `ConfigError` if the run directory has checkpoints, and they are of another training."""
        if job.training.resume:
            made, rundir = self.make(job, self.data, torch.device("cpu")), RunDir(job.run_dir)
            parts = made.describe(job.training)
            manager = CheckpointManager(rundir, job.training.keep_checkpoints, made.fingerprint, parts=parts)
            if (position := manager.refuse_others()) is not None and not self.data.substreams:
                samples = self.data.count("train")
                plan = job.training
                steps_left(samples, position[1] % samples, plan.global_batch_size, plan.micro_batches)

    def open_data(self, job: JobConfig, device: torch.device) -> TrainingData:
        return self.data

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        judge: Judge = TaskJudge(self.task, data, job.training.monitor, job.training.mode)
        if job.tracking.registered_model is not None:  # a copy, before a strategy takes the model apart
            judge = load("trainer.evaluation.program_judge:ProgramJudge")(judge, copy.deepcopy(self.model).cpu())
        module = self.model.to(device)
        for part in (self.task, *([self.task.criterion] if isinstance(self.task, SupervisedTask) else [])):
            if isinstance(part, nn.Module):
                part.to(device)
        shapes = [[name, list(item.shape)] for name, item in module.state_dict().items() if isinstance(item, Tensor)]
        model = {"factory": SCRIPT, "args": self.model_name}
        loss = {"factory": SCRIPT, "args": self.task_name}
        return Problem(
            data=data,
            task=self.task,
            module=module,
            judge=judge,
            recipe=self.recipe,
            callbacks=self.callbacks,
            identity=(data.dataset_id, model, shapes, loss),
            description={"model": model, "loss": loss},
            valid_name=self.data.name_split("valid"),
            valid_collate=self.data.collate_of("valid"),
            evaluation_batch=job.training.batch_size_per_gpu,
        )


def _name_of(part: Any) -> dict[str, str]:
    return {"class": getattr(part, "__qualname__", type(part).__qualname__)}
