"""The asset `cost_estimate`: a training's plan and its cost, known before the training is bought."""

import os
import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import head_of_page, refusing_mistakes
from dtrain_dagster.assets.pipeline import STOCK, Pipeline
from dtrain_dagster.assets.plan_limits import (
    cheapest_here,
    choices_dots,
    choices_metadata,
    explain_choice,
    in_words,
    limits_of,
    refuse_plan,
    sure_objection,
    warnings_of,
)
from dtrain_dagster.assets.plan_options import (
    NodeTier,
    PlanOptions,
    ScriptOptions,
    TrainingOptions,
    with_checked_names,
    with_nodes_of_run,
)
from dtrain_dagster.assets.plan_probe import Pace, measure_pace, probe_metadata, with_load
from dtrain_dagster.assets.provisioning import provisioning
from dtrain_dagster.clusters.ranks import hosts_of
from dtrain_dagster.costs.estimate import Estimate, Forecast, estimate_forecast
from dtrain_dagster.costs.evictions import tell_evictions
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.planning.build_plan import (
    PlannedJob,
    assemble_plan,
    compare_choices,
    explain_excess,
    mark_planned,
    size_up_job,
)
from dtrain_dagster.planning.choices import Choices, name_nodes
from dtrain_dagster.planning.history import History, knows
from dtrain_dagster.planning.probe_cost import charge_usd
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, cluster_resource, project_resource
from dtrain_dagster.settings.tiers import OLD_SPOT_NOTICE, tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.page_entries import fit_page
from dtrain_dagster.support.secrets import redact
from trainer.node.gpus import explain_local_gpus, visible_gpus
from trainer.performance.memory import ModelBytes
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from dtrain_dagster.assets.training_request import TrainingRequest


ROOM = 64 << 20
"""Bytes that events, logs, reports and the code of a packed model take, at the least."""
_COPIES = 4
"""Copies of the weights in the temporary folder while a model is registered and its server asked."""

DESCRIPTION = (
    "The plan: SKU, nodes, time and dollars with a 90 % interval, from past runs of this training or a short probe "
    "of it on this cluster. It is refused if it does not fit the budget or the deadline, or if storage, disk or "
    "registry would fail at the end. A probe costs money too: its cost is announced before it runs, counts against "
    "the limits, and is billed with the training. `trained_checkpoint` carries the plan out."
)


def build_cost_estimate(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `cost_estimate` of a graph."""
    return _of_script(pipeline) if pipeline.source == "script" else _of_dataset(pipeline)


def _of_dataset(pipeline: Pipeline) -> dg.AssetsDefinition:
    kind = with_checked_names(TrainingOptions, pipeline.defaults.get("cost_estimate", {}))
    names, options = pipeline.names, pipeline.options("cost_estimate", kind)

    @dg.asset(
        **pipeline.asset("cost_estimate", "planning", inputs=("sharded_dataset",)),
        kinds={"python"},
        required_resource_keys=names.resources,
        description=DESCRIPTION,
    )
    def cost_estimate(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
        sharded_dataset: BuiltDataset,
    ):  # no annotation, see assets.common
        """Plan the training: estimate its time and cost from past runs or a probe, and refuse it where it exceeds a
        limit."""
        from dtrain_dagster.assets.training_request import DatasetTraining

        cluster = with_nodes_of_run(cluster_resource(context, names), config)
        project = project_resource(context, names)
        request = DatasetTraining(names, config, cluster, project, sharded_dataset)
        return plan_training(context, config, cluster, project, request, registers=True)

    return cost_estimate


def _of_script(pipeline: Pipeline) -> dg.AssetsDefinition:
    names, options = pipeline.names, pipeline.options("cost_estimate", ScriptOptions)

    @dg.asset(
        **pipeline.asset("cost_estimate", "planning"),
        deps=list(pipeline.deps),
        kinds={"python"},
        required_resource_keys=names.resources,
        description=DESCRIPTION,
    )
    def cost_estimate(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
    ):  # no annotation, see assets.common
        """Plan a script's training, which is found out by running the script up to its call of fit."""
        from dtrain_dagster.assets.training_request import ScriptTraining

        cluster = with_nodes_of_run(cluster_resource(context, names), config)
        project = project_resource(context, names)
        request = ScriptTraining(names, config, cluster, project, pipeline.script)
        return plan_training(context, config, cluster, project, request)

    return cost_estimate


cost_estimate = build_cost_estimate(STOCK)


def plan_training(
    context: dg.AssetExecutionContext,
    config: PlanOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    request: "TrainingRequest",
    registers: bool = False,
) -> dg.MaterializeResult:
    """Return the plan of a wanted training. ``registers``: whether its model is to be registered. Raise
    `dagster.Failure` where it exceeds a limit, or its end lacks something."""
    from dtrain_dagster.planning.check_job import memory_of

    limits = limits_of(config)
    if config.tier is NodeTier.low_priority:
        context.log.warning(f"{OLD_SPOT_NOTICE}; choose spot in the launchpad")
    with refusing_mistakes():
        planned = plan_of_launchpad(config, cluster, request)
        price, tier, count = planned.price, planned.tier, planned.node_count
        history = read_history(context, planned)
        ranks, hosts = count * planned.sizes.processes_per_node, hosts_of(planned.kind, count)
        has_trained = any(run.sku == price.sku for run in history.runs)
        checked = request.check(planned.job, ranks, hosts, rehearses=not has_trained)
        holds, sentences = memory_of(planned, checked)
        for sentence in sentences:
            context.log.warning(sentence)
        model = checked.model or (planned.script.model if planned.script else None)
        kept = planned.job.training.keep_checkpoints
        refuse_what_cannot_end(cluster, project, model, kept, registers, context.run.run_id)
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
    table = compare_choices(planned, forecast, limits, holds)
    if config.choose_nodes and (cheapest := cheapest_here(table, planned.price.sku, planned.tier, count)):
        table = mark_planned(table, cheapest)
        context.log.info(f"of 1 to {count} nodes, this choice costs least: {in_words(cheapest)}")
        planned = planned.on_nodes(request.on_nodes(cheapest.node_count).job, cheapest.node_count)
        history = read_history(context, planned)
        past = history.forecast(planned.sizes, planned.node_count, planned.price.sku)
        if past and knows(past, planned.node_count):
            forecast = replace(past, other_cores=forecast.other_cores)
    price, tier, count = planned.price, planned.tier, planned.node_count
    estimate = estimate_forecast(forecast, price, tier, count)
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
        metadata=fit_page(
            {
                **plan_head(plan, table),
                **choices_metadata(table, plan.fingerprint, project.storage_uri),
                **plan_metadata(plan, forecast, planned.place),
                **probe_metadata(pace, manager),
                **provisioning(manager),
                "training": dg.JsonMetadataValue(plan.job["training"]),
            }
        ),
    )


def plan_of_launchpad(config: PlanOptions, cluster: GPUClusterResource, request: "TrainingRequest") -> "PlannedJob":
    """Return the training as the launchpad and the settings ask for it. Raise `dagster.Failure` for options that
    exclude each other, and `PriceError` for a SKU without a price, before anything is bought."""
    price, tier = price_of(cluster.sku), tier_of(cluster.first_tier)
    price.usd_per_hour(tier)
    wanted = request.on_nodes(cluster.node_count)
    stated_ranks = config.more.get("world_size")
    if stated_ranks and config.choose_nodes:
        raise dg.Failure(
            "choose_nodes and more.world_size cannot be combined: where nodes are chosen, each rank keeps its batch. "
            "Remove one of them (launchpad of cost_estimate)",
            allow_retries=False,
        )
    return size_up_job(
        wanted.job, wanted.samples, price, tier, cluster.node_count, cluster.ranks_per_node, cluster.traits,
        stated_ranks, request.names, wanted.script,
    )  # fmt: skip


def read_history(context: dg.AssetExecutionContext, planned: "PlannedJob") -> "History":
    """Return the records of past runs of this training, or at this pace, in this Dagster instance."""
    is_here = planned.kind.is_this_machine
    return History.read(context.instance, planned.fingerprint, planned.pace, is_here, planned.names)


def plan_head(plan: TrainingPlan, table: "Choices") -> dict[str, Any]:
    """Return what the page of a plan begins with."""
    estimate, sku = plan.estimate, plan.sku.removeprefix("Standard_")
    return head_of_page(
        f"{format_duration(estimate.seconds.expected)} and {dollars(estimate.usd.expected)} "
        f"({_range(estimate.usd, dollars)}) on {name_nodes(plan.node_count, sku, plan.tier, table.place)}; "
        f"from {plan.basis.partition(';')[0]}",
        choices_dots(table),
        {
            "estimated_usd": round(estimate.usd.expected, 6),
            "estimated_seconds": round(estimate.seconds.expected, 1),
            "steps": plan.work.steps,
        },
    )


def plan_metadata(plan: TrainingPlan, forecast: Forecast, place: str) -> dict[str, Any]:
    """Return what Dagster shows of a plan beside its head: the plan as a table, and what its figures rest on.
    ``place``: see `dtrain_dagster.planning.choices.Choices`."""
    return {
        "plan": dg.MarkdownMetadataValue(plan_table(plan, place, forecast.startup_at(plan.node_count))),
        "basis": forecast.basis,
        "basis_words": plan.basis,
        "rests_on": list(forecast.rests_on),
        "learned_factor": forecast.learned.factor,
        "fingerprint": plan.fingerprint,
        "sku": plan.sku,
        "price": plan.price_note,
        "parts": dg.JsonMetadataValue(asdict(forecast.parts(plan.node_count))),
        "measured": dg.JsonMetadataValue([asdict(item) for item in forecast.measured]),
    }


def plan_table(plan: TrainingPlan, place: str, startup_seconds: float) -> str:
    """Return the plan as a Markdown table. ``startup_seconds``: of its nodes."""
    estimate: Estimate = plan.estimate
    training = plan.job["training"]
    nodes = name_nodes(plan.node_count, plan.sku, plan.tier, place)
    evictions = tell_evictions(estimate.usd.expected, plan.node_count, price_of(plan.sku), plan.tier, startup_seconds)
    batch = training["batch_size_per_gpu"] * training["gradient_accumulation_steps"] * training["world_size"]
    rows = [
        ("Nodes", f"{nodes}; {plan.node_count} node(s) with {plan.processes_per_node} process(es) each"),
        ("Model, loss", f"{plan.job['model']['factory']}, {plan.job['loss']['factory']}"),
        ("Work", f"{plan.work.steps} steps of {batch} samples, {plan.work.evaluations} evaluations"),
        ("Time", f"**{format_duration(estimate.seconds.expected)}** ({_range(estimate.seconds, format_duration)})"),
        ("Cost", f"**{dollars(estimate.usd.expected)}** ({_range(estimate.usd, dollars)}), {plan.price_words}"),
        *([("Evictions", evictions)] if evictions else []),
        *([("Probe", f"{dollars(plan.probe_usd)}, run before and billed with it")] if plan.probes else []),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _range(interval: Any, write: Any) -> str:
    return f"{write(interval.low)} to {write(interval.high)}"


def refuse_what_cannot_end(
    cluster: GPUClusterResource,
    project: ProjectResource,
    model: ModelBytes | None,
    keep_checkpoints: int,
    registers: bool,
    run_id: str,
) -> None:
    """Try what a training's end needs. Raise `dagster.Failure` with all that is missing. ``model``: None where its
    bytes are not known; ``registers``: whether the graph registers what it trains."""
    problems = try_places(project, room_needed(model, keep_checkpoints))
    if registers:
        from dtrain_dagster.registry import RegistryError  # not above: loads MLflow

        try:
            cluster.registry(project, run_id).try_out(project.model_name, project.experiment)
        except RegistryError as error:
            problems.append(str(error))
    if problems:
        raise dg.Failure(
            "nothing was started, since the training could not finish: " + "; and ".join(problems),
            allow_retries=False,
        )


def room_needed(model: ModelBytes | None, keep_checkpoints: int) -> dict[str, int]:
    """Return the bytes that a training needs in its storage, in the home and in the temporary folder. Pure."""
    weights, checkpoint = 0, 0
    if model is not None:
        weights, checkpoint = model.parameters, model.parameters + 2 * model.trained
    return {  # of checkpoints there are the best one and one that is being written besides
        "storage": ROOM + weights + (keep_checkpoints + 2) * checkpoint, "home": ROOM + weights,
        "temporary": ROOM + _COPIES * weights,
    }  # fmt: skip


def try_places(project: ProjectResource, needed: Mapping[str, int]) -> list[str]:
    """Write to the storage of jobs, to the home and to the temporary folder, and return what is wrong with them. Disks
    are asked for room as long as they are of this machine; one that several places are on has to have it for all."""
    storage, name, problems = open_storage(project.shared_uri), f"dtrain-tried-{uuid.uuid4().hex[:8]}", []
    try:
        storage.write(name, b"")
        storage.delete(name)
    except Exception as error:  # each kind of storage has errors of its own
        problems.append(f"{redact(project.shared_uri)} cannot be written to ({redact(str(error))}): see DTRAIN_STORAGE")
    places = {"home": (Path(project.home), "DTRAIN_HOME"), "temporary": (Path(tempfile.gettempdir()), "TMPDIR")}
    if storage.is_local:
        places["storage"] = storage.local_path(), "DTRAIN_HOME"
    disks: dict[int, list[str]] = defaultdict(list)
    for place, (folder, setting) in places.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                disks[folder.stat().st_dev].append(place)
        except OSError as error:
            problems.append(f"{folder} cannot be written to ({error.strerror or error}): see {setting}")
    for of_disk in disks.values():
        folder, total = places[of_disk[0]][0], sum(needed[place] for place in of_disk)
        if (free := shutil.disk_usage(folder).free) < total:
            settings = " or ".join(sorted({places[place][1] for place in of_disk}))
            problems.append(
                f"the disk of {folder} has {free / 1e9:.3g} GB left, and this training needs {total / 1e9:.3g} GB "
                f"(checkpoints, the registered model, and copies on its way): make room, or see {settings}"
            )
    return problems
