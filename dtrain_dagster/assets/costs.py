"""What the training cost: by node, by time, against the estimate."""

from dataclasses import asdict

import dagster as dg

from dtrain_dagster.assets.common import CODE_VERSION, OWNERS, read_finished, table_schema
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.tracker import CostTracker, overrun
from dtrain_dagster.monitoring import charts
from dtrain_dagster.resources import GPUClusterResource
from dtrain_dagster.settings import load_settings
from dtrain_dagster.wording import dollars
from trainer.rundir import RESULT, RunDir

COST_REPORT = "reports/cost_breakdown.json"


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
            "estimated_low_usd": round(estimate.low, 5),
            "estimated_high_usd": round(estimate.high, 5),
            "above_estimate_percent": round(100 * above, 1),
            "wall_seconds": round(3600 * metrics.training_duration_hours, 1),
            "estimated_seconds": round(plan.estimate.seconds.expected, 1),
            "fingerprint": plan.fingerprint,
            "node_hours": round(tracker.node_hours, 5),
            "usd_per_epoch": round(metrics.cost_per_epoch, 5),
            "usd_per_1000_samples": round(1000 * metrics.total_cost_usd / max(1, result["samples_seen"]), 7),
            "by_node": dg.TableMetadataValue(rows, table_schema(rows)),
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
