"""The plan of a training, built from what is known of it: its job, the nodes, a forecast, the limits.

Reading the launchpad, notifying people and recording belong in `dtrain_dagster.assets.planning`; making a forecast, in
`history` and `probe`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dtrain_dagster.costs.estimate import Estimate, Forecast, LearnedCorrection, Sizes, estimate_cost, estimate_forecast
from dtrain_dagster.costs.evictions import tell_evictions, tell_spot_price
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.plan import SECTIONS, ProbeCharge, TrainingPlan
from dtrain_dagster.costs.prices import SkuPrice, alternatives_to, is_of_site, price_words
from dtrain_dagster.jobs.progress import fingerprint
from dtrain_dagster.jobs.script_job import ScriptJob
from dtrain_dagster.planning.choices import Baseline, Choices, PlanChoice, choices
from dtrain_dagster.planning.history import pace_mark
from dtrain_dagster.settings.cluster_kinds import ClusterKind
from dtrain_dagster.settings.tiers import TIERS, Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from trainer.config import SCRIPT, JobConfig

if TYPE_CHECKING:
    from dtrain_dagster.planning.probe_cost import ExpectedProbe


LEAST_SECONDS = 5.0
"""Least seconds of any training: its processes start, load their libraries, and end."""

LEAST_LOAD_SPREAD = 0.02
"""Spread from which the load of the machine is worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A training on the nodes that are planned for it, before its speed is known."""

    job: JobConfig
    sizes: Sizes
    fingerprint: str
    """Digest of everything that decides the result, see `dtrain_dagster.jobs.progress.fingerprint`."""
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
    def price_words(self) -> str:
        """Return what the dollars of its figures are, in words."""
        return price_words(self.price.sku, self.kind.buys_nodes)

    @property
    def place(self) -> str:
        """Return where its nodes are, in words, if they are only priced as their SKU; "" where they are of it."""
        if self.kind.buys_nodes or is_of_site(self.price.sku):
            return ""
        return "this machine" if self.kind.is_this_machine else f"the {self.kind.words}"

    def on_nodes(self, job: JobConfig, node_count: int) -> PlannedJob:
        """Return the same training on another number of nodes. Each rank keeps its batch, so that sizes and pace
        stay."""
        digest = fingerprint(job, node_count, self.sizes.processes_per_node, self.script.digest if self.script else "")
        return replace(self, job=job, fingerprint=self.names.mark(digest), node_count=node_count)


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


def compare_choices(
    planned: PlannedJob, forecast: Forecast, limits: Limits, too_small: Callable[[SkuPrice, int], str] | None = None
) -> Choices:
    """Return the alternatives: every SKU, every tier, one node to twice as many; the planned nodes alone where somebody
    has stated the world size, and no other SKU or tier at a site's price. ``too_small``: see `choices`."""
    count = planned.node_count
    baseline = Baseline(
        price=planned.price,
        node_count=count,
        tier=planned.tier,
        ranks_per_node=forecast.sizes.processes_per_node,
        batch_size_per_rank=forecast.sizes.batch_size_per_rank,
        measured_nodes=tuple(item.node_count for item in forecast.measured),
    )
    return choices(
        forecast,
        baseline,
        alternatives_to(planned.price.sku).values(),
        {count} if planned.sizes.stated_ranks else {*range(1, count + 1), 2 * count},
        (planned.tier,) if is_of_site(planned.price.sku) else TIERS,
        epochs=planned.sizes.epochs,
        today=datetime.now(UTC).date(),
        deadline_seconds=left_of(3600 * limits.deadline_hours, limits.spent_seconds),
        budget_usd=left_of(limits.budget_usd, limits.spent_usd),
        spent_usd=limits.spent_usd,
        spent_seconds=limits.spent_seconds,
        is_stand_in=not planned.kind.buys_nodes,
        is_this_machine=planned.kind.is_this_machine,
        price_words=planned.price_words,
        too_small=too_small,
        place=planned.place,
    )


def left_of(limit: float, spent: float) -> float | None:
    """Return what is left of a limit, never nothing; None where there is no limit. Pure."""
    return max(limit - spent, 1e-9) if limit else None


def mark_planned(table: Choices, planned: PlanChoice) -> Choices:
    """Return the same choices, with this one marked as the plan."""
    return replace(table, rows=tuple(replace(row, is_planned=row is planned) for row in table.rows))


def assemble_plan(
    planned: PlannedJob, forecast: Forecast, estimate: Estimate, limits: Limits, stop_at_usd: float,
    probes: tuple[ProbeCharge, ...] = (),
) -> TrainingPlan:  # fmt: skip
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
        basis=f"{forecast.basis_words}{_learned_words(forecast.learned)}{tell_load(forecast, count)}",
        price_note=note_price(planned, forecast, estimate),
        price_words=planned.price_words,
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


def note_price(planned: PlannedJob, forecast: Forecast, estimate: Estimate) -> str:
    """Return the source of the price in words, that nothing is billed where it is a stand-in, and what may be added to
    a price of Spot."""
    price, figure = planned.price, planned.price.figure(planned.tier)
    if is_of_site(price.sku):
        return (
            f"{figure.usd_per_hour:.2f} USD per node-hour: {price.sku}, from {figure.source} of {figure.recorded_on}. "
            "The site's price of the partition; for speed and energy, its nodes are taken for that SKU."
        )
    note = f"{figure.usd_per_hour:.2f} USD per node-hour: {price.sku}, {planned.tier}, {price.region}, {figure.how} "
    note += f"{figure.recorded_on}."
    if not planned.kind.buys_nodes:
        retired = f", which Azure retired on {price.retired_on}" if price.retired_on else ""
        note += f" A stand-in: nodes of the {planned.kind.words} are priced as this SKU{retired}; nothing is billed."
    startup = forecast.startup_at(planned.node_count)
    said = (
        tell_spot_price(price, planned.tier),
        tell_evictions(estimate.usd.expected, planned.node_count, price, planned.tier, startup),
    )
    return " ".join([note, *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in said if sentence)])


def _learned_words(learned: LearnedCorrection) -> str:
    if not learned.runs:
        return ""
    if learned.factor == 1:
        return f"; not corrected, since the errors of {learned.runs} past estimate(s) do not support a correction"
    return f"; corrected by {learned.factor - 1:+.1%}, as {learned.runs} past estimate(s) suggest"


def tell_load(forecast: Forecast, node_count: int) -> str:
    """Return that other work on the machine widens the interval; "" where it does not."""
    if forecast.sizes.load_spread(node_count, forecast.other_cores) < LEAST_LOAD_SPREAD:
        return ""
    used = f"{forecast.other_cores:.1f} of {forecast.sizes.cores} cores"
    return f"; the interval is wider, since other work took {used} when this was estimated"


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


def explain_excess(estimate: Estimate | PlanChoice, limits: Limits, at_least: bool = False) -> str | None:
    """Return in words how the estimate exceeds the limits; None where it fits. ``at_least``: only what is beyond doubt
    counts, the lower end of the interval."""
    usd, seconds = estimate.usd, estimate.seconds
    said = []
    if limits.budget_usd and (usd.low if at_least else usd.expected) + limits.spent_usd > limits.budget_usd:
        after = f" after {dollars(limits.spent_usd)} for its probe" if limits.spent_usd else ""
        said.append(
            f"it would cost {_told(usd, dollars, at_least)}{after}, and budget_usd is {dollars(limits.budget_usd)}"
        )
    took = (seconds.low if at_least else seconds.expected) + limits.spent_seconds
    if limits.deadline_hours and took > limits.deadline_hours * 3600:
        after = f" after {format_duration(limits.spent_seconds)} for its probe" if limits.spent_seconds else ""
        said.append(
            f"it would take {_told(seconds, format_duration, at_least)}{after}, "
            f"and deadline_hours is {limits.deadline_hours:g}"
        )
    return "; ".join(said) or None


def explain_dear_probe(probe: ExpectedProbe, limits: Limits, stop_at_usd: float) -> str | None:
    """Return in words why not even the plan's probe fits its limits; None where it does, as expected. A probe that was
    run before is free."""
    said = [
        f"{name} is {dollars(limit)}"
        for name, limit in (("budget_usd", limits.budget_usd), ("stop_at_usd", stop_at_usd))
        if 0 < limit < probe.usd.expected
    ]
    if 0 < limits.deadline_hours * 3600 < probe.seconds.expected:
        said.append(f"deadline_hours is {limits.deadline_hours:g}")
    return f"the probe alone would take {probe}, and {' and '.join(said)}" if said else None


def least(price: SkuPrice, tier: Tier, node_count: int) -> Estimate:
    """Return the least time and cost of any training on these nodes, before anything is known of it."""
    seconds = Interval(low=LEAST_SECONDS, expected=LEAST_SECONDS, high=LEAST_SECONDS)
    return estimate_cost(seconds, price, tier, node_count)


def remedies(
    forecast: Forecast, limits: Limits, price: SkuPrice, tier: Tier, node_counts: Iterable[int], planned: int
) -> list[str]:
    """Return what would fit, in words: another number of nodes, fewer epochs."""
    found = []
    for count in node_counts:
        estimate = estimate_forecast(forecast, price, tier, count)
        if count != planned and explain_excess(estimate, limits) is None:
            cost = f"{dollars(estimate.usd.expected)} and {format_duration(estimate.seconds.expected)}"
            found.append(f"{count} node(s) (DTRAIN_NODES={count}): about {cost}")
    if epochs := most_epochs(forecast, limits, price, tier, planned):
        found.append(f"epochs={epochs} instead of {forecast.sizes.epochs} on {planned} node(s)")
    return found


def most_epochs(forecast: Forecast, limits: Limits, price: SkuPrice, tier: Tier, node_count: int) -> int:
    """Return the most epochs that fit, fewer than planned; 0 where none do."""
    fits, too_many = 0, forecast.sizes.epochs
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fewer = replace(forecast, sizes=replace(forecast.sizes, epochs=middle), totals=())
        estimate = estimate_forecast(fewer, price, tier, node_count)
        if explain_excess(estimate, limits) is None:
            fits = middle
        else:
            too_many = middle
    return fits


def _told(interval: Interval, write: Callable[[float], str], at_least: bool) -> str:
    if at_least:
        return f"at least {write(interval.low)}"
    return f"about {write(interval.expected)} ({write(interval.low)} to {write(interval.high)})"
