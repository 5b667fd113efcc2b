"""`PyTorchDDPTrainer` and `HorovodTrainer`: a training by the names of the framework that sums its gradients.

Each is `trainer.fit.Trainer` with a strategy; what it is given under other names becomes a setting of
`trainer.fit.DistributedConfig`. Names that a launcher decides are checked against it. Those of frameworks that have a
loop of their own do not belong here.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer.comm.launcher_env import RankFacts, rank_variables
from trainer.comm.own_address import hold_ports, own_address
from trainer.config import ConfigError, DistributedTrainingConfig, TrackingConfig
from trainer.fit import DistributedConfig, FitResult, Trainer
from trainer.rundir import RunDir
from trainer.runtime.launch import GivenOrder
from trainer.strategies import require_package, settings_of_backend, settings_of_deepspeed

Data = Dataset[Any] | DataLoader[Any]
_NAMES = {"batch_size": "batch_size_per_gpu", "gradient_clipping": "clip_norm", "resume_from_checkpoint": "resume"}
"""Other names of settings."""
_SCALER = {"scaler_init_scale": 2**16, "scaler_growth_interval": 2000}
"""How the loss is scaled with fp16, which is no setting."""


@dataclass(frozen=True, slots=True)
class History:
    """How a training went."""

    result: FitResult
    total_time: float
    """Seconds of training, without the start."""
    best_accuracy: float | None
    """The metric ``accuracy`` of the best weights on the test split, on the validation split where there is no test
    split; None where no metric of this name was given."""


class PyTorchDDPTrainer:
    """A training with torch's data parallelism, or with DeepSpeed's ZeRO where ``zero_stage`` or ``deepspeed_config``
    asks for it."""

    strategy = "ddp"

    def __init__(
        self, model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
        num_gpus: int | None = None, num_nodes: int | None = None, gpus_per_node: int | None = None,
        mixed_precision: bool = False, mlflow_tracking: bool = False, checkpoint_dir: str | None = None,
        communication_backend: str | None = None, verbose: bool | None = None, zero_stage: int | None = None,
        deepspeed_config: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        """``optimizer``: any optimizer of the model that has taken no step, whose learning rates then stay constant
        (with DeepSpeed AdamW, or Adam without weight decay, of one group); None: AdamW by the settings. ``loss_fn`` and
        ``metrics``: as `Trainer` takes them. ``num_gpus`` (in all), ``num_nodes`` and ``gpus_per_node``: only their
        number of ranks is checked, since whoever starts this script decides. ``mixed_precision``: fp16 on GPUs, bf16 on
        CPUs. ``mlflow_tracking``: to the server that MLFLOW_TRACKING_URI names. ``checkpoint_dir``: the run
        directory. ``communication_backend``: gloo or nccl. ``verbose``: whether rank 0 shows its progress.
        ``zero_stage``: 1, 2 or 3, for DeepSpeed; ``deepspeed_config``:
        its own configuration, as a mapping or as its ``DeepSpeedConfig``, of which what has no counterpart is refused.
        ``settings``: any of `DistributedConfig`, some by the names ``batch_size``, ``gradient_clipping`` and
        ``resume_from_checkpoint``; ``checkpoint_frequency`` counts optimizer steps.

        Raise `ConfigError` for what cannot be used."""
        self.model, self.loss_fn, self.metrics, self.verbose = model, loss_fn, metrics, verbose
        self._run_dir, self._sizes = checkpoint_dir, (num_gpus, num_nodes, gpus_per_node)
        for name, usual in _SCALER.items():
            if settings.pop(name, usual) != usual:
                raise ConfigError(f"{name} is always {usual}: leave it out")
        settings.pop("find_unused_parameters", None)  # they are always found
        found = {_NAMES.get(name, name): value for name, value in settings.items()}
        if communication_backend is not None:
            if communication_backend == "mpi":
                raise ConfigError("communication_backend = 'mpi' is not in torch's packages: use gloo or nccl")
            found |= settings_of_backend(communication_backend)
        if mixed_precision:
            found["precision"] = "fp16" if torch.cuda.is_available() else "bf16"
        if deepspeed_config is not None:
            found = settings_of_deepspeed(getattr(deepspeed_config, "_param_dict", deepspeed_config)) | found
        if zero_stage is not None:
            found |= {"strategy": "deepspeed", "zero_stage": zero_stage}
        self._settings: dict[str, Any] = {"strategy": self.strategy, **found}
        self._optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
        if optimizer is not None and self._settings["strategy"] == "deepspeed":
            self._settings = {**settings_of_optimizer(optimizer), **self._settings}
        elif optimizer is not None:
            self._optimizer = optimizer_like(optimizer, model)
            self._settings = {"schedule": "constant", "warmup_steps": 0, **self._settings}
        DistributedConfig(**self._settings)  # what cannot be used is refused here, and not when it is fitted
        if not GivenOrder.read(os.environ).describe:  # nodes may have what this machine has not
            require_package(self._settings["strategy"])
        self._tracking = _tracking(mlflow_tracking)

    def fit(
        self,
        train: Data,
        valid: Data | None = None,
        test: Data | None = None,
        *,
        epochs: int | None = None,
        checkpoint_dir: str | None = None,
        mlflow_experiment: str | None = None,
    ) -> History:
        """Train as `Trainer.fit` does, and return how it went. Arguments win over those given before. Raise what it
        raises."""
        settings = self._settings if epochs is None else self._settings | {"epochs": epochs}
        config = DistributedConfig(**settings)
        check_sizes(*self._sizes, _planned_ranks(config))
        tracking = self._tracking
        if mlflow_experiment is not None:
            tracking = replace(tracking or _tracking(True) or TrackingConfig(), mlflow_experiment=mlflow_experiment)
        trainer = Trainer(
            self.model,
            config,
            loss=self.loss_fn,
            metrics=self.metrics,
            optimizer=self._optimizer,
            run_dir=checkpoint_dir or self._run_dir,
            tracking=tracking,
            progress=self.verbose,
        )
        result = trainer.fit(train, valid, test)
        return History(result, result.train_seconds, result.test.get("accuracy"))


class HorovodTrainer(PyTorchDDPTrainer):
    """A training whose gradients Horovod sums. It runs under torchrun, `dtrain launch`, `dtrain train --script` and
    horovodrun, whether or not the script calls ``hvd.init()``."""

    strategy = "horovod"

    def __init__(self, model: nn.Module, *, compression: Any = "none", **options: Any) -> None:
        """``compression``: ``hvd.Compression.fp16`` or ``"fp16"`` for half the bytes, else ``"none"``. ``options``: as
        `PyTorchDDPTrainer` takes them. Raise `ConfigError` where Horovod is not installed."""
        if not GivenOrder.read(os.environ).describe:
            require_package(self.strategy)
        take_ranks_of_horovod()
        super().__init__(model, communication=name_of_compression(compression), **options)

    def metric_average(self, value: float | Tensor, name: str) -> float:
        """Return the mean of a number over all ranks, of which each gives its own. A collective of Horovod, whose world
        forms in `fit`; before, and on one rank, the number itself."""
        import horovod.torch as hvd

        number = torch.as_tensor(value, dtype=torch.float64).reshape(1).cpu()
        if hvd.is_initialized() and hvd.size() > 1:
            number = hvd.allreduce(number, name=f"metric.{name}", op=hvd.Average)
        return float(number)


def name_of_compression(compression: Any) -> str:
    """Return ``training.communication`` for one of Horovod's compressions, or for its name. Raise `ConfigError` for
    another one."""
    name = compression if isinstance(compression, str) else getattr(compression, "__name__", str(compression))
    kinds = {"fp16": "fp16", "FP16Compressor": "fp16", "none": "allreduce", "NoneCompressor": "allreduce"}
    if name not in kinds:
        raise ConfigError(f"compression = {name!r}: choose 'fp16' or 'none'")
    return kinds[name]


def optimizer_like(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return what makes the same optimizer of any division of the model. Raise `ConfigError` for an optimizer of other
    parameters, and for one that keeps something already."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in known):
        raise ConfigError("the optimizer has parameters that are not the model's: make it of model.parameters()")
    if optimizer.state:
        raise ConfigError(
            f"the {type(optimizer).__name__} keeps something already, from steps before or from its start: give "
            "trainer.Trainer(…, optimizer=…) a function that makes it"
        )

    def make(module: nn.Module) -> torch.optim.Optimizer:
        own = dict(module.named_parameters())
        known_as = {id(parameter): own[names[id(parameter)]] for parameter in known}
        made = copy.deepcopy(optimizer, known_as)
        for name in vars(optimizer).keys() - vars(made).keys():  # a class's own attributes, which torch does not copy
            setattr(made, name, copy.deepcopy(vars(optimizer)[name], known_as))
        return made

    mine, copied = vars(optimizer), vars(make(model))
    if lost := [name for name, value in mine.items() if isinstance(value, dict) and len(value) != len(copied[name])]:
        raise ConfigError(
            f"a copy of the {type(optimizer).__name__} would lack what it has in {', '.join(lost)}, such as hooks: "
            "give trainer.Trainer(…, optimizer=…) a function that makes it"
        )
    return make


def settings_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings that stand for an optimizer, whose learning rate stays constant. Raise `ConfigError` for one
    that trains otherwise than DeepSpeed's AdamW."""
    remedy = (
        "with DeepSpeed give AdamW with one parameter group and the usual betas, or leave it out and set learning_rate "
        "and weight_decay"
    )
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.Adam) or len(optimizer.param_groups) != 1:
        raise ConfigError(
            f"the optimizer is {kind.__name__} with {len(optimizer.param_groups)} parameter group(s): {remedy}"
        )
    [group] = optimizer.param_groups
    usual = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}
    odd = [name for name, value in usual.items() if group[name] != value]
    if odd or (kind is torch.optim.Adam and group["weight_decay"]):
        raise ConfigError(f"an optimizer with unusual {' and '.join(odd) or 'weight_decay (L2)'}: {remedy}")
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    return {
        "learning_rate": rate,
        "weight_decay": decay,
        "decay_norms_and_biases": True,
        "schedule": "constant",
        "warmup_steps": 0,
    }


def check_sizes(num_gpus: int | None, num_nodes: int | None, gpus_per_node: int | None, ranks: int) -> None:
    """Raise `ConfigError` if a script asks for other ranks than those that were started. Pure."""
    each = gpus_per_node if num_nodes is None or gpus_per_node is None else num_nodes * gpus_per_node
    asked = num_gpus if num_gpus is not None else each if num_nodes is not None else None
    if num_gpus is not None and num_nodes is not None and gpus_per_node is not None and each != num_gpus:
        raise ConfigError(f"num_gpus = {num_gpus} is not num_nodes * gpus_per_node = {num_nodes} * {gpus_per_node}")
    if asked is not None and asked != ranks:
        nodes = num_nodes or 1
        raise ConfigError(
            f"{asked} GPUs are requested, but this script was started on {ranks} rank{'s' if ranks > 1 else ''}, one "
            f"for each GPU: start it with `dtrain train --script FILE --nodes {nodes} --procs-per-node "
            f"{asked // nodes}`, or with `torchrun --nproc-per-node {asked // nodes}`; or leave the number out"
        )


def take_ranks_of_horovod() -> None:
    """Take over the ranks that horovodrun has given this process, where no other launcher has given any: also the
    address at which rank 0 can listen. Starts Horovod, if the script has not; a collective of all its ranks."""
    if "RANK" in os.environ or "HOROVOD_RANK" not in os.environ:
        return
    import horovod.torch as hvd

    hvd.init()
    host = own_address(os.environ, os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"))
    with hold_ports(host) as [port]:
        host, port = hvd.broadcast_object([host, port], root_rank=0)
    facts = RankFacts(
        rank=hvd.rank(),
        world_size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_world_size=hvd.local_size(),
        node_rank=hvd.cross_rank(),
        master_addr=host,
        master_port=port,
    )
    os.environ.update(rank_variables(facts))


def _planned_ranks(config: DistributedTrainingConfig) -> int:
    """Return the ranks that this script's training is planned for: those of its cluster, else of its launcher."""
    order = GivenOrder.read(os.environ)
    if order.run_dir and not order.describe:
        return RunDir(order.run_dir).read_job().training.world_size
    for override in order.overrides:
        name, _, value = override.partition("=")
        if name == "training.world_size":
            return int(value)
    return config.world_size


def _tracking(is_asked: bool) -> TrackingConfig | None:
    if not is_asked:
        return None
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError("MLflow is asked for: set MLFLOW_TRACKING_URI to its server, or to sqlite:///mlflow.db")
    return TrackingConfig(mlflow_tracking_uri=uri)
