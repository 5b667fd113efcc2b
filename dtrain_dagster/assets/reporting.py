"""The asset `performance_report`: how fast the nodes were, and what held them up."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import (
    best_rows,
    head_of_page,
    links,
)
from dtrain_dagster.assets.outcome import Outcome
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import alternatives_to, price_of
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.progress import PERFORMANCE_REPORT
from dtrain_dagster.jobs.totals import sum_launches
from dtrain_dagster.reports.small_pictures import small_bar
from dtrain_dagster.support.formatting import format_duration
from dtrain_dagster.support.page_entries import fit_page

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
        outcome = Outcome(context, pipeline.names, cost_estimate, trained_checkpoint)
        result = report_performance(outcome)
        add_report_to_mlflow(outcome, str((result.metadata or {})["verdict"]))
        return result

    return performance_report


def add_report_to_mlflow(outcome: Outcome, verdict: str) -> None:
    """Give the training's run in MLflow its description and reports; where that is impossible, a warning says why."""
    from dtrain_dagster.registry.run_record import add_to_run, note_of

    job, project = outcome.job, outcome.project
    worth = worth_line(outcome.evaluation, sum_launches(outcome.billed, outcome.plan.tier).usd)
    note = note_of(verdict, worth, job.run_dir, project.run_url(outcome.context.run.run_id))
    uri = outcome.cluster.registry(project).tracking_uri
    outcome.warn(add_to_run(uri, outcome.rundir, job.job_id, note=note))


def report_performance(outcome: Outcome) -> dg.MaterializeResult:
    """Return a finished training's figures, after its reports were written."""
    from dtrain_dagster.dashboard.page import write_report
    from dtrain_dagster.planning.optimizer import ResourceOptimizer
    from dtrain_dagster.reports.performance import summarise_performance

    rundir, plan, usage = outcome.rundir, outcome.plan, outcome.usage
    events, ranks = list(rundir.events()), outcome.result["world_size"]
    performance = summarise_performance(events, ranks, outcome.billed, plan.job["training"])
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
    figures, rows = _figures(performance), [_rank_row(rank) for rank in performance.ranks]
    first = ("samples_per_second", "goodput_percent", "step_milliseconds_median")
    metadata: dict[str, Any] = {
        **head_of_page(
            performance.verdict,
            small_bar(performance.segment_shares or {"trained": good.trained_node_seconds, **good.elsewhere}),
            {name: figures.pop(name) for name in first},
        ),
        **({"by_rank": best_rows(rows, RANK_COLUMNS)} if rows else {}),
        "recommendations": dg.MarkdownMetadataValue(
            "\n".join(f"- {item.text}" for item in performance.recommendations)
            or "These figures do not suggest any change."
        ),
        "next_run": dg.MarkdownMetadataValue(advice.markdown()),
        **links(dashboard=outcome.project.job_url(outcome.job.job_id)),
        "report_page": dg.MetadataValue.path(write_report(rundir, plan.tier)),
        "report": dg.MetadataValue.path(f"{rundir.uri}/{PERFORMANCE_REPORT}"),
        "time_against_estimate": f"{took.words}; estimated {format_duration(expected.expected)} "
        f"({format_duration(expected.low)} to {format_duration(expected.high)})",
        **figures,
        "wall_seconds": round(took.seconds, 1),
        "test": dg.JsonMetadataValue(outcome.evaluation["model"]),
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
