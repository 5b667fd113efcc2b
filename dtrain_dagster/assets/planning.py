"""The asset `cost_estimate`: a training's plan and its cost, known before the training is bought.

It gathers what is known (launchpad, past runs, a probe) and records what was decided; the decisions are pure functions
of `dtrain_dagster.planning`, and the page is `plan_page`.
"""

import math
import os
from dataclasses import replace

import dagster as dg

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import hardware_mark, refusing_mistakes
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.plan_options import (
    PlanOptions,
    ScriptOptions,
    TrainingOptions,
    check_planned,
    job_of_dataset,
    job_of_script,
    with_checked_names,
    with_nodes_of_run,
)
from dtrain_dagster.assets.plan_page import plan_page
from dtrain_dagster.costs.estimate import estimate_cost, estimate_forecast
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.jobs.spending import Wanted
from dtrain_dagster.jobs.start import BudgetSpentError
from dtrain_dagster.planning.build_plan import (
    LEAST_SECONDS,
    Limits,
    PlannedJob,
    assemble_plan,
    compare_choices,
    explain_excess,
    remedies,
    size_up_job,
    sure_objection,
    warnings_of,
)
from dtrain_dagster.planning.evidence import (
    History,
    Pace,
    bill_charges,
    forecast_from_probe,
    has_succeeded,
    knows,
    left_node_seconds,
    probe_id,
    unpaid_charges,
)
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.page_entries import fit_page
from trainer.node.gpus import explain_local_gpus, visible_gpus
from trainer.performance.memory import ModelBytes
from trainer.rundir import RunDir

DESCRIPTION = (
    "The plan: SKU, nodes, time and dollars with a 90 % interval, from past runs of this training or a short probe "
    "of it on this cluster. It is refused if it does not fit the budget or the deadline, or if storage, disk or "
    "registry would fail at the end. A probe costs money too: its cost is announced before it runs, counts against "
    "the limits, and is billed with the training. `trained_checkpoint` carries the plan out."
)


def build_cost_estimate(pipeline: Pipeline) -> dg.AssetsDefinition:
    names, is_script = pipeline.names, pipeline.source == "script"
    of_dataset = with_checked_names(TrainingOptions, pipeline.defaults.get("cost_estimate", {}))
    options = pipeline.options("cost_estimate", ScriptOptions if is_script else of_dataset)

    @dg.asset(
        **pipeline.asset("cost_estimate", "planning", inputs=() if is_script else ("sharded_dataset",)),
        deps=list(pipeline.deps) if is_script else None,
        kinds={"python"},
        required_resource_keys=names.resources,
        description=DESCRIPTION,
    )
    def cost_estimate(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
        **inputs: BuiltDataset,
    ):  # no annotation, see assets.common
        """Plan the training: estimate its time and cost from past runs or a probe, and refuse it where it exceeds a
        limit. That of a script is found out by running the script up to its call of fit."""
        with refusing_mistakes():
            cluster = with_nodes_of_run(cluster_resource(context, names), config)
            run = ClusterRun.of(context, cluster, project_resource(context, names))
            price, tier = price_of(cluster.sku), cluster.first_tier
            price.usd_per_hour(tier)  # nodes without a price are refused before a script is run
            model_name = None if pipeline.unregistered else run.project.model_name
            if is_script:
                job, samples, script = job_of_script(config, run, pipeline.script, model_name)
            else:
                job, samples, script = job_of_dataset(config, run, inputs["sharded_dataset"])
            planned = size_up_job(
                job, samples, price, tier, cluster.node_count, cluster.ranks_per_node, cluster.traits,
                config.more.get("world_size"), names, script,  # type: ignore[attr-defined]
            )  # fmt: skip
        return plan_training(run, config, planned, registers=model_name is not None)

    return cost_estimate


def plan_training(run: ClusterRun, config: PlanOptions, planned: PlannedJob, registers: bool) -> dg.MaterializeResult:
    """Return the plan of a wanted training. ``registers``: whether its model is to be registered. Raise
    `dagster.Failure` where it exceeds a limit, or its end lacks something."""
    limits, log = Limits(budget_usd=config.budget_usd, deadline_hours=config.deadline_hours), run.context.log
    from dtrain_dagster.planning.check_job import memory_of  # not above: loads numpy

    with refusing_mistakes():
        count = planned.node_count
        history = read_history(run, planned)
        checked = check_planned(planned, run.cluster.have_gpus, rehearses=not history.runs)
        too_small, sentences = memory_of(planned, checked)
        for sentence in sentences:
            log.warning(sentence)
        model = checked.model or (planned.script.model if planned.script else None)
        refuse_what_cannot_end(run, model, planned.job.training.keep_checkpoints, registers)
    past = history.forecast(planned.sizes, count)
    if said := sure_objection(past, planned, limits):
        would_fit = remedies(compare_choices(planned, past, limits, too_small), planned, past) if past else []
        raise run.refuse_plan(nodes_of(planned), said, would_fit)
    if past is not None and knows(past, count):
        pace = Pace(planned=planned, forecast=past)
    else:
        pace = measure_pace(run, config, planned, history, limits)
    planned, forecast = pace.planned, pace.forecast
    spent = bill_charges(pace.charges, planned.tier).total_usd
    limits = replace(limits, spent_usd=spent, spent_seconds=pace.seconds)
    table = compare_choices(planned, forecast, limits, too_small)
    estimate = estimate_forecast(forecast, planned.price, planned.tier, planned.node_count)
    if said := explain_excess(estimate, limits):
        raise run.refuse_plan(nodes_of(planned), said, remedies(table, planned, forecast))
    usd = min(estimate.usd.expected, config.stop_at_usd or math.inf)
    run.refuse_excess(Wanted(f"the training {planned.fingerprint}", usd))
    if table.cheapest and table.cheapest.usd.expected < estimate.usd.expected:
        log.info(f"cheaper would be {table.cheapest.text} (DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)")
    plan = assemble_plan(planned, forecast, estimate, limits, config.stop_at_usd, pace.charges)
    log.info(
        f"estimate: {dollars(estimate.usd.expected)} and {format_duration(estimate.seconds.expected)}, "
        f"from {plan.basis}" + (f"; with its probe {dollars(estimate.usd.expected + spent)}" if spent else "")
    )
    unused = explain_local_gpus(len(visible_gpus(os.environ)), plan.node_count, plan.processes_per_node)
    for warning in (*warnings_of(plan, limits), *([unused] if unused and planned.kind.is_this_machine else [])):
        log.warning(warning)
    return dg.MaterializeResult(
        value=plan,
        data_version=dg.DataVersion(plan.fingerprint),
        metadata=fit_page(plan_page(run, plan, table, forecast, pace)),
    )


def nodes_of(planned: PlannedJob) -> str:
    return f"{planned.node_count} x {planned.price.sku} ({planned.tier})"


def read_history(run: ClusterRun, planned: PlannedJob) -> History:
    """Return the records of past runs of this training, or at this pace, in this Dagster instance."""
    is_here = planned.kind.is_this_machine
    return History.read(run.context.instance, planned.pace, planned.price.sku, is_here, planned.names)


def refuse_what_cannot_end(run: ClusterRun, model: ModelBytes | None, keep_checkpoints: int, registers: bool) -> None:
    """Try what a training's end needs. Raise `dagster.Failure` with all that is missing. ``model``: None where its
    bytes are not known; ``registers``: whether the graph registers what it trains."""
    from dtrain_dagster.planning.check_job import room_needed, try_places

    project, run_id = run.project, run.context.run.run_id
    problems = try_places(project.shared_uri, project.home, room_needed(model, keep_checkpoints))
    if registers:
        from dtrain_dagster.registry.versions import RegistryError  # not above: loads MLflow

        try:
            run.cluster.registry(project, run_id).try_out(project.model_name, project.experiment)
        except RegistryError as error:
            problems.append(str(error))
    if problems:
        raise dg.Failure(
            "nothing was started, since the training could not finish: " + "; and ".join(problems),
            allow_retries=False,
        )


def measure_pace(run: ClusterRun, config: PlanOptions, planned: PlannedJob, history: History, limits: Limits) -> Pace:
    """Return the forecast from a short probe on the available nodes, unless past runs on these very nodes tell enough.
    Raise `dagster.Failure` where that would exceed a limit, or probes are switched off and no past run is known."""
    sizes, cluster = planned.sizes, run.cluster
    manager, jobs_uri, tell = run.manager, run.project.jobs_uri, run.context.log.info
    if not config.probe:
        forecast = history.forecast(sizes, planned.node_count)
        if forecast is None:
            raise dg.Failure(
                "no earlier run on this SKU shows the pace of this training, so its cost cannot be estimated: "
                "set probe to true",
                allow_retries=False,
            )
        return Pace(planned=planned, forecast=forecast)
    count = planned.node_count
    _, left, is_due = prepare_probe(run, config, planned, limits)
    if is_due:
        hourly = count * planned.price.usd_per_hour(planned.tier)
        bound = "" if left is None else f", for {dollars(left / 3600 / count * hourly)} at most"
        tell(
            f"a probe is run first on {nodes_of(planned)}, at {dollars(hourly)} an hour{bound}; it counts against "
            "budget_usd and stop_at_usd and is billed with the training"
        )
    got = run.provision(cluster.sku, count)
    price, tier = price_of(got.gpu_type), tier_of(got.tier or cluster.first_tier)
    price.usd_per_hour(tier)  # the probe runs on them: nodes without a price are refused before
    planned = replace(planned, price=price, tier=tier)
    if price.sku != history.sku:
        history = read_history(run, planned)
    forecast = history.forecast(sizes, count)
    if forecast is not None and knows(forecast, count):
        return Pace(planned=planned, forecast=forecast)
    mark, left, is_due = prepare_probe(run, config, planned, limits)
    nodes = RunDir(f"{jobs_uri}/{probe_id(mark, count)}").nodes()  # of a try before, which counts in its limit
    most = None if left is None else left + sum(node.seconds(node.last_seen_at or node.started_at) for node in nodes)
    learned, command = history.learned("probe"), planned.script.command if planned.script else None
    env = cluster.node_env(run.project)
    try:
        with run.queueing():
            forecast = forecast_from_probe(manager, planned.job, sizes, count, mark, env, learned, tell, most, command)
    except BudgetSpentError as error:
        usd = dollars((left or 0.0) / 3600 * price.usd_per_hour(tier))
        said = f"the probe reached the limit of {usd}, which its limits and the ceiling on spending leave it: {error}"
        raise run.refuse_plan(nodes_of(planned), said) from error
    if is_due:
        run.leave_queue(got)
    charges = unpaid_charges(manager, jobs_uri, forecast.rests_on)
    seconds = bill_charges(charges, tier).wall_seconds if is_due else 0.0
    return Pace(planned=planned, forecast=forecast, charges=charges, seconds=seconds)


def prepare_probe(
    run: ClusterRun, config: PlanOptions, planned: PlannedJob, limits: Limits
) -> tuple[str, float | None, bool]:
    """Return the mark of the probe on the planned nodes, the node-seconds that the limits and the ceiling leave for it
    (None: any), and whether it is still to be run. Raise `dagster.Failure` where no probe fits into what is left."""
    count, jobs_uri, price, tier = planned.node_count, run.project.jobs_uri, planned.price, planned.tier
    mark = planned.pace + hardware_mark(run.cluster, price.sku)
    job_id, each = probe_id(mark, count), price.usd_per_hour(tier)
    charges = unpaid_charges(run.manager, jobs_uri, [job_id])
    left = left_node_seconds(limits, config.stop_at_usd, charges, price, tier, count)
    is_due = not has_succeeded(RunDir(f"{jobs_uri}/{job_id}"))
    least = estimate_cost(LEAST_SECONDS, price, tier, count).usd.expected if is_due else 0.0
    room = run.refuse_excess(Wanted(job_id, least))
    if room is not None and room < count * each:  # beyond, an hour counts while it runs, as of all without a limit
        left = min(room / each * 3600, math.inf if left is None else left)
    if is_due and left is not None and left < LEAST_SECONDS.low * count:
        said = (
            f"budget_usd, stop_at_usd, deadline_hours or the ceiling leave {left:.1f} node-seconds for its probe, "
            f"which takes {LEAST_SECONDS.low:g} s of each node at least"
        )
        raise run.refuse_plan(nodes_of(planned), said)
    return mark, left, is_due
