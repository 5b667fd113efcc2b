"""`RayTrainer`: `trainer.Trainer` on Ray Train: a group of Ray's workers, each of which is a rank of the training.

What is asked of Ray, and what of a driver's objects goes to its workers, belongs here; what a worker does is
`trainer.adapters.ray_worker`. Inside a trial of Ray Tune, or a worker of a group that is there, it trains in place.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import itertools
import logging
import os
import secrets
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer.adapters.ray_worker import TrainerInRay, be_rank, find_trial_folder, find_worker_place, work
from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import LOOPBACK
from trainer.config import ConfigError, DistributedTrainingConfig, TrackingConfig, settings_of
from trainer.engine.result import write_result
from trainer.errors import DamagedError
from trainer.exit_codes import FAILED, LOST
from trainer.fit import (
    DistributedConfig,
    FitResult,
    Trainer,
    TrainingFailedError,
    best_accuracy_in,
    failure_of,
    figures_of,
    new_run_dir,
    refuse,
)
from trainer.model.task import SupervisedTask, Task
from trainer.rundir import MODEL, RESULT, WEIGHTS, RunDir
from trainer.runtime.launch import GivenOrder

SHORT_NAMES = {"lr": "learning_rate", "batch_size": "batch_size_per_gpu"}
"""Names of a search's figures, and the settings that they are."""
_OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else it tells its makers of each start
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else it takes an address that others reach, and listens on it
    "RAY_AUTH_MODE": "token",  # else other users of this machine could have it run their code
}
"""Variables that a Ray of this machine alone reads as it is imported."""
_FITS = itertools.count(1)
"""Numbers the trainings of this process."""
_log = logging.getLogger(__name__)
Data = Dataset[Any] | DataLoader[Any]


def read_settings(given: Mapping[str, Any]) -> DistributedConfig:
    """Return the settings among the values of a search, such as Ray Tune hands to a trial. Other values are the
    model's. Raise `ConfigError` for a name that is nearly that of a setting. Pure."""
    known = {field.name for field in fields(DistributedConfig)}
    settings = {SHORT_NAMES.get(name, name): value for name, value in given.items()}
    if len(settings) < len(given):
        twice = next(name for name in given if SHORT_NAMES.get(name) in given)
        raise ConfigError(f"{twice} and {SHORT_NAMES[twice]} are the same setting: give one of them")
    for name in settings.keys() - known:
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise ConfigError(f"{name} is not a setting: did you mean {close[0]}?")
        _log.info("%s is not a training setting: it is passed to the model", name)
    return DistributedConfig(**{name: value for name, value in settings.items() if name in known})


def plan_world(config: DistributedTrainingConfig, workers: tuple[int, int]) -> DistributedTrainingConfig:
    """Return the settings for a group of this many workers, from the fewest to the most. A planned world of one, which
    is what a driver has, becomes that of the group. Raise `ConfigError` where workers would have nothing to do.
    Pure."""
    fewest, most = workers
    if not 1 <= fewest <= most:
        raise ConfigError(f"num_workers = {workers}: give a number of 1 or more, or a minimum and a maximum")
    planned = replace(config, world_size=most) if config.world_size == 1 else config
    if planned.micro_batches < most:
        raise ConfigError(
            f"num_workers = {most} share {planned.micro_batches} micro-batches (training.world_size x "
            "training.gradient_accumulation_steps): raise gradient_accumulation_steps, or ask for fewer workers"
        )
    return planned


def judges_classes(task: Task) -> bool:
    """Return whether the task's loss is a cross entropy, so that its outputs have a most probable class."""
    return isinstance(task, SupervisedTask) and isinstance(task.criterion, nn.CrossEntropyLoss)


def is_right(outputs: Tensor, target: Tensor) -> Tensor:
    """Return 1 where the most probable class is the target, a class or the probabilities of all; shape (B, …)."""
    classes = target.argmax(1) if target.is_floating_point() else target
    return (outputs.argmax(1) == classes).float()


class RayTrainer:
    """A trainer of a caller's own model on the workers of Ray Train.

    `fit` of a driver starts the workers, on the cluster that it is connected to, that RAY_ADDRESS names, or on this
    machine. Where a worker is lost, Ray starts the group again, and the training goes on from the latest checkpoint of
    its run directory, which all machines must see.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DistributedTrainingConfig | Mapping[str, Any] | None = None,
        *,
        num_workers: int | tuple[int, int] | None = None,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        max_failures: int = 3,
        loss: Callable[[Any, Any], Tensor] | None = None,
        task: Task | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        tracking: TrackingConfig | Mapping[str, Any] | None = None,
    ) -> None:
        """``config``: settings, or the values of a search (`read_settings`). ``num_workers``: ranks, or the fewest and
        the most, between which Ray changes their number as machines come and go; None: ``config.world_size``.
        ``use_gpu``: one GPU for each. ``max_failures``: how often Ray starts the group again. The others are those of
        `trainer.Trainer`; without ``metrics``, the cross entropy brings ``accuracy``. Raise `ConfigError` for what
        cannot be used."""
        settings: DistributedTrainingConfig = (
            read_settings(config)
            if isinstance(config, Mapping)
            else settings_of(config, DistributedConfig, "config", DistributedTrainingConfig)
        )
        workers = num_workers if num_workers is not None else settings.world_size
        self.workers = workers if isinstance(workers, tuple) else (workers, workers)
        self._is_group_asked = num_workers is not None and self.workers[1] > 1
        self.config = plan_world(settings, self.workers)
        self.model, self.use_gpu, self.max_failures = model, use_gpu, max_failures
        self.resources_per_worker = resources_per_worker
        self.run_dir = None if run_dir is None else str(run_dir)
        self._parts = {"loss": loss, "task": task, "metrics": metrics, "name": name, "tracking": tracking}
        self._fitted: str | None = None
        Trainer(self.model, self.config, **self._options())

    @property
    def best_accuracy(self) -> float:
        """The best ``accuracy`` by validation of the latest `fit`. Raise ValueError where no such metric was
        measured."""
        return best_accuracy_in(self._fitted)

    def fit(self, train: Data, valid: Data | None = None, test: Data | None = None) -> FitResult:
        """Train on ``train``, choose the weights by ``valid``, judge them on ``test``, and return the result, as
        `trainer.Trainer.fit` does. Raise `ConfigError` for what cannot be used, also for what cannot be pickled, and
        `TrainingFailedError` where Ray has given up."""
        self._refuse_other_launchers()
        _import_ray()
        given = {"train": train, "valid": valid, "test": test}
        # Here, before Ray gets anything: what the workers would refuse one after the other.
        task = Trainer(self.model, self.config, **self._options()).try_problem(given)[1].task
        if judges_classes(task) and not self._parts["metrics"]:
            self._parts["metrics"] = {"accuracy": is_right}
        place, trial = find_worker_place(), find_trial_folder()
        is_in_place = place is not None or trial is not None
        result = self._fit_here(given, trial) if is_in_place else self._fit_group(given)
        self._fitted = result.run_dir
        return result

    # Helpers of the methods above, in the order of their use.

    def _options(self) -> dict[str, Any]:
        return {name: part for name, part in self._parts.items() if part is not None}

    def _refuse_other_launchers(self) -> None:
        """Raise `ConfigError` where another launcher has started this process as one of its ranks."""
        if find_worker_place() is not None:
            return
        order = GivenOrder.read(os.environ)
        if order.run_dir or order.describe:
            refuse(
                "`dtrain train --script` starts the ranks itself: use trainer.Trainer there, or start the script by "
                "python FILE.PY"
            )
        if os.environ.get("WORLD_SIZE", "1") != "1":
            refuse(
                "WORLD_SIZE says that a launcher has started several processes, and RayTrainer starts its own: use "
                "python FILE.PY"
            )

    def _fit_here(self, given: Mapping[str, Data | None], trial: str | None) -> FitResult:
        """Train in this process, which Ray has started."""
        import ray.train
        import ray.tune

        place, run_dir = find_worker_place(), self.run_dir
        if place is None and self._is_group_asked:
            raise ConfigError(
                f"num_workers = {self.workers[1]} inside a trial of Ray Tune, which trains in its own process: leave "
                "num_workers out, and give more cores or GPUs to the trial"
            )
        if place is not None and run_dir is None and place.world_size > 1:
            raise ConfigError("several workers need RayTrainer(…, run_dir=…): a folder that all of them can reach")
        if run_dir is None and trial is not None:
            run_dir = f"{trial}/fit-{next(_FITS)}"  # the same where Ray starts the trial again
        config = self.config if place is None else plan_world(self.config, (place.world_size, place.world_size))
        with nullcontext() if place is None or place.world_size == 1 else be_rank(place):
            trainer = TrainerInRay(self.model, config, run_dir=run_dir, progress=False, **self._options())
            trainer.report = ray.tune.report if place is None else ray.train.report
            return trainer.fit(given["train"], given["valid"], given["test"])  # type: ignore[arg-type]

    def _fit_group(self, given: Mapping[str, Data | None]) -> FitResult:
        """Start a group of workers, wait for its end, and return the result with the best weights."""
        import ray
        import ray.train
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        run_dir = self.run_dir or new_run_dir(type(self.model).__name__, RankFacts(), next(_FITS))
        # The workers have other working folders.
        rundir = RunDir(run_dir.rstrip("/") if "://" in run_dir else str(Path(run_dir).absolute()))
        rundir.make()
        rundir.storage.delete(RESULT)
        if not ray.is_initialized():
            _start_ray()
        objects = {"model": self.model, "config": self.config, **self._options(), **given}
        parts = {name: _put(name, part) for name, part in objects.items() if part is not None}
        is_local = "://" not in rundir.uri
        fewest, most = self.workers
        elastic: Any = self.workers  # which Ray's own types do not say
        group = DataParallelTrainer(
            work,
            train_loop_config={"parts": parts, "run_dir": rundir.uri, "script": sys.argv[0]},
            backend_config=_backend(),
            scaling_config=ray.train.ScalingConfig(
                num_workers=most if fewest == most else elastic,
                use_gpu=self.use_gpu,
                resources_per_worker=None if self.resources_per_worker is None else dict(self.resources_per_worker),
            ),
            run_config=ray.train.RunConfig(
                name=f"{rundir.uri.rpartition('/')[2]}-{uuid.uuid4().hex[:8]}",  # a name of Ray's would be resumed
                storage_path=f"{rundir.uri}/ray" if is_local else None,
                failure_config=ray.train.FailureConfig(max_failures=self.max_failures),
            ),
        )
        try:
            ended: Any = group.fit()
        except ray.train.TrainingFailedError as error:
            failure = _failure(rundir, error)
            write_result(rundir, {"status": "failed", "error": str(failure)}, None)
            raise failure from error
        return self._read_result(rundir, FAILED if ended.return_value is None else int(ended.return_value))

    def _read_result(self, rundir: RunDir, code: int) -> FitResult:
        result = rundir.read_result()
        if result is None or result["status"] != "succeeded":
            said = str((result or {}).get("error") or "the workers ended without a result")
            raise failure_of(said, code or FAILED, rundir.uri)
        data, described = rundir.storage.read(WEIGHTS), rundir.read_json(MODEL) or {}
        if hashlib.sha256(data).hexdigest() != described.get("file_sha256"):
            raise DamagedError(f"{rundir.uri}/{WEIGHTS}", "it does not match its description")
        self.model.cpu().load_state_dict(torch.load(io.BytesIO(data), weights_only=True, map_location="cpu"))
        return FitResult(model=self.model, run_dir=rundir.uri, **figures_of(result))


def _import_ray() -> None:
    """Import Ray such that one that is started here keeps to loopback. Raise `ConfigError`, with the remedy, where Ray
    Train is missing."""
    if "ray" not in sys.modules and "RAY_ADDRESS" not in os.environ:
        for name, value in {**_OWN_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
            os.environ.setdefault(name, value)
    try:
        import ray.train
        import ray.tune  # noqa: F401
    except ImportError as error:
        raise ConfigError(f'RayTrainer needs Ray Train: pip install "ray[train,tune]>=2.60" ({error})') from None


def _start_ray() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine."""
    import ray

    if "RAY_ADDRESS" in os.environ:
        ray.init()
        return
    if ray.util.get_node_ip_address() != LOOPBACK:
        _log.warning(
            "Ray was imported before and accepts connections from other machines that have its token: start this "
            "process with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"
        )
    ray.init(address="local", include_dashboard=False)


def _backend() -> Any:
    """Return what Ray does for a group besides starting it: all workers of a machine see all of its GPUs, as the ranks
    of any launcher do, which take them by their local rank."""
    from ray.train.backend import Backend, BackendConfig

    class Ranks(Backend):
        share_cuda_visible_devices = True

    class RanksConfig(BackendConfig):
        backend_cls = Ranks

    return RanksConfig()


def _put(name: str, part: Any) -> Any:
    """Return a reference to a part in Ray's store: it is pickled once, whatever the number of workers. Raise
    `ConfigError`, which names it, where it cannot be."""
    import ray

    try:
        return ray.put(part)
    except Exception as error:  # whatever the part's own __reduce__ raises
        raise ConfigError(
            f"{name} ({type(part).__name__}) cannot be pickled, and Ray's workers are other processes: {error}. Give "
            "one that can be pickled, and open files, locks and connections on first use"
        ) from error


def _failure(rundir: RunDir, error: Exception) -> Exception:
    """Return what a training of which Ray has given up raises: the first cause that a worker has written or told."""
    failures = getattr(error, "worker_failures", {})
    result = rundir.read_result() or {}
    causes = [getattr(failure, "_base_exc", failure) for failure in failures.values()]
    told = next((cause for cause in causes if isinstance(cause, TrainingFailedError)), None)
    code = told.code if told is not None else LOST
    return TrainingFailedError(str(result.get("error") or told or error), code)
