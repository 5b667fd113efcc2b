"""The asset `cost_estimate`: a training's plan and its cost, known before anything is bought."""

import json
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import CODE_VERSION, OWNERS, hardware_mark
from dtrain_dagster.assets.plan_choices import choices_metadata, in_words
from dtrain_dagster.assets.plan_limits import cheapest_here, limits_of, refuse_plan, sure_objection, warnings_of
from dtrain_dagster.assets.provisioning import provision, provisioning
from dtrain_dagster.clusters.base import GPUClusterManager
from dtrain_dagster.costs.estimate import Estimate, Forecast, estimate_cost
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of, tier_of
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.planning.limits import explain_excess
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.config import DistributedTrainingConfig, JobConfig, parse_job
from trainer.model.allowed_factories import refuse_foreign_factories

if TYPE_CHECKING:
    from dtrain_dagster.planning.build_plan import PlannedJob
    from dtrain_dagster.planning.history import History

_DEFAULT = DistributedTrainingConfig()


class TrainingOptions(dg.Config):
    """The training, its limits and its probe, in the launchpad. Any other field of the trainer's configuration goes
    into ``more``."""

    model: str = "tcn"
    """tcn, lstm, transformer, or a factory of your own as package.module:factory."""
    model_args: dict[str, Any] = {}
    loss: str = "student_t"
    """student_t, gaussian, mse, or a factory of your own as package.module:factory."""
    loss_args: dict[str, Any] = {}
    epochs: int = _DEFAULT.epochs
    batch_size_per_gpu: int = _DEFAULT.batch_size_per_gpu
    gradient_accumulation_steps: int = _DEFAULT.gradient_accumulation_steps
    learning_rate: float = _DEFAULT.learning_rate
    lr_scaling: str = _DEFAULT.lr_scaling
    warmup_steps: int = _DEFAULT.warmup_steps
    checkpoint_frequency: int = _DEFAULT.checkpoint_frequency
    precision: str = _DEFAULT.precision
    seed: int = _DEFAULT.seed
    more: dict[str, Any] = {}
    """Any other field of DistributedTrainingConfig, such as {"early_stopping_patience": 3}."""
    settings_file: str = ""
    """The file that `dtrain tune` has written for this training. A value stated here, other than its default or under
    ``more``, takes precedence."""
    budget_usd: float = 0.0
    """The highest expected cost in dollars; above it nothing starts. 0: no limit."""
    deadline_hours: float = 0.0
    """The longest expected time in hours; above it nothing starts. 0: no limit."""
    stop_at_usd: float = 0.0
    """The cost in dollars at which the training saves a checkpoint and stops, whatever was expected. 0: never."""
    choose_nodes: bool = False
    """Take the number of nodes, up to DTRAIN_NODES, that costs least within budget and deadline; each rank keeps its
    batch."""
    probe: bool = True
    """Run a short probe where no past run tells the pace. False: nothing runs before the plan is known."""

    def training(self, world_size: int, threads_per_rank: int | None) -> dict[str, Any]:
        """Return the trainer's configuration: the fields named here, then those of ``more``."""
        known = {field.name for field in fields(DistributedTrainingConfig)}
        named = {name: getattr(self, name) for name in type(self).model_fields if name in known}
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
        "of it on this cluster, refused where it does not fit the budget or the deadline. `trained_checkpoint` carries "
        "it out; nothing is bought before it is known."
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
    from dtrain_dagster.planning.build_plan import assemble_plan, compare_choices, mark_planned
    from dtrain_dagster.planning.history import knows

    limits, planned = limits_of(config), plan_of_launchpad(config, cluster, project, sharded_dataset)
    price, tier, count = planned.price, planned.tier, planned.node_count
    history = read_history(context, planned)
    forecast = history.forecast(planned.sizes, count, price.sku)
    past = forecast if forecast and forecast.basis == "history" else None  # a guess refuses nothing a probe could tell
    if said := sure_objection(past, price, tier, count, limits, config.choose_nodes):
        raise refuse_plan(context, project, said, past, limits, price, tier, count)

    manager = cluster.manager(context.run.run_id)
    if not knows(forecast, count):
        planned, forecast = measure_pace(context, config, cluster, project, manager, planned, history)
    else:
        assert forecast is not None
        forecast = _with_load(forecast)
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
    if table.chosen and not table.chosen.is_planned:
        context.log.info(f"of all SKUs, tiers and numbers of nodes this one costs least: {in_words(table.chosen)}")
    plan = assemble_plan(planned, forecast, estimate, limits, config.stop_at_usd)
    context.log.info(
        f"estimate: {dollars(estimate.usd.expected)} and {format_duration(estimate.seconds.expected)}, "
        f"from {plan.basis}"
    )
    for warning in warnings_of(plan, limits):
        context.log.warning(warning)
    return dg.MaterializeResult(
        value=plan,
        data_version=dg.DataVersion(plan.fingerprint),
        metadata={
            **plan_metadata(plan, forecast),
            **choices_metadata(table),
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

    price, tier = price_of(cluster.gpu_type), tier_of(cluster.first_tier)
    price.usd_per_hour(tier)
    job = job_on(cluster.node_count, config, cluster, project, dataset)
    stated_ranks = config.more.get("world_size")
    if stated_ranks and config.choose_nodes:
        raise dg.Failure(
            "choose_nodes and more.world_size do not go together: where nodes are chosen, each rank keeps its batch. "
            "Take one of them away (launchpad of cost_estimate)",
            allow_retries=False,
        )
    is_local = cluster.kind == "local"
    return size_up_job(
        job, dataset.samples, price, tier, cluster.node_count, cluster.processes_per_node, is_local, stated_ranks
    )  # fmt: skip


def read_history(context: dg.AssetExecutionContext, planned: "PlannedJob") -> "History":
    """Return the records of past runs of this training, or at this pace, in this Dagster instance."""
    from dtrain_dagster.planning.history import History

    return History.read(context.instance, planned.fingerprint, planned.pace, keeps_cache=planned.is_local)


def measure_pace(
    context: dg.AssetExecutionContext,
    config: TrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    manager: GPUClusterManager,
    planned: "PlannedJob",
    history: "History",
) -> "tuple[PlannedJob, Forecast]":
    """Return the plan and its forecast on the nodes that are available, which may be others than those asked for.

    The forecast comes from a short probe, unless past runs on these very nodes tell enough; without a probe, it comes
    from past runs on other nodes. Raise `dagster.Failure` where the probe is switched off and no past run is known.
    """
    from dtrain_dagster.planning import probe
    from dtrain_dagster.planning.history import knows

    if not config.probe:
        forecast = history.forecast(planned.sizes, planned.node_count, planned.price.sku)
        if forecast is None:
            raise dg.Failure(
                "no run of this training's pace is known, so nothing can be said of its cost: set probe to true",
                allow_retries=False,
            )
        return planned, _with_load(forecast)
    count = planned.node_count
    got = provision(context, manager, cluster, project, cluster.gpu_type, count)
    price, tier = price_of(got.gpu_type), tier_of(got.tier or cluster.first_tier)
    price.usd_per_hour(tier)  # the probe runs on them: nodes without a price are refused before
    planned = replace(planned, price=price, tier=tier)
    forecast = history.forecast(planned.sizes, count, price.sku)
    if forecast is not None and knows(forecast, count):
        return planned, _with_load(forecast)
    return planned, probe.forecast(
        manager,
        planned.job,
        planned.sizes,
        probe.probe_counts(count, bool(limits_of(config)) or config.choose_nodes),
        planned.pace + hardware_mark(cluster, price.sku),
        cluster.node_env(project),
        history.learned("probe", price.sku),
        context.log.info,
    )


def _with_load(forecast: Forecast) -> Forecast:
    """Return the forecast from past runs with the load that is on the machine now."""
    from dtrain_dagster.planning.machine_load import cores_of_others

    return replace(forecast, other_cores=cores_of_others(forecast.sizes))


def plan_metadata(plan: TrainingPlan, forecast: Forecast) -> dict[str, Any]:
    """Return what Dagster shows of a plan: its figures, their basis, and the plan as a table."""
    estimate = plan.estimate
    return {
        "estimated_usd": round(estimate.usd.expected, 4),
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
    training = config.training(node_count * cluster.processes_per_node, cluster.threads_per_rank)
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
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _range(interval: Any, write: Any) -> str:
    return f"{write(interval.low)} to {write(interval.high)}"
