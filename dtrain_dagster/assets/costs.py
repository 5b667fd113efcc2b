"""The asset `cost_breakdown` and its checks: a training's cost by node, by time and by cause, against the estimate."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import best_rows, head_of_page, plan_of, read_finished, with_rest
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.costs import export
from dtrain_dagster.costs.export import Rows
from dtrain_dagster.costs.ledger import Ledger, ledger
from dtrain_dagster.costs.money import SECOND, digits_of, total_shown
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostMetrics, CostTracker, bill_usage, overrun
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.verdict import Reason, explain_variance, reasons
from dtrain_dagster.jobs.totals import LaunchTotals, sum_launches
from dtrain_dagster.planning.history import JobCourse
from dtrain_dagster.planning.projection import THRESHOLDS
from dtrain_dagster.reports.small_pictures import small_bar
from dtrain_dagster.resources import GPUClusterResource, cluster_resource, project_resource
from dtrain_dagster.support.formatting import dollars, in_block
from dtrain_dagster.support.graph_names import GraphNames
from dtrain_dagster.support.page_entries import fit_page, read_entries
from trainer.errors import DamagedError
from trainer.rundir import RESULT, RunDir

COST_REPORT = "reports/cost_breakdown.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """An ended job's cost and the records that it rests on."""

    job: FinishedJob
    plan: TrainingPlan
    usage: Sequence[NodeUsage]
    """Presence of the training's own nodes."""
    tracker: CostTracker
    """The training and the probes that are paid with it."""
    took: LaunchTotals
    found: Ledger
    metrics: CostMetrics
    samples_seen: int
    told: Sequence[Reason]
    """The reasons for the difference to the estimate, in dollars."""
    why: str
    """The same reasons as a sentence."""

    @property
    def above(self) -> float:
        """The excess of the training over its estimate, as a fraction of the estimate. A probe is paid before there is
        an estimate, and counts in neither."""
        return overrun(self.tracker.training_usd, self.plan.estimate.usd.expected)

    @property
    def usd_per_1000_samples(self) -> float:
        """The dollars that 1000 samples cost."""
        return 1000 * self.metrics.total_cost_usd / max(1, self.samples_seen)

    @property
    def digits(self) -> int:
        """The number of decimals with which the dollars of a table add up."""
        return digits_of(self.tracker.total_units)


def build_cost_breakdown(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `cost_breakdown` of a graph."""
    key = pipeline.names.key("cost_breakdown")

    @dg.asset(
        **pipeline.asset("cost_breakdown", "reporting", inputs=("cost_estimate", "trained_checkpoint")),
        kinds={"python"},
        required_resource_keys=pipeline.names.resources,
        description="What the training cost, by node, by time and by cause, and why it differs from the estimate.",
        check_specs=[
            dg.AssetCheckSpec(
                "within_estimate",
                asset=key,
                description="The cost exceeds the estimate by no more than DTRAIN_OVERRUN_FRACTION.",
            ),
            dg.AssetCheckSpec(
                "ledger_is_the_bill",
                asset=key,
                blocking=True,
                description="Every paid node-second is in one row, and the rows sum to the bill exactly. Unexplained "
                "time has a row of its own.",
            ),
        ],
    )
    def cost_breakdown(
        context: dg.AssetExecutionContext, cost_estimate: TrainingPlan, trained_checkpoint: FinishedJob
    ) -> dg.MaterializeResult:
        """Bill a finished training, write the report and its tables, and check the bill against the ledger and the
        estimate."""
        made = bill_training(cluster_resource(context, pipeline.names), cost_estimate, trained_checkpoint)
        add_bill_to_mlflow(context, pipeline.names, trained_checkpoint, read_entries(made.metadata or {}))
        return made

    return cost_breakdown


def add_bill_to_mlflow(
    context: dg.AssetExecutionContext, names: GraphNames, job: FinishedJob, figures: Mapping[str, Any]
) -> None:
    """Write the dollars to the training's run in MLflow; where that is impossible, a warning says why."""
    from dtrain_dagster.registry.run_record import add_to_run, cost_metrics, lost_metric

    cluster, project = cluster_resource(context, names), project_resource(context, names)
    uri, rundir = cluster.registry(project).tracking_uri, RunDir(job.run_dir)
    rows = {row["cause"]: row["node_seconds"] for row in read_finished(rundir, COST_REPORT)["ledger"]}
    metrics = cost_metrics(figures) | lost_metric(float(rows.get(CostCause.LOST, 0)))
    if why := add_to_run(uri, rundir, job.job_id, metrics=metrics):
        context.log.warning(why)


def bill_training(cluster: GPUClusterResource, cost_estimate: TrainingPlan, job: FinishedJob) -> dg.MaterializeResult:
    """Return a finished training's bill with its checks, after its reports were written."""
    rundir = RunDir(job.run_dir)
    plan = plan_of(rundir, cost_estimate)
    usage, events = cluster.manager().node_usage(job.job_id), list(rundir.events(strict=True))
    result = read_finished(rundir, RESULT)
    tracker = CostTracker(job.cluster_name, [*usage, *plan.probe_usage], plan.tier)
    found = ledger(tracker.nodes, events)
    told = reasons(plan, tracker.training_nodes, found, result["steps"], _probe(cluster, plan, rundir))
    bill = Bill(
        job=job,
        plan=plan,
        usage=usage,
        tracker=tracker,
        took=sum_launches(usage, plan.tier),
        found=found,
        metrics=tracker.metrics(result["epochs"], plan.estimate.usd.expected + tracker.probe_usd),
        samples_seen=result["samples_seen"],
        told=told,
        why=explain_variance(told, tracker.training_usd, plan.estimate.usd.expected),
    )
    _write_report(rundir, bill)
    account = cluster.manager().describe_account(job.job_id)
    by_cluster = {"accounting": dg.MarkdownMetadataValue(in_block("\n".join(account)))} if account else {}
    return dg.MaterializeResult(
        metadata=fit_page(_page(rundir, bill) | by_cluster),
        check_results=[_estimate_check(bill), _ledger_check(tracker, found)],
    )


def _write_report(rundir: RunDir, bill: Bill) -> None:
    """Write the report into the run directory."""
    estimated, reasons = bill.plan.estimate.usd.expected, list(map(asdict, bill.told))
    document = export.cost_document(
        bill.tracker,
        bill.found,
        bill.metrics,
        bill.plan.price_note,
        usd_per_1000_samples=bill.usd_per_1000_samples,
        launches=asdict(bill.took),
        difference={"usd": bill.tracker.training_usd - estimated, "words": bill.why, "reasons": reasons},
    )
    rundir.write_json(COST_REPORT, document)


def _page(rundir: RunDir, bill: Bill) -> dict[str, Any]:
    """Return metadata: dollars against the estimate, what they bought, by cause and by node, and what that rests on."""
    estimate = bill.plan.estimate
    causes = sorted(export.ledger_rows(bill.found, bill.digits), key=lambda row: -row["usd"])
    nodes = sorted(_by_node(bill.tracker, bill.digits), key=lambda row: -row["usd"])
    notes = [*bill.tracker.notes, *bill.found.notes]
    total = _number(total_shown([bill.tracker.total_units], bill.digits))
    return {
        **head_of_page(
            f"{dollars(total)}, of which {bill.found.goodput:.0%} trained; {bill.why.partition(':')[0]}.",
            small_bar({row["cause"]: float(row["usd"]) for row in causes if row["usd"]}),
            {
                "total_usd": total,
                "above_estimate_percent": round(100 * bill.above, 1),
                "goodput_percent": round(100 * bill.found.goodput, 1),
            },
        ),
        "ledger": _table(causes, "cause", ("cause", "usd", "percent", "node_seconds")),
        "why": dg.MarkdownMetadataValue(f"{bill.why}\n\n{_reasons_table(bill.told)}"),
        "by_node": _table(nodes, "node", ("node", "purpose", "seconds", "usd")),
        "report": dg.MetadataValue.path(f"{rundir.uri}/{COST_REPORT}"),
        "price": bill.plan.price_note,
        "notes": dg.MarkdownMetadataValue("\n".join(f"- {note}" for note in notes) or "–"),
        "training_usd": round(bill.tracker.training_usd, 6),
        "probe_usd": round(bill.tracker.probe_usd, 6),
        "estimated_usd": round(estimate.usd.expected, 6),
        "estimated_low_usd": round(estimate.usd.low, 6),
        "estimated_high_usd": round(estimate.usd.high, 6),
        "wall_seconds": round(bill.took.seconds, 1),
        "estimated_seconds": round(estimate.seconds.expected, 1),
        "node_hours": round(bill.tracker.node_hours, 6),
        "usd_per_epoch": round(bill.metrics.cost_per_epoch, 5),
        "usd_per_1000_samples": round(bill.usd_per_1000_samples, 7),
        **_identity(bill.job, bill.plan, bill.tracker),
        **asdict(JobCourse.read(rundir)),
    }


def _estimate_check(bill: Bill) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="within_estimate",
        passed=bill.above <= THRESHOLDS[0],
        severity=dg.AssetCheckSeverity.WARN,
        metadata={
            "actual": dollars(bill.tracker.training_usd),
            "estimate": dollars(bill.plan.estimate.usd.expected),
            "above_estimate_percent": round(100 * bill.above, 1),
            "why": bill.why,
        },
    )


def _identity(job: FinishedJob, plan: TrainingPlan, tracker: CostTracker) -> dict[str, Any]:
    """Return metadata: the job, as it was planned and on which nodes it ran."""
    return {
        "job_id": job.job_id,
        "fingerprint": plan.fingerprint,
        "sku": ", ".join(sorted({price_of(node.sku).sku for node in tracker.nodes})),
        "tier": ", ".join(sorted({str(node.tier) for node in tracker.nodes})),
        "planned_sku": plan.sku,
        "planned_tier": plan.tier,
        "basis": plan.basis_kind,
        "learned_factor": plan.learned_factor,
    }


def _probe(cluster: GPUClusterResource, plan: TrainingPlan, rundir: RunDir) -> Ledger | None:
    """Return the ledger of the probe that the estimate rests on; None where it is gone or there was none."""
    if plan.basis_kind != "probe" or not plan.rests_on:
        return None
    job_id = next((name for name in plan.rests_on if name.endswith(f"-{plan.node_count}n")), plan.rests_on[0])
    short = RunDir(f"{rundir.uri.rsplit('/', 1)[0]}/{job_id}")
    if not short.storage.exists(RESULT):
        return None
    try:
        usage, events = cluster.manager().node_usage(job_id), list(short.events(strict=True))
    except (ClusterError, DamagedError):  # the cluster has another name by now, or the record is damaged: it only
        return None  # serves to explain a difference
    return ledger(bill_usage(usage)[0], events)


def _ledger_check(tracker: CostTracker, found: Ledger) -> dg.AssetCheckResult:
    row = found.causes().get(CostCause.UNEXPLAINED)
    share = row.microseconds / found.microseconds if row else 0.0
    return dg.AssetCheckResult(
        check_name="ledger_is_the_bill",
        passed=found.units == tracker.total_units,
        metadata={
            "node_seconds": round(found.microseconds / SECOND, 3),
            "unexplained_percent": round(100 * share, 2),
        },
    )


def _by_node(tracker: CostTracker, digits: int) -> Rows:
    return [
        {
            "node": f"node {row['node']}",
            "purpose": row["purpose"],
            "sku": row["sku"],
            "seconds": round(row["seconds"], 1),
            "node_hours": round(node.hours, 5),
            "usd_per_hour": row["usd_per_hour"],
            "usd": row["usd"],
        }
        for node, row in zip(tracker.nodes, export.node_rows(tracker, digits), strict=True)
    ]


def _reasons_table(told: Sequence[Reason]) -> str:
    rows = ["| reason | dollars |", "|---|---|"]
    rows += [f"| {item.words} | {'+' if item.usd >= 0 else '−'}{dollars(abs(item.usd))} |" for item in told]
    return "\n".join(rows)


def _table(rows: Rows, name: str, columns: Sequence[str]) -> dg.TableMetadataValue:
    """Return the largest rows as a table whose dollars add up to the bill."""
    sums = [column for column in columns if rows and isinstance(rows[0][column], int | float | Decimal)]
    plain = [{key: _number(value) for key, value in row.items()} for row in with_rest(rows, name, sums)]
    plain = [row | {key: round(row[key], 1) for key in ("node_seconds", "seconds") if key in row} for row in plain]
    return best_rows(plain, columns)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value
