"""The options of `cost_estimate` in the launchpad: the training, its limits and its probe; and the job that they ask
for, of a dataset, as the launchpad describes it, or of a script, as it describes itself."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, create_model

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import LaunchpadOptions
from dtrain_dagster.clusters.ranks import hosts_of
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.jobs.script_job import ScriptJob, describe_script
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.environment import MOST_NODES
from trainer.config import ConfigError, DistributedTrainingConfig, JobConfig, parse_job
from trainer.data.manifest import kind_of
from trainer.model.allowed_factories import STOCK, modules_of_settings, refuse_foreign_factories, usual_parts
from trainer.rundir import resolve_start

if TYPE_CHECKING:
    from dtrain_dagster.planning.build_plan import PlannedJob
    from dtrain_dagster.planning.check_job import Checked

_DEFAULT = DistributedTrainingConfig()


LearningRateScaling = StrEnum("LearningRateScaling", "none linear sqrt")
Strategy = StrEnum("Strategy", "ddp fsdp hsdp horovod deepspeed")
Precision = StrEnum("Precision", "fp32 tf32 bf16 fp16")
NodeTier = StrEnum("NodeTier", "dedicated spot")


def _of_training(name: str) -> Any:
    """Return a field with the default and the bounds that the trainer's configuration has for it."""
    field = DistributedTrainingConfig.__pydantic_fields__[name]  # type: ignore[attr-defined]
    bounds = {
        key: getattr(item, key) for item in field.metadata for key in ("ge", "gt", "le", "lt") if hasattr(item, key)
    }
    return Field(default=getattr(_DEFAULT, name), **bounds)


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
    probe: bool = True
    """Run a short probe where no past run tells the pace; its cost counts against the limits. False: nothing runs
    before the plan is known."""


def with_nodes_of_run(cluster: GPUClusterResource, config: PlanOptions) -> GPUClusterResource:
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
    optimizer: str = ""
    """A class such as torch.optim:SGD, or a function of your own, as for the model. Left empty: AdamW by
    learning_rate."""
    optimizer_args: dict[str, Any] = {}
    """Arguments of the optimizer's class, by name."""
    lr_scheduler: str = ""
    """A scheduler such as torch.optim.lr_scheduler:OneCycleLR, or a function of your own. Left empty: warm-up, then
    half a cosine."""
    lr_scheduler_args: dict[str, Any] = {}
    """Arguments of the scheduler, by name; "$total_steps" stands for the number of all steps."""
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
    """Type of the forward pass; tf32 and fp16 need a GPU. Weights stay fp32."""
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
        named = {name: str(value) if isinstance(value, StrEnum) else value for name, value in values.items()}
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


WantedJob = tuple[JobConfig, Mapping[str, int], ScriptJob | None]
"""A training, the samples of each split, and the script that trains; None where the trainer does by itself."""


def job_of_dataset(config: TrainingOptions, run: ClusterRun, dataset: BuiltDataset) -> WantedJob:
    """Return the training of the launchpad's model and loss on a dataset. Raise `ConfigError` for what cannot be
    trained."""
    config = with_usual_parts(config, dataset.manifest())
    return job_on(run.cluster.node_count, config, run.cluster, run.project, dataset), dataset.samples, None


def job_of_script(config: ScriptOptions, run: ClusterRun, script: str, registered_model: str | None) -> WantedJob:
    """Return the training of a script that calls `trainer.Trainer.fit`, which is run up to that call.
    ``registered_model``: the name under which its model is registered; None: it is not. Raise `ConfigError` where it
    does not come to that call."""
    cluster, project = run.cluster, run.project
    ranks, is_here = cluster.node_count * cluster.ranks_per_node, cluster.traits.is_this_machine
    share = max(1, (os.cpu_count() or 1) // ranks) if is_here else None
    overrides = list(config.overrides(ranks, cluster.threads_per_rank or share))
    if registered_model is not None:
        overrides.append(f"tracking.registered_model={json.dumps(registered_model)}")
    run_dir, env = f"{project.jobs_uri}/plan", project.trainer_env()
    found = describe_script(script, config.arguments, overrides, "plan", run_dir, env)
    return found.job, found.samples, found


def check_planned(planned: PlannedJob, has_gpus: bool, rehearses: bool) -> Checked:
    """Return what could not be checked of a training: data, model and loss, as `planning.check_job.check_job` does, and
    its strategy. A script was run up to its first batch when it was planned. Raise `ConfigError` for what cannot be
    trained, or for encryption that cannot be had."""
    from dtrain_dagster.planning.check_job import Checked, check_job, check_strategy
    from trainer.comm.encryption import refuse_nccl

    hosts = hosts_of(planned.kind, planned.node_count)
    said = tuple(check_strategy(planned.job.training, hosts, has_gpus, planned.kind.is_this_machine))
    if planned.script is not None:
        refuse_nccl(planned.job.training, hosts, has_gpus)
        return Checked(said)
    ranks = planned.node_count * planned.sizes.processes_per_node
    checked = check_job(planned.job, ranks, rehearses, hosts, has_gpus)
    return replace(checked, sentences=(*said, *checked.sentences))


def with_usual_parts(config: TrainingOptions, manifest: Mapping[str, Any]) -> TrainingOptions:
    """Return the options with the usual model and loss of this kind of dataset, where nobody has stated others. Raise
    ValueError for an unknown kind. Pure."""
    stated = config.stated()
    parts = usual_parts(kind_of(manifest), manifest.get("task"), has_own_model="model" in stated)
    usual = zip(("model", "loss"), parts, strict=True)
    return config.model_copy(update={name: part for name, part in usual if name not in stated})


def job_on(
    node_count: int,
    config: TrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    dataset: BuiltDataset,
) -> JobConfig:
    """Return the training as it would run on ``node_count`` nodes. A file's settings are part of it and of its
    fingerprint."""
    training = config.training(node_count * cluster.ranks_per_node, cluster.threads_per_rank)
    sections: dict[str, Any] = {
        "dataset": {"uri": dataset.shared_uri, "dataset_id": dataset.dataset_id},
        "model": {"factory": config.model, "args": config.model_args},
        "loss": {"factory": config.loss, "args": config.loss_args},
        "training": training,
    }
    for part in ("optimizer", "lr_scheduler"):
        if factory := getattr(config, part):
            sections[part] = {"factory": factory, "args": getattr(config, f"{part}_args")}
        elif given := getattr(config, f"{part}_args"):
            raise ConfigError(f"{part}_args = {given!r} belongs to an {part}, and none is named: set {part} too")
    place = {"job_id": "plan", "run_dir": f"{project.jobs_uri}/plan"}
    job = job_config(sections, **place)
    if not config.settings_file:
        return job
    from dtrain_dagster.planning.tuned_settings import read_tuned

    own = {"threads_per_rank"} if cluster.threads_per_rank else set()  # DTRAIN_THREADS_PER_RANK
    found = read_tuned(config.settings_file)
    tuned, words = found.settings_for(job, config.stated() | own)
    for sentence in words:
        dg.get_dagster_logger().warning(sentence)
    return job_config({**sections, **found.parts_for(job), "training": {**training, **tuned}}, **place)


def job_config(sections: dict[str, Any], **fields: Any) -> JobConfig:
    """Return a checked `JobConfig`. `trainer.config.ConfigError` names each launchpad field that cannot be used, and
    the setting that would allow a model or loss of the user's own."""
    job = parse_job(json.dumps({**sections, **fields}), source="launchpad")
    refuse_foreign_factories(job)
    return resolve_start(job)
