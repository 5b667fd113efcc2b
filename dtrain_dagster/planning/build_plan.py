"""The plan of a training, built from what is known of it: its job, the nodes, a forecast, the limits; and the choices
of nodes that it was taken from. Pure.

What is known is gathered by `evidence` and `check_job`; `dtrain_dagster.assets.planning` records the plan. Choices are
SKUs × nodes × tiers, each with time and dollars. Every GPU of a node is a rank, and each rank keeps its batch. The
cheapest is that of all choices which keep the deadline and the budget with the upper ends of their intervals. It is a
comparison: what runs is the planned one.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from typing import Literal

from dtrain_dagster.clusters.ranks import explain_idle_gpus
from dtrain_dagster.costs.estimate import (
    Estimate,
    Forecast,
    Interval,
    LearnedCorrection,
    Sizes,
    estimate_cost,
    estimate_forecast,
)
from dtrain_dagster.costs.plan import SECTIONS, ProbeCharge, TrainingPlan
from dtrain_dagster.costs.prices import (
    LISTED,
    PriceError,
    SkuPrice,
    alternatives_to,
    is_of_site,
    price_of,
    price_words,
)
from dtrain_dagster.jobs.script_job import ScriptJob
from dtrain_dagster.jobs.start import fingerprint
from dtrain_dagster.settings.cluster_kinds import TIERS, ClusterKind, Tier, tier_in_words
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from trainer.config import SCRIPT, JobConfig

LEAST_SECONDS = Interval(low=5.0, expected=5.0, high=5.0)
"""Least seconds of any training: its processes start, load their libraries, and end."""
End = Literal["low", "expected", "high"]
ENDS: Mapping[End, tuple[str, str]] = {
    "low": ("would", "at least"),
    "expected": ("would", "about"),
    "high": ("may", "up to"),
}
"""An end of an estimate, and the words for a figure there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A training on the nodes that are planned for it, before its speed is known."""

    job: JobConfig
    sizes: Sizes
    fingerprint: str
    """Digest of everything that decides the result, see `dtrain_dagster.jobs.start.fingerprint`."""
    pace: str
    """Digest of everything that decides the duration of a step, see `pace_mark`."""
    price: SkuPrice
    tier: Tier
    node_count: int
    kind: ClusterKind
    """The kind of cluster: nodes that are not bought are priced as a SKU, and nothing is billed."""
    names: GraphNames = STOCK_NAMES
    """Of the graph that trains: its name is a part of both digests, and so of jobs' ids."""
    script: ScriptJob | None = None
    """The script that trains; None where the trainer does, by ``job.json`` alone."""

    @property
    def place(self) -> str:
        """Return where its nodes are, in words, if they are only priced as their SKU; "" where they are of it."""
        if self.kind.buys_nodes or is_of_site(self.price.sku):
            return ""
        return "this machine" if self.kind.is_this_machine else f"the {self.kind.words}"


def size_up_job(
    job: JobConfig,
    samples: Mapping[str, int],
    price: SkuPrice,
    tier: Tier,
    node_count: int,
    processes_per_node: int,
    kind: ClusterKind,
    stated_ranks: int | None = None,
    names: GraphNames = STOCK_NAMES,
    script: ScriptJob | None = None,
) -> PlannedJob:
    """Return the wanted training on its nodes, before its speed is known. ``samples``: of each split. ``stated_ranks``:
    the world size that somebody has given, if it is not that of the nodes."""
    code = script.digest if script else ""
    sizes = sizes_of(job, samples, processes_per_node, os.cpu_count() if kind.is_this_machine else None)
    return PlannedJob(
        job=job,
        sizes=replace(sizes, stated_ranks=stated_ranks),
        fingerprint=names.mark(fingerprint(job, node_count, processes_per_node, code)),
        pace=names.mark(pace_mark(job, processes_per_node, code)) + (f"-w{stated_ranks}" if stated_ranks else ""),
        price=price,
        tier=tier,
        node_count=node_count,
        kind=kind,
        names=names,
        script=script,
    )


def pace_mark(job: JobConfig, processes_per_node: int, script: str = "") -> str:
    """Return eight hex digits over all that decides the duration of a step, an evaluation or a start, on any nodes: not
    the number of steps, the frequency of saves and evaluations, or the numbers of an optimizer."""
    training = replace(
        job.training,
        world_size=1,
        epochs=1,
        max_steps=None,
        eval_frequency=None,
        checkpoint_frequency=1,
        keep_checkpoints=1,
        early_stopping_patience=None,
        log_frequency=1,
        seed=0,
        start_from=None,
        start_sha256=None,
        learning_rate=1.0,
        lr_scaling="none",
        lr_base_batch_size=1,
        warmup_steps=0,
        schedule="constant",
        min_lr_fraction=0.0,
        weight_decay=0.0,
        monitor="loss",
        mode="min",
    )
    return fingerprint(replace(job, training=training), 0, processes_per_node, script)


def sizes_of(job: JobConfig, samples: Mapping[str, int], processes_per_node: int, cores: int | None) -> Sizes:
    """Return how much the job has to do. ``samples``: of each split; ``cores``: see `Sizes`."""
    training = job.training
    return Sizes(
        train_samples=samples["train"],
        valid_samples=samples["valid"],
        test_samples=samples["test"],
        batch_size_per_rank=training.batch_size_per_gpu * training.gradient_accumulation_steps,
        micro_batches_per_rank=training.gradient_accumulation_steps,
        processes_per_node=processes_per_node,
        epochs=training.epochs,
        max_steps=training.max_steps,
        eval_frequency=training.eval_frequency,
        checkpoint_frequency=training.checkpoint_frequency,
        early_stopping_patience=training.early_stopping_patience,
        cores=cores,
    )


def assemble_plan(
    planned: PlannedJob,
    forecast: Forecast,
    estimate: Estimate,
    limits: Limits,
    stop_at_usd: float,
    probes: tuple[ProbeCharge, ...] = (),
) -> TrainingPlan:
    """Return the plan as `trained_checkpoint` carries it out. ``probes``: those that are paid with it."""
    count = planned.node_count
    return TrainingPlan(
        fingerprint=planned.fingerprint,
        job={name: asdict(getattr(planned.job, name)) for name in SECTIONS}
        | ({SCRIPT: planned.script.document()} if planned.script else {}),
        sku=planned.price.sku,
        tier=planned.tier,
        node_count=count,
        processes_per_node=planned.sizes.processes_per_node,
        work=planned.sizes.work(count),
        estimate=estimate,
        basis=f"{forecast.basis_words}{_learned_words(forecast.learned)}",
        price_note=note_price(planned),
        price_words=price_words(planned.price.sku, planned.kind.buys_nodes),
        pace=planned.pace,
        basis_kind=forecast.basis,
        rests_on=forecast.rests_on,
        learned_factor=forecast.learned.factor,
        budget_usd=limits.budget_usd,
        deadline_hours=limits.deadline_hours,
        stop_at_usd=stop_at_usd,
        probes=probes,
        phases=asdict(forecast.parts(count)),
    )


def note_price(planned: PlannedJob) -> str:
    """Return the source of the price in words, and what it leaves open."""
    price, figure = planned.price, planned.price.figure(planned.tier)
    if is_of_site(price.sku):
        return (
            f"{figure.usd_per_hour:.2f} USD per node-hour: {price.sku}, from {figure.source} of {figure.recorded_on}. "
            "The site's price of the partition; for speed, its nodes are taken for that SKU."
        )
    note = f"{figure.usd_per_hour:.2f} USD per node-hour: {price.sku}, {planned.tier}, {price.region}, {figure.how} "
    note += f"{figure.recorded_on}."
    if not planned.kind.buys_nodes:
        retired = f", which Azure retired on {price.retired_on}" if price.retired_on else ""
        note += f" A stand-in: nodes of the {planned.kind.words} are priced as this SKU{retired}; nothing is billed."
    said = price.tell_spot(planned.tier)
    return f"{note} {said}." if said else note


def _learned_words(learned: LearnedCorrection) -> str:
    if not learned.runs:
        return ""
    if learned.factor == 1:
        return f"; not corrected, since the errors of {learned.runs} past estimate(s) do not support a correction"
    return f"; corrected by {learned.factor - 1:+.1%}, as {learned.runs} past estimate(s) suggest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a plan. 0: no such limit."""

    budget_usd: float = 0.0
    deadline_hours: float = 0.0
    spent_usd: float = 0.0
    """Dollars that the plan has cost before its training starts: those of its probe. They count against the budget."""
    spent_seconds: float = 0.0
    """Seconds that this took just now; they count against the deadline."""

    def __bool__(self) -> bool:
        return bool(self.budget_usd or self.deadline_hours)


def explain_excess(estimate: Estimate, limits: Limits, end: End = "expected") -> str | None:
    """Return in words how this end of the estimate exceeds the limits; None where it fits. With ``low`` the plan cannot
    fit, with ``high`` it is not sure to."""
    verb, about = ENDS[end]
    usd, seconds, said = estimate.usd, estimate.seconds, []

    def tell(interval: Interval, write: Callable[[float], str], spent: float) -> str:
        figure = interval.told(write) if end == "expected" else write(getattr(interval, end))
        return f"{about} {figure}" + (f" after {write(spent)} for its probe" if spent else "")

    if 0 < limits.budget_usd < getattr(usd, end) + limits.spent_usd:
        cost = tell(usd, dollars, limits.spent_usd)
        said.append(f"it {verb} cost {cost}, and budget_usd is {dollars(limits.budget_usd)}")
    if 0 < limits.deadline_hours * 3600 < getattr(seconds, end) + limits.spent_seconds:
        time = tell(seconds, format_duration, limits.spent_seconds)
        said.append(f"it {verb} take {time}, and deadline_hours is {limits.deadline_hours:g}")
    return "; ".join(said) or None


def estimate_on(plan: TrainingPlan, price: SkuPrice, tier: Tier) -> Estimate:
    """Return the estimate of a plan on these nodes. On others than it was made for, times are the plan's, scaled by the
    table of speeds, fixed costs too: a rough guess."""
    seconds = plan.estimate.seconds.scaled(price_of(plan.sku).speed / price.speed)
    return estimate_cost(seconds, price, tier, plan.node_count)


def sure_objection(past: Forecast | None, planned: PlannedJob, limits: Limits) -> str | None:
    """Return a sentence on why the plan cannot fit its limits, before anything is run; None where it may fit. It rests
    on past runs, or on the least that any training takes."""
    seconds = past.seconds_at(planned.node_count) if past else LEAST_SECONDS
    return explain_excess(estimate_cost(seconds, planned.price, planned.tier, planned.node_count), limits, "low")


def warnings_of(plan: TrainingPlan, limits: Limits) -> list[str]:
    """Return sentences on the limits that a plan which fits may still exceed."""
    usd, spent = plan.estimate.usd, limits.spent_usd
    said = list(filter(None, [explain_excess(plan.estimate, limits, "high")]))
    if 0 < plan.stop_at_usd < usd.high + spent:
        said.append(
            f"it may reach stop_at_usd = {dollars(plan.stop_at_usd)} before its end: {dollars(usd.expected + spent)} "
            f"are expected{' with its probe' if spent else ''}, up to {dollars(usd.high + spent)}"
        )
    idle = explain_idle_gpus(
        price_of(plan.sku), plan.processes_per_node, plan.node_count, usd.expected, plan.price_words != LISTED
    )
    return [*said, idle] if idle else said


def most_epochs(forecast: Forecast, limits: Limits, price: SkuPrice, tier: Tier, node_count: int) -> int:
    """Return the most epochs that fit, fewer than planned; 0 where none do."""

    def are_too_many(epochs: int) -> bool:
        fewer = replace(forecast, sizes=replace(forecast.sizes, epochs=epochs))
        return explain_excess(estimate_forecast(fewer, price, tier, node_count), limits) is not None

    return bisect_left(range(1, forecast.sizes.epochs), True, key=are_too_many)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """One way to run the training."""

    price: SkuPrice
    tier: Tier
    node_count: int
    global_batch: int
    estimate: Estimate
    time_from: str
    """A sentence on where the time comes from and what it leaves out."""

    @property
    def key(self) -> tuple[str, Tier, int]:
        return self.price.sku, self.tier, self.node_count

    @property
    def seconds(self) -> Interval:
        return self.estimate.seconds

    @property
    def usd(self) -> Interval:
        return self.estimate.usd

    @property
    def name(self) -> str:
        return name_nodes(self.node_count, self.price.sku, self.tier)

    @property
    def price_from(self) -> str:
        """Return the price per hour with its source, and what it leaves open."""
        figure = self.price.figure(self.tier)
        told = f"{figure.usd_per_hour:g} USD per node-hour in {self.price.region}, {figure.how} {figure.recorded_on}: "
        return "; ".join(filter(None, [f"{told}{figure.source}", self.price.tell_spot(self.tier)]))

    @property
    def text(self) -> str:
        """Return the nodes, the time and the dollars with their ranges, and where the time comes from."""
        return f"{self.name}: {self.seconds.told(format_duration)}, {self.usd.told(dollars)}; {self.time_from}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The table of choices, sorted by cost."""

    rows: tuple[PlanChoice, ...]
    limits: Limits
    planned: PlanChoice | None
    """The choice that will run: that of the settings. None where its nodes cannot be bought, or are not compared."""

    @property
    def cheapest(self) -> PlanChoice | None:
        """The cheapest of those that keep deadline and budget."""
        return next((row for row in self.rows if is_sure(row, self.limits)), None)


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
    """Return every choice that is on offer, has a price and is large enough.

    ``too_small``: why so many nodes of a SKU have too little memory, "" if they have enough. None: every SKU and tier
    of the planned one's table, of a site's price no other; one node to twice as many as planned, where nobody has
    stated the world size."""
    count, price = planned.node_count, planned.price
    if node_counts is None:
        node_counts = {count} if planned.sizes.stated_ranks else {*range(1, count + 1), 2 * count}
    if tiers is None:
        tiers = (planned.tier,) if is_of_site(price.sku) else TIERS
    counts, tiers, today = sorted(set(node_counts)), tuple(tiers), today or datetime.now(UTC).date()
    rows: list[PlanChoice] = []
    for other in alternatives_to(price.sku).values() if prices is None else prices:
        is_stand_in = other.sku == price.sku and not planned.kind.buys_nodes
        small = {each: too_small(other, each) for each in counts}
        for tier in tiers:
            if not explain_unavailable(other, tier, None if is_stand_in else today):
                rows += [_choice(planned, forecast, other, each, tier) for each in counts if not small[each]]
    rows.sort(key=lambda row: (row.usd.expected, row.seconds.expected))
    mine = next((row for row in rows if row.key == (price.sku, planned.tier, count)), None)
    return Choices(rows=tuple(rows), limits=limits, planned=mine)


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
    where no choice is sure to fit, the cheapest and the fastest one."""
    others = {row.node_count: row for row in table.rows if row.key[:2] == (planned.price.sku, planned.tier)}
    others.pop(planned.node_count, None)
    found = [
        f"{count} node(s) (DTRAIN_NODES={count}): about {dollars(row.usd.expected)} and "
        f"{format_duration(row.seconds.expected)}"
        for count, row in sorted(others.items())
        if explain_excess(row.estimate, table.limits) is None
    ]
    if epochs := most_epochs(forecast, table.limits, planned.price, planned.tier, planned.node_count):
        found.append(f"epochs={epochs} instead of {planned.sizes.epochs} on {planned.node_count} node(s)")
    if table.cheapest:
        found.append(f"{table.cheapest.text} (DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)")
    elif table.rows:
        cheapest, fastest = table.rows[0], min(table.rows, key=lambda row: row.seconds.expected)
        nearest = [cheapest] if fastest is cheapest else [cheapest, fastest]
        told = " and ".join(
            f"{row.name}, up to {dollars(row.usd.high)} and {format_duration(row.seconds.high)}" for row in nearest
        )
        found.append(f"nearest come {told} (DTRAIN_GPU_TYPE, DTRAIN_TIER, DTRAIN_NODES)")
    return found


def is_sure(choice: PlanChoice, limits: Limits) -> bool:
    """Return whether a choice keeps the limits with the upper ends of its intervals."""
    return explain_excess(choice.estimate, limits, "high") is None


def name_nodes(node_count: int, sku: str, tier: Tier, place: str = "") -> str:
    """Return ``3 × NC24ads_A100_v4 (Spot)``, or ``this machine, priced as if it were 3 × …``."""
    nodes = f"{node_count} × {sku.removeprefix('Standard_')} ({tier_in_words(tier)})"
    return f"{place}, priced as if it were {nodes}" if place else nodes


def _choice(planned: PlannedJob, forecast: Forecast, price: SkuPrice, node_count: int, tier: Tier) -> PlanChoice:
    own, own_ranks = price.sku == planned.price.sku, planned.sizes.processes_per_node
    ranks = node_count * (own_ranks if own else price.gpus)
    alike = max(1, round(ranks / own_ranks))  # as many of the planned nodes have as many ranks
    relative = price.speed / planned.price.speed
    time_from = (
        f"guessed: a node is taken to compute {relative:.3g} times as fast as one of {planned.price.sku}; "
        "network, start-up and disks are taken to be the same"
    )
    if own:
        is_measured = any(item.node_count == node_count for item in forecast.measured)
        time_from = f"{'measured' if is_measured else 'scaled to other nodes'}: {forecast.basis_words}"
    return PlanChoice(
        price=price,
        tier=tier,
        node_count=node_count,
        global_batch=ranks * planned.sizes.batch_size_per_rank,
        estimate=estimate_cost(forecast.seconds_at(alike, relative * node_count / alike), price, tier, node_count),
        time_from=time_from,
    )
