"""`TensorFlowDistributedTrainer`: a Keras model, trained by the ranks that a launcher has started.

It is `trainer.fit.Trainer` of a Keras model as a module of torch (`trainer.adapters.keras_module`); what is given in
Keras' terms, and the ranks of ``TF_CONFIG``, belong here. TensorFlow is imported when a training begins.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer.comm.launcher_env import RankFacts, rank_facts, rank_variables
from trainer.config import ConfigError, DistributedTrainingConfig, TrackingConfig, settings_of
from trainer.fit import DistributedConfig, FitResult, Trainer, best_accuracy_in
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from trainer.adapters.keras_module import Figure

WEIGHTS = "model/model.weights.h5"
"""The weights of the trained model, for ``keras.Model.load_weights``."""
_ONLY = {
    "precision": ("fp32", "set a policy where the model is made: keras.mixed_precision"),
    "compile": ("off", "TensorFlow compiles its graphs itself"),
    "strategy": ("ddp", "each rank holds the whole model"),
    "activation_checkpointing": (False, "use keras.RematScope where the model is made"),
}
"""The one value of a setting that can be honoured, and what to do instead of another."""
Data = Dataset[Any] | DataLoader[Any] | tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class KerasResult(FitResult):
    """How a training ended, the same on all ranks."""

    model: Any
    """The Keras model with the best weights by validation, the last where there was no validation."""


class TensorFlowDistributedTrainer:
    """A trainer of a Keras model.

    It trains in one process, and in the ranks that `dtrain train --script`, torchrun, `dtrain launch`, SLURM, mpirun or
    ``TF_CONFIG`` name, as `trainer.Trainer` does: TensorFlow computes outputs, losses and gradients, everything else is
    the loop for PyTorch.
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
        """``make_model`` makes the Keras model. ``loss``: one of Keras (an object or a name), or ``loss(target,
        outputs)`` with one figure per sample; None: that which the model was compiled with. ``metrics``: further
        figures per sample, called alike, of which means are reported; without any, the cross entropy of classes brings
        ``accuracy``. The others are those of `trainer.Trainer`. Raise `ConfigError` for settings that TensorFlow cannot
        honour."""
        self.make_model = make_model
        self.config = settings_of(config, DistributedConfig, "config", DistributedTrainingConfig)
        self._loss, self._metrics = loss, metrics
        self._options: dict[str, Any] = {"run_dir": run_dir, "name": name, "tracking": tracking, "progress": progress}
        self._fitted: str | None = None
        for setting, (only, remedy) in _ONLY.items():
            if (given := getattr(self.config, setting)) != only:
                raise ConfigError(
                    f"training.{setting} = {given!r} is not for TensorFlow: {remedy}, and leave the setting at {only!r}"
                )

    @property
    def best_accuracy(self) -> float:
        """The best ``accuracy`` by validation of the latest `fit`. Raise ValueError where none was measured."""
        return best_accuracy_in(self._fitted)

    def fit(self, train: Data, valid: Data | None = None, test: Data | None = None) -> KerasResult:
        """Train on ``train``, choose the weights by ``valid``, judge them on ``test``, and return the result, as
        `trainer.Trainer.fit` does. Data are map-style datasets, loaders of torch, or pairs of arrays (inputs, target).
        All ranks call this together. Raise what `trainer.Trainer.fit` raises."""
        given = {"train": train, "valid": valid, "test": test}
        splits: Any = [None if part is None else as_dataset(part, split) for split, part in given.items()]
        os.environ.update(variables_of_tf_config(os.environ))
        facts, config = rank_facts(os.environ, self.config), self.config
        if config.world_size == 1 and facts.world_size > 1:
            config = replace(config, world_size=facts.world_size)
        from trainer.adapters import keras_module as parts

        parts.prepare_tensorflow(facts, config)
        module = parts.KerasModule(self.make_model())
        loss = parts.choose_loss(self._loss, module.keras_model)
        figures: dict[str, Any] = {
            "loss": parts.as_criterion(loss),
            "metrics": parts.choose_metrics(self._metrics, loss),
        }
        result = Trainer(module, config, **figures, **self._options).fit(*splits)
        self._fitted = result.run_dir
        model = module.settle()
        if facts.rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                model.save_weights(path := Path(folder) / "model.weights.h5")
                RunDir(result.run_dir).storage.write(WEIGHTS, path.read_bytes())
        told = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "model"}
        return KerasResult(model=model, **told)


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


def variables_of_tf_config(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for the workers of ``TF_CONFIG``; none where it is not set, or torchrun's are.
    Rank 0 is found where TensorFlow's own server would be. Raise `ConfigError` for what names no workers. Pure."""
    if "TF_CONFIG" not in environment or "RANK" in environment:
        return {}
    try:
        given: Any = json.loads(environment["TF_CONFIG"])
        cluster, kind, rank = given["cluster"], str(given["task"]["type"]), int(given["task"]["index"])
        chief = [str(place) for place in cluster.get("chief", [])]
        places = [place.rpartition(":") for place in (*chief, *map(str, cluster.get("worker", [])))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        example = '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": 0}}'
        raise ConfigError(f"TF_CONFIG is not valid: it needs {example} ({type(error).__name__}: {error})") from None
    if other := [name for name in (*sorted(cluster), kind) if name not in ("chief", "worker")]:
        raise ConfigError(f"TF_CONFIG has tasks of the type {other[0]!r}: all ranks are workers")
    rank += len(chief) if kind == "worker" else 0
    if not 0 <= rank < len(places):
        raise ConfigError(f"TF_CONFIG has {len(places)} workers and says that this one is number {rank}")
    hosts, port = [host.strip("[]") for host, _, _ in places], places[0][2]
    if not port.isdecimal():
        raise ConfigError(f"TF_CONFIG has the worker {''.join(places[0])!r}: write HOST:PORT")
    of_node = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return rank_variables(
        RankFacts(
            rank=rank,
            world_size=len(hosts),
            local_rank=of_node.index(rank),
            local_world_size=len(of_node),
            node_rank=list(dict.fromkeys(hosts)).index(hosts[rank]),
            master_addr=hosts[0],
            master_port=int(port),
        )
    )
