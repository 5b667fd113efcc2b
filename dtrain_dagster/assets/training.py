"""The asset `trained_checkpoint`: the plan is carried out on the cluster, and survives the death of the run that
watches."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.checks import TRAINING_CHECKS, FinishedTraining, training_check_specs
from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import best_rows, head_of_page, links, page_of, round_figures
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training_progress import RAISE_BUDGET, follow_training, totals_metadata
from dtrain_dagster.clusters.base import ClusterConfig
from dtrain_dagster.costs.plan import PLAN, PLANNED_FOR, TrainingPlan, charges_of, node_seconds_of, write_limit
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.orders import source_tags
from dtrain_dagster.jobs.progress import CLAIM, choose_job, known_jobs
from dtrain_dagster.jobs.spending import Wanted, note_attached
from dtrain_dagster.jobs.start import BudgetSpentError, code_version, start_job
from dtrain_dagster.jobs.totals import read_phase_totals, sum_launches
from dtrain_dagster.planning.build_plan import Limits, estimate_on, explain_excess
from dtrain_dagster.planning.evidence import take_charges
from dtrain_dagster.reports.small_pictures import small_curves
from dtrain_dagster.resources import GPUClusterResource, cluster_resource, project_resource
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.links import studio_url
from dtrain_dagster.support.formatting import dollars, in_markdown
from dtrain_dagster.support.page_entries import fit_page
from trainer.config import JobConfig, TrackingConfig, parse_job
from trainer.elastic.generation_record import generations
from trainer.evaluation.gate import score_of
from trainer.rundir import EVALUATION, LAUNCH, LIMIT, RESULT, RunDir
from trainer.spec import WINDOWS

if TYPE_CHECKING:
    from trainer.elastic.generation import Generation

CLUSTER_TAG = "dtrain/cluster"
"""The tag of an asset `gpu_cluster` that names the cluster: graphs on the same one are watched together."""


def build_gpu_cluster(pipeline: Pipeline) -> dg.AssetSpec:
    """Return the external asset `gpu_cluster` of a graph."""
    return dg.AssetSpec(
        pipeline.names.key("gpu_cluster"),
        # Beside the group of a graph with a name: Dagster refuses to materialize a group with an external asset in it.
        group_name=pipeline.names.unique("cluster") if pipeline.names.pipeline else "training",
        kinds={"python"},
        owners=list(pipeline.owners),
        tags={CLUSTER_TAG: pipeline.cluster} if pipeline.cluster else {},
        description="The training cluster as the sensors see it: what runs and what is idle. It is observed, not "
        "made here.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedJob:
    """A training that succeeded, as all later assets read it."""

    job_id: str
    run_dir: str
    cluster_name: str
    node_count: int
    processes_per_node: int


def build_trained_checkpoint(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `trained_checkpoint` of a graph."""
    names, key = pipeline.names, pipeline.names.key("trained_checkpoint")

    @dg.asset(
        **pipeline.asset("trained_checkpoint", "training", inputs=("cost_estimate",)),
        kinds={"pytorch"},
        required_resource_keys=names.resources,
        deps=[pipeline.gpu_cluster],
        description=(
            "The checkpoint that the cluster's nodes train together, as planned. While it trains, progress is recorded "
            "as observations. Terminating the run cancels the job; if the run dies, the job goes on and is found "
            "again. Its settings are those of the plan: see the launchpad of `cost_estimate`."
        ),
        check_specs=training_check_specs(key),
    )
    def trained_checkpoint(
        context: dg.AssetExecutionContext, cost_estimate: TrainingPlan
    ):  # no annotation, see assets.common
        """Run the planned training on the cluster, or attach to the job that already does, and follow it to its
        end."""
        cluster, project = of_plan(cluster_resource(context, names), cost_estimate), project_resource(context, names)
        run = ClusterRun.of(context, cluster, project)
        got = run.provision(cost_estimate.sku, cost_estimate.node_count)
        root_run_id, digest = context.run.root_run_id or context.run.run_id, cost_estimate.fingerprint
        choice = choose_job(digest, root_run_id, known_jobs(run.manager, project.jobs_uri, digest))
        context.log.info(f"{choice.action} job {choice.job_id}: {choice.reason}")
        rundir = RunDir(f"{project.jobs_uri}/{choice.job_id}")
        plan = with_probes(cost_estimate, rundir, project.jobs_uri, choice.job_id)
        try:
            with run.owning(rundir, choice.job_id):
                if choice.action in ("start", "restart"):
                    job = planned_job(plan, choice.job_id, run)
                    if pipeline.source == "script" and not pipeline.unregistered:  # its nodes write what is registered
                        job.tracking.registered_model = project.model_name
                    start_planned(run, plan, job, got, is_new=choice.action == "start")
                elif choice.action == "attach":
                    note_attached(run.manager.home, choice.job_id)
                    context.log.info(f"{choice.job_id}: {hand_over_budget(run, plan, rundir, choice.job_id, got)}")
                with run.queueing():
                    follow_training(run, rundir, choice.job_id, plan, cache(lambda: run.leave_queue(got)))
        except BudgetSpentError as error:
            raise dg.Failure(f"{error}; {RAISE_BUDGET}", allow_retries=False) from error
        result, evaluation = read_finished(rundir, RESULT), read_finished(rundir, EVALUATION)
        events, usage = list(rundir.events()), run.manager.node_usage(choice.job_id)
        finished = FinishedJob(
            job_id=choice.job_id,
            run_dir=rundir.uri,
            cluster_name=cluster.cluster_name,
            node_count=plan.node_count,
            processes_per_node=plan.processes_per_node,
        )
        training = FinishedTraining(events, result, evaluation, plan, usage)
        outcome = dg.MaterializeResult(
            value=finished,
            data_version=dg.DataVersion(result["weights_sha256"]),
            metadata=fit_page(
                training_page(run, rundir, events, result, evaluation, plan, usage)
                | ({"registration": pipeline.unregistered} if pipeline.unregistered else {})
            ),
            check_results=[check.judge(training) for check in TRAINING_CHECKS],
        )
        # This comes last: where a line above raises, the next run can adopt the job instead of training again.
        rundir.write_json(CLAIM, {"dagster_run_id": context.run.run_id, "claimed_at": time.time()})
        return outcome

    return trained_checkpoint


def start_planned(run: ClusterRun, plan: TrainingPlan, job: JobConfig, got: ClusterConfig, is_new: bool) -> None:
    """Start the job that carries a plan out, on the nodes that were got, within its limits and the ceiling. Raise
    `dagster.Failure` for what they do not allow. ``is_new``: whether it was never started before."""
    refuse_dearer_nodes(run, plan, got)
    usage = run.manager.node_usage(job.job_id) if plan.stop_at_usd and not is_new else []
    if (budget := node_seconds(plan, usage, got.gpu_type, got.tier)) is not None:
        job.training.max_node_seconds = budget
    planned_for = {PLANNED_FOR: run.context.asset_key.to_user_string()}
    RunDir(job.run_dir).write_json(PLAN, asdict(plan) | planned_for)
    env, size = run.cluster.node_env(run.project), (plan.node_count, plan.processes_per_node)
    with run.promising(wanted_by_plan(plan, got, job.job_id)):
        start_job(run.manager, job, *size, env, plan.stop_at_usd, plan.command)


def wanted_by_plan(plan: TrainingPlan, got: ClusterConfig, job_id: str) -> Wanted:
    """Return the start of a plan on the nodes that were got. It may cost what is expected, or less where it stops at a
    number of dollars."""
    estimate = estimate_on(plan, price_of(got.gpu_type), tier_of(got.tier or plan.tier))
    return Wanted(job_id, min(estimate.usd.expected, plan.stop_at_usd or math.inf))


def of_plan(cluster: GPUClusterResource, plan: TrainingPlan) -> GPUClusterResource:
    """Return the cluster with the nodes, their SKU and their tier that were planned: the launchpad of the plan may have
    asked for others than the environment's."""
    sku = plan.sku if plan.sku != cluster.sku else None
    tier = plan.tier if plan.tier != cluster.first_tier else None
    return cluster.with_hardware(plan.node_count, sku, tier)


def refuse_dearer_nodes(run: ClusterRun, plan: TrainingPlan, got: ClusterConfig) -> None:
    """Raise `dagster.Failure` where the nodes that were got differ from the planned ones and the plan does not fit on
    them. The difference is logged in any case, before anything runs."""
    price, tier = price_of(got.gpu_type), tier_of(got.tier or plan.tier)
    if (price.sku, tier) == (plan.sku, plan.tier):
        return
    told = f"planned on {plan.sku} ({plan.tier}), got {price.sku} ({tier})"
    run.context.log.warning(f"{told}: prices differ; see cost_breakdown")
    limits = Limits(budget_usd=plan.budget_usd, deadline_hours=plan.deadline_hours)
    if said := explain_excess(estimate_on(plan, price, tier), limits):
        raise run.refuse_plan(f"{plan.node_count} x {price.sku} ({tier})", f"{said} ({told})")


def with_probes(plan: TrainingPlan, rundir: RunDir, jobs_uri: str, job_id: str) -> TrainingPlan:
    """Return the plan with the probes that this job pays for: those of the plan, unless another training was quicker to
    take them, and those of the plan that the job was started with."""
    before = rundir.read_json(PLAN)
    earlier = charges_of(before)
    charges = {charge.job_id: charge for charge in (*plan.probes, *earlier)}
    mine = take_charges(jobs_uri, list(charges.values()), job_id)
    if before is not None and mine != earlier:
        rundir.write_json(PLAN, before | {"probes": [asdict(charge) for charge in mine]})
    return replace(plan, probes=mine)


def planned_job(plan: TrainingPlan, job_id: str, run: ClusterRun) -> JobConfig:
    """Return the `JobConfig` that carries out the plan."""
    project = run.project
    source: dict[str, str] = {}
    if not project.tracks_in_workspace:  # which keeps few tags of a run, and knows its source by itself
        source = source_tags("dagster: trained_checkpoint", Path.cwd())
    tracking = TrackingConfig(
        mlflow_tracking_uri=run.cluster.registry(project).tracking_uri,
        mlflow_experiment=project.experiment,
        mlflow_run_name=job_id,
        tags={**source, "dagster_run_id": run.context.run.run_id, "code_version": code_version()},
    )
    fields = {"job_id": job_id, "run_dir": f"{project.jobs_uri}/{job_id}", "tracking": asdict(tracking)}
    return parse_job(json.dumps({**plan.sections, **fields}), source="the plan")


def node_seconds(plan: TrainingPlan, usage: Sequence[NodeUsage], sku: str, tier: str | None) -> float | None:
    """Return the plan's hard budget in seconds of these nodes from now on; None where it has none. ``usage``: what was
    paid for before."""
    if not plan.stop_at_usd:
        return None
    return node_seconds_of(plan.stop_at_usd, [*usage, *plan.probe_usage], sku, tier_of(tier or plan.tier))


def hand_over_budget(run: ClusterRun, plan: TrainingPlan, rundir: RunDir, job_id: str, got: ClusterConfig) -> str:
    """Give a running job the plan's hard budget, if there is one; return a sentence on the budget that holds now."""
    launch = rundir.read_json(LAUNCH) or {}
    usage = run.manager.node_usage(job_id) if plan.stop_at_usd else []
    seconds = node_seconds(plan, usage, launch.get("sku", got.gpu_type), launch.get("tier", got.tier))
    if seconds is None:
        kept = (rundir.read_json(LIMIT) or {}).get("stop_at_usd")
        return f"keeps its hard budget of {dollars(kept)}" if kept else "no hard budget in dollars is set"
    write_limit(rundir, seconds, plan.stop_at_usd)
    return f"runs up to stop_at_usd = {dollars(plan.stop_at_usd)} from now on ({seconds / 3600:.4g} node-hours in all)"


def read_finished(rundir: RunDir, name: str) -> dict[str, Any]:
    """Return a document of a job that has succeeded. Raise `dagster.Failure` where it is missing: the folder was
    changed."""
    document = rundir.read_json(name)
    if document is None:
        raise dg.Failure(f"{rundir.uri} has no {name}: its job did not finish; materialize trained_checkpoint again")
    return document


def training_page(
    run: ClusterRun,
    rundir: RunDir,
    events: Sequence[dict[str, Any]],
    result: dict[str, Any],
    evaluation: dict[str, Any],
    plan: TrainingPlan,
    usage: Sequence[NodeUsage],
) -> dict[str, Any]:
    """Return the page of a finished training. ``usage``: of its own nodes."""
    from dtrain_dagster.registry.versions import scores_table

    steps, evaluations = ([item for item in events if item["kind"] == kind] for kind in ("step", "evaluation"))
    totals, job_id = totals_metadata(usage, plan.tier), rundir.uri.rsplit("/", 1)[-1]
    worth = worth_line(evaluation, sum_launches([*usage, *plan.probe_usage], plan.tier).usd)
    model, history, score = evaluation["model"], generations(rundir.storage), score_of(evaluation)
    curves = {
        "training": [(row["step"], row["loss"]) for row in steps],
        "validation": [(row["step"], row["loss"]) for row in evaluations if row.get("split") == "valid"],
    }
    metadata = head_of_page(
        next(iter(evaluation["notes"]), "The training has finished."),
        small_curves(curves),
        {
            f"test_{score or 'loss'}": round_figures(model.get(score or "loss")),
            "train_seconds": round_figures(read_phase_totals(rundir, events).get("training", result["train_seconds"])),
            "cost_usd": totals.get("cost_usd"),
        },
    )
    if model.get("nll") is not None:
        metadata["scores"] = best_rows(_score_rows(evaluation), ("name", "nll", "t"))
    elif evaluation.get("kind", WINDOWS) != WINDOWS:
        metadata["scores"] = dg.MarkdownMetadataValue(scores_table(evaluation, is_table=True))
    metadata |= links(
        dashboard=run.project.job_url(job_id), studio=studio_url((rundir.read_json(LAUNCH) or {}).get("studio_url"))
    )
    metadata["notes"] = dg.MarkdownMetadataValue("\n".join(f"- {in_markdown(note)}" for note in evaluation["notes"]))
    metadata["membership"] = dg.MarkdownMetadataValue(membership_table(history))
    rest: dict[str, Any] = {
        "job_id": job_id,
        "run_dir": dg.MetadataValue.path(rundir.uri),
        "steps": result["steps"],
        "world_size": result["world_size"],
        "generations": len(history),
        "dataset_id": plan.job["dataset"]["dataset_id"],
        "weights_sha256": f"{result['weights_sha256'][:16]}…, the full hash is in the data version",
        **totals,
        **{f"test_{name}": round_figures(value) for name, value in model.items() if isinstance(value, float)},
    }
    return page_of(metadata, rest) | ({"earned": worth} if worth else {}) | run.attempts()


def _score_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for the model and each baseline that forecasts a distribution, the best first."""
    scored = [("this model", evaluation["model"]), *evaluation["baselines"].items()]
    rows = sorted((item for item in scored if item[1].get("nll") is not None), key=lambda item: item[1]["nll"])
    return [
        {
            "name": name,
            "nll": round(row["nll"], 4),
            "coverage_90": round(row["coverage_90"], 3),
            "model_gain": round(row.get("model_gain_nll") or 0.0, 4),
            "t": round(row.get("model_gain_t") or 0.0, 1),
        }
        for name, row in rows
    ]


def membership_table(history: "Sequence[Generation]") -> str:
    """Return the members of each generation as a Markdown table, one row per generation."""
    rows = ["| generation | at | from step | nodes | mode | why |", "|---|---|---|---|---|---|"]
    for item in history:
        at = datetime.fromtimestamp(item.formed_at, UTC).strftime("%H:%M:%S")
        nodes = ", ".join(str(seat.node) for seat in item.members)
        mode = "parameter server" if item.topology == "star" else "all-reduce"
        rows.append(f"| {item.number} | {at} UTC | {item.step} | {nodes} | {mode} | {in_markdown(item.reason)} |")
    return "\n".join(rows)
