"""`Trainer`: a caller's own model and datasets, trained from a script or a notebook with all that a job's training has.

The public entrance for scripts belongs here, with `DistributedConfig`, its settings. The loop is
`trainer.engine.trainer`; reading a caller's datasets is `trainer.data.dataset_data`, and trying a caller's model and
loss `trainer.engine.task_check`.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ArgsKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer.comm.descriptors import raise_descriptor_limit
from trainer.comm.group import has_abandoned_groups
from trainer.comm.launcher_env import RankFacts, rank_facts
from trainer.config import (
    SCRIPT,
    ConfigError,
    DatasetRef,
    DistributedTrainingConfig,
    FactoryConfig,
    JobConfig,
    TrackingConfig,
    checked_settings,
    parse_job,
    settings_of,
)
from trainer.data.dataset_data import DatasetData
from trainer.data.stream_data import data_of_requests
from trainer.data.torch_loader import LoaderRequest, read_request
from trainer.engine.callbacks import check_callbacks
from trainer.engine.given_problem import GivenProblem
from trainer.engine.module_state import refuse_extra_state
from trainer.engine.reports import Watch
from trainer.engine.run_job import INTERRUPTED, leave_process, train_job
from trainer.engine.state import Progress
from trainer.engine.steps import Steps, carry_out
from trainer.engine.task_check import check_model, check_task, choose_usual_loss, try_task
from trainer.engine.workload import count_steps, make_sampler, most_samples
from trainer.exit_codes import DONE, EVICTED, UNUSABLE
from trainer.model.optimizer_check import try_optimizer
from trainer.model.optimizers import OptimizerRecipe, recipe_for
from trainer.model.sizes import model_bytes
from trainer.model.task import Measure, SupervisedTask, Task
from trainer.observability.node_presence import record_presence
from trainer.observability.progress_line import ProgressLine, is_notebook
from trainer.rundir import SCRIPT_FOLDER, RunDir, resolve_start
from trainer.runtime.launch import GivenOrder, Launch
from trainer.runtime.packages import load
from trainer.strategies import ENGINES, require_package, settings_of_backend

_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")
_FITS = itertools.count(1)
"""Numbers the trainings of this process."""
_log = logging.getLogger(__name__)


def _launcher_facts() -> RankFacts:
    return rank_facts(os.environ, DistributedTrainingConfig())


@checked_settings("training")
@checked_dataclass(kw_only=True, slots=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class DistributedConfig(DistributedTrainingConfig):
    """The settings of a training from a script: those of `DistributedTrainingConfig`, of which three begin elsewhere.
    Values are checked when it is made."""

    world_size: int = Field(default_factory=lambda: _launcher_facts().world_size, ge=1)
    """Ranks the batch is planned for; the ranks that the launcher tells."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per rank and optimizer step at the planned world size. If above 1, more nodes than planned may
    join."""
    batch_size_per_gpu: int = Field(default=32, ge=1)
    """Samples in one micro-batch. A `DataLoader` brings its own, which wins."""

    @model_validator(mode="before")
    @classmethod
    def _know_engines(cls, given: Any) -> Any:
        """Let ``backend`` name an engine, such as ``horovod`` or ``pytorch-ddp``: then it stands for ``strategy``."""
        settings = given.kwargs if isinstance(given, ArgsKwargs) else given
        if not isinstance(settings, dict) or settings.get("backend") not in (*ENGINES, "ray", "tensorflow"):
            return given
        others = {name: value for name, value in settings.items() if name != "backend"}
        meant = settings_of_backend(settings["backend"])
        if (other := others.get("strategy", meant.get("strategy"))) != meant.get("strategy"):
            raise ValueError(
                f"backend = {settings['backend']!r} and strategy = {other!r} are two different engines: give only one"
            )
        return others | meant


class TrainingFailedError(RuntimeError):
    """A training did not end well. The message is that of its result; ``code`` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Say how it is made again in another process."""
        return type(self), (str(self), self.code)


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
    """Of the weights that were chosen."""
    best_score: float | None
    """The figure by which they were chosen (``training.monitor``), on the validation split."""
    test: Mapping[str, float | None]
    """``loss`` and metrics on the test split; on the validation split where there is no test split. None for a metric
    that is no finite number."""
    train_seconds: float
    model_version: str | None = None
    """``NAME version N`` on rank 0, where this process has registered the model."""
    rank: int = 0
    """Of this process at the end. What follows in the script runs on each rank, of which one has 0, whichever nodes
    were lost."""


class Trainer:
    """A trainer of a caller's own model.

    It trains in one process, under torchrun, `dtrain launch` and `dtrain train --script`. Each sample is used once per
    epoch; training resumes from the latest checkpoint of its run directory; under `dtrain train --script` it goes on
    when nodes are lost. Settings, and where it runs, change nothing in the script.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DistributedTrainingConfig | Mapping[str, Any] | None = None,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        task: Task | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Tensor] | Measure] | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        lr_scheduler: Callable[..., Any] | None = None,
        callbacks: Sequence[Any] = (),
        run_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        tracking: TrackingConfig | Mapping[str, Any] | None = None,
        registry: bool | str = False,
        progress: bool | None = None,
    ) -> None:
        """``config``: a `DistributedConfig`, or a mapping of its settings; ``tracking`` alike.

        ``loss``: of pairs (inputs, target), ``loss(model(inputs), target)`` with one figure per sample; torch's own
        losses are taken as they are. ``task``: instead, for batches of any structure. Without both, targets that are
        classes get the cross entropy, and numbers the squared error.

        ``metrics``: further figures per sample, of which means are reported, as the loss; or measures of a whole split
        by the protocol of torchmetrics (`trainer.task.Measure`). With ``monitor`` in the settings one of them chooses
        the best weights.

        ``optimizer``: a function from the model to a torch optimizer; None: AdamW by the settings. ``lr_scheduler``: a
        function from the optimizer, and ``total_steps`` if it has an argument of that name, to a scheduler of torch,
        which moves on with each step, or to a function from the step to a factor; None: the schedule of the settings,
        as a multiple of the optimizer's own rates. ``callbacks``: objects with some of the methods of
        `trainer.Callback`.

        ``run_dir``: where everything is written, a path or any fsspec address; a training goes on from the checkpoint
        that it finds there (None: a new folder below ``runs``). ``name``: of the data's content, to which checkpoints
        belong (None: from the data). ``registry``: the name under which MLflow registers the trained model, or True for
        that of its class (`trainer.evaluation.program_judge`). ``progress``: whether rank 0 shows a line of progress
        (None: on a terminal, and in a notebook).

        Raise `ConfigError` for what cannot be used."""
        if loss is not None and task is not None:
            raise ConfigError("give either loss or task: a task has its own loss")
        if task is not None and metrics:
            raise ConfigError("give metrics as the method metrics(model, batch) of the task")
        check_model(model)
        self._callbacks = tuple(callbacks)
        self.model, self._recipe = model, OptimizerRecipe(optimizer, lr_scheduler)
        self.config = settings_of(config, DistributedConfig, "config", DistributedTrainingConfig)
        self._loss, self._task, self._metrics = loss, task, dict(metrics or {})
        self._given_run_dir, self._name = run_dir, name
        self._tracking = settings_of(tracking, TrackingConfig, "tracking")
        if registry:
            name_there = type(model).__name__.lower() if registry is True else registry
            others = {**asdict(self._tracking), "registered_model": name_there}
            self._tracking = settings_of(others, TrackingConfig, "tracking")
        self._shows_progress = (sys.stderr.isatty() or is_notebook()) if progress is None else progress
        self._weights_and_lengths: tuple[Any, Any] = None, None

    def fit(
        self,
        train: Dataset[Any] | DataLoader[Any],
        valid: Dataset[Any] | DataLoader[Any] | None = None,
        test: Dataset[Any] | DataLoader[Any] | None = None,
        *,
        sample_weights: Any = None,
        lengths: Any = None,
    ) -> FitResult:
        """Train on ``train``, choose the weights by ``valid``, judge them on ``test``, and return the result.

        Datasets are map-style, and ``train`` may be a `trainer.Stream`; of a loader its dataset, batch size, collate
        function and workers are used (`trainer.data.torch_loader`).

        ``sample_weights`` (n,): training samples are drawn with replacement, each as often as its weight says, of any
        scale; an epoch has n draws. ``lengths`` (n,): those of like length come into one global batch, so that a
        collate function pads little; each is used once per epoch. Both are for datasets of n samples, and with neither
        their order is a permutation.

        Raise `ConfigError` for what cannot be used, `TrainingFailedError` where the
        training ends otherwise than well, and KeyboardInterrupt where a person ends it. A process that was told to end
        (SIGTERM) leaves with its exit code (SystemExit), and so does one that a cluster has started, however it
        ends."""
        self._weights_and_lengths = sample_weights, lengths
        return carry_out(self.steps({"train": train, "valid": valid, "test": test}))

    def steps(self, given: Mapping[str, Dataset[Any] | DataLoader[Any] | None]) -> Steps[FitResult]:
        """Yield the steps of the training that `fit` carries out on these splits, and return its result."""
        try:
            job, problem = self._prepare(given)
        except ConfigError as error:
            if describe := GivenOrder.read(os.environ).describe:
                Path(describe).write_text(json.dumps({"error": str(error)}))
            elif GivenOrder.read(os.environ).run_dir:
                print(error, file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
                sys.exit(UNUSABLE)
            raise
        rundir, line = RunDir(job.run_dir), ProgressLine()
        raise_descriptor_limit()
        failure: Exception | None = None
        try:
            try:
                problem.data.start_workers(job.training, _launcher_facts())  # while there are no threads
            except Exception as error:
                failure = error
            with record_presence(job, os.environ) as leaving:
                leaving.code, result = yield from train_job(job, problem, self._watch(line), failure)
        finally:
            line.close()
            problem.data.close()
        return self._result(rundir, leaving.code, result)

    def try_problem(
        self, given: Mapping[str, Dataset[Any] | DataLoader[Any] | None]
    ) -> tuple[DistributedTrainingConfig, GivenProblem]:
        """Return the settings and what is trained, tried on the first samples. Raise `ConfigError` for what cannot be
        used."""
        request, data = self._read_given(given)
        config = self._config_for(request, data)
        task = self._choose_task(data)
        check_task(task)
        refuse_extra_state(self.model, config.strategy)
        is_tried = bool(GivenOrder.read(os.environ).run_dir)  # where this node's job was ordered
        try_task(self.model, task, data, config, thorough=not is_tried)
        check_callbacks(self._callbacks, config)
        recipe = self._try_optimizer(self._recipe, config, data)
        return config, GivenProblem(self.model, data, task, recipe, self._callbacks)

    def _read_given(
        self, given: Mapping[str, Dataset[Any] | DataLoader[Any] | None]
    ) -> tuple[LoaderRequest, DatasetData]:
        """Return what the training loader asks for, and the data of all splits."""
        requests = {split: read_request(part, split) for split, part in given.items() if part is not None}
        return requests["train"], data_of_requests(requests, self._name, *self._weights_and_lengths)

    def _prepare(self, given: Mapping[str, Dataset[Any] | DataLoader[Any] | None]) -> tuple[JobConfig, GivenProblem]:
        """Return the job and its problem, which were tried, with the job written to its run directory. Where the script
        is only described, write its description and leave (SystemExit). Raise `ConfigError` for what cannot be used."""
        config, problem = self.try_problem(given)
        data, number = problem.data, next(_FITS)
        if describe := GivenOrder.read(os.environ).describe:
            job = self._job(config, problem, number)
            self._try_registration(job, problem)
            problem.refuse_other_checkpoints(job)
            samples = {split: data.count(split) for split in ("valid", "test")}
            samples |= {"train": most_samples(job.training, data)}
            recipe = recipe_for(job.optimizer, job.lr_scheduler, self._recipe)
            recipe = self._try_optimizer(recipe, job.training, data)
            model = asdict(model_bytes(self.model, moments=recipe.moments))
            described = {"job": asdict(job), "samples": samples, "model": model}
            Path(describe).write_text(json.dumps(described))
            sys.exit(0)
        if GivenOrder.read(os.environ).run_dir:
            return _ordered_job(data, number), problem
        if number > 1 and _launcher_facts().world_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError("several ranks can call fit a second time only under torchrun, whose store they share")
        job = self._job(config, problem, number)
        self._try_registration(job, problem)
        require_package(job.training.strategy)
        rundir = RunDir(job.run_dir)
        rundir.make()
        problem.refuse_other_checkpoints(job)
        if _launcher_facts().rank == 0:
            rundir.write_job(job)
        return job, problem

    def _try_optimizer(
        self, recipe: OptimizerRecipe, config: DistributedTrainingConfig, data: DatasetData
    ) -> OptimizerRecipe:
        sampler = make_sampler(config, data, 0, 1)
        if recipe.is_usual:
            return recipe
        steps = count_steps(config, sampler, Progress())
        return try_optimizer(self.model, recipe, config, steps, data.count("valid") > 0)

    def _watch(self, line: ProgressLine) -> Watch | None:
        """Return what is called with each event of this process; None: nothing is."""
        return line.take if self._shows_progress else None

    def _config_for(self, request: LoaderRequest, data: DatasetData) -> DistributedTrainingConfig:
        """Return the settings with what the training loader asks for. Raise `ConfigError` for those that need a split
        that is not there."""
        notes, config = list(request.notes), self.config
        if not data.count("valid"):
            if config.early_stopping_patience is not None:
                raise ConfigError("training.early_stopping_patience needs a validation split: call fit(train, valid)")
            if config.monitor != "loss":
                raise ConfigError("training.monitor needs a validation split: call fit(train, valid)")
            if config.eval_frequency is not None:
                notes.append("training.eval_frequency has no effect: there is no validation split")
        if _launcher_facts().rank == 0:
            for note in notes:
                _log.warning("%s", note)
        return config if request.batch_size is None else replace(config, batch_size_per_gpu=request.batch_size)

    def _job(self, config: DistributedTrainingConfig, problem: GivenProblem, number: int) -> JobConfig:
        run_dir = str(self._given_run_dir or new_run_dir(type(self.model).__name__, _launcher_facts(), number)).rstrip(
            "/"
        )
        names = problem.model_name, problem.task_name
        return make_job(run_dir, config, problem.data.dataset_id, *names, self._tracking, **problem.recipe_names)

    def _try_registration(self, job: JobConfig, problem: GivenProblem) -> None:
        """Raise `ConfigError` where the model is to be registered and cannot be."""
        if job.tracking.registered_model is None:
            return
        is_described = bool(GivenOrder.read(os.environ).describe)  # then `dtrain` brings its own
        if job.tracking.mlflow_tracking_uri is None and not is_described:
            raise ConfigError(
                "registry: no MLflow is named that could register the model: give tracking={'mlflow_tracking_uri': "
                "'sqlite:///mlflow.db'} or a server's address, or start the script by `dtrain train --script`"
            )
        load("trainer.evaluation.program_judge:try_program")(self.model, problem.task, problem.data)

    def _choose_task(self, data: DatasetData) -> Task:
        if self._task is not None:
            return self._task
        loss = self._loss if self._loss is not None else choose_usual_loss(self.model, data)
        return SupervisedTask(loss, self._metrics)

    def _result(self, rundir: RunDir, code: int, result: dict[str, Any]) -> FitResult:
        if code != DONE or "steps" not in result:
            # A cluster reads the exit code, and knows what follows; so does whoever has sent SIGTERM.
            if Launch.read(os.environ).is_elastic or code == EVICTED:
                sys.exit(leave_process(code))
            raise failure_of(result.get("error") or f"the training ended with exit code {code}", code, rundir.uri)
        if Launch.read(os.environ).is_elastic:
            atexit.register(_leave_at_once)
        return FitResult(
            model=self.model.cpu(),
            run_dir=rundir.uri,
            model_version=_register(rundir, result["rank"]),
            rank=result["rank"],
            **figures_of(result),
        )


def _register(rundir: RunDir, rank: int) -> str | None:
    """Register the model of a training that nobody orchestrates, and return its version; None: it is not to be, or
    could not be, which is told. The training has ended well, whatever becomes of that."""
    if GivenOrder.read(os.environ).run_dir or rank != 0:
        return None
    job = rundir.read_job()
    if job.tracking.registered_model is None:
        return None
    try:
        version: str = load("trainer.observability.program_registry:register_here")(job, rundir)
    except ValueError as error:
        _log.warning("%s", f"{rundir.uri}: the model is not registered: {error}")
        return None
    return version


def make_job(
    run_dir: str,
    config: DistributedTrainingConfig,
    data_id: str,
    model: dict[str, str],
    loss: dict[str, str],
    tracking: TrackingConfig,
    **more: Any,
) -> JobConfig:
    """Return the job as its run directory describes it: with the overrides of whoever has started the script. ``model``
    and ``loss``: what they are, in words; ``more``: of its ``optimizer`` and ``lr_scheduler``."""
    job = JobConfig(
        job_id=_NO_NAME.sub("-", run_dir.rpartition("/")[2]).lstrip("._-")[:200] or SCRIPT,
        run_dir=run_dir,
        training=DistributedTrainingConfig(**asdict(config)),
        dataset=DatasetRef(uri=f"{SCRIPT}:{Path(sys.argv[0]).name or 'notebook'}", dataset_id=data_id),
        model=FactoryConfig(factory=SCRIPT, args=model),
        loss=FactoryConfig(factory=SCRIPT, args=loss),
        tracking=tracking,
        **more,
    )
    overrides = list(GivenOrder.read(os.environ).overrides)
    return resolve_start(parse_job(job.to_json(), overrides, source="the script's settings") if overrides else job)


def figures_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a `FitResult` that ``result.json`` has."""
    return {
        name: result[name]
        for name in ("steps", "samples_seen", "best_valid_loss", "best_score", "test", "train_seconds")
    }


def refuse(why: str) -> NoReturn:
    """Raise `ConfigError`; where the script is only described, the description says why."""
    if describe := GivenOrder.read(os.environ).describe:
        Path(describe).write_text(json.dumps({"error": why}))
    raise ConfigError(why)


def failure_of(why: str, code: int, run_dir: str) -> BaseException:
    """Return what ``fit`` raises where a training ended otherwise than well."""
    if why == INTERRUPTED:
        return KeyboardInterrupt(f"Trainer(…, run_dir={run_dir!r}) continues from the last checkpoint")
    return ConfigError(why) if code == UNUSABLE else TrainingFailedError(why, code)


def best_accuracy_in(run_dir: str | None) -> float:
    """Return the best ``accuracy`` by validation of a run directory. Raise ValueError where none was measured."""
    events = RunDir(run_dir).events("evaluation") if run_dir is not None else []
    found = [(event.get("metrics") or {}).get("accuracy") for event in events]
    if not (measured := [accuracy for accuracy in found if accuracy is not None]):
        raise ValueError("no accuracy was measured: give metrics={'accuracy': …}, and fit(train, valid)")
    return max(measured)


def _ordered_job(data: DatasetData, number: int) -> JobConfig:
    """Return the job that a cluster was ordered to run. Raise `ConfigError` where this node has other data, or the
    script has trained before."""
    if number > 1:
        raise ConfigError(
            "this script calls fit a second time, but a cluster job is one training: use one script for each"
        )
    job = RunDir(GivenOrder.read(os.environ).run_dir).read_job()
    if job.dataset.dataset_id != data.dataset_id:
        raise ConfigError(
            f"this node's training data is {data.dataset_id}, but the job was submitted for {job.dataset.dataset_id}: "
            "all nodes must read the same samples in the same order. Data that differ from process to process (a "
            "clock, an unseeded generator) need one seed"
        )
    return job


def _leave_at_once() -> None:
    """End this process where nodes were lost: a thread of an abandoned group may be inside native code, which does not
    survive the interpreter's end. A code that the script gives to `sys.exit` after its training is lost with that."""
    if has_abandoned_groups():
        leave_process(1 if getattr(sys, "last_value", None) is not None else DONE)


def new_run_dir(model: str, facts: RankFacts, number: int) -> str:
    """Return a folder that no other training of this machine has; the same on all ranks of a launch, and again when
    torchrun starts them again. Raise `ConfigError` for ranks that cannot choose the same. ``model``: what it is called;
    ``number``: of the training in this process."""
    if folder := os.environ.get(SCRIPT_FOLDER):
        return f"{folder}/fit-{number}"
    if facts.world_size == 1:
        wanted = str(Path("runs") / f"{model.lower()}-{time.strftime('%Y%m%d-%H%M%S')}")
        further = (f"{wanted}-{count}" for count in itertools.count(2))
        return next(folder for folder in itertools.chain([wanted], further) if not Path(folder).exists())
    if facts.local_world_size < facts.world_size or "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError("several ranks need Trainer(…, run_dir=…): a folder that all of them can reach")
    launcher = psutil.Process(os.getppid())
    began = time.strftime("%Y%m%d-%H%M%S", time.localtime(launcher.create_time()))
    return str(Path("runs") / f"{model.lower()}-{began}-{launcher.pid}-{number}")
