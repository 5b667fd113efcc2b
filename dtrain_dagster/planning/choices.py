"""The choices of nodes for a training: SKUs × nodes × tiers, each with time and dollars, the cheapest marked. Pure.

Every GPU of a node is a rank, and each rank keeps its batch: more of them make larger and fewer steps of the same
epochs. The origin of a figure stands beside it: measured, scaled from a measurement, or guessed from a table of speeds.

The cheapest is that of all choices which keep the deadline and the budget with the upper ends of their intervals. It is
a comparison: what runs is the planned one, see `PlanChoice.is_planned`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Literal

from dtrain_dagster.costs.estimate import Forecast, estimate_cost
from dtrain_dagster.costs.evictions import tell_evictions, tell_spot_price
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.prices import LISTED, Figure, PriceError, SkuPrice
from dtrain_dagster.settings.tiers import Tier, tier_in_words
from dtrain_dagster.support.formatting import dollars, format_duration

Origin = Literal["measured", "scaled", "guessed"]


class PlanError(ValueError):
    """No choice keeps the deadline and the budget. The message names those that come nearest, and the settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The plan that the forecast is made for."""

    price: SkuPrice
    """Price of its nodes. On a local cluster: the stand-in price, of nodes that no provider has to offer."""
    node_count: int
    tier: Tier
    ranks_per_node: int
    batch_size_per_rank: int
    """Samples of one rank in one optimizer step."""
    measured_nodes: tuple[int, ...] = ()
    """Node counts on which this training has been measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """One way to run the training."""

    sku: str
    gpu: str
    gpus: int
    """GPUs of one node."""
    node_count: int
    tier: Tier
    global_batch: int
    """Samples in one optimizer step."""
    seconds: Interval
    usd: Interval
    usd_per_node_hour: float
    usd_per_epoch: float
    efficiency: float
    """Speed of the whole training, start-up and evaluations included, relative to that of one node of this SKU times
    the nodes."""
    origin: Origin
    """Origin of the time."""
    time_from: str
    """A sentence on where the time comes from and what it leaves out."""
    price_from: str
    is_pareto: bool = False
    """Whether no other choice is both as cheap and as quick, and better in one of them."""
    is_cheapest: bool = False
    """Whether it is the cheapest of those that keep deadline and budget."""
    is_planned: bool = False
    """Whether it is carried out: the one of the settings, unless the plan takes another number of nodes."""
    why_not: str = ""
    """What speaks against it, compared with the cheapest; empty for the cheapest itself."""

    @property
    def name(self) -> str:
        """Return the choice in a few words."""
        return name_nodes(self.node_count, self.sku.removeprefix("Standard_"), self.tier)


@dataclass(frozen=True, kw_only=True, slots=True)
class NotAvailable:
    """A SKU on a tier that cannot be bought, and why."""

    sku: str
    tier: Tier
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The table of choices, sorted by cost."""

    rows: tuple[PlanChoice, ...]
    not_available: tuple[NotAvailable, ...]
    deadline_seconds: float | None
    budget_usd: float | None
    basis: str
    """The basis of the times, in words."""
    assumptions: tuple[str, ...]
    price_words: str
    spent_usd: float = 0.0
    """Dollars that the probe has cost; ``budget_usd`` is what is left of the budget. A new budget has to hold both."""
    spent_seconds: float = 0.0
    place: str = ""
    """Where the planned nodes are, in words, if they are only priced as their SKU; "" where they are of it."""

    @property
    def cheapest(self) -> PlanChoice | None:
        """Return the cheapest choice that fits, None where none does."""
        return next((row for row in self.rows if row.is_cheapest), None)

    @property
    def planned(self) -> PlanChoice | None:
        """Return the choice that will run; None where its nodes cannot be bought, or are not compared."""
        return next((row for row in self.rows if row.is_planned), None)

    @property
    def pareto(self) -> tuple[PlanChoice, ...]:
        """Return the Pareto front, sorted by cost, and so from slow to quick."""
        return tuple(row for row in self.rows if row.is_pareto)


def choices(
    forecast: Forecast,
    baseline: Baseline,
    prices: Iterable[SkuPrice],
    node_counts: Iterable[int],
    tiers: Iterable[Tier],
    *,
    epochs: float,
    today: date,
    deadline_seconds: float | None = None,
    budget_usd: float | None = None,
    is_stand_in: bool = False,
    is_this_machine: bool = True,
    price_words: str = LISTED,
    spent_usd: float = 0.0,
    spent_seconds: float = 0.0,
    too_small: Callable[[SkuPrice, int], str] | None = None,
    place: str = "",
) -> Choices:
    """Return every choice, with the Pareto front and the cheapest that fits marked; none is marked where none fits.

    ``is_stand_in``: the baseline's nodes are only priced as its SKU, which may be retired then. ``is_this_machine``:
    they are parts of this machine. ``too_small``: why so many nodes of a SKU have too little memory, "" if they have
    enough. ``place``: see `Choices`.
    """
    counts, offered, missing = sorted(set(node_counts)), [], []
    for price in prices:
        for tier in tiers:
            why = _why_not_available(price, tier, today, is_stand_in and price.sku == baseline.price.sku)
            small = {count: too_small(price, count) if too_small else "" for count in counts}
            if why := why or (min(small.values(), default="") and small[counts[-1]]):
                missing.append(NotAvailable(sku=price.sku, tier=tier, why=why))
            else:
                fitting_counts = [count for count in counts if not small[count]]
                offered += [_choice(forecast, baseline, price, count, tier, epochs) for count in fitting_counts]
    rows = sorted(offered, key=_by_cost)
    front = _front(rows)
    fitting = [row for row in rows if not misses(row, deadline_seconds, budget_usd)]
    cheapest = fitting[0] if fitting else None
    return Choices(
        rows=tuple(
            replace(
                row,
                is_pareto=row in front,
                is_cheapest=row is cheapest,
                why_not=_why_not(row, cheapest, deadline_seconds, budget_usd),
            )
            for row in rows
        ),
        not_available=tuple(missing),
        deadline_seconds=deadline_seconds,
        budget_usd=budget_usd,
        basis=forecast.basis_words,
        assumptions=_assumptions(rows, baseline, is_stand_in and is_this_machine),
        price_words=price_words,
        spent_usd=spent_usd,
        spent_seconds=spent_seconds,
        place=place,
    )


def require_choice(table: Choices) -> PlanChoice:
    """Return the cheapest choice that fits. Raise `PlanError` where none fits, with the nearest choices and the
    setting to change for each."""
    if table.cheapest:
        return table.cheapest
    if not table.rows:
        known = "; ".join(f"{item.sku} ({tier_in_words(item.tier)}): {item.why}" for item in table.not_available)
        raise PlanError(f"there is nothing to choose from: {known or 'no SKU was named'}. Set DTRAIN_GPU_TYPE")
    deadline, budget = table.deadline_seconds, table.budget_usd
    in_time = [row for row in table.rows if not misses(row, deadline, None)]
    affordable = [row for row in table.rows if not misses(row, None, budget)]
    limits = [] if deadline is None else [f"the deadline of {format_duration(deadline)}"]
    limits += [] if budget is None else [f"the budget of {dollars(budget)}"]
    words = [f"none of {len(table.rows)} choices keeps {' and '.join(limits)}"]
    if in_time and budget is not None:
        near = min(in_time, key=lambda row: row.usd.high)
        within = " within the deadline" if deadline is not None else ""
        setting = f"budget_usd = {_rounded_up(near.usd.high + table.spent_usd)}"
        words.append(f"The cheapest{within} is {_told(near)}: set {setting}")
    if affordable and deadline is not None:
        near = min(affordable, key=lambda row: row.seconds.high)
        within = " within the budget" if budget is not None else ""
        setting = f"deadline_hours = {_rounded_up((near.seconds.high + table.spent_seconds) / 3600)}"
        words.append(f"The fastest{within} is {_told(near)}: set {setting}")
    if not in_time and not affordable:
        fastest = min(table.rows, key=lambda row: row.seconds.high)
        cheapest = min(table.rows, key=lambda row: row.usd.high)
        words.append(
            f"The fastest is {_told(fastest)}, the cheapest {_told(cheapest)}: raise deadline_hours, budget_usd"
        )
    words.append("Or train less (epochs, max_steps), or allow other SKUs, nodes and tiers")
    raise PlanError(". ".join(words))


def misses(choice: PlanChoice, deadline_seconds: float | None, budget_usd: float | None) -> list[str]:
    """Return in words which limits a choice may not keep, judged by the upper ends of its intervals."""
    found = []
    if deadline_seconds is not None and choice.seconds.high > deadline_seconds:
        late = choice.seconds.high - deadline_seconds
        found.append(f"may take {format_duration(choice.seconds.high)}, {format_duration(late)} past the deadline")
    if budget_usd is not None and choice.usd.high > budget_usd:
        over = choice.usd.high - budget_usd
        found.append(f"may cost {dollars(choice.usd.high)}, {dollars(over)} over the budget")
    return found


def name_nodes(node_count: int, sku: str, tier: Tier, place: str = "") -> str:
    """Return ``3 × NC24ads_A100_v4 (Spot)``, or ``this machine, priced as if it were 3 × …``. ``place``: see
    `Choices`."""
    nodes = f"{node_count} × {sku} ({tier_in_words(tier)})"
    return f"{place}, priced as if it were {nodes}" if place else nodes


def _choice(
    forecast: Forecast, baseline: Baseline, price: SkuPrice, node_count: int, tier: Tier, epochs: float
) -> PlanChoice:
    own = price.sku == baseline.price.sku
    ranks_per_node = baseline.ranks_per_node if own else price.gpus
    relative = price.speed / baseline.price.speed

    def alike(count: int) -> int:
        """Return as many of the baseline's nodes as have this number of ranks."""
        return max(1, round(count * ranks_per_node / baseline.ranks_per_node))

    def seconds_at(count: int) -> Interval:
        """Return the time on such nodes, at the speed left for each."""
        return forecast.seconds_at(alike(count), relative * count / alike(count))

    seconds, alone = seconds_at(node_count), seconds_at(1)
    efficiency = alone.expected / (node_count * seconds.expected)
    startup, figure = forecast.startup_at(alike(node_count)), price.figure(tier)
    estimate = estimate_cost(seconds, price, tier, node_count, startup)
    seconds, usd = estimate.seconds, estimate.usd
    origin: Origin = "guessed"
    if own and forecast.basis != "table":
        origin = "measured" if node_count in baseline.measured_nodes else "scaled"
    return PlanChoice(
        sku=price.sku,
        gpu=price.gpu,
        gpus=price.gpus,
        node_count=node_count,
        tier=tier,
        global_batch=node_count * ranks_per_node * baseline.batch_size_per_rank,
        seconds=seconds,
        usd=usd,
        usd_per_node_hour=figure.usd_per_hour,
        usd_per_epoch=usd.expected / epochs if epochs else usd.expected,
        efficiency=efficiency,
        origin=origin,
        time_from=_time_from(origin, forecast, baseline, price),
        is_planned=own and (node_count, tier) == (baseline.node_count, baseline.tier),
        price_from=_price_from(figure, price, tier, tell_evictions(usd.expected, node_count, price, tier, startup)),
    )


def _time_from(origin: Origin, forecast: Forecast, baseline: Baseline, price: SkuPrice) -> str:
    if price.sku == baseline.price.sku:
        return f"{origin}{' to other nodes' if origin == 'scaled' else ''}: {forecast.basis_words}"
    return (
        f"guessed: a node is taken to compute {price.speed / baseline.price.speed:.3g} times as fast as one of "
        f"{baseline.price.sku}; network, start-up and disks are taken to be the same"
    )


def _price_from(figure: Figure, price: SkuPrice, tier: Tier, evictions: str) -> str:
    told = f"{figure.usd_per_hour:g} USD per node-hour in {price.region}, {figure.how} {figure.recorded_on}: "
    return "; ".join(filter(None, [f"{told}{figure.source}", tell_spot_price(price, tier), evictions]))


def _why_not_available(price: SkuPrice, tier: Tier, today: date, is_stand_in: bool) -> str:
    if price.retired_on and date.fromisoformat(price.retired_on) <= today and not is_stand_in:
        return f"retired on {price.retired_on}"
    try:
        price.figure(tier)
    except PriceError as error:
        return str(error)
    return ""


def _by_cost(choice: PlanChoice) -> tuple[float, float]:
    return choice.usd.expected, choice.seconds.expected


def _front(rows: Sequence[PlanChoice]) -> list[PlanChoice]:
    """Return, of choices sorted by cost, then time, each that is quicker than all that are cheaper."""
    front: list[PlanChoice] = []
    for row in rows:
        if not front or row.seconds.expected < front[-1].seconds.expected or _by_cost(row) == _by_cost(front[-1]):
            front.append(row)
    return front


def _why_not(
    row: PlanChoice, cheapest: PlanChoice | None, deadline_seconds: float | None, budget_usd: float | None
) -> str:
    if row is cheapest:
        return ""
    missed = misses(row, deadline_seconds, budget_usd)
    if missed or not cheapest:
        return "; ".join(missed)
    slower = row.seconds.expected - cheapest.seconds.expected
    words = f"{dollars(row.usd.expected - cheapest.usd.expected)} more"
    longer = f"{format_duration(abs(slower))} {'longer' if slower >= 0 else 'shorter'}"
    return f"{words} and {longer} than the cheapest that fits"


def _assumptions(rows: Sequence[PlanChoice], baseline: Baseline, shares_machine: bool) -> tuple[str, ...]:
    found = [
        "A choice fits when the upper ends of its intervals keep the deadline and the budget. The cheapest of those is "
        "marked, and the row of this plan is what runs.",
        f"Each rank keeps its {baseline.batch_size_per_rank} samples of a step: with more GPUs the global batch grows, "
        "and its effect on the model is not judged here (training.lr_scaling, gradient_accumulation_steps).",
    ]
    if shares_machine:
        found.append(
            "The measurements come from local nodes, which share the cores of one machine: on separate machines, "
            "several nodes take less time than is shown here."
        )
    if any(row.sku != baseline.price.sku for row in rows):
        found.append(f"How fast other SKUs compute is {baseline.price.speed_note}.")
    if any(row.tier == "spot" for row in rows):
        found.append(
            "The price of Spot nodes varies, and they may be evicted at any time. `price_from` says how far the price "
            "has moved and what evictions are expected to cost, or that it is not known."
        )
    if any(row.sku != baseline.price.sku and row.gpus > 1 for row in rows):
        found.append(
            "SKUs with several GPUs: one rank for each GPU, and as much communication as between as many nodes; within "
            "a node it is quicker than that."
        )
    return tuple(found)


def _told(choice: PlanChoice) -> str:
    return f"{choice.name}: up to {format_duration(choice.seconds.high)} and {dollars(choice.usd.high)}"


def _rounded_up(value: float) -> str:
    """Return the value rounded up to cents, and below 1 to three digits: what is set is never less than what is
    needed."""
    value *= 1 + 1e-9  # floats: what is set is multiplied again before it is compared
    digits = 2 if value >= 1 else 2 - math.floor(math.log10(max(value, 1e-9)))
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"
