"""Planning: what a training will cost, known before anything is bought (R5.1)."""

import json
from dataclasses import asdict, fields
from typing import Any

import dagster as dg

from dtrain_dagster import probe
from dtrain_dagster.assets.capacity import provision, provisioning
from dtrain_dagster.assets.common import CODE_VERSION, OWNERS, hardware_mark
from dtrain_dagster.costs.estimate import Estimate, estimate_cost, estimate_seconds, work_of
from dtrain_dagster.costs.plan import LISTED, STAND_IN, TrainingPlan
from dtrain_dagster.costs.prices import price_of, tier_of
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.jobs import fingerprint
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.wording import dollars, duration
from trainer.config import DistributedTrainingConfig, JobConfig, parse_job

_DEFAULT = DistributedTrainingConfig()


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
    budget_usd: float = 0
    """What the plan may cost; 0: no limit."""
    more: dict[str, Any] = {}
    """Any other field of DistributedTrainingConfig, such as {"early_stopping_patience": 3}."""

    def training(self, world_size: int, threads_per_rank: int | None) -> dict[str, Any]:
        known = {field.name for field in fields(DistributedTrainingConfig)}
        named = {name: getattr(self, name) for name in type(self).model_fields if name in known}
        return {"world_size": world_size, "threads_per_rank": threads_per_rank, **named, **self.more}


@dg.asset(
    group_name="planning",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    description=(
        "The plan: SKU, nodes, time and dollars with an interval, from a short probe of this training on this "
        "cluster. `trained_checkpoint` carries it out; nothing is bought before it is known (R5.1)."
    ),
)
def cost_estimate(
    context: dg.AssetExecutionContext,
    config: TrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    sharded_dataset: BuiltDataset,
):  # no annotation, see assets.common
    price_of(cluster.gpu_type).usd_per_hour(tier_of(cluster.tier))  # what has no price is refused before it is bought
    sections = {
        "dataset": {"uri": sharded_dataset.shared_uri, "dataset_id": sharded_dataset.dataset_id},
        "model": {"factory": config.model, "args": config.model_args},
        "loss": {"factory": config.loss, "args": config.loss_args},
        "training": config.training(cluster.node_count * cluster.processes_per_node, cluster.threads_per_rank),
    }
    job = job_config(sections, job_id="plan", run_dir=project.jobs_uri)
    from trainer.sampler import steps_per_epoch  # imports numpy only

    samples = sharded_dataset.samples["train"]
    work = work_of(
        steps_per_epoch=steps_per_epoch(samples, job.training.global_batch_size, job.training.micro_batches),
        epochs=job.training.epochs,
        max_steps=job.training.max_steps,
        eval_frequency=job.training.eval_frequency,
        checkpoint_frequency=job.training.checkpoint_frequency,
    )
    mark = fingerprint(job, cluster.node_count, cluster.processes_per_node)
    manager = cluster.manager(context.run.run_id)
    got = provision(context, manager, cluster, project, cluster.gpu_type)
    price = price_of(got.gpu_type)
    tier = tier_of(got.tier or cluster.tier)
    usd_per_hour = price.usd_per_hour(tier)
    short = probe.probe_job(job, project.jobs_uri, mark + hardware_mark(cluster, got.gpu_type))
    context.log.info(f"probing: {short.training.max_steps} steps on {cluster.node_count} nodes, job {short.job_id}")
    measured, ran = probe.measure(
        manager, short, cluster.node_count, cluster.processes_per_node, cluster.node_env(project)
    )
    estimate = estimate_cost(estimate_seconds(measured, work), price, tier, cluster.node_count)
    basis = f"a probe of {short.training.max_steps} steps on {cluster.node_count} {cluster.kind} nodes" + (
        "" if ran else ", measured before and reused: nothing has changed since"
    )
    note = f"{usd_per_hour:.2f} USD per node-hour: {price.sku}, {tier}, {price.region}, recorded {price.recorded_on}."
    words = STAND_IN if cluster.kind == "local" else LISTED
    if words == STAND_IN:
        note += " A stand-in: local nodes are priced as this SKU, nothing is billed."
    plan = TrainingPlan(
        fingerprint=mark,
        job={name: asdict(getattr(job, name)) for name in ("dataset", "model", "loss", "training")},
        sku=price.sku,
        tier=tier,
        node_count=cluster.node_count,
        processes_per_node=cluster.processes_per_node,
        work=work,
        estimate=estimate,
        basis=basis,
        price_note=note,
        price_words=words,
    )
    context.log.info(
        f"estimate: {dollars(estimate.usd.expected)} and {duration(estimate.seconds.expected)}, from {basis}"
    )
    return dg.MaterializeResult(
        value=plan,
        data_version=dg.DataVersion(mark),
        metadata={
            "estimated_usd": round(estimate.usd.expected, 4),
            "estimated_seconds": round(estimate.seconds.expected, 1),
            "plan": dg.MarkdownMetadataValue(plan_table(plan)),
            "basis": basis,
            "price": note,
            "steps": work.steps,
            "probe": dg.JsonMetadataValue(asdict(measured)),
            "probe_job": short.job_id,
            **provisioning(manager),
            "training": dg.JsonMetadataValue(plan.job["training"]),
        },
    )


def job_config(sections: dict[str, Any], **fields: Any) -> JobConfig:
    """A checked `JobConfig`; `trainer.config.ConfigError` names each launchpad field that cannot be used."""
    return parse_job(json.dumps({**sections, **fields}), source="launchpad")


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
