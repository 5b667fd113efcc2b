"""The choices of nodes for a training: SKUs × nodes × tiers, each with time and dollars, the cheapest marked. Pure.

Every GPU of a node is a rank, and each rank keeps its batch. The cheapest is that of all choices which keep the
deadline and the budget with the upper ends of their intervals. It is a comparison: what runs is the planned one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Literal, NamedTuple

from dtrain_dagster.costs.estimate import Estimate, Forecast, Interval, estimate_cost
from dtrain_dagster.costs.prices import PriceError, SkuPrice, alternatives_to, is_of_site, price_words
from dtrain_dagster.planning.build_plan import Limits, PlannedJob, explain_excess, most_epochs
from dtrain_dagster.settings.tiers import TIERS, Tier, tier_in_words
from dtrain_dagster.support.formatting import dollars, format_duration

Origin = Literal["measured", "scaled", "guessed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """One way to run the training."""

    sku: str
    gpu: str
    gpus: int
    node_count: int
    tier: Tier
    global_batch: int
    estimate: Estimate
    origin: Origin
    time_from: str
    """A sentence on where the time comes from and what it leaves out."""
    price_from: str
    is_cheapest: bool = False
    """Whether it is the cheapest of those that keep deadline and budget."""
    is_planned: bool = False
    """Whether it is carried out: the one of the settings, unless the plan takes another number of nodes."""

    @property
    def seconds(self) -> Interval:
        return self.estimate.seconds

    @property
    def usd(self) -> Interval:
        return self.estimate.usd

    @property
    def name(self) -> str:
        return name_nodes(self.node_count, self.sku, self.tier)


class NotAvailable(NamedTuple):
    """A SKU on a tier that cannot be bought, and why."""

    sku: str
    tier: Tier
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The table of choices, sorted by cost."""

    rows: tuple[PlanChoice, ...]
    not_available: tuple[NotAvailable, ...]
    limits: Limits
    notes: tuple[str, ...]
    place: str = ""
    """See `PlannedJob.place`."""

    @property
    def cheapest(self) -> PlanChoice | None:
        return next((row for row in self.rows if row.is_cheapest), None)

    @property
    def planned(self) -> PlanChoice | None:
        """Return the choice that will run; None where its nodes cannot be bought, or are not compared."""
        return next((row for row in self.rows if row.is_planned), None)

    def with_planned(self, planned: PlanChoice) -> Choices:
        return replace(self, rows=tuple(replace(row, is_planned=row is planned) for row in self.rows))

    def cheapest_here(self, sku: str, tier: Tier, most: int) -> PlanChoice | None:
        """Return the cheapest choice that a cluster of these nodes can carry out and that surely fits; else the
        cheapest that fits as expected; else the cheapest of all, which is refused. None where it can carry out none."""
        here = [row for row in self.rows if (row.sku, row.tier) == (sku, tier) and row.node_count <= most]
        surely = [row for row in here if is_sure(row, self.limits)]
        likely = [row for row in here if explain_excess(row.estimate, self.limits) is None]
        return next(iter(surely or likely or here), None)


def compare_choices(
    planned: PlannedJob,
    forecast: Forecast,
    limits: Limits,
    too_small: Callable[[SkuPrice, int], str] = lambda price, node_count: "",
    *,
    prices: Iterable[SkuPrice] | None = None,
    node_counts: Iterable[int] | None = None,
    tiers: Iterable[Tier] | None = None,
    today: date | None = None,
) -> Choices:
    """Return every choice, with the cheapest that fits marked; none is marked where none fits.

    ``too_small``: why so many nodes of a SKU have too little memory, "" if they have enough. None: every SKU and tier
    of the planned one's table, of a site's price no other; one node to twice as many as planned, where nobody has
    stated the world size."""
    count, price = planned.node_count, planned.price
    if node_counts is None:
        node_counts = {count} if planned.sizes.stated_ranks else {*range(1, count + 1), 2 * count}
    if tiers is None:
        tiers = (planned.tier,) if is_of_site(price.sku) else TIERS
    counts, tiers, today = sorted(set(node_counts)), tuple(tiers), today or datetime.now(UTC).date()
    offered: list[PlanChoice] = []
    missing: list[NotAvailable] = []
    for other in alternatives_to(price.sku).values() if prices is None else prices:
        is_stand_in = other.sku == price.sku and not planned.kind.buys_nodes
        small = {each: too_small(other, each) for each in counts}
        for tier in tiers:
            why = explain_unavailable(other, tier, None if is_stand_in else today)
            if why := why or (min(small.values(), default="") and small[counts[-1]]):
                missing.append(NotAvailable(other.sku, tier, why))
            else:
                offered += [_choice(planned, forecast, other, each, tier) for each in counts if not small[each]]
    rows = sorted(offered, key=lambda row: (row.usd.expected, row.seconds.expected))
    cheapest = next((row for row in rows if is_sure(row, limits)), None)
    return Choices(
        rows=tuple(replace(row, is_cheapest=row is cheapest) for row in rows),
        not_available=tuple(missing),
        limits=limits,
        notes=_notes(rows, planned, forecast.basis_words),
        place=planned.place,
    )


def explain_unavailable(price: SkuPrice, tier: Tier, today: date | None) -> str:
    """Return why nodes cannot be had, "" if they can. ``today``: None for nodes that are only priced as this SKU."""
    if today and price.retired_on and date.fromisoformat(price.retired_on) <= today:
        return f"retired on {price.retired_on}"
    try:
        price.figure(tier)
    except PriceError as error:
        return str(error)
    return ""


def remedies(table: Choices, planned: PlannedJob, forecast: Forecast) -> list[str]:
    """Return what would fit, in words: another number of the planned nodes, fewer epochs, the cheapest of all choices;
    where no choice is sure to fit, those that come nearest."""
    kind, found = (planned.price.sku, planned.tier), []
    for row in sorted(table.rows, key=lambda row: row.node_count):
        is_other = (row.sku, row.tier) == kind and row.node_count != planned.node_count
        if is_other and explain_excess(row.estimate, table.limits) is None:
            cost = f"{dollars(row.usd.expected)} and {format_duration(row.seconds.expected)}"
            found.append(f"{row.node_count} node(s) (DTRAIN_NODES={row.node_count}): about {cost}")
    if epochs := most_epochs(forecast, table.limits, planned.price, planned.tier, planned.node_count):
        found.append(f"epochs={epochs} instead of {planned.sizes.epochs} on {planned.node_count} node(s)")
    if table.cheapest:
        found.append(f"{in_words(table.cheapest)} (DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)")
    elif table.rows:
        found.append(_nearest(table))
    return found


def _nearest(table: Choices) -> str:
    """Return for each limit that is set the choice that needs least of it while it keeps the other one, or of all
    where none keeps that; each with limits that are enough for it."""
    limits, near = table.limits, []

    def without(**limit: float) -> Sequence[PlanChoice]:
        return [row for row in table.rows if is_sure(row, replace(limits, **limit))] or table.rows

    if limits.budget_usd:
        near.append(min(without(budget_usd=0.0), key=lambda row: row.usd.high))
    if limits.deadline_hours:
        near.append(min(without(deadline_hours=0.0), key=lambda row: row.seconds.high))
    told = "; ".join(dict.fromkeys(_told(row, limits) for row in near))
    return f"nearest come {told} (with DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)"


def is_sure(choice: PlanChoice, limits: Limits) -> bool:
    """Return whether a choice keeps the limits with the upper ends of its intervals."""
    return explain_excess(choice.estimate, limits, "high") is None


def name_nodes(node_count: int, sku: str, tier: Tier, place: str = "") -> str:
    """Return ``3 × NC24ads_A100_v4 (Spot)``, or ``this machine, priced as if it were 3 × …``."""
    nodes = f"{node_count} × {sku.removeprefix('Standard_')} ({tier_in_words(tier)})"
    return f"{place}, priced as if it were {nodes}" if place else nodes


def in_words(choice: PlanChoice, place: str = "") -> str:
    """Return the nodes, the time and the dollars with their ranges, and where the time comes from."""
    name = name_nodes(choice.node_count, choice.sku, choice.tier, place)
    return f"{name}: {choice.seconds.told(format_duration)}, {choice.usd.told(dollars)}; {choice.time_from}"


def explain_choice(table: Choices) -> str:
    """Return what runs, what fewer such nodes would save, and the cheapest of all choices. Pure."""
    planned, cheapest = table.planned, table.cheapest
    if planned is None:
        said = ["The planned nodes are not among the choices (see choices_not_available)."]
    else:
        said = [f"This plan runs on {in_words(planned, table.place)}."]
        least = table.cheapest_here(planned.sku, planned.tier, planned.node_count)
        if least and least.usd.expected < planned.usd.expected and is_sure(least, table.limits):
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


def _choice(planned: PlannedJob, forecast: Forecast, price: SkuPrice, node_count: int, tier: Tier) -> PlanChoice:
    own, own_ranks = price.sku == planned.price.sku, planned.sizes.processes_per_node
    ranks = node_count * (own_ranks if own else price.gpus)
    alike = max(1, round(ranks / own_ranks))  # as many of the planned nodes have as many ranks
    relative = price.speed / planned.price.speed
    estimate = estimate_cost(forecast.seconds_at(alike, relative * node_count / alike), price, tier, node_count)
    figure = price.figure(tier)
    told = f"{figure.usd_per_hour:g} USD per node-hour in {price.region}, {figure.how} {figure.recorded_on}: "
    origin: Origin = "guessed"
    if own:
        origin = "measured" if any(item.node_count == node_count for item in forecast.measured) else "scaled"
    return PlanChoice(
        sku=price.sku,
        gpu=price.gpu,
        gpus=price.gpus,
        node_count=node_count,
        tier=tier,
        global_batch=ranks * planned.sizes.batch_size_per_rank,
        estimate=estimate,
        origin=origin,
        time_from=f"{origin}{' to other nodes' if origin == 'scaled' else ''}: {forecast.basis_words}"
        if own
        else f"guessed: a node is taken to compute {relative:.3g} times as fast as one of {planned.price.sku}; "
        "network, start-up and disks are taken to be the same",
        is_planned=own and (node_count, tier) == (planned.node_count, planned.tier),
        price_from="; ".join(filter(None, [f"{told}{figure.source}", price.tell_spot(tier)])),
    )


def _notes(rows: Sequence[PlanChoice], planned: PlannedJob, basis: str) -> tuple[str, ...]:
    found = [
        f"Times rest on {basis}.",
        f"Dollars are time × nodes × price: {price_words(planned.price.sku, planned.kind.buys_nodes)}.",
        "A choice fits when the upper ends of its intervals keep the deadline and the budget. The cheapest of those is "
        "marked, and the row of this plan is what runs.",
        f"Each rank keeps its {planned.sizes.batch_size_per_rank} samples of a step: with more GPUs the global batch "
        "grows, and its effect on the model is not judged here (training.lr_scaling, gradient_accumulation_steps).",
    ]
    if planned.kind.is_this_machine:
        found.append("On separate machines several nodes take less time: here they share the cores of one machine.")
    if any(row.sku != planned.price.sku for row in rows):
        found.append(f"How fast other SKUs compute is {planned.price.speed_note}.")
    if any(row.tier == "spot" for row in rows):
        found.append("The price of Spot nodes varies. What evictions cost is not in its figures.")
    if any(row.sku != planned.price.sku and row.gpus > 1 for row in rows):
        found.append(
            "SKUs with several GPUs have one rank for each, and are taken to communicate as slowly as separate nodes."
        )
    return tuple(found)


def _told(choice: PlanChoice, limits: Limits) -> str:
    """Return a choice and what the limits that it exceeds have to be for it."""
    usd, hours = choice.usd.high + limits.spent_usd, (choice.seconds.high + limits.spent_seconds) / 3600
    needs = [f"budget_usd = {_rounded_up(usd)}"] if 0 < limits.budget_usd < usd else []
    needs += [f"deadline_hours = {_rounded_up(hours)}"] if 0 < limits.deadline_hours < hours else []
    most = f"up to {format_duration(choice.seconds.high)} and {dollars(choice.usd.high)}"
    return f"{choice.name}, {most}: {', '.join(needs)}"


def _rounded_up(value: float) -> str:
    """Return the value rounded up to cents, and below 1 to three digits."""
    value *= 1 + 1e-9  # floats: what is set is multiplied again before it is compared
    digits = 2 if value >= 1 else 2 - math.floor(math.log10(max(value, 1e-9)))
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"
