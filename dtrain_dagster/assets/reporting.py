"""The asset `performance_report`: how fast the nodes were, and what held them up."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import (
    best_rows,
    head_of_page,
    links,
    plan_of,
    read_finished,
)
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import PriceError, alternatives_to, price_of
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.progress import PERFORMANCE_REPORT
from dtrain_dagster.jobs.totals import sum_launches
from dtrain_dagster.reports.small_pictures import small_bar
from dtrain_dagster.resources import GPUClusterResource, cluster_resource, project_resource
from dtrain_dagster.support.formatting import format_duration
from dtrain_dagster.support.graph_names import GraphNames
from dtrain_dagster.support.page_entries import fit_page
from trainer.rundir import EVALUATION, RESULT, RunDir

if TYPE_CHECKING:
    from dtrain_dagster.reports.performance import Performance, RankPerformance

RANK_COLUMNS = ("rank", "forward_ms", "backward_ms", "waiting_ms")
"""The columns of the table on the page; the report has all."""


def build_performance_report(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `performance_report` of a graph."""

    @dg.asset(
        **pipeline.asset("performance_report", "reporting", inputs=("cost_estimate", "trained_checkpoint")),
        kinds={"python"},
        required_resource_keys=pipeline.names.resources,
        description="How fast the nodes trained and what held them up: verdict first, then figures and the saved page.",
    )
    def performance_report(
        context: dg.AssetExecutionContext, cost_estimate: TrainingPlan, trained_checkpoint: FinishedJob
    ) -> dg.MaterializeResult:
        """Summarise a finished training's performance, write the report's page, and recommend changes for the next
        run."""
        cluster, project = cluster_resource(context, pipeline.names), project_resource(context, pipeline.names)
        result = report_performance(
            cluster, cost_estimate, trained_checkpoint, project.job_url(trained_checkpoint.job_id)
        )
        verdict = str((result.metadata or {})["verdict"])
        add_report_to_mlflow(context, pipeline.names, cost_estimate, trained_checkpoint, verdict)
        return result

    return performance_report


def add_report_to_mlflow(
    context: dg.AssetExecutionContext,
    names: GraphNames,
    cost_estimate: TrainingPlan,
    job: FinishedJob,
    verdict: str,
) -> None:
    """Give the training's run in MLflow its description and reports; where that is impossible, a warning says why."""
    from dtrain_dagster.registry.run_record import add_to_run, note_of

    cluster, project, rundir = cluster_resource(context, names), project_resource(context, names), RunDir(job.run_dir)
    plan = plan_of(rundir, cost_estimate)
    try:
        usage = [*cluster.manager().node_usage(job.job_id), *plan.probe_usage]
        usd = CostTracker(job.cluster_name, usage, plan.tier).total_usd
    except PriceError:
        usd = None
    worth = worth_line(read_finished(rundir, EVALUATION), usd)
    note = note_of(verdict, worth, job.run_dir, project.run_url(context.run.run_id))
    uri = cluster.registry(project).tracking_uri
    if why := add_to_run(uri, rundir, job.job_id, note=note):
        context.log.warning(why)


def report_performance(
    cluster: GPUClusterResource, cost_estimate: TrainingPlan, job: FinishedJob, job_url: str
) -> dg.MaterializeResult:
    """Return a finished training's figures, after its reports were written. ``job_url``: its page on the dashboard."""
    from dtrain_dagster.dashboard.page import write_report
    from dtrain_dagster.monitoring.alerts import describe_strategy
    from dtrain_dagster.planning.optimizer import ResourceOptimizer
    from dtrain_dagster.reports.performance import summarise_performance

    rundir = RunDir(job.run_dir)
    plan = plan_of(rundir, cost_estimate)
    result, evaluation = read_finished(rundir, RESULT), read_finished(rundir, EVALUATION)
    usage = cluster.manager().node_usage(job.job_id)
    events = list(rundir.events())
    performance = summarise_performance(
        events,
        result["world_size"],
        [*usage, *plan.probe_usage],
        plan.job["training"],
    )
    advice = ResourceOptimizer(
        events,
        usage,
        price=price_of(plan.sku),
        tier=plan.tier,
        training=plan.job["training"],
        prices=alternatives_to(plan.sku).values(),
        today=datetime.now(UTC).date(),
    )
    rundir.write_json(PERFORMANCE_REPORT, asdict(performance) | {"optimization": advice.document()})
    took = sum_launches(usage)
    expected, good = plan.estimate.seconds, performance.goodput
    figures, ranks = _figures(performance), [_rank_row(rank) for rank in performance.ranks]
    first = ("samples_per_second", "goodput_percent", "step_milliseconds_median")
    metadata: dict[str, Any] = {
        **head_of_page(
            performance.verdict,
            small_bar(performance.segment_shares or {"trained": good.trained_node_seconds, **good.elsewhere}),
            {name: figures.pop(name) for name in first},
        ),
        **({"by_rank": best_rows(ranks, RANK_COLUMNS)} if ranks else {}),
        "recommendations": dg.MarkdownMetadataValue(
            "\n".join(f"- {describe_strategy(item)}" for item in performance.recommendations)
            or "These figures do not suggest any change."
        ),
        "next_run": dg.MarkdownMetadataValue(advice.markdown()),
        **links(dashboard=job_url),
        "report_page": dg.MetadataValue.path(write_report(rundir, plan.tier)),
        "report": dg.MetadataValue.path(f"{rundir.uri}/{PERFORMANCE_REPORT}"),
        "time_against_estimate": f"{took.words}; estimated {format_duration(expected.expected)} "
        f"({format_duration(expected.low)} to {format_duration(expected.high)})",
        **figures,
        "wall_seconds": round(took.seconds, 1),
        "test": dg.JsonMetadataValue(evaluation["model"]),
    }
    if advice.utilization:
        metadata["utilization_percent"] = round(100 * advice.utilization.fraction, 1)
    return dg.MaterializeResult(metadata=fit_page(metadata))


def _figures(performance: "Performance") -> dict[str, Any]:
    """Return the figures that Dagster plots from run to run. Unknown ones are left out."""
    figures: dict[str, Any] = {
        "cause": performance.diagnosis.where,
        "cause_percent": 100 * performance.diagnosis.share,
        "samples_per_second": performance.samples_per_second,
        "rank_samples_per_second": performance.samples_per_second_per_rank,
        "step_milliseconds_median": performance.step_milliseconds_median,
        "step_milliseconds_p95": performance.step_milliseconds_p95,
        "goodput_percent": 100 * performance.goodput.share,
    }
    if performance.segment_shares:
        figures["input_percent"] = 100 * performance.segment_shares["input"]
    if len(performance.ranks) > 1:
        figures["communication_percent"] = 100 * performance.segment_shares["communication"]
        figures["waiting_percent"] = 100 * performance.segment_shares["waiting"]
    also = [
        f"- {item.where}, {item.share:.0%} of training time: {item.evidence}" for item in performance.diagnosis.also
    ]
    if also:
        figures["also_found"] = dg.MarkdownMetadataValue("\n".join(also))
    return {name: _short(value) for name, value in figures.items()}


def _rank_row(rank: "RankPerformance") -> dict[str, Any]:
    row = {"rank": rank.rank, "node": f"node {rank.node_id}", "samples_per_second": "none"}
    if rank.samples_per_second is not None:
        row["samples_per_second"] = _short(rank.samples_per_second)
    return row | {f"{name}_ms": round(value, 3) for name, value in rank.milliseconds.items()}


def _short(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
