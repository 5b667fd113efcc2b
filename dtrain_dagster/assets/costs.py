"""The asset `cost_breakdown` and its checks: a training's cost by node, by time and by cause, against the estimate."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import best_rows, head_of_page, with_rest
from dtrain_dagster.assets.outcome import Outcome
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.costs import export
from dtrain_dagster.costs.ledger import Ledger, ledger
from dtrain_dagster.costs.money import SECOND, digits_of, total_shown
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostMetrics, CostTracker, overrun
from dtrain_dagster.costs.verdict import Reason, explain_variance, reasons
from dtrain_dagster.jobs.totals import LaunchTotals, sum_launches
from dtrain_dagster.planning.evidence import JobCourse
from dtrain_dagster.reports.small_pictures import small_bar
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.page_entries import fit_page

COST_REPORT = "reports/cost_breakdown.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """A finished training's cost and the records that it rests on."""

    outcome: Outcome
    tracker: CostTracker
    """The training and the probes that are paid with it."""
    took: LaunchTotals
    found: Ledger
    told: Sequence[Reason]
    """The reasons for the difference to the estimate, in dollars."""

    @property
    def plan(self) -> TrainingPlan:
        return self.outcome.plan

    @property
    def metrics(self) -> CostMetrics:
        expected = self.plan.estimate.usd.expected + self.tracker.probe_usd
        return self.tracker.metrics(self.outcome.result["epochs"], expected)

    @property
    def above(self) -> float:
        """Return the excess of the training, without its probe, over its estimate, as a fraction of that."""
        return overrun(self.tracker.training_usd, self.plan.estimate.usd.expected)

    @property
    def why(self) -> str:
        """Return the reasons as a sentence."""
        return explain_variance(self.told, self.tracker.training_usd, self.plan.estimate.usd.expected)

    @property
    def usd_per_1000_samples(self) -> float:
        return 1000 * self.metrics.total_cost_usd / max(1, self.outcome.result["samples_seen"])


def build_cost_breakdown(pipeline: Pipeline) -> dg.AssetsDefinition:
    key = pipeline.names.key("cost_breakdown")

    @dg.asset(
        **pipeline.asset("cost_breakdown", "reporting", inputs=("cost_estimate", "trained_checkpoint")),
        kinds={"python"},
        required_resource_keys=pipeline.names.resources,
        description="What the training cost, by node, by time and by cause, and why it differs from the estimate.",
        check_specs=[
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
        """Bill a finished training, write the report and its tables, and check the bill against the ledger. Its dollars
        are written to the training's run in MLflow; where that fails, a warning says why."""
        from dtrain_dagster.registry.run_record import add_to_run, cost_metrics

        outcome = Outcome(context, pipeline.names, cost_estimate, trained_checkpoint)
        rundir, bill = outcome.rundir, bill_training(outcome)
        document = _report(bill)
        rundir.write_json(COST_REPORT, document)
        page = _page(bill)
        lost = sum(row["node_seconds"] for row in document["ledger"] if row["cause"] == CostCause.LOST)
        metrics = cost_metrics(page, float(lost))
        uri = outcome.cluster.registry(outcome.project).tracking_uri
        outcome.warn(add_to_run(uri, rundir, outcome.job.job_id, metrics=metrics))
        return dg.MaterializeResult(metadata=fit_page(page), check_results=[_ledger_check(bill.tracker, bill.found)])

    return cost_breakdown


def bill_training(outcome: Outcome) -> Bill:
    """Return a finished training's bill."""
    plan, tracker = outcome.plan, outcome.tracker
    found = ledger(tracker.nodes, list(outcome.rundir.events(strict=True)))
    told = reasons(plan, tracker.training_nodes, found, outcome.result["steps"])
    took = sum_launches(outcome.usage, plan.tier)
    return Bill(outcome=outcome, tracker=tracker, took=took, found=found, told=told)


def _report(bill: Bill) -> dict[str, Any]:
    difference = bill.tracker.training_usd - bill.plan.estimate.usd.expected
    return export.cost_document(
        bill.tracker,
        bill.found,
        bill.metrics,
        bill.plan.price_note,
        usd_per_1000_samples=bill.usd_per_1000_samples,
        launches=asdict(bill.took),
        difference={"usd": difference, "words": bill.why, "reasons": list(map(asdict, bill.told))},
    )


def _page(bill: Bill) -> dict[str, Any]:
    """Return metadata: dollars against the estimate, what they bought, by cause and by node, and what that rests on."""
    estimate, tracker, rundir = bill.plan.estimate, bill.tracker, bill.outcome.rundir
    digits = digits_of(tracker.total_units)  # with which the dollars of a table add up
    causes = sorted(export.ledger_rows(bill.found, digits), key=lambda row: -row["usd"])
    nodes = [row | {"node": f"node {row['node']}"} for row in export.node_rows(tracker, digits)]
    nodes.sort(key=lambda row: -row["usd"])
    notes = [*tracker.notes, *bill.found.notes]
    total = float(total_shown([tracker.total_units], digits))
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
        "training_usd": round(tracker.training_usd, 6),
        "probe_usd": round(tracker.probe_usd, 6),
        "estimated_usd": round(estimate.usd.expected, 6),
        "estimated_low_usd": round(estimate.usd.low, 6),
        "estimated_high_usd": round(estimate.usd.high, 6),
        "wall_seconds": round(bill.took.seconds, 1),
        "estimated_seconds": round(estimate.seconds.expected, 1),
        "node_hours": round(tracker.node_hours, 6),
        "usd_per_epoch": round(bill.metrics.cost_per_epoch, 5),
        "usd_per_1000_samples": round(bill.usd_per_1000_samples, 7),
        "job_id": bill.outcome.job.job_id,
        "fingerprint": bill.plan.fingerprint,
        "sku": ", ".join(sorted({price_of(node.sku).sku for node in tracker.nodes})),
        "tier": ", ".join(sorted({str(node.tier) for node in tracker.nodes})),
        "planned_sku": bill.plan.sku,
        "planned_tier": bill.plan.tier,
        "basis": bill.plan.basis_kind,
        "learned_factor": bill.plan.learned_factor,
        **asdict(JobCourse.read(rundir)),
    }


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


def _reasons_table(told: Sequence[Reason]) -> str:
    rows = ["| reason | dollars |", "|---|---|"]
    rows += [f"| {item.words} | {'+' if item.usd >= 0 else '−'}{dollars(abs(item.usd))} |" for item in told]
    return "\n".join(rows)


def _table(rows: export.Rows, name: str, columns: Sequence[str]) -> dg.TableMetadataValue:
    """Return the largest rows as a table whose dollars add up to the bill."""
    sums = [column for column in columns if rows and isinstance(rows[0][column], int | float | Decimal)]
    plain = export.plain([dict(row) for row in with_rest(rows, name, sums)])
    plain = [row | {key: round(row[key], 1) for key in ("node_seconds", "seconds") if key in row} for row in plain]
    return best_rows(plain, columns)
