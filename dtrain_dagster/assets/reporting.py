"""Reporting: what each dollar was spent on, and how fast the nodes were."""

from dataclasses import asdict
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import CODE_VERSION, OWNERS, dollars, duration, read_finished
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.tracker import CostTracker, overrun
from dtrain_dagster.monitoring import charts
from dtrain_dagster.monitoring.performance import NodePerformance, summarise
from dtrain_dagster.resources import GPUClusterResource
from dtrain_dagster.settings import load_settings
from trainer.rundir import EVALUATION, RESULT, RunDir

COST_REPORT = "reports/cost_breakdown.json"
PERFORMANCE_REPORT = "reports/performance_report.json"


@dg.asset(
    group_name="reporting",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    description="What the training cost, by node and by time, against what was estimated (R5.2).",
    check_specs=[
        dg.AssetCheckSpec(
            "within_estimate",
            asset="cost_breakdown",
            description="The cost is no further above the estimate than DTRAIN_OVERRUN_FRACTION allows (R5.4).",
        )
    ],
)
def cost_breakdown(
    cluster: GPUClusterResource, cost_estimate: TrainingPlan, trained_checkpoint: FinishedJob
) -> dg.MaterializeResult:
    plan, job = cost_estimate, trained_checkpoint
    rundir = RunDir(job.run_dir)
    tracker = CostTracker(job.cluster_name, cluster.manager().node_usage(job.job_id), plan.tier)
    result = read_finished(rundir, RESULT)
    metrics = tracker.metrics(result["epochs"], plan.estimate.usd.expected)
    above = overrun(metrics.total_cost_usd, metrics.estimated_total_cost)
    periods = tracker.by_period()
    rundir.write_json(
        COST_REPORT,
        {
            "metrics": asdict(metrics),
            "nodes": [asdict(node) for node in tracker.nodes],
            "periods": [asdict(period) for period in periods],
            "price": plan.price_note,
        },
    )
    estimate = plan.estimate.usd
    rows = [
        dg.TableRecord(
            {
                "node": f"node {node.node_id}",
                "sku": node.sku,
                "seconds": round(node.hours * 3600, 1),
                "node_hours": round(node.hours, 5),
                "usd": round(node.usd, 5),
            }
        )
        for node in tracker.nodes
    ]
    return dg.MaterializeResult(
        metadata={
            "total_usd": round(metrics.total_cost_usd, 5),
            "estimated_usd": round(metrics.estimated_total_cost, 5),
            "above_estimate_percent": round(100 * above, 1),
            "node_hours": round(tracker.node_hours, 5),
            "usd_per_epoch": round(metrics.cost_per_epoch, 5),
            "usd_per_1000_samples": round(1000 * metrics.total_cost_usd / max(1, result["samples_seen"]), 7),
            "by_node": dg.TableMetadataValue(rows, _schema(rows)),
            "over_time": dg.MarkdownMetadataValue(
                charts.markdown_image(
                    charts.cost_chart(
                        periods, (estimate.low, estimate.expected, estimate.high), words=plan.price_words
                    ),
                    "Cost over time",
                )
            ),
            "price": plan.price_note,
            "report": dg.MetadataValue.path(f"{rundir.uri}/{COST_REPORT}"),
        },
        check_results=[
            dg.AssetCheckResult(
                check_name="within_estimate",
                passed=above <= load_settings().overrun_fraction,
                severity=dg.AssetCheckSeverity.WARN,
                metadata={
                    "actual": dollars(metrics.total_cost_usd),
                    "estimate": dollars(metrics.estimated_total_cost),
                    "above_estimate_percent": round(100 * above, 1),
                },
            )
        ],
    )


@dg.asset(
    group_name="reporting",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    description="How fast the nodes trained and what held them up: verdict first, then figures and pictures (R3.1).",
)
def performance_report(
    cluster: GPUClusterResource, cost_estimate: TrainingPlan, trained_checkpoint: FinishedJob
) -> dg.MaterializeResult:
    job = trained_checkpoint
    rundir = RunDir(job.run_dir)
    result, evaluation = read_finished(rundir, RESULT), read_finished(rundir, EVALUATION)
    usage = cluster.manager().node_usage(job.job_id)
    paid = max(node.ended_at for node in usage) - min(node.started_at for node in usage)
    events = list(rundir.events())
    performance = summarise(events, result["phase_seconds"], result["world_size"], paid)
    rundir.write_json(PERFORMANCE_REPORT, asdict(performance))
    node_events = [item for item in events if item["kind"] == "node"]
    rows = [dg.TableRecord(_node_row(node)) for node in performance.nodes]
    expected = cost_estimate.estimate.seconds
    metadata: dict[str, Any] = {
        "verdict": performance.verdict,
        "samples_per_second": round(performance.samples_per_second, 1),
        "step_milliseconds_median": round(performance.step_milliseconds_median, 2),
        "step_milliseconds_p95": round(performance.step_milliseconds_p95, 2),
        "wall_seconds": round(paid, 1),
        "time_against_estimate": f"{duration(paid)}; estimated {duration(expected.expected)} "
        f"({duration(expected.low)} to {duration(expected.high)})",
        "test": dg.JsonMetadataValue(evaluation["model"]),
        "report": dg.MetadataValue.path(f"{rundir.uri}/{PERFORMANCE_REPORT}"),
    }
    pictures = [charts.markdown_image(charts.phase_chart(performance.phase_seconds), "Where the time went")]
    if rows:
        metadata["by_node"] = dg.TableMetadataValue(rows, _schema(rows))
        pictures.append(charts.markdown_image(charts.node_charts(node_events), "Nodes over time"))
    steps = [item for item in events if item["kind"] == "step"]
    evaluations = [item for item in events if item["kind"] == "evaluation"]
    pictures.append(charts.markdown_image(charts.training_curves(steps, evaluations), "Training curves"))
    report = "\n\n".join([f"**{performance.verdict}**", *pictures])
    metadata["pictures"] = dg.MarkdownMetadataValue(report)
    return dg.MaterializeResult(metadata=metadata)


def _node_row(node: NodePerformance) -> dict[str, Any]:
    row = asdict(node) | {"node_id": f"node {node.node_id}"}
    return {name: "none" if value is None else _short(value) for name, value in row.items()}


def _short(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def _schema(rows: list[dg.TableRecord]) -> dg.TableSchema:
    """The columns of the first row; text where a value is not a number."""
    kinds = {int: "int", float: "float"}
    first = rows[0].data if rows else {}
    return dg.TableSchema(
        columns=[dg.TableColumn(name, kinds.get(type(value), "string")) for name, value in first.items()]
    )
