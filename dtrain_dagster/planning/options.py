"""The table of options: what a training would take and cost if one thing about it were changed, each priced once. Pure.

The alert of a cost overrun and the advice after a run print rows of it, and the plan's table and its refusal have the
same dollars for the same training. Which rows are printed where is decided there; how a step changes belongs to
`monitoring.step_model`.

Every row is priced by `dtrain_dagster.costs.estimate.estimate_cost`: nodes x seconds x price of a node-hour, start-up
included. What evictions of Spot nodes cost is not known, and the row of Spot says so.

To change the nodes of a job that runs, it starts again from its last checkpoint: `BaseRun.restart_seconds`. That is 0
for a run that has not begun, and for advice on another run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from dtrain_dagster.costs.estimate import estimate_cost
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.monitoring.gpu_memory import MEMORY_LOW, MEMORY_TARGET, GPUMemory, gpu_memory, sharing_of
from dtrain_dagster.monitoring.step_model import WORTH_IT, StepModel, step_model
from dtrain_dagster.monitoring.strategies import communication_strategies, on_fewer_nodes
from dtrain_dagster.planning.choices import explain_unavailable
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.events import OutOfMemoryEvent, TimingEvent, read_events
from trainer.performance.memory import format_bytes

FITS = 0.9
"""Share of another GPU's memory that a training may need to fit there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a training, and its time and dollars with it."""

    name: str
    setting: str
    """The action, with the setting."""
    node_count: int
    sku: str
    tier: Tier
    seconds: Interval
    """Paid wall-clock seconds."""
    usd: Interval
    saved_usd: float
    """Dollars saved against the run as it is; negative where the change is dearer."""
    lost_seconds: float
    """Seconds lost; negative where it is quicker."""
    why: str
    """What the figures rest on."""
    of: str = ""
    """What it saves on, in words."""

    def is_worth_it(self, usd: float) -> bool:
        """Return whether the change saves at least `WORTH_IT` of ``usd``."""
        return self.saved_usd > 0 and self.saved_usd >= WORTH_IT * usd

    @property
    def text(self) -> str:
        """Return the change as a line of a message."""
        saved = f"saves {dollars(self.saved_usd)} {self.of}".rstrip()
        return f"{self.name}: {self.setting}: {saved}" + (f" ({self.why})" if self.why else "")

    def document(self) -> dict[str, str | float]:
        """Return the change for JSON."""
        said = {"title": self.name, "setting": self.setting, "sentence": self.why}
        return {**said, "saved_usd": self.saved_usd, "lost_seconds": self.lost_seconds}


def change_table(found: Iterable[Change]) -> str:
    """Return changes as a Markdown table."""
    rows = ["| what | change | saves | takes | why |", "|---|---|---|---|---|"]
    for item in found:
        saved = f"{dollars(item.saved_usd)} {item.of}".rstrip()
        took = f"{format_duration(abs(item.lost_seconds))} {'more' if item.lost_seconds >= 0 else 'less'}"
        rows.append(f"| **{item.name}** | {item.setting} | {saved} | {took} | {item.why} |")
    return "\n".join(rows) if len(rows) > 2 else "These figures do not suggest any change."


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRun:
    """The run that the options are compared with: a whole one, finished or expected, or the rest of a running one."""

    price: SkuPrice
    tier: Tier
    node_count: int
    """Nodes that are paid for."""
    seconds: float
    """Paid wall-clock seconds as it is."""
    usd: float
    """Dollars as it is. Nodes may have been there for a part of the time only: options keep that share."""
    step_seconds: float = 0.0
    """Seconds of ``seconds`` in which steps are done: another step makes these longer or shorter…"""
    evaluation_seconds: float = 0.0
    """…and these follow the computing of a step. Start-up, saves and finish stay as they are."""
    restart_seconds: float = 0.0
    """What a change of nodes costs besides: the start-up, and the steps since the last checkpoint once more."""

    def paid_share(self) -> float:
        """Return the dollars relative to those of all nodes over all of the time; 1 where none came later or left."""
        whole = self.node_count * self.seconds * self.price.usd_per_hour(self.tier) / 3600
        return self.usd / whole if whole else 1.0

    def seconds_with(self, now: StepModel, then: StepModel) -> float:
        """Return the seconds of the run with another step, see the fields."""
        longer = now.samples_per_second / then.samples_per_second - 1
        before, after = (item.computing / item.samples for item in (now, then))
        return (
            self.seconds
            + self.step_seconds * longer
            + self.evaluation_seconds * (after / before - 1 if before else 0.0)
        )


def build_options(
    base: BaseRun,
    world: Sequence[TimingEvent],
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    prices: Iterable[SkuPrice],
    today: date,
) -> tuple[Change, ...]:
    """Return every possible change of one thing.

    ``world``: timing of the steps of the world that trained; without any, only prices count. ``events``: for the memory
    of the GPUs. ``training``: the trainer's configuration. ``prices``: of the SKUs that may be bought; those that are
    retired on ``today`` cannot.
    """
    now = step_model(world) if world else None
    now = now if now and now.samples else None
    memory = gpu_memory(world, events, training) if world else "no timing of its steps is known"
    return (
        *_price_fewer_nodes(base, world, now, memory, training),
        *_price_other_skus(base, now, memory, prices, today),
        *_price_spot(base),
        *_price_larger_batch(base, world, now, memory, events, training),
    )


def best_of(options: Iterable[Change], name: str) -> Change | None:
    """Return the change of that name that saves most; None where there is none."""
    found = [item for item in options if item.name == name]
    return max(found, key=lambda item: item.saved_usd, default=None)


def _priced(
    base: BaseRun,
    name: str,
    setting: str,
    seconds: float,
    *,
    node_count: int | None = None,
    price: SkuPrice | None = None,
    tier: Tier | None = None,
    assumptions: Sequence[str] = (),
) -> Change:
    """``seconds``: as long as the run takes with this change."""
    price, tier, count = price or base.price, tier or base.tier, node_count or base.node_count
    is_moved = (price.sku, tier, count) != (base.price.sku, base.tier, base.node_count)
    said = list(assumptions)
    if is_moved and base.restart_seconds:
        seconds += base.restart_seconds
        said.append(f"{format_duration(base.restart_seconds)} for starting again from the checkpoint are in it")
    estimate = estimate_cost(Interval(low=seconds, expected=seconds, high=seconds), price, tier, count)
    usd = estimate.usd.scaled(base.paid_share())
    return Change(
        name=name,
        setting=setting,
        node_count=count,
        sku=price.sku,
        tier=tier,
        seconds=estimate.seconds,
        usd=usd,
        saved_usd=base.usd - usd.expected,
        lost_seconds=estimate.seconds.expected - base.seconds,
        why="; ".join(filter(None, [*said, price.tell_spot(tier)])),
    )


def _price_fewer_nodes(
    base: BaseRun,
    world: Sequence[TimingEvent],
    now: StepModel | None,
    memory: GPUMemory | str,
    training: Mapping[str, Any],
) -> list[Change]:
    if now is None:
        return []
    note = "planned micro-batches are divided among the nodes that are there"
    return [
        _priced(
            base,
            "fewer nodes",
            _nodes_setting(model.nodes, now, world, training),
            base.seconds_with(now, model),
            node_count=model.nodes,
            assumptions=(note,),
        )
        for model in on_fewer_nodes(world)
        if model.nodes < base.node_count and _fits_on(model.nodes, world, memory, training)
    ]


def _fits_on(nodes: int, world: Sequence[TimingEvent], memory: GPUMemory | str, training: Mapping[str, Any]) -> bool:
    """Return whether a model that ranks share fits on so many nodes, of which each holds more of it, as far as that is
    known."""
    if not isinstance(memory, GPUMemory):
        return True
    sharing = sharing_of(world[-1], str(training.get("strategy") or "ddp"), nodes)
    return memory.used_with(sharing) <= FITS * memory.total


def _nodes_setting(count: int, now: StepModel, world: Sequence[TimingEvent], training: Mapping[str, Any]) -> str:
    steps = int(training.get("gradient_accumulation_steps") or 0) * now.nodes
    if steps and steps % count == 0:
        return f"DTRAIN_NODES = {count}, gradient_accumulation_steps = {steps // count}: the global batch stays"
    return f"DTRAIN_NODES = {count}, more.world_size = {world[-1].world_size}: the global batch stays"


def _price_other_skus(
    base: BaseRun, now: StepModel | None, memory: GPUMemory | str, prices: Iterable[SkuPrice], today: date
) -> list[Change]:
    """Return options with as many GPUs in each node. All of forward and backward pass is taken to be as much slower as
    the GPU is. That is an upper bound of the loss, since the time in which a GPU idles does not grow."""
    found = []
    for price in prices:
        if price.sku == base.price.sku or not _is_offered(price, base, memory, today):
            continue
        ratio = base.price.speed / price.speed
        slower = replace(now, computing=now.computing * ratio) if now else None
        seconds = base.seconds_with(now, slower) if now and slower else base.seconds * ratio
        note = f"{price.gpu} instead of {base.price.gpu}, {1 / ratio:.2g} times as fast by a rough guess"
        setting = f"DTRAIN_GPU_TYPE = {price.sku}"
        found.append(_priced(base, "other SKU", setting, seconds, price=price, assumptions=(note,)))
    return found


def _is_offered(price: SkuPrice, base: BaseRun, memory: GPUMemory | str, today: date) -> bool:
    """Return whether such nodes can be bought and hold the same ranks; one with less memory is offered where what is
    used was measured and fits."""
    if explain_unavailable(price, base.tier, today) or price.gpus != base.price.gpus:
        return False
    if isinstance(memory, GPUMemory):
        return memory.used <= FITS * price.gpu_memory_gib * 2**30
    return price.gpu_memory_gib >= base.price.gpu_memory_gib


def _price_spot(base: BaseRun) -> list[Change]:
    if base.tier != "dedicated" or explain_unavailable(base.price, "spot", None):
        return []
    return [_priced(base, "spot", "DTRAIN_TIER = spot", base.seconds, tier="spot")]


def _price_larger_batch(
    base: BaseRun,
    world: Sequence[TimingEvent],
    now: StepModel | None,
    memory: GPUMemory | str,
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
) -> list[Change]:
    """Return the option of a batch as large as the GPU's memory holds; if that was not measured, as large as
    communication calls for. A fixed number of steps with a larger batch is more work, not the same work in fewer
    steps."""
    if now is None or training.get("max_steps") or read_events(OutOfMemoryEvent, events):
        return []
    if isinstance(memory, GPUMemory):
        batch = memory.batch_at()
        if memory.fraction >= MEMORY_LOW or batch == memory.batch:
            return []
        setting, note = f"training.batch_size_per_gpu = {batch} (now {memory.batch})", _batch_words(memory, training)
        factor = batch / memory.batch
    else:
        ranked = communication_strategies(world, training)
        more = next((item for item in ranked if item.name == "larger micro-batch"), None)
        if more is None:
            return []
        setting, note = more.change, more.note
        factor = more.samples_per_second * more.step_seconds / now.samples
    seconds = base.seconds_with(now, now.with_batch(factor))
    return [_priced(base, "larger batch", setting, seconds, assumptions=(note,))]


def _batch_words(memory: GPUMemory, training: Mapping[str, Any]) -> str:
    """Return in words how large a batch the memory holds, what it does to the global batch and the learning rate, and
    how to keep both."""
    ranks, steps = int(training.get("world_size") or 1), int(training.get("gradient_accumulation_steps") or 1)
    batch = memory.batch_at()
    fixed = f" and {format_bytes(memory.fixed)} for what else is held between steps" if memory.fixed else ""
    now, then = (size * steps * ranks for size in (memory.batch, batch))
    words = (
        f"GPU memory is {memory.fraction:.0%} full at most, {format_bytes(memory.used)} of "
        f"{format_bytes(memory.total)}: {format_bytes(memory.state)} for weights, gradients and moments{fixed}, "
        f"{memory.bytes_per_sample / 2**20:.3g} MiB for each of {memory.batch} samples. {batch} of them would fill "
        f"{MEMORY_TARGET:.0%}. The global batch grows from {now} to {then} samples, there are {then / now:.3g} times "
        "fewer steps"
    )
    rate, scaling = training.get("learning_rate"), training.get("lr_scaling", "none")
    if rate and scaling == "none":
        linear, root = rate * then / now, rate * math.sqrt(then / now)
        words += (
            f"; the learning rate stays at {rate:g}, where {root:.2g} (square root) to {linear:.2g} (linear) is usual"
        )
    elif rate:
        power = 1.0 if scaling == "linear" else 0.5
        words += (
            f"; training.lr_scaling = {scaling} raises the learning rate {(then / now) ** power:.3g}-fold by itself"
        )
    fitting = [part for part in range(2, steps + 1) if steps % part == 0 and part * memory.batch <= batch]
    if fitting:
        part = max(fitting)
        words += (
            f". With batch_size_per_gpu = {part * memory.batch} and gradient_accumulation_steps = {steps // part} both "
            "stay as they are"
        )
    return words
