"""The asset `cost_estimate`: a training's plan and its cost, known before the training is bought."""

import json
import math
import os
from dataclasses import asdict, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.common import CODE_VERSION, OWNERS, LaunchpadOptions, refusing_mistakes
from dtrain_dagster.assets.plan_choices import choices_metadata, explain_choice, in_words
from dtrain_dagster.assets.plan_limits import cheapest_here, limits_of, refuse_plan, sure_objection, warnings_of
from dtrain_dagster.assets.plan_probe import Pace, measure_pace, probe_metadata, with_load
from dtrain_dagster.assets.provisioning import provisioning
from dtrain_dagster.costs.estimate import Estimate, Forecast, estimate_cost
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of, tier_of
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.planning.limits import explain_excess
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.settings.cluster_kinds import describe_kind
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import DistributedTrainingConfig, JobConfig, parse_job
from trainer.model.allowed_factories import refuse_foreign_factories

if TYPE_CHECKING:
    from dtrain_dagster.planning.build_plan import PlannedJob
    from dtrain_dagster.planning.history import History

_DEFAULT = DistributedTrainingConfig()


class LearningRateScaling(Enum):
    """How the learning rate follows the global batch."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


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


class TrainingOptions(LaunchpadOptions):
    """The training, its limits and its probe, in the launchpad."""

    model: str = "tcn"
    """tcn, lstm, transformer, or a factory of your own as package.module:factory."""
    model_args: dict[str, Any] = {}
    """Arguments of the model's factory, by name."""
    loss: str = "student_t"
    """student_t, gaussian, mse, or a factory of your own as package.module:factory."""
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
    seed: int = _of_training("seed")
    """Seed of the first weights and of the order of samples."""
    more: dict[str, Any] = {}
    """Any other field of DistributedTrainingConfig, such as {"early_stopping_patience": 3}."""
    settings_file: str = ""
    """The file that `dtrain tune` has written for this training. A value stated here, other than its default or under
    ``more``, takes precedence."""
    budget_usd: float = Field(default=0.0, ge=0, lt=math.inf)
    """The highest expected cost in dollars, probe included; above it nothing starts. 0: no limit."""
    deadline_hours: float = Field(default=0.0, ge=0, lt=math.inf)
    """The longest expected time in hours; above it nothing starts. 0: no limit."""
    stop_at_usd: float = Field(default=0.0, ge=0, lt=math.inf)
    """The cost in dollars, probe included, at which the training saves a checkpoint and stops. 0: never."""
    choose_nodes: bool = False
    """Take the number of nodes, up to DTRAIN_NODES, that costs least within budget and deadline; each rank keeps its
    batch."""
    probe: bool = True
    """Run a short probe where no past run tells the pace; its cost counts against the limits. False: nothing runs
    before the plan is known."""

    def training(self, world_size: int, threads_per_rank: int | None) -> dict[str, Any]:
        """Return the trainer's configuration: the fields named here, then those of ``more``."""
        known = {field.name for field in fields(DistributedTrainingConfig)}
        values = {name: getattr(self, name) for name in type(self).model_fields if name in known}
        named = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        return {"world_size": world_size, "threads_per_rank": threads_per_rank, **named, **self.more}

    def stated(self) -> set[str]:
        """Return the fields of the training that the user has set."""
        default = type(self)()
        changed = {name for name in type(self).model_fields if getattr(self, name) != getattr(default, name)}
        return changed | set(self.more)


@dg.asset(
    group_name="planning",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    description=(
        "The plan: SKU, nodes, time and dollars with a 90 % interval, from past runs of this training or a short probe "
        "of it on this cluster, refused where it does not fit the budget or the deadline. A probe costs too: what is "
        "told before it runs, counts against the limits, and is billed with the training. `trained_checkpoint` "
        "carries the plan out."
    ),
)
def cost_estimate(
    context: dg.AssetExecutionContext,
    config: TrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    sharded_dataset: BuiltDataset,
):  # no annotation, see assets.common
    """Plan the training: estimate its time and cost from past runs or a probe, and refuse it where it exceeds a
    limit."""
    from dtrain_dagster.clusters.ranks import hosts_of
    from dtrain_dagster.planning.build_plan import assemble_plan, compare_choices, mark_planned
    from dtrain_dagster.planning.check_job import check_job
    from dtrain_dagster.planning.history import knows
    from dtrain_dagster.planning.probe_cost import charge_usd
    from trainer.node.gpus import explain_local_gpus, visible_gpus

    limits = limits_of(config)
    with refusing_mistakes():
        planned = plan_of_launchpad(config, cluster, project, sharded_dataset)
        price, tier, count = planned.price, planned.tier, planned.node_count
        history = read_history(context, planned)
        ranks, hosts = count * planned.sizes.processes_per_node, hosts_of(planned.kind, count)
        for sentence in check_job(planned.job, ranks, not history.runs, hosts, cluster.have_gpus):
            context.log.warning(sentence)
    forecast = history.forecast(planned.sizes, count, price.sku)
    past = forecast if forecast and forecast.basis == "history" else None  # a guess refuses nothing a probe could tell
    if said := sure_objection(past, price, tier, count, limits, config.choose_nodes):
        raise refuse_plan(context, project, said, past, limits, price, tier, count)

    manager = cluster.manager(context.run.run_id)
    if forecast is not None and knows(forecast, count):
        pace = Pace(planned=planned, forecast=with_load(forecast))
    else:
        pace = measure_pace(context, config, cluster, project, manager, planned, history)
    planned, forecast = pace.planned, pace.forecast
    spent = charge_usd(pace.charges, planned.tier)
    limits = replace(limits, spent_usd=spent, spent_seconds=pace.seconds)
    table = compare_choices(planned, forecast, limits)
    if config.choose_nodes and (cheapest := cheapest_here(table, planned.price.sku, planned.tier, count)):
        table = mark_planned(table, cheapest)
        context.log.info(f"of 1 to {count} nodes these cost least: {in_words(cheapest)}")
        job = job_on(cheapest.node_count, config, cluster, project, sharded_dataset)
        planned = planned.on_nodes(job, cheapest.node_count)
        history = read_history(context, planned)
        past = history.forecast(planned.sizes, planned.node_count, planned.price.sku)
        if past and knows(past, planned.node_count):
            forecast = replace(past, other_cores=forecast.other_cores)
    price, tier, count = planned.price, planned.tier, planned.node_count
    estimate = estimate_cost(forecast.seconds_at(count), price, tier, count)
    if said := explain_excess(estimate, limits):
        raise refuse_plan(context, project, said, forecast, limits, price, tier, count, table)
    context.log.info(explain_choice(table))
    plan = assemble_plan(planned, forecast, estimate, limits, config.stop_at_usd, pace.charges)
    context.log.info(
        f"estimate: {dollars(estimate.usd.expected)} and {format_duration(estimate.seconds.expected)}, "
        f"from {plan.basis}" + (f"; with its probe {dollars(estimate.usd.expected + spent)}" if spent else "")
    )
    unused = explain_local_gpus(len(visible_gpus(os.environ)), plan.node_count, plan.processes_per_node)
    for warning in (*warnings_of(plan, limits), *([unused] if unused and planned.kind.is_this_machine else [])):
        context.log.warning(warning)
    return dg.MaterializeResult(
        value=plan,
        data_version=dg.DataVersion(plan.fingerprint),
        metadata={
            **plan_metadata(plan, forecast),
            **probe_metadata(pace, manager),
            **choices_metadata(table),
            "cluster": dg.JsonMetadataValue(describe_kind(cluster.traits)),
            **provisioning(manager),
            "training": dg.JsonMetadataValue(plan.job["training"]),
        },
    )


def plan_of_launchpad(
    config: TrainingOptions, cluster: GPUClusterResource, project: ProjectResource, dataset: BuiltDataset
) -> "PlannedJob":
    """Return the training as the launchpad and the settings ask for it. Raise `dagster.Failure` for options that
    exclude each other, and `PriceError` for a SKU without a price, before anything is bought."""
    from dtrain_dagster.planning.build_plan import size_up_job

    price, tier = price_of(cluster.sku), tier_of(cluster.first_tier)
    price.usd_per_hour(tier)
    job = job_on(cluster.node_count, config, cluster, project, dataset)
    stated_ranks = config.more.get("world_size")
    if stated_ranks and config.choose_nodes:
        raise dg.Failure(
            "choose_nodes and more.world_size do not go together: where nodes are chosen, each rank keeps its batch. "
            "Take one of them away (launchpad of cost_estimate)",
            allow_retries=False,
        )
    return size_up_job(
        job, dataset.samples, price, tier, cluster.node_count, cluster.ranks_per_node, cluster.traits, stated_ranks
    )


def read_history(context: dg.AssetExecutionContext, planned: "PlannedJob") -> "History":
    """Return the records of past runs of this training, or at this pace, in this Dagster instance."""
    from dtrain_dagster.planning.history import History

    return History.read(context.instance, planned.fingerprint, planned.pace, keeps_cache=planned.kind.is_this_machine)


def plan_metadata(plan: TrainingPlan, forecast: Forecast) -> dict[str, Any]:
    """Return what Dagster shows of a plan: its figures, their basis, and the plan as a table."""
    estimate = plan.estimate
    return {
        "estimated_usd": round(estimate.usd.expected, 6),
        "estimated_seconds": round(estimate.seconds.expected, 1),
        "plan": dg.MarkdownMetadataValue(plan_table(plan)),
        "basis": forecast.basis,
        "basis_words": plan.basis,
        "rests_on": list(forecast.rests_on),
        "learned_factor": forecast.learned.factor,
        "fingerprint": plan.fingerprint,
        "sku": plan.sku,
        "price": plan.price_note,
        "steps": plan.work.steps,
        "parts": dg.JsonMetadataValue(asdict(forecast.parts(plan.node_count))),
        "measured": dg.JsonMetadataValue([asdict(item) for item in forecast.measured]),
    }


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
    place = {"job_id": "plan", "run_dir": f"{project.jobs_uri}/plan"}
    job = job_config(sections, **place)
    if not config.settings_file:
        return job
    from dtrain_dagster.planning.tuned_settings import read_tuned

    own = {"threads_per_rank"} if cluster.threads_per_rank else set()  # DTRAIN_THREADS_PER_RANK
    tuned, words = read_tuned(config.settings_file).settings_for(job, config.stated() | own)
    for sentence in words:
        dg.get_dagster_logger().warning(sentence)
    return job_config({**sections, "training": {**training, **tuned}}, **place)


def job_config(sections: dict[str, Any], **fields: Any) -> JobConfig:
    """Return a checked `JobConfig`. `trainer.config.ConfigError` names each launchpad field that cannot be used, and
    the setting that would allow a model or loss of the user's own."""
    job = parse_job(json.dumps({**sections, **fields}), source="launchpad")
    refuse_foreign_factories(job)
    return job


def plan_table(plan: TrainingPlan) -> str:
    """Return the plan as a Markdown table."""
    estimate: Estimate = plan.estimate
    training = plan.job["training"]
    batch = training["batch_size_per_gpu"] * training["gradient_accumulation_steps"] * training["world_size"]
    rows = [
        ("Nodes", f"{plan.node_count} × {plan.sku} ({plan.tier}), {plan.processes_per_node} process(es) each"),
        ("Model, loss", f"{plan.job['model']['factory']}, {plan.job['loss']['factory']}"),
        ("Work", f"{plan.work.steps} steps of {batch} samples, {plan.work.evaluations} evaluations"),
        ("Time", f"**{format_duration(estimate.seconds.expected)}** ({_range(estimate.seconds, format_duration)})"),
        ("Cost", f"**{dollars(estimate.usd.expected)}** ({_range(estimate.usd, dollars)}), {plan.price_words}"),
        *([("Probe", f"{dollars(plan.probe_usd)}, run before and paid with it")] if plan.probes else []),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _range(interval: Any, write: Any) -> str:
    return f"{write(interval.low)} to {write(interval.high)}"
