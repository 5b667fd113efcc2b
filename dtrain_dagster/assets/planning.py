"""Planning: what a training will cost, known before anything is bought (R5.1)."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import CODE_VERSION, OWNERS, hardware_mark
from dtrain_dagster.assets.plan_choices import choices_metadata, in_words
from dtrain_dagster.assets.plan_limits import cheapest_here, limits_of, refusal, sure_objection, warnings_of
from dtrain_dagster.assets.provisioning import provision, provisioning
from dtrain_dagster.costs.estimate import Estimate, Forecast, Learned, Sizes, estimate_cost
from dtrain_dagster.costs.plan import LISTED, STAND_IN, TrainingPlan
from dtrain_dagster.costs.prices import SkuPrice, Tier, price_of, price_table, tier_of
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.jobs.progress import fingerprint
from dtrain_dagster.planning.limits import objection
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.support.formatting import dollars, duration
from trainer.config import DistributedTrainingConfig, JobConfig, parse_job
from trainer.model.allowed_factories import refuse_foreign_factories

if TYPE_CHECKING:
    from dtrain_dagster.planning.choices import Baseline

_DEFAULT = DistributedTrainingConfig()
CLUSTER_TIERS: tuple[Tier, ...] = ("dedicated", "low_priority")
"""What clusters can be had on (DTRAIN_TIER)."""


class TrainingOptions(dg.Config):
    """What is trained and how. Every other field of the trainer's configuration can be given under ``more``."""

    model: str = "tcn"
    """tcn, lstm, transformer, or your own as package.module:factory."""
    model_args: dict[str, Any] = {}
    loss: str = "student_t"
    """student_t, gaussian, mse, or your own as package.module:factory."""
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
    """What `dtrain tune` has written for this training. What is stated here, other than its default or under ``more``,
    wins."""
    budget_usd: float = 0.0
    """What it may be expected to cost at most; else nothing starts. 0: any sum."""
    deadline_hours: float = 0.0
    """How long it may be expected to take at most; else nothing starts. 0: any time."""
    stop_at_usd: float = 0.0
    """At so many dollars it saves a checkpoint and stops, whatever was expected. 0: never."""
    choose_nodes: bool = False
    """Take as many nodes, up to DTRAIN_NODES, as cost least within budget and deadline; each rank keeps its batch."""
    probe: bool = True
    """Run a short probe where no past run tells the pace. False: nothing runs before the plan is known."""

    def training(self, world_size: int, threads_per_rank: int | None) -> dict[str, Any]:
        known = {field.name for field in fields(DistributedTrainingConfig)}
        named = {name: getattr(self, name) for name in type(self).model_fields if name in known}
        return {"world_size": world_size, "threads_per_rank": threads_per_rank, **named, **self.more}

    def stated(self) -> set[str]:
        """Fields of the training that somebody has chosen."""
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
        "it out; nothing is bought before it is known (R5.1)."
    ),
)
def cost_estimate(
    context: dg.AssetExecutionContext,
    config: TrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    sharded_dataset: BuiltDataset,
):  # no annotation, see assets.common
    from dtrain_dagster.planning import probe
    from dtrain_dagster.planning.choices import choices
    from dtrain_dagster.planning.history import History, knows, pace_mark

    price = price_of(cluster.gpu_type)
    tier = tier_of(cluster.first_tier)
    price.usd_per_hour(tier)  # what has no price is refused before it is bought
    limits = limits_of(config)
    node_count, processes = cluster.node_count, cluster.processes_per_node
    job = job_on(node_count, config, cluster, project, sharded_dataset)
    cores = os.cpu_count() if cluster.kind == "local" else None
    stated_ranks = config.more.get("world_size")
    if stated_ranks and config.choose_nodes:
        raise dg.Failure(
            "choose_nodes and more.world_size do not go together: where nodes are chosen, each rank keeps its batch. "
            "Take one of them away (launchpad of cost_estimate)",
            allow_retries=False,
        )
    sizes = replace(sizes_of(job, sharded_dataset.samples, processes, cores), stated_ranks=stated_ranks)
    mark = fingerprint(job, node_count, processes)
    pace = pace_mark(job, processes) + (f"-w{stated_ranks}" if stated_ranks else "")
    history = History.read(context.instance, mark, pace, keeps_cache=cluster.kind == "local")
    forecast = history.forecast(sizes, node_count, price.sku)
    past = forecast if forecast and forecast.basis == "history" else None  # a guess refuses nothing a probe could tell
    if said := sure_objection(past, price, tier, node_count, limits, config.choose_nodes):
        raise refusal(context, project, said, past, limits, price, tier, node_count)

    manager = cluster.manager(context.run.run_id)
    if not knows(forecast, node_count):
        if config.probe:
            got = provision(context, manager, cluster, project, cluster.gpu_type, node_count)
            price, tier = price_of(got.gpu_type), tier_of(got.tier or cluster.first_tier)
            price.usd_per_hour(tier)  # these may be other nodes than those asked for, and the probe runs on them
            forecast = history.forecast(sizes, node_count, price.sku)
        elif forecast is None:
            raise dg.Failure(
                "no run of this training's pace is known, so nothing can be said of its cost: set probe to true",
                allow_retries=False,
            )
    if config.probe and not knows(forecast, node_count):
        counts = probe.probe_counts(node_count, bool(limits) or config.choose_nodes)
        forecast = probe.forecast(
            manager,
            job,
            sizes,
            counts,
            pace + hardware_mark(cluster, price.sku),
            cluster.node_env(project),
            history.learned("probe", price.sku),
            context.log.info,
        )
    assert forecast is not None
    words = STAND_IN if cluster.kind == "local" else LISTED
    table = choices(
        forecast,
        baseline(forecast, price, tier, node_count),
        price_table().values(),
        {node_count} if stated_ranks else {*range(1, node_count + 1), 2 * node_count},
        CLUSTER_TIERS,
        epochs=sizes.epochs,
        today=datetime.now(UTC).date(),
        deadline_seconds=3600 * limits.deadline_hours or None,
        budget_usd=limits.budget_usd or None,
        is_stand_in=words == STAND_IN,
        price_words=words,
    )
    if config.choose_nodes and (cheapest := cheapest_here(table, price.sku, tier, node_count)):
        node_count = cheapest.node_count
        rows = tuple(replace(row, is_planned=row is cheapest) for row in table.rows)
        table = replace(table, rows=rows)
        context.log.info(f"of 1 to {cluster.node_count} nodes these cost least: {in_words(cheapest)}")
        job = job_on(node_count, config, cluster, project, sharded_dataset)
        mark = fingerprint(job, node_count, processes)
        history = History.read(context.instance, mark, pace, keeps_cache=cluster.kind == "local")
        past = history.forecast(sizes, node_count, price.sku)
        forecast = past if past and knows(past, node_count) else forecast
    estimate = estimate_cost(forecast.seconds_at(node_count), price, tier, node_count)
    if said := objection(estimate, limits):
        raise refusal(context, project, said, forecast, limits, price, tier, node_count, table)
    if table.chosen and not table.chosen.is_planned:
        context.log.info(f"of all SKUs, tiers and numbers of nodes this one costs least: {in_words(table.chosen)}")
    figure = price.figure(tier)
    note = f"{figure.usd_per_hour:.2f} USD per node-hour: {price.sku}, {tier}, {price.region}, {figure.how} "
    note += f"{figure.recorded_on}."
    if words == STAND_IN:
        note += " A stand-in: local nodes are priced as this SKU, nothing is billed."
    plan = TrainingPlan(
        fingerprint=mark,
        job={name: asdict(getattr(job, name)) for name in ("dataset", "model", "loss", "training")},
        sku=price.sku,
        tier=tier,
        node_count=node_count,
        processes_per_node=processes,
        work=sizes.work(node_count),
        estimate=estimate,
        basis=f"{forecast.basis_words}{_learned_words(forecast.learned)}",
        price_note=note,
        price_words=words,
        pace=pace,
        basis_kind=forecast.basis,
        rests_on=forecast.rests_on,
        learned_factor=forecast.learned.factor,
        budget_usd=config.budget_usd,
        deadline_hours=config.deadline_hours,
        stop_at_usd=config.stop_at_usd,
        phases=asdict(forecast.parts(node_count)),
    )
    context.log.info(
        f"estimate: {dollars(estimate.usd.expected)} and {duration(estimate.seconds.expected)}, from {plan.basis}"
    )
    for warning in warnings_of(plan, limits):
        context.log.warning(warning)
    return dg.MaterializeResult(
        value=plan,
        data_version=dg.DataVersion(mark),
        metadata={
            "estimated_usd": round(estimate.usd.expected, 4),
            "estimated_seconds": round(estimate.seconds.expected, 1),
            "plan": dg.MarkdownMetadataValue(plan_table(plan)),
            "basis": forecast.basis,
            "basis_words": plan.basis,
            "rests_on": list(forecast.rests_on),
            "learned_factor": forecast.learned.factor,
            "fingerprint": mark,
            "sku": price.sku,
            "price": note,
            "steps": plan.work.steps,
            "parts": dg.JsonMetadataValue(asdict(forecast.parts(node_count))),
            "measured": dg.JsonMetadataValue([asdict(item) for item in forecast.measured]),
            **choices_metadata(table),
            **provisioning(manager),
            "training": dg.JsonMetadataValue(plan.job["training"]),
        },
    )


def job_on(
    node_count: int,
    config: TrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    dataset: BuiltDataset,
) -> JobConfig:
    """The training as it would be on so many nodes. Settings of a file are a part of it, and of its fingerprint."""
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


def baseline(forecast: Forecast, price: SkuPrice, tier: Tier, node_count: int) -> "Baseline":
    """What the choices are compared with: the nodes that the settings ask for."""
    from dtrain_dagster.planning.choices import Baseline

    return Baseline(
        price=price,
        node_count=node_count,
        tier=tier,
        ranks_per_node=forecast.sizes.processes_per_node,
        batch_size_per_rank=forecast.sizes.batch_size_per_rank,
        measured_nodes=tuple(item.node_count for item in forecast.measured),
    )


def sizes_of(job: JobConfig, samples: Mapping[str, int], processes_per_node: int, cores: int | None) -> Sizes:
    """How much the job has to do. ``samples``: of each split; ``cores``: see `Sizes`."""
    training = job.training
    return Sizes(
        train_samples=samples["train"],
        valid_samples=samples["valid"],
        test_samples=samples["test"],
        batch_size_per_rank=training.batch_size_per_gpu * training.gradient_accumulation_steps,
        micro_batches_per_rank=training.gradient_accumulation_steps,
        processes_per_node=processes_per_node,
        epochs=training.epochs,
        max_steps=training.max_steps,
        eval_frequency=training.eval_frequency,
        checkpoint_frequency=training.checkpoint_frequency,
        early_stopping_patience=training.early_stopping_patience,
        cores=cores,
    )


def _learned_words(learned: Learned) -> str:
    if not learned.runs:
        return ""
    return f"; corrected by {learned.factor - 1:+.1%}, as {learned.runs} past estimate(s) have taught"


def job_config(sections: dict[str, Any], **fields: Any) -> JobConfig:
    """A checked `JobConfig`; `trainer.config.ConfigError` names each launchpad field that cannot be used, and the
    setting that would allow a model or loss of one's own."""
    job = parse_job(json.dumps({**sections, **fields}), source="launchpad")
    refuse_foreign_factories(job)
    return job


def plan_table(plan: TrainingPlan) -> str:
    """The plan as a Markdown table."""
    estimate: Estimate = plan.estimate
    training = plan.job["training"]
    batch = training["batch_size_per_gpu"] * training["gradient_accumulation_steps"] * training["world_size"]
    rows = [
        ("Nodes", f"{plan.node_count} × {plan.sku} ({plan.tier}), {plan.processes_per_node} process(es) each"),
        ("Model, loss", f"{plan.job['model']['factory']}, {plan.job['loss']['factory']}"),
        ("Work", f"{plan.work.steps} steps of {batch} samples, {plan.work.evaluations} evaluations"),
        ("Time", f"**{duration(estimate.seconds.expected)}** ({_range(estimate.seconds, duration)})"),
        ("Cost", f"**{dollars(estimate.usd.expected)}** ({_range(estimate.usd, dollars)}), {plan.price_words}"),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _range(interval: Any, write: Any) -> str:
    return f"{write(interval.low)} to {write(interval.high)}"
