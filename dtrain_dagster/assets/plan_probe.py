"""The probe of a plan: its cost is told and checked against the limits before it runs, and belongs to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import hardware_mark
from dtrain_dagster.assets.plan_limits import limits_of, refuse_plan
from dtrain_dagster.assets.provisioning import leave_queue, provision, queueing
from dtrain_dagster.clusters.base import GPUClusterManager
from dtrain_dagster.costs.estimate import Forecast
from dtrain_dagster.costs.plan import ProbeCharge
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.jobs.progress import BudgetSpentError
from dtrain_dagster.planning import probe, probe_cost
from dtrain_dagster.planning.build_plan import PlannedJob, explain_dear_probe
from dtrain_dagster.planning.history import History, knows
from dtrain_dagster.planning.probe_cost import ExpectedProbe
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.settings.tiers import tier_of
from dtrain_dagster.support.formatting import dollars, format_duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The pace of a planned training, and what it cost to learn it."""

    planned: PlannedJob
    """The plan on the nodes that are available, which may be others than those asked for."""
    forecast: Forecast
    expected: ExpectedProbe | None = None
    """The expected cost of the probes before they ran; None where none had to be run."""
    charges: tuple[ProbeCharge, ...] = ()
    """The probes that the forecast rests on and that no training has paid for, run now or before."""
    seconds: float = 0.0
    """Wall seconds of the probes that were run now."""


def measure_pace(
    context: dg.AssetExecutionContext,
    config: Any,
    cluster: GPUClusterResource,
    project: ProjectResource,
    manager: GPUClusterManager,
    planned: PlannedJob,
    history: History,
) -> Pace:
    """Return the forecast from a short probe on the available nodes, unless past runs on these very nodes tell enough;
    with ``config.probe`` false, from past runs on other nodes.

    Raise `dagster.Failure` where the probe is switched off and no past run is known, where the probe does not fit the
    limits, and where it comes to them.
    """
    limits = limits_of(config)
    counts = probe.probe_counts(planned.node_count, bool(limits) or config.choose_nodes)
    if not config.probe:
        forecast = history.forecast(planned.sizes, planned.node_count, planned.price.sku)
        if forecast is None:
            raise dg.Failure(
                "no earlier run shows the pace of this training, so its cost cannot be estimated: set probe to true",
                allow_retries=False,
            )
        return Pace(planned=planned, forecast=with_load(forecast))
    mark = planned.pace + hardware_mark(cluster, planned.price.sku)
    due = probe.probes_to_run(planned.job, project.jobs_uri, mark, counts, planned.sizes)
    expected = probe_cost.expect_probes(history.probes, due, planned.sizes, planned.price, planned.tier)
    if expected:
        context.log.info(
            f"a probe is run first, expected to cost {expected}; it counts against budget_usd and stop_at_usd and is "
            "billed with the training"
        )
        if said := explain_dear_probe(expected, limits, config.stop_at_usd):
            raise refuse_plan(context, project, said, None, limits, planned.price, planned.tier, planned.node_count)
    got = provision(context, manager, cluster, project, cluster.sku, planned.node_count)
    price, tier = price_of(got.gpu_type), tier_of(got.tier or cluster.first_tier)
    price.usd_per_hour(tier)  # the probe runs on them: nodes without a price are refused before
    planned = replace(planned, price=price, tier=tier)
    forecast = history.forecast(planned.sizes, planned.node_count, price.sku)
    if forecast is not None and knows(forecast, planned.node_count):
        return Pace(planned=planned, forecast=with_load(forecast))
    mark = planned.pace + hardware_mark(cluster, price.sku)
    shorts = {count: f"probe-{mark}-{count}n" for count in counts}
    due = probe.probes_to_run(planned.job, project.jobs_uri, mark, counts, planned.sizes)
    limit_usd = min((limit for limit in (limits.budget_usd, config.stop_at_usd) if limit), default=0.0)

    def left() -> float | None:
        """Return the node-seconds that the limits leave for the next probe."""
        paid = probe_cost.unpaid_charges(manager, project.jobs_uri, list(shorts.values()))
        return probe_cost.left_node_seconds(limit_usd, paid, price, tier)

    try:
        with queueing(context, project, cluster):
            forecast = probe.forecast(
                manager, planned.job, planned.sizes, counts, mark, cluster.node_env(project),
                history.learned("probe", price.sku), context.log.info, left,
                planned.script.command if planned.script else None,
            )  # fmt: skip
    except BudgetSpentError as error:
        said = f"the probe reached the limit of {dollars(limit_usd)}: {error}"
        raise refuse_plan(context, project, said, None, limits, price, tier, planned.node_count) from error
    if due:
        leave_queue(context, project, got)
    charges = probe_cost.unpaid_charges(manager, project.jobs_uri, forecast.rests_on)
    now = [charge for charge in charges if charge.job_id in {shorts[count] for count in due}]
    return Pace(
        planned=planned,
        forecast=forecast,
        expected=expected,
        charges=charges,
        seconds=probe_cost.charge_seconds(now),
    )


def with_load(forecast: Forecast) -> Forecast:
    """Return the forecast from past runs with the load that is on the machine now."""
    from dtrain_dagster.planning.probe import cores_of_others

    return replace(forecast, other_cores=cores_of_others(forecast.sizes))


def probe_metadata(pace: Pace, manager: GPUClusterManager) -> dict[str, Any]:
    """Return what Dagster shows of a plan's probes: their cost, what was expected, and their durations for later
    plans; nothing where the plan rests on none."""
    if pace.forecast.basis != "probe":
        return {}
    planned = pace.planned
    words = describe_probes(pace)
    counts = [item.node_count for item in pace.forecast.measured]
    probes = [
        probe_cost.PastProbe(
            job_id=job_id,
            sku=planned.price.sku,
            node_count=count,
            processes_per_node=planned.sizes.processes_per_node,
            seconds=probe_cost.charge_seconds([probe_cost.charge_of(manager, job_id)]),
        )
        for count, job_id in zip(counts, pace.forecast.rests_on, strict=True)
    ]
    return {
        "probe": words,
        "probe_usd": round(probe_cost.charge_usd(pace.charges, planned.tier), 6),
        "probe_node_seconds": round(probe_cost.charge_node_seconds(pace.charges), 1),
        "probes": dg.JsonMetadataValue([asdict(item) for item in probes]),
    }


def describe_probes(pace: Pace) -> str:
    """Return in words what the plan's probes cost, what had been expected, and who pays. Pure."""
    charges: Sequence[ProbeCharge] = pace.charges
    if not charges:
        return "measured before, and paid for by another training"
    usd = probe_cost.charge_usd(charges, pace.planned.tier)
    said = (
        f"{dollars(usd)} for {probe_cost.charge_node_seconds(charges):.1f} node-seconds in "
        f"{format_duration(probe_cost.charge_seconds(charges))}, billed with this training"
    )
    return f"{said}; expected were {pace.expected}" if pace.expected else f"{said}; measured before"
