"""The plan of a training, built from what is known of it: its job, the nodes, a forecast, the limits. Pure.

What is known is gathered by `history`, `probe` and `check_job`; `dtrain_dagster.assets.planning` records the plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
from dtrain_dagster.costs.prices import LISTED, SkuPrice, is_of_site, price_of, price_words
from dtrain_dagster.jobs.progress import fingerprint
from dtrain_dagster.jobs.script_job import ScriptJob
from dtrain_dagster.settings.cluster_kinds import ClusterKind
from dtrain_dagster.settings.tiers import Tier
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
    def place(self) -> str:
        """Return where its nodes are, in words, if they are only priced as their SKU; "" where they are of it."""
        if self.kind.buys_nodes or is_of_site(self.price.sku):
            return ""
        return "this machine" if self.kind.is_this_machine else f"the {self.kind.words}"

    def on_nodes(self, job: JobConfig, node_count: int) -> PlannedJob:
        """Return the same training on other nodes; sizes and pace stay, since each rank keeps its batch."""
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


def explain_on_other_nodes(plan: TrainingPlan, price: SkuPrice, tier: Tier) -> str | None:
    """Return in words how a plan exceeds its limits on other nodes than it was made for; None where it fits. Times on
    these are the plan's, scaled by the table of speeds, fixed costs too: a rough guess."""
    seconds = plan.estimate.seconds.scaled(price_of(plan.sku).speed / price.speed)
    limits = Limits(budget_usd=plan.budget_usd, deadline_hours=plan.deadline_hours)
    return explain_excess(estimate_cost(seconds, price, tier, plan.node_count), limits)


def sure_objection(past: Forecast | None, planned: PlannedJob, limits: Limits, choose_nodes: bool) -> str | None:
    """Return a sentence on why the plan cannot fit its limits, before anything is run; None where it may fit. It rests
    on past runs, or on the least that any training takes. Where nodes may be chosen, no number of them would fit."""
    said, price, tier = None, planned.price, planned.tier
    for count in range(1, planned.node_count + 1) if choose_nodes else [planned.node_count]:
        seconds = past.seconds_at(count) if past else LEAST_SECONDS
        said = explain_excess(estimate_cost(seconds, price, tier, count), limits, "low")
        if said is None:
            return None
    return said


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
    fits, too_many = 0, forecast.sizes.epochs
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fewer = replace(forecast, sizes=replace(forecast.sizes, epochs=middle))
        estimate = estimate_forecast(fewer, price, tier, node_count)
        if explain_excess(estimate, limits) is None:
            fits = middle
        else:
            too_many = middle
    return fits
