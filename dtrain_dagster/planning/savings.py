"""The options that would make a running training cheaper: the rows of their table that an overrun alert prints. Pure.

A change that keeps the job as it is (other nodes, another tier) can be made from its checkpoint: it saves on what is
left. One that changes the training saves in another run like this one. An option without a saving is not in the list.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.monitoring.step_model import step_model
from dtrain_dagster.monitoring.windows import worlds
from dtrain_dagster.planning.options import BaseRun, Change, best_of, build_options
from dtrain_dagster.planning.projection import Projection, pauses_left
from dtrain_dagster.settings.tiers import Tier, tier_of
from trainer.documents.events import TimingEvent

LEFT, ANOTHER = "of what is left, from the checkpoint", "in another run like this one"
STILL_THERE_SECONDS = 60.0
"""Nodes whose intervals end within so long of the last end count as there: their clocks and looks differ."""
_FROM_CHECKPOINT = ("fewer nodes", "other SKU", "spot")
_ANOTHER_RUN = ("larger batch", "smaller model")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaidNodes:
    """The nodes that are paid for at this time."""

    price: SkuPrice
    tier: Tier
    node_count: int


def paid_nodes(usage: Sequence[NodeUsage], table: Mapping[str, SkuPrice], tier: str) -> PaidNodes:
    """Return the nodes that are present at the latest look. ``tier``: of those that do not say theirs. Raise KeyError
    where the SKU is not in the table, ValueError where no node was ever present."""
    last = max(usage, key=lambda item: item.ended_at)
    there = {item.node_id for item in usage if item.ended_at >= last.ended_at - STILL_THERE_SECONDS}
    by_name = {name.casefold(): row for name, row in table.items()}
    return PaidNodes(price=by_name[last.sku.casefold()], tier=tier_of(last.tier or tier), node_count=len(there))


def rest_and_whole(
    nodes: PaidNodes, projection: Projection, plan: Mapping[str, Any], view: JobView
) -> tuple[BaseRun, BaseRun]:
    """Return the rest of a running job, and the whole of it as projected, both on the present nodes.

    ``plan``: the content of ``plan.json``. Phases that were not measured are taken from there.
    """
    usd_whole = projection.at_end.expected if projection.at_end else projection.so_far
    usd_left = max(0.0, usd_whole - projection.so_far)
    work, phases = plan.get("work") or {}, plan.get("phases") or {}
    steps = int(work.get("steps") or 0)
    planned = {name: float(phases.get(name) or 0.0) for name in ("startup", "evaluation", "checkpoint", "finish")}
    planned["steps"] = float(phases.get("steps") or 0.0)
    left, restart = planned, 0.0
    if view.reports and steps:
        share, step = max(0.0, 1 - view.step / steps), statistics.median(item[1] for item in view.reports)
        evaluation, checkpoint = pauses_left(view, work, phases)
        left = planned | {"startup": 0.0, "steps": share * steps * step}
        left |= {"evaluation": evaluation, "checkpoint": checkpoint}
        training = (plan.get("job") or {}).get("training") or {}
        restart = planned["startup"] + step * float(training.get("checkpoint_frequency") or 0) / 2
    whole = planned if planned["steps"] else left | {"startup": planned["startup"]}
    startup = planned["startup"] or None
    return _base_run(nodes, usd_left, left, startup, restart), _base_run(nodes, usd_whole, whole, startup, 0.0)


def savings(
    rest: BaseRun,
    whole: BaseRun,
    found: Sequence[TimingEvent],
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    table: Mapping[str, SkuPrice],
    today: date,
) -> tuple[Change, ...]:
    """Return the best option of each kind that is worth it, the largest saving first. ``found``, ``events``: how the
    latest steps went; without any, only prices count. ``today``: for SKUs that are retired by then."""
    groups = worlds(found)
    world = groups[0] if groups and step_model(groups[0]).samples else []
    told: list[Change] = []
    for base, kinds, when in ((rest, _FROM_CHECKPOINT, LEFT), (whole, _ANOTHER_RUN, ANOTHER)):
        options = build_options(base, world, events, training, table.values(), today) if base.usd > 0 else ()
        best = [best_of(options, name) for name in kinds]
        told += [replace(item, of=when) for item in best if item and item.is_worth_it(base.usd)]
    return tuple(sorted(told, key=lambda item: -item.saved_usd))


def _base_run(
    nodes: PaidNodes, usd: float, phases: Mapping[str, float], startup: float | None, restart: float
) -> BaseRun:
    """Phases are brought to the length that the dollars pay for: what is projected and what is timed differ a little.
    Where nothing is known of them, all of it is steps."""
    seconds = 3600 * usd / (nodes.node_count * nodes.price.usd_per_hour(nodes.tier))
    total = sum(phases.values()) if phases["steps"] else 0.0
    return BaseRun(
        price=nodes.price,
        tier=nodes.tier,
        node_count=nodes.node_count,
        seconds=seconds,
        usd=usd,
        step_seconds=seconds * phases["steps"] / total if total else seconds,
        evaluation_seconds=seconds * phases["evaluation"] / total if total else 0.0,
        startup_seconds=startup,
        restart_seconds=restart,
    )
