"""What would make a training cheaper, each with the dollars that it would save, from this run's own figures. Pure.

What keeps the job as it is (other nodes, another tier) can be done from its checkpoint: it saves on what is left. What
changes the training saves in another run like this one. Whatever would save nothing is not in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.costs.prices import PriceError, SkuPrice, Tier
from dtrain_dagster.monitoring.step_model import StepModel, Strategy, step_model
from dtrain_dagster.monitoring.strategies import communication_strategies, strategies
from dtrain_dagster.monitoring.windows import TimingWindow, worlds
from dtrain_dagster.support.formatting import dollars

LEAST_SHARE = 0.01
"""A saving below this share is none."""
LEFT, ANOTHER = "of what is left, from the checkpoint", "in another run like this one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    name: str
    change: str
    usd: float
    when: str
    note: str = ""

    @property
    def text(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.name}: {self.change}: saves {dollars(self.usd)} {self.when}{note}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hired:
    """What is paid for."""

    sku: str
    tier: Tier
    usd_left: float
    """What the rest of the job is projected to cost."""
    usd_whole: float
    """What the whole of it is."""


def savings(
    hired: Hired,
    found: Sequence[TimingWindow],
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    table: Mapping[str, SkuPrice],
    today: str,
) -> tuple[Saving, ...]:
    """The largest saving first. ``found``, ``events``: how the latest steps went; without any, only prices speak.
    ``today``: as 2026-01-31, for SKUs that are retired by then."""
    groups = worlds(found)
    world = groups[0] if groups and step_model(groups[0]).samples else []
    every = [*_other_skus(hired, world, table, today), *_low_priority(hired, table)]
    if world:
        ranked = communication_strategies(world, training)
        every += _of_strategies("fewer nodes", ranked, hired.usd_left, LEFT)
        every += _smaller_model(hired, step_model(world))
        if not training.get("max_steps"):  # else a larger batch is more work, not the same work in fewer steps
            ranked += strategies(found, events, training)
            every += _of_strategies("larger batch", ranked, hired.usd_whole, ANOTHER)
    best: dict[str, Saving] = {}
    for item in sorted(every, key=lambda item: -item.usd):
        if item.usd >= LEAST_SHARE * (hired.usd_left if item.when == LEFT else hired.usd_whole) > 0:
            best.setdefault(item.name, item)
    return tuple(best.values())


def saving_table(found: Iterable[Saving]) -> str:
    """As a Markdown table."""
    rows = ["| what | change | saves | | mind |", "|---|---|---|---|---|"]
    rows += [f"| **{it.name}** | {it.change} | {dollars(it.usd)} | {it.when} | {it.note} |" for it in found]
    return "\n".join(rows) if len(rows) > 2 else "Nothing that these figures speak for."


_BY_STRATEGY = {
    "fewer nodes": "fewer nodes",
    "larger micro-batch": "larger batch",
    "use the GPU's memory": "larger batch",
}


def _of_strategies(name: str, ranked: Iterable[Strategy], usd: float, when: str) -> list[Saving]:
    return [
        Saving(name=name, change=item.change, usd=usd * (1 - 1 / (1 + item.cost_gain)), when=when, note=item.note)
        for item in ranked
        if _BY_STRATEGY.get(item.name) == name and item.cost_gain > 0
    ]


def _smaller_model(hired: Hired, now: StepModel) -> list[Saving]:
    then = replace(now, computing=now.computing / 2, communication=now.communication / 2)
    change = "half the parameters (model_args)"
    note = "computing and gradients halve at best; look at the validation loss"
    usd = hired.usd_whole * (1 - then.seconds / now.seconds)
    return [Saving(name="smaller model", change=change, usd=usd, when=ANOTHER, note=note)]


def _other_skus(hired: Hired, world: Sequence[TimingWindow], table: Mapping[str, SkuPrice], today: str) -> list[Saving]:
    """The same number of other nodes with as many GPUs and as much memory on each: computing takes as long as their
    speeds say, everything else as long as now."""
    own = _row(hired.sku, table)
    if own is None:
        return []
    now = step_model(world) if world else None
    computing = now.computing / now.seconds if now else 1.0
    found = []
    for row in table.values():
        is_alike = row.gpus == own.gpus and row.gpu_memory_gib >= own.gpu_memory_gib
        if row.sku == own.sku or not is_alike or (row.retired_on and row.retired_on <= today):
            continue
        try:
            price = row.usd_per_hour(hired.tier) / own.usd_per_hour(hired.tier)
        except PriceError:
            continue
        seconds = computing * own.speed / row.speed + 1 - computing
        usd = hired.usd_left * (1 - price * seconds)
        time = f"takes {seconds:.2g} times as long" if seconds >= 1 else f"takes {1 - seconds:.0%} less time"
        change = f"{row.sku} ({row.gpu}) instead of {own.sku} ({own.gpu}) (DTRAIN_GPU_TYPE)"
        note = f"{time}, by a rough guess of its speed"
        found.append(Saving(name="other SKU", change=change, usd=usd, when=LEFT, note=note))
    return found


def _low_priority(hired: Hired, table: Mapping[str, SkuPrice]) -> list[Saving]:
    own = _row(hired.sku, table)
    if own is None or hired.tier != "dedicated":
        return []
    try:
        share = own.usd_per_hour("low_priority") / own.usd_per_hour(hired.tier)
    except PriceError:
        return []
    note = "nodes may be evicted; the others go on, and what comes in their place joins in"
    usd, change = hired.usd_left * (1 - share), "low-priority nodes (DTRAIN_TIER=low_priority)"
    return [Saving(name="spot", change=change, usd=usd, when=LEFT, note=note)]


def _row(sku: str, table: Mapping[str, SkuPrice]) -> SkuPrice | None:
    return next((row for name, row in table.items() if name.casefold() == sku.casefold()), None)
