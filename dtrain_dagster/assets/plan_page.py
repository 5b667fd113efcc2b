"""The page of a plan: its time and dollars, the choices that it was taken from, its probes, and what they rest on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import dagster as dg

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import MOST_ROWS, best_rows, head_of_page
from dtrain_dagster.costs.estimate import Forecast
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.planning.build_plan import Choices, PlanChoice, name_nodes
from dtrain_dagster.planning.evidence import Pace, bill_charges
from dtrain_dagster.support.formatting import dollars, format_duration

SHOWN = ("choice", "usd", "mark", "seconds")
"""The columns of the table on the page; ``all_choices`` has more."""


def plan_page(run: ClusterRun, plan: TrainingPlan, table: Choices, forecast: Forecast, pace: Pace) -> dict[str, Any]:
    """Return the page of a plan."""
    return {
        **plan_head(plan, pace.planned.place),
        **choices_metadata(table),
        **plan_metadata(plan, forecast, pace.planned.place),
        **probe_metadata(pace),
        **run.attempts(),
        "training": dg.JsonMetadataValue(plan.job["training"]),
    }


def plan_head(plan: TrainingPlan, place: str) -> dict[str, Any]:
    """Return what the page of a plan begins with."""
    estimate = plan.estimate
    return head_of_page(
        f"{format_duration(estimate.seconds.expected)} and {dollars(estimate.usd.expected)} "
        f"({estimate.usd.range_in(dollars)}) on {name_nodes(plan.node_count, plan.sku, plan.tier, place)}; "
        f"from {plan.basis.partition(';')[0]}",
        "",
        {
            "estimated_usd": round(estimate.usd.expected, 6),
            "estimated_seconds": round(estimate.seconds.expected, 1),
            "steps": plan.work.steps,
        },
    )


def plan_metadata(plan: TrainingPlan, forecast: Forecast, place: str) -> dict[str, Any]:
    """Return what Dagster shows of a plan beside its head: the plan as a table, and what its figures rest on.
    ``place``: see `dtrain_dagster.planning.build_plan.PlannedJob`."""
    return {
        "plan": dg.MarkdownMetadataValue(plan_table(plan, place)),
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


def plan_table(plan: TrainingPlan, place: str) -> str:
    """Return the plan as a Markdown table."""
    estimate, training = plan.estimate, plan.job["training"]
    nodes = name_nodes(plan.node_count, plan.sku, plan.tier, place)
    spot = price_of(plan.sku).tell_spot(plan.tier)
    batch = training["batch_size_per_gpu"] * training["gradient_accumulation_steps"] * training["world_size"]
    rows = [
        ("Nodes", f"{nodes}; {plan.node_count} node(s) with {plan.processes_per_node} process(es) each"),
        ("Model, loss", f"{plan.job['model']['factory']}, {plan.job['loss']['factory']}"),
        *[
            (label, plan.job[part]["factory"])
            for part, label in (("optimizer", "Optimizer"), ("lr_scheduler", "Learning rate"))
            if plan.job.get(part)
        ],
        ("Work", f"{plan.work.steps} steps of {batch} samples, {plan.work.evaluations} evaluations"),
        ("Time", f"**{format_duration(estimate.seconds.expected)}** ({estimate.seconds.range_in(format_duration)})"),
        ("Cost", f"**{dollars(estimate.usd.expected)}** ({estimate.usd.range_in(dollars)}), {plan.price_words}"),
        *([("Spot", spot)] if spot else []),
        *([("Probe", f"{dollars(plan.probe_usd)}, run before and billed with it")] if plan.probes else []),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def choices_metadata(table: Choices) -> dict[str, Any]:
    """Return ``choices`` (the cheapest ones and the planned one) and ``all_choices``; nothing where there is none."""
    metadata: dict[str, Any] = {}
    if table.rows:
        first = [choice for choice in table.rows[:MOST_ROWS] if choice is not table.planned]
        planned = [table.planned] if table.planned else []
        best = sorted([*first[: MOST_ROWS - len(planned)], *planned], key=lambda choice: choice.usd.expected)
        metadata["choices"] = best_rows([_row(choice, table) for choice in best], SHOWN)
        metadata["all_choices"] = dg.JsonMetadataValue([_row(choice, table) for choice in table.rows])
    return metadata


def _row(choice: PlanChoice, table: Choices) -> dict[str, Any]:
    marks = ["➜ this plan"] if choice is table.planned else []
    marks += ["cheapest"] if choice is table.cheapest else []
    return {
        "choice": choice.name,
        "usd": round(choice.usd.expected, 6),
        "mark": ", ".join(marks),
        "seconds": round(choice.seconds.expected, 1),
        "sku": choice.price.sku,
        "tier": choice.tier,
        "nodes": choice.node_count,
        "usd_range": choice.usd.range_in(dollars),
        "time_range": choice.seconds.range_in(format_duration),
        "global_batch": choice.global_batch,
        "time_from": choice.time_from,
        "price_from": choice.price_from,
    }


def probe_metadata(pace: Pace) -> dict[str, Any]:
    """Return what Dagster shows of a plan's probe: its cost, and who pays; nothing where the plan rests on none."""
    if pace.forecast.basis != "probe":
        return {}
    bill = bill_charges(pace.charges, pace.planned.tier)
    return {
        "probe": describe_probe(pace, bill),
        "probe_usd": round(bill.total_usd, 6),
        "probe_node_seconds": round(3600 * bill.node_hours, 1),
    }


def describe_probe(pace: Pace, bill: CostTracker) -> str:
    """Return in words what the plan's probe costs, and who pays. Pure."""
    if not pace.charges:
        return "measured before, and paid for by another training"
    said = (
        f"{dollars(bill.total_usd)} for {3600 * bill.node_hours:.1f} node-seconds in "
        f"{format_duration(bill.wall_seconds)}, billed with this training"
    )
    return said if pace.seconds else f"{said}; measured before"
