"""The options of `cost_estimate` in the launchpad: the training, its limits and its probe."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum, StrEnum
from typing import Any

from pydantic import Field, create_model

from dtrain_dagster.assets.common import LaunchpadOptions
from dtrain_dagster.resources import GPUClusterResource
from dtrain_dagster.settings.environment import MOST_NODES
from dtrain_dagster.settings.tiers import tier_of
from trainer.config import DistributedTrainingConfig
from trainer.model.allowed_factories import STOCK, modules_of_settings

_DEFAULT = DistributedTrainingConfig()


class LearningRateScaling(Enum):
    """How the learning rate follows the global batch."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class Strategy(Enum):
    """What a rank holds of the model, and what sums gradients."""

    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"
    horovod = "horovod"
    deepspeed = "deepspeed"


class Precision(Enum):
    """The autocast type of the forward pass."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def _of_training(name: str) -> Any:
    """Return a field with the default and the bounds that the trainer's configuration has for it."""
    field = DistributedTrainingConfig.__pydantic_fields__[name]  # type: ignore[attr-defined]
    bounds = {
        key: getattr(item, key) for item in field.metadata for key in ("ge", "gt", "le", "lt") if hasattr(item, key)
    }
    return Field(default=getattr(_DEFAULT, name), **bounds)


class NodeTier(Enum):
    """How firmly nodes are bought."""

    dedicated = "dedicated"
    spot = "spot"
    low_priority = "low_priority"
    """The old name of spot."""


class PlanOptions(LaunchpadOptions):
    """The nodes, the limits and the probe of a training of any kind, in the launchpad."""

    nodes: int | None = Field(default=None, ge=1, le=MOST_NODES)
    """Nodes of this run; unset: DTRAIN_NODES."""
    gpu_type: str | None = None
    """SKU of this run, such as Standard_NC24ads_A100_v4; `dtrain cost` has all. Unset: DTRAIN_GPU_TYPE."""
    tier: NodeTier | None = None
    """Tier on which the nodes of this run are requested; unset: DTRAIN_TIER."""
    more: dict[str, Any] = {}
    """Any other field of DistributedTrainingConfig, such as {"early_stopping_patience": 3}."""
    budget_usd: float = Field(default=0.0, ge=0, lt=math.inf)
    """The highest expected cost in dollars, probe included; above it nothing starts. 0: no limit."""
    deadline_hours: float = Field(default=0.0, ge=0, lt=math.inf)
    """The longest expected time in hours; above it nothing starts. 0: no limit."""
    stop_at_usd: float = Field(default=0.0, ge=0, lt=math.inf)
    """The cost in dollars, probe included, at which the training saves a checkpoint and stops. 0: never."""
    choose_nodes: bool = False
    """Take the number of nodes, up to those of this run, that costs least within budget and deadline; each rank keeps
    its batch."""
    probe: bool = True
    """Run a short probe where no past run tells the pace; its cost counts against the limits. False: nothing runs
    before the plan is known."""


def with_nodes_of_run(cluster: GPUClusterResource, config: PlanOptions) -> GPUClusterResource:
    """Return the cluster with the nodes that the launchpad asks for."""
    return cluster.with_hardware(config.nodes, config.gpu_type, tier_of(config.tier.value) if config.tier else None)


class TrainingOptions(PlanOptions):
    """The training, its limits and its probe, in the launchpad."""

    model: str = "har_tcn"
    """A stock model, such as har_tcn or mlp, or a factory of your own as package.module:factory, which
    DTRAIN_FACTORY_MODULES has to allow. Where this is left as it is, a dataset of rows gets the usual model
    of its kind."""
    model_args: dict[str, Any] = {}
    """Arguments of the model's factory, by name."""
    loss: str = "return_and_volatility"
    """A stock loss, or a factory of your own, as for the model. Left as it is: see the model; with another model of
    windows, student_t."""
    loss_args: dict[str, Any] = {}
    """Arguments of the loss's factory, by name."""
    epochs: int = _of_training("epochs")
    """Passes over the training split."""
    batch_size_per_gpu: int = _of_training("batch_size_per_gpu")
    """Samples that a rank computes at once."""
    gradient_accumulation_steps: int = _of_training("gradient_accumulation_steps")
    """Such batches of each rank in one optimizer step."""
    learning_rate: float = _of_training("learning_rate")
    """Peak of the learning rate, before lr_scaling."""
    lr_scaling: LearningRateScaling = LearningRateScaling(_DEFAULT.lr_scaling)
    """Whether the learning rate grows with the global batch: not, with it, or with its square root."""
    warmup_steps: int = _of_training("warmup_steps")
    """Optimizer steps in which the learning rate rises from zero; at most a tenth of all."""
    checkpoint_frequency: int = _of_training("checkpoint_frequency")
    """Optimizer steps between checkpoints."""
    precision: Precision = Precision(_DEFAULT.precision)
    """Type of the forward pass; fp16 needs a GPU. Weights stay fp32."""
    strategy: Strategy = Strategy(_DEFAULT.strategy)
    """All of the model on each rank (ddp, horovod), or parts of it (fsdp, hsdp, deepspeed)."""
    seed: int = _of_training("seed")
    """Seed of the first weights and of the order of samples."""
    settings_file: str = ""
    """The file that `dtrain tune` or a search has written for this training. A value stated here, other than its
    default or under ``more``, takes precedence."""

    def training(self, world_size: int, threads_per_rank: int | None) -> dict[str, Any]:
        """Return the trainer's configuration: the fields named here, then those of ``more``."""
        known = {field.name for field in fields(DistributedTrainingConfig)}
        values = {name: getattr(self, name) for name in type(self).model_fields if name in known}
        named = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        return {"world_size": world_size, "threads_per_rank": threads_per_rank, **named, **self.more}

    def stated(self) -> set[str]:
        """Return the fields of the training that the user has set."""
        starts = (type(self)(), TrainingOptions())  # where a pipeline has its own, they are stated in its definition
        changed = {
            name
            for name in TrainingOptions.model_fields
            if any(getattr(self, name) != getattr(start, name) for start in starts)
        }
        return changed | set(self.more)


def with_checked_names(kind: type[TrainingOptions], given: Mapping[str, Any]) -> type[TrainingOptions]:
    """Return the options with the names of models and losses as enums, which Dagster offers and checks in the
    launchpad. They stay strings where factories of the user's own are allowed. ``given``: where the launchpad
    begins."""
    if modules_of_settings():
        return kind
    checked: dict[str, Any] = {}
    for part, names in STOCK.items():
        if ":" in given.get(part, ""):
            continue  # a factory of the graph's author
        field = copy.copy(kind.model_fields[part])
        options: Any = StrEnum(part.capitalize(), dict(zip(names, names, strict=True)))  # type: ignore[misc]
        field.default = options(field.default)
        checked[part] = (options, field)
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **checked)


class ScriptOptions(PlanOptions):
    """The training of a script, in the launchpad. Its model, data, loss and settings are the script's own."""

    arguments: list[str] = []
    """Arguments of the script's command."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training split; unset: as the script has it."""

    def overrides(self, world_size: int, threads_per_rank: int | None) -> list[str]:
        """Return the fields that come after the script's own, as ``dotted.key=value``."""
        fields = {"world_size": world_size, "threads_per_rank": threads_per_rank, "epochs": self.epochs}
        given = {name: value for name, value in fields.items() if value is not None} | self.more
        return [f"training.{name}={json.dumps(value)}" for name, value in given.items()]
