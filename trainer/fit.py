"""`Trainer`: a caller's own model and datasets, trained from a script or a notebook with all that a job's training has.

The public entrance for scripts belongs here, with `DistributedConfig`, its settings. The loop is
`trainer.engine.trainer`; reading a caller's datasets is `trainer.data.dataset_data`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer.comm.descriptors import raise_descriptor_limit
from trainer.comm.launcher_env import rank_facts
from trainer.config import (
    SCRIPT,
    ConfigError,
    DatasetRef,
    DistributedTrainingConfig,
    FactoryConfig,
    JobConfig,
    TrackingConfig,
    parse_job,
)
from trainer.data.batches import move_to
from trainer.data.dataset_data import DatasetData
from trainer.data.training_data import TrainingData
from trainer.data.user_loaders import join_requests, read_request
from trainer.elastic.node_presence import record_presence
from trainer.engine.problem import Problem
from trainer.engine.run_job import leave_process, train_job
from trainer.evaluation.judge import TaskJudge
from trainer.exit_codes import DONE
from trainer.model.task import SupervisedTask, Task, per_sample, unreduced
from trainer.rundir import RunDir

RUN_DIR = "DTRAIN_RUN_DIR"
"""Variable: the run directory, where a cluster starts the script."""
DESCRIBE = "DTRAIN_DESCRIBE_JOB"
"""Variable: a file to which the job is written, with the numbers of its samples; the script then ends untrained."""
OVERRIDES = "DTRAIN_SET"
"""Variable: a JSON list of ``dotted.key=value``, which come after the script's own settings when it is described."""
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")
_log = logging.getLogger(__name__)


@checked_dataclass(kw_only=True, slots=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class DistributedConfig(DistributedTrainingConfig):
    """The settings of a training from a script: those of `DistributedTrainingConfig`, of which three begin elsewhere.
    Values are checked when it is made."""

    world_size: int = Field(
        default_factory=lambda: rank_facts(os.environ, DistributedTrainingConfig()).world_size, ge=1
    )
    """Ranks the batch is planned for; the ranks that the launcher tells."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per rank and optimizer step at the planned world size. More of them than ranks let nodes come."""
    batch_size_per_gpu: int = Field(default=32, ge=1)
    """Samples in one micro-batch. A `DataLoader` brings its own, which wins."""


def _started_ranks() -> int:
    return rank_facts(os.environ, DistributedTrainingConfig()).world_size


class TrainingFailedError(RuntimeError):
    """A training did not end well. The message is that of its result; ``code`` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class FitResult:
    """How a training ended, the same on all ranks that took part until the end."""

    model: nn.Module
    """The caller's module with the best weights by validation, the last where there was no validation; on the CPU."""
    run_dir: str
    """Events, checkpoints, report and result."""
    steps: int
    samples_seen: int
    best_valid_loss: float | None
    test: Mapping[str, float]
    """``loss`` and metrics on the test split; on the validation split where there is no test split."""
    train_seconds: float


class Trainer:
    """A trainer of a caller's own model.

    It trains in one process, under torchrun, `dtrain launch` and `dtrain train --script`. Each sample is used once per
    epoch; training resumes from the latest checkpoint of its run directory; under `dtrain train --script` it goes on
    when nodes are lost. Settings, and where it runs, change nothing in the script.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DistributedTrainingConfig | None = None,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        task: Task | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        tracking: TrackingConfig | None = None,
    ) -> None:
        """``loss``: of pairs (inputs, target), ``loss(model(inputs), target)`` with one figure per sample; torch's own
        losses are taken as they are. ``task``: instead, for batches of any structure. Without both, targets that are
        classes get the cross entropy, and numbers the squared error. ``metrics``: further figures per sample, of which
        means are reported, as the loss. ``run_dir``: where everything is written; a training goes on from the
        checkpoint that it finds there (None: a new folder below ``runs``). ``name``: of the data's content, to which
        checkpoints belong (None: from the data). Raise `ConfigError` for what cannot be used."""
        if loss is not None and task is not None:
            raise ConfigError("give either loss or task: a task has its own loss")
        if task is not None and metrics:
            raise ConfigError("give metrics as the method metrics(model, batch) of the task")
        self.model, self.config = model, config or DistributedConfig()
        self._loss, self._task, self._metrics = loss, task, dict(metrics or {})
        self._given_run_dir, self._name, self._tracking = run_dir, name, tracking

    def fit(
        self,
        train: Dataset[Any] | DataLoader[Any],
        valid: Dataset[Any] | DataLoader[Any] | None = None,
        test: Dataset[Any] | DataLoader[Any] | None = None,
    ) -> FitResult:
        """Train on ``train``, choose the weights by ``valid``, judge them on ``test``, and return the result.

        Datasets are map-style; of a loader its dataset, batch size, collate function and workers are used
        (`trainer.data.user_loaders`). Raise `ConfigError` for what cannot be used, before anything is trained, and
        `TrainingFailedError` where the training ends otherwise than well. A process that a cluster has told to end, or
        whose job others end, leaves with the exit code that the cluster expects (SystemExit)."""
        requests = [
            (split, None if given is None else read_request(given, split))
            for split, given in (("train", train), ("valid", valid), ("test", test))
        ]
        data = join_requests(requests, self._name)
        asked = requests[0][1]
        assert asked is not None
        for note in asked.notes:
            _log.warning("%s", note)
        config = self.config if asked.batch_size is None else replace(self.config, batch_size_per_gpu=asked.batch_size)
        task = self._choose_task(data)
        _try_loss(self.model, task, data)
        if describe := os.environ.get(DESCRIBE):
            job = self._job(config, data)
            samples = {split: data.count(split) for split in ("train", "valid", "test")}
            Path(describe).write_text(json.dumps({"job": asdict(job), "samples": samples}))
            sys.exit(0)
        job = self._ordered_job(data) if RUN_DIR in os.environ else self._job(config, data)
        rundir = RunDir(job.run_dir)
        if RUN_DIR not in os.environ:
            rundir.make()
            if rank_facts(os.environ, job.training).rank == 0:
                rundir.write_job(job)
        raise_descriptor_limit()
        with record_presence(job, os.environ) as leaving:
            leaving.code, result = train_job(job, _GivenProblem(self.model, data, task))
        return self._result(rundir, leaving.code, result)

    def _ordered_job(self, data: DatasetData) -> JobConfig:
        """Return the job that a cluster was ordered to run. Raise `ConfigError` where this node has other data."""
        job = RunDir(os.environ[RUN_DIR]).read_job()
        if job.dataset.dataset_id != data.dataset_id:
            raise ConfigError(
                f"this node's training data is {data.dataset_id}, and the job was ordered for "
                f"{job.dataset.dataset_id}: all nodes must read the same samples in the same order"
            )
        return job

    def _job(self, config: DistributedTrainingConfig, data: DatasetData) -> JobConfig:
        """Return the job as its run directory describes it: with the overrides of whoever has started the script."""
        run_dir = str(self._given_run_dir or _new_run_dir(self.model))
        plain = DistributedTrainingConfig(**asdict(config))
        job = JobConfig(
            job_id=_NO_NAME.sub("-", run_dir.rstrip("/").rpartition("/")[2]).lstrip("._-") or SCRIPT, run_dir=run_dir,
            dataset=DatasetRef(uri=f"{SCRIPT}:{Path(sys.argv[0]).name or 'notebook'}", dataset_id=data.dataset_id),
            model=FactoryConfig(factory=SCRIPT, args={"class": type(self.model).__qualname__}),
            loss=FactoryConfig(factory=SCRIPT), training=plain,
            tracking=self._tracking or TrackingConfig(),
        )  # fmt: skip
        overrides = json.loads(os.environ.get(OVERRIDES, "[]"))
        return parse_job(job.to_json(), overrides, source="the script's settings") if overrides else job

    def _choose_task(self, data: DatasetData) -> Task:
        if self._task is not None:
            return self._task
        loss = unreduced(self._loss) if self._loss is not None else _usual_loss(self.model, data)
        return SupervisedTask(loss, self._metrics)

    def _result(self, rundir: RunDir, code: int, result: dict[str, Any]) -> FitResult:
        if code != DONE or "steps" not in result:
            if "DTRAIN_LAUNCH" in os.environ:  # a cluster reads the exit code, and knows what follows
                sys.exit(leave_process(code))
            raise TrainingFailedError(str(result.get("error") or f"the training ended with exit code {code}"), code)
        return FitResult(
            model=self.model.cpu(), run_dir=rundir.uri, steps=result["steps"], samples_seen=result["samples_seen"],
            best_valid_loss=result["best_valid_loss"], test=result["test"], train_seconds=result["train_seconds"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _GivenProblem:
    """Makes the problem that a caller has given as objects."""

    model: nn.Module
    data: DatasetData
    task: Task

    def open_data(self, job: JobConfig, device: torch.device) -> TrainingData:
        return self.data

    def make(self, job: JobConfig, data: TrainingData, device: torch.device) -> Problem:
        module = self.model.to(device)
        if isinstance(self.task, SupervisedTask):
            self.task.to(device)
        shapes = [[name, list(tensor.shape)] for name, tensor in module.state_dict().items()]
        model = {"factory": SCRIPT, "args": {"class": type(module).__qualname__}}
        return Problem(
            data=data,
            task=self.task,
            module=module,
            judge=TaskJudge(self.task, data),
            identity=(data.dataset_id, model, shapes),
            description={"model": model, "loss": {"factory": SCRIPT, "args": {}}},
            evaluation_batch=job.training.batch_size_per_gpu,
        )


def _try_loss(model: nn.Module, task: Task, data: DatasetData) -> None:
    """Try the task on two samples, without gradients. Raise `ConfigError` for a loss or a metric that is not one figure
    per sample."""
    positions = _first_positions(data)
    was_training = model.training
    model.eval()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            batch = data.read("train", positions, device)
            per_sample(task.loss(model, batch), len(positions), "the loss")
            metrics = getattr(task, "metrics", None)
            for name, values in (metrics(model, batch) if metrics else {}).items():
                per_sample(values, len(positions), f"the metric {name!r}")
    finally:
        model.train(was_training)


def _usual_loss(model: nn.Module, data: DatasetData) -> nn.Module:
    """Return the usual loss for the targets of the first samples. Raise `ConfigError` where none is usual."""
    batch = data.read("train", _first_positions(data), torch.device("cpu"))
    remedy = "give Trainer(…, loss=…), such as torch.nn.CrossEntropyLoss(), or a task for batches of another structure"
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ConfigError(f"batches are no pairs (inputs, target), so there is no usual loss for them: {remedy}")
    was_training, target = model.training, batch[1]
    model.eval()
    try:
        with torch.no_grad():
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            outputs = model(move_to(batch[0], device))
    finally:
        model.train(was_training)
    if isinstance(outputs, Tensor) and not target.is_floating_point() and outputs.dim() == target.dim() + 1:
        _log.info("the loss is the cross entropy: targets are classes")
        return nn.CrossEntropyLoss(reduction="none")
    if isinstance(outputs, Tensor) and target.is_floating_point() and outputs.shape == target.shape:
        _log.info("the loss is the squared error: targets are numbers")
        return nn.MSELoss(reduction="none")
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ConfigError(
        f"no loss is usual for outputs of {shape} and targets of {tuple(target.shape)}, {target.dtype}: {remedy}"
    )


def _first_positions(data: DatasetData) -> Any:
    return np.arange(min(2, data.count("train")), dtype=np.int64)


def _new_run_dir(model: nn.Module) -> str:
    """Return a folder below ``runs`` that no other training of this machine has; the same on all ranks of a launch on
    one host. Raise `ConfigError` for ranks of several hosts, which cannot choose the same."""
    facts = rank_facts(os.environ, DistributedTrainingConfig())
    if facts.local_world_size < facts.world_size:
        raise ConfigError("ranks of several hosts need Trainer(…, run_dir=…): one folder that all of them see")
    began = time.strftime("%Y%m%d-%H%M%S")
    if facts.world_size > 1:  # ranks begin in different seconds, and have one parent
        began = f"{facts.master_port}-{os.getppid()}"
    return str(Path("runs") / f"{type(model).__name__.lower()}-{began}")
