"""A plan's limits: budget and deadline. A plan that does not fit starts nothing, and a person is told what would
fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.plan_choices import in_words
from dtrain_dagster.clusters.base import ClusterConfig
from dtrain_dagster.costs.estimate import Forecast, estimate_cost, estimate_forecast
from dtrain_dagster.costs.evictions import evictions_of, without_evictions
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import LISTED, SkuPrice, price_of
from dtrain_dagster.planning.limits import Limits, explain_excess, least, remedies
from dtrain_dagster.resources import ProjectResource
from dtrain_dagster.settings.tiers import Tier, tier_of
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.notify import notify_and_log

if TYPE_CHECKING:
    from dtrain_dagster.planning.choices import Choices, PlanChoice


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
        from dtrain_dagster.planning.choices import PlanError, require_choice

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
    from dtrain_dagster.clusters.ranks import explain_idle_gpus

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
    from dtrain_dagster.planning.choices import misses

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
