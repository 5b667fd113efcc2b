"""`TensorFlowDistributedTrainer`: a Keras model, trained by the ranks that a launcher has started.

What is asked for, and how a training that ends otherwise than well is told, belongs here; the loop is
`trainer.tensorflow.loop`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer.checkpoint.manager import CheckpointError
from trainer.config import ConfigError, DistributedTrainingConfig, TrackingConfig, settings_of
from trainer.data.dataset_data import DatasetData
from trainer.data.shards import DatasetError
from trainer.data.user_loaders import join_requests, read_request
from trainer.engine.result import write_result
from trainer.engine.run_job import INTERRUPTED, leave_process
from trainer.engine.signals import Stopped
from trainer.errors import DamagedError
from trainer.exit_codes import EVICTED, FAILED, LOST, UNUSABLE
from trainer.fit import (
    DESCRIBE,
    RUN_DIR,
    DistributedConfig,
    FitResult,
    TrainingFailedError,
    best_accuracy_in,
    failure_of,
    figures_of,
    make_job,
    new_run_dir,
    refuse,
)
from trainer.observability.progress_line import ProgressLine
from trainer.rundir import RESULT, RunDir
from trainer.storage.base import StorageError
from trainer.tensorflow.cluster import Cluster, choose_facts, find_cluster

if TYPE_CHECKING:
    from trainer.tensorflow.loop import KerasTraining
    from trainer.tensorflow.replica import Figure

_ONLY = {
    "precision": ("fp32", "set a policy where the model is made: keras.mixed_precision"),
    "compile": ("off", "TensorFlow compiles its graphs itself"),
    "communication": ("allreduce", "TensorFlow sums gradients exactly"),
    "strategy": ("ddp", "each rank of this strategy holds the whole model"),
    "activation_checkpointing": (False, "use keras.RematScope where the model is made"),
    "max_node_seconds": (None, "only trainings of PyTorch have a budget"),
    "start_from": (None, "load the weights in make_model"),
    "profile_steps": (None, "use TensorFlow's own profiler: tf.profiler.experimental"),
}
"""The one value of a setting that can be honoured, and what to do instead of another."""
_FITS = itertools.count(1)
"""Numbers the trainings of this process."""
Data = Dataset[Any] | DataLoader[Any] | tuple[Any, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KerasResult(FitResult):
    """How a training ended, the same on all ranks."""

    model: Any
    """The Keras model with the best weights by validation, the last where there was no validation."""


class TensorFlowDistributedTrainer:
    """A trainer of a Keras model under `tf.distribute.MultiWorkerMirroredStrategy`.

    It trains in one process, and in the ranks that torchrun, `dtrain launch`, SLURM, mpirun or ``TF_CONFIG`` name. Each
    sample is used once per epoch, in the batches of PyTorch's loop with the same seed; training resumes from the latest
    checkpoint of its run directory. Where a rank is lost, all end, and the job is submitted again.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        config: DistributedTrainingConfig | Mapping[str, Any] | None = None,
        *,
        loss: Any = None,
        metrics: Mapping[str, Figure] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        tracking: TrackingConfig | Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> None:
        """``make_model`` makes the Keras model, under the strategy. ``loss``: one of Keras (an object or a name), or
        ``loss(target, outputs)`` with one figure per sample; None: that which the model was compiled with. ``metrics``:
        further figures per sample, called alike, of which means are reported; without any, the cross entropy of classes
        brings ``accuracy``. The others are those of `trainer.Trainer`. Raise `ConfigError` for settings that TensorFlow
        cannot honour."""
        self.make_model = make_model
        self.config = settings_of(config, DistributedConfig, "config", DistributedTrainingConfig)
        self._loss, self._metrics, self._name = loss, metrics, name
        self._tracking = settings_of(tracking, TrackingConfig, "tracking")
        self._given_run_dir = run_dir
        self._shows_progress = sys.stderr.isatty() if progress is None else progress
        self._fitted: str | None = None
        if why := explain_settings(self.config):
            raise ConfigError(why)

    @property
    def best_accuracy(self) -> float:
        """The best ``accuracy`` by validation of the latest `fit`. Raise ValueError where none was measured."""
        return best_accuracy_in(self._fitted)

    def fit(self, train: Data, valid: Data | None = None, test: Data | None = None) -> KerasResult:
        """Train on ``train``, choose the weights by ``valid``, judge them on ``test``, and return the result.

        Data are map-style datasets, loaders of torch, or pairs of arrays (inputs, target). All ranks call this
        together. Raise `ConfigError` for what cannot be used, `TrainingFailedError` where the training ends otherwise
        than well, and KeyboardInterrupt where a person ends it; a process that was told to end (SIGTERM) leaves with
        its exit code (SystemExit)."""
        if RUN_DIR in os.environ or DESCRIBE in os.environ:
            refuse(
                "`dtrain train --script` trains models of PyTorch: start this script by "
                "`dtrain launch --engine tensorflow`"
            )
        data, config = self._read_data({"train": train, "valid": valid, "test": test})
        facts, _ = choose_facts(os.environ, config)
        if config.world_size == 1 and facts.world_size > 1:
            config = replace(config, world_size=facts.world_size)
        run_dir = str(self._given_run_dir or new_run_dir("keras", facts, next(_FITS))).rstrip("/")
        cluster = find_cluster(config, os.environ)
        if why := explain_settings(config, cluster.is_one_host):
            raise ConfigError(why)
        rundir = RunDir(run_dir)
        rundir.make()
        if facts.rank == 0:
            rundir.storage.delete(RESULT)  # it is of an earlier start
        line = ProgressLine()
        try:
            data.start_workers(config, facts)
            code, result, model = self._train(data, config, cluster, rundir, line)
        finally:
            line.close()
            data.close()
        return self._result(rundir, code, result, model)

    # Helpers of the methods above, in the order of their use.

    def _read_data(self, given: Mapping[str, Data | None]) -> tuple[DatasetData, DistributedTrainingConfig]:
        requests = {
            split: read_request(as_dataset(part, split), split) for split, part in given.items() if part is not None
        }
        config, size = self.config, requests["train"].batch_size
        if config.early_stopping_patience is not None and given["valid"] is None:
            raise ConfigError("training.early_stopping_patience needs a validation split: call fit(train, valid)")
        return join_requests(requests, self._name), config if size is None else replace(config, batch_size_per_gpu=size)

    def _train(
        self, data: DatasetData, config: DistributedTrainingConfig, cluster: Cluster, rundir: RunDir, line: ProgressLine
    ) -> tuple[int, dict[str, Any], Any]:
        """Return the exit code, the result and the model."""
        training: KerasTraining | None = None
        lost: tuple[type[Exception], ...] = (StorageError,)
        code, model = FAILED, None
        try:
            from trainer.tensorflow.loop import KerasTraining
            from trainer.tensorflow.replica import LOST as COLLECTIVES
            from trainer.tensorflow.replica import Replica, describe_layers, describe_loss, open_strategy

            lost = (*COLLECTIVES, StorageError)
            strategy = open_strategy(cluster, config)
            replica = Replica(self.make_model, strategy, config, self._loss, self._metrics)
            model = replica.model
            names = {"class": f"keras.{type(model).__qualname__}"}, {"class": replica.loss_name}
            job = make_job(rundir.uri, config, data.dataset_id, *names, self._tracking)
            if cluster.facts.rank == 0:
                rundir.write_job(job)
            shapes = [[variable.name, list(variable.shape)] for variable in model.trainable_variables]
            identity = [data.dataset_id, data.count("train"), asdict(job.model), asdict(job.loss), shapes]
            parts = {
                "dataset": data.dataset_id,
                "model": describe_layers(model),
                "loss": describe_loss(replica.loss),
                "training": {"seed": config.seed, "shuffle_block": config.shuffle_block},
            }
            fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
            watch = line.take if self._shows_progress else None
            training = KerasTraining(job, replica, data, cluster.facts, fingerprint, parts, watch)
            result, code = training.train(), 0
        except Stopped:
            code, result = EVICTED, {"status": "stopped", "steps": training.progress.step if training else 0}
        except (ConfigError, DamagedError, DatasetError, CheckpointError) as error:
            code, result = UNUSABLE, {"status": "failed", "error": str(error)}
        except lost as error:
            told = str(error).strip().splitlines() or [""]
            code, result = LOST, {"status": "failed", "error": f"{type(error).__name__}: {told[-1]}"}
        except KeyboardInterrupt:
            code, result = FAILED, {"status": "failed", "error": INTERRUPTED}
        except Exception as error:
            traceback.print_exc()
            code, result = FAILED, {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        self._end(training, rundir, code, result, cluster.facts.rank)
        return code, result, model

    def _end(
        self, training: KerasTraining | None, rundir: RunDir, code: int, result: dict[str, Any], rank: int
    ) -> None:
        """Write how the training ended, and its last reports."""
        if training is not None:
            if "error" in result:
                training.reports.emit("error", message=result["error"], fatal=code != LOST)
            training.reports.emit("end", status=result["status"])
            training.close(60.0 if code == 0 else 5.0)
        if "error" in result:
            print(result["error"], file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
        if (rank == 0 or "error" in result) and not write_result(rundir, result, None) and code == 0:
            raise TrainingFailedError(f"could not write the result to {rundir.uri}: make room there, and resume", LOST)

    def _result(self, rundir: RunDir, code: int, result: dict[str, Any], model: Any) -> KerasResult:
        if code == EVICTED:
            sys.exit(leave_process(code))
        if code != 0:
            raise failure_of(result["error"], code, rundir.uri)
        self._fitted = rundir.uri
        return KerasResult(model=model, run_dir=rundir.uri, **figures_of(result))


def as_dataset(given: Data, split: str) -> Dataset[Any] | DataLoader[Any]:
    """Return data as torch's datasets are. Raise `ConfigError` for what has no positions. Pure."""
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, np.ndarray) for part in given):
        inputs, target = given
        if len(inputs) != len(target):
            raise ConfigError(f"{split}: {len(inputs)} inputs and {len(target)} targets; give one target for each")
        return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(target))
    if type(given).__module__.partition(".")[0] == "tensorflow":
        raise ConfigError(
            f"{split} is a {type(given).__name__}: its samples have no positions, so they cannot be dealt to ranks, "
            "nor be used exactly once. Give a pair of arrays, or a map-style dataset (__getitem__ and __len__)"
        )
    return given  # type: ignore[return-value]


def explain_settings(config: DistributedTrainingConfig, is_one_host: bool = True) -> str:
    """Return why TensorFlow's loop cannot have these settings, and the remedy; "" if it can."""
    for name, (only, remedy) in _ONLY.items():
        if (given := getattr(config, name)) != only:
            return f"training.{name} = {given!r} is not for TensorFlow: {remedy}, and leave the setting at {only!r}"
    if not is_one_host and (config.tls is not None or config.encryption == "required"):
        given = "training.tls" if config.tls is not None else "training.encryption = 'required'"
        return f"{given}: TensorFlow sends gradients between hosts unencrypted. Encrypt the network, or leave it out"
    return ""
