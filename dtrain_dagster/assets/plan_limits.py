"""A plan's limits, budget and deadline, and the choices that it was taken from, as a page shows them. A plan that does
not fit starts nothing, and a person is told what would fit."""

from __future__ import annotations

from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import MOST_ROWS, best_rows, charts, table_file
from dtrain_dagster.clusters.base import ClusterConfig
from dtrain_dagster.clusters.ranks import explain_idle_gpus
from dtrain_dagster.costs.estimate import Forecast, estimate_cost, estimate_forecast
from dtrain_dagster.costs.evictions import evictions_of, without_evictions
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import LISTED, SkuPrice, price_of
from dtrain_dagster.planning.build_plan import Limits, explain_excess, least, remedies
from dtrain_dagster.planning.choices import Choices, PlanChoice, PlanError, misses, name_nodes, require_choice
from dtrain_dagster.resources import ProjectResource
from dtrain_dagster.settings.tiers import Tier, tier_in_words, tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.notify import notify_and_log

SHOWN = ("choice", "usd", "mark", "seconds")
"""The columns of the table on the page; the file has all."""


def limits_of(config: Any) -> Limits:
    """Return the limits in the launchpad of `cost_estimate`."""
    return Limits(budget_usd=config.budget_usd, deadline_hours=config.deadline_hours)


def sure_objection(
    past: Forecast | None, price: SkuPrice, tier: Tier, node_count: int, limits: Limits, choose_nodes: bool
) -> str | None:
    """Return a sentence on why the plan cannot fit its limits, before anything is run; None where it may fit. It rests
    on past runs, or on the least that any training takes. Where nodes may be chosen, no number of them would fit."""
    said = None
    for count in range(1, node_count + 1) if choose_nodes else [node_count]:
        bound = estimate_forecast(past, price, tier, count) if past else least(price, tier, count)
        said = explain_excess(bound, limits, at_least=True)
        if said is None:
            return None
    return said


def refuse_plan(
    context: dg.AssetExecutionContext,
    project: ProjectResource,
    said: str,
    forecast: Forecast | None,
    limits: Limits,
    price: SkuPrice,
    tier: Tier,
    node_count: int,
    table: Choices | None = None,
) -> dg.Failure:
    """Tell a person that nothing is started and what would fit; return the `dagster.Failure` to raise."""
    counts = range(1, 2 * node_count + 1)
    fits = remedies(forecast, limits, price, tier, counts, node_count) if forecast else []
    nearest = ""
    if table:
        try:
            fits.append(f"{in_words(require_choice(table))} (DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)")
        except PlanError as error:
            nearest = f" Of all choices {error}."
    remedy = f"What would fit: {'; '.join(fits)}." if fits else "No known way to run this training would fit."
    remedy += nearest
    text = (
        f"this training is not started: on {node_count} x {price.sku} ({tier}) {said}. {remedy} Or raise the limit in "
        "the launchpad of cost_estimate."
    )
    notify_and_log(
        project.notify_urls(),
        "dtrain: a training does not fit its budget or deadline",
        f"{text} {project.run_url(context.run.run_id)}",
        context.log,
    )
    return dg.Failure(text, metadata={"objection": said, "would_fit": fits}, allow_retries=False)


def warnings_of(plan: TrainingPlan, limits: Limits) -> list[str]:
    """Return sentences on the limits that a plan which fits may still exceed."""
    usd, seconds, said = plan.estimate.usd, plan.estimate.seconds, []
    spent = limits.spent_usd
    probe = f" with the {dollars(spent)} of its probe" if spent else ""
    if 0 < limits.budget_usd < usd.high + spent:
        high = dollars(usd.high + spent)
        said.append(f"it may cost up to {high}{probe}, which exceeds budget_usd = {dollars(limits.budget_usd)}")
    if 0 < limits.deadline_hours * 3600 < seconds.high + limits.spent_seconds:
        said.append(
            f"it may take up to {format_duration(seconds.high)}, over deadline_hours = {limits.deadline_hours:g}"
        )
    if 0 < plan.stop_at_usd < usd.high + spent:
        said.append(
            f"it may reach stop_at_usd = {dollars(plan.stop_at_usd)} before its end: {dollars(usd.expected + spent)} "
            f"are expected{probe}, up to {dollars(usd.high + spent)}"
        )
    idle = explain_idle_gpus(
        price_of(plan.sku), plan.processes_per_node, plan.node_count, usd.expected, plan.price_words != LISTED
    )
    return [*said, idle] if idle else said


def cheapest_here(table: Choices, sku: str, tier: Tier, most: int) -> PlanChoice | None:
    """Return the cheapest choice that this cluster can carry out as it is and that surely fits; else the cheapest that
    fits as expected; else the cheapest of all, which is refused. None where this cluster can carry out no choice."""
    here = [row for row in table.rows if (row.sku, row.tier) == (sku, tier) and row.node_count <= most]
    limits = Limits(budget_usd=table.budget_usd or 0.0, deadline_hours=(table.deadline_seconds or 0.0) / 3600)
    surely = [row for row in here if not misses(row, table.deadline_seconds, table.budget_usd)]
    likely = [row for row in here if explain_excess(row, limits) is None]
    return next(iter(surely or likely or here), None)


def refuse_dearer_nodes(
    context: dg.AssetExecutionContext, project: ProjectResource, plan: TrainingPlan, got: ClusterConfig
) -> None:
    """Raise `dagster.Failure` where the nodes that were got differ from the planned ones and the plan does not fit on
    them. The difference is logged in any case, before anything runs. Times on these nodes are the plan's, scaled by the
    table of speeds, fixed costs too: a rough guess."""
    price, tier = price_of(got.gpu_type), tier_of(got.tier or plan.tier)
    if (price.sku, tier) == (plan.sku, plan.tier):
        return
    told = f"planned on {plan.sku} ({plan.tier}), got {price.sku} ({tier})"
    context.log.warning(f"{told}: prices differ; see cost_breakdown")
    limits = Limits(budget_usd=plan.budget_usd, deadline_hours=plan.deadline_hours)
    startup, planned = plan.phases.get("startup"), price_of(plan.sku)
    evictions = evictions_of(planned, plan.tier, startup)
    undisturbed = without_evictions(plan.estimate.seconds, evictions, plan.node_count)  # the new nodes' are added
    seconds = undisturbed.scaled(planned.speed / price.speed)
    estimate = estimate_cost(seconds, price, tier, plan.node_count, startup)
    if said := explain_excess(estimate, limits):
        raise refuse_plan(context, project, f"{said} ({told})", None, limits, price, tier, plan.node_count)


def choices_dots(table: Choices) -> str:
    """Return a small picture of time and cost of all choices."""
    from dtrain_dagster.reports.small_pictures import small_dots

    points = [(row.seconds.expected, row.usd.expected) for row in table.rows]
    mine = table.planned
    marked = None if mine is None else (mine.seconds.expected, mine.usd.expected)
    return small_dots(points, marked, f"{len(points)} choices: time →, cost ↑; orange: this plan")


def choices_metadata(table: Choices, fingerprint: str, storage_uri: str) -> dict[str, Any]:
    """Return ``choice`` (`explain_choice`), ``choices`` (the cheapest ones and the planned one), ``choices_file`` (all
    of them, as CSV), ``choices_picture``, ``choices_rest_on`` and ``choices_not_available``, each only where it is not
    empty."""
    from dtrain_dagster.reports.cost_charts import choices_chart

    metadata: dict[str, Any] = {}
    if table.rows:
        metadata["choice"] = explain_choice(table)
        first = [choice for choice in table.rows[:MOST_ROWS] if not choice.is_planned]
        planned = [choice for choice in table.rows if choice.is_planned]
        best = sorted([*first[: MOST_ROWS - len(planned)], *planned], key=lambda choice: choice.usd.expected)
        shown = [_row(choice) | {"choice": choice.name} for choice in best]
        metadata["choices"] = best_rows(shown, SHOWN)
        rows = [_row(choice) for choice in table.rows]
        metadata["choices_file"] = table_file(f"{storage_uri}/plans/{fingerprint}", "choices.csv", rows)
        metadata["choices_picture"] = charts({"Cost against time of every choice": choices_chart(table)})
    metadata["choices_rest_on"] = dg.MarkdownMetadataValue(_rest_on(table))
    if table.not_available:
        missing = [
            {"sku": item.sku.removeprefix("Standard_"), "tier": tier_in_words(item.tier), "why": item.why}
            for item in table.not_available
        ]
        metadata["choices_not_available"] = best_rows(missing)
    return metadata


def explain_choice(table: Choices) -> str:
    """Return what runs, what fewer nodes of the same kind would save, and the cheapest of all choices, each with its
    dollars and its time. Pure."""
    planned, cheapest = table.planned, table.cheapest
    if planned is None:
        said = ["The planned nodes are not among the choices (see choices_not_available)."]
    else:
        said = [f"This plan runs on {in_words(planned, table.place)}."]
        kind = (planned.sku, planned.tier)
        fewer = [row for row in table.rows if (row.sku, row.tier) == kind and row.node_count < planned.node_count]
        fitting = [row for row in fewer if not misses(row, table.deadline_seconds, table.budget_usd)]
        least = min(fitting, key=lambda row: row.usd.expected, default=planned)
        if least.usd.expected < planned.usd.expected:
            said.append(f"{_compared(least, planned)}: `choose_nodes: true` takes it.")
    if cheapest is None:
        said.append("No choice is sure to keep the limits.")
    elif planned is None:
        said.append(f"The cheapest of all choices is {in_words(cheapest)}.")
    elif cheapest is planned:
        said.append("It is the cheapest of all choices.")
    elif (cheapest.sku, cheapest.tier) != (planned.sku, planned.tier) or cheapest.node_count > planned.node_count:
        said.append(
            f"Of all choices the cheapest is {_compared(cheapest, planned)}, {cheapest.origin} "
            "(DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)."
        )
    return " ".join(said)


def _compared(other: PlanChoice, planned: PlanChoice) -> str:
    """Return ``1 × NC6s_v3 (dedicated): $0.031 instead of $0.083, 36 s instead of 32 s``."""
    return (
        f"{other.name}: {dollars(other.usd.expected)} instead of {dollars(planned.usd.expected)}, "
        f"{format_duration(other.seconds.expected)} instead of {format_duration(planned.seconds.expected)}"
    )


def in_words(choice: PlanChoice, place: str = "") -> str:
    """Return ``2 × NC6s_v3 (dedicated): 3 h 10 min (2 h 50 min to 3 h 40 min), $19.38 ($17.34 to $22.44); scaled from
    …``"""
    seconds, usd = choice.seconds, choice.usd
    name = name_nodes(choice.node_count, choice.sku.removeprefix("Standard_"), choice.tier, place)
    return (
        f"{name}: {format_duration(seconds.expected)} "
        f"({format_duration(seconds.low)} to {format_duration(seconds.high)}), "
        f"{dollars(usd.expected)} ({dollars(usd.low)} to {dollars(usd.high)}); {choice.time_from}"
    )


def _row(choice: PlanChoice) -> dict[str, str | int | float]:

    told = (("this plan", choice.is_planned), ("cheapest", choice.is_cheapest), ("Pareto", choice.is_pareto))
    marks = [word for word, holds in told if holds]
    seconds, usd = choice.seconds, choice.usd
    return {
        "mark": ("➜ " if choice.is_planned else "") + ", ".join(marks),
        "nodes": choice.node_count,
        "sku": choice.sku,
        "gpus": f"{choice.node_count * choice.gpus} × {choice.gpu}",
        "tier": tier_in_words(choice.tier),
        "usd": round(usd.expected, 6),
        "usd_range": f"{dollars(usd.low)} to {dollars(usd.high)}",
        "seconds": round(seconds.expected, 1),
        "time": format_duration(seconds.expected),
        "time_range": f"{format_duration(seconds.low)} to {format_duration(seconds.high)}",
        "usd_per_epoch": round(choice.usd_per_epoch, 5),
        "global_batch": choice.global_batch,
        "efficiency_percent": round(100 * choice.efficiency, 1),
        "why_not": choice.why_not,
        "time_from": choice.time_from,
        "price_from": choice.price_from,
    }


def _rest_on(table: Choices) -> str:
    dollars_are = f"Dollars are time × nodes × price: {table.price_words}."
    lines = [f"Times rest on {table.basis}.", dollars_are, *table.assumptions]
    return "\n".join(f"- {line}" for line in lines)
