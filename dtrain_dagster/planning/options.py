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
    seconds: Interval | None
    """Paid wall-clock seconds; None where the change cannot be priced."""
    usd: Interval | None
    saved_usd: float = 0.0
    """Dollars saved against the run as it is; negative where the change is dearer."""
    lost_seconds: float = 0.0
    """Seconds lost; negative where it is quicker."""
    why: str = ""
    """What the figures rest on, or why the change is impossible."""
    is_possible: bool = True
    of: str = ""
    """What it saves on, in words."""
    step: StepModel | None = None
    """The step as it would be, where the change is one of the step."""
    batch_size: int | None = None
    """Samples of a micro-batch, where the change is one of it."""

    def is_worth_it(self, usd: float) -> bool:
        """Return whether the change is possible and saves at least `WORTH_IT` of ``usd``."""
        return self.is_possible and self.saved_usd > 0 and self.saved_usd >= WORTH_IT * usd

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
    """Return every change of one thing, impossible ones with the reason.

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
        *_price_smaller_model(base, now),
    )


def best_of(options: Iterable[Change], name: str) -> Change | None:
    """Return the possible change of that name that saves most; None where there is none."""
    found = [item for item in options if item.name == name and item.is_possible]
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
    step: StepModel | None = None,
    batch_size: int | None = None,
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
        step=step,
        batch_size=batch_size,
    )


def _refused(
    base: BaseRun, name: str, setting: str, why: str, sku: str | None = None, tier: Tier | None = None
) -> Change:
    return Change(
        name=name,
        setting=setting,
        node_count=base.node_count,
        sku=sku or base.price.sku,
        tier=tier or base.tier,
        seconds=None,
        usd=None,
        why=why,
        is_possible=False,
    )


def _price_fewer_nodes(
    base: BaseRun,
    world: Sequence[TimingEvent],
    now: StepModel | None,
    memory: GPUMemory | str,
    training: Mapping[str, Any],
) -> list[Change]:
    if now is None:
        return [_refused(base, "fewer nodes", "fewer nodes (DTRAIN_NODES)", "no timing of its steps is known")]
    found = []
    for model in on_fewer_nodes(world):
        if model.nodes >= base.node_count:
            continue
        change = _nodes_setting(model.nodes, now, world, training)
        if why := _why_too_few(model.nodes, world, memory, training):
            found.append(_refused(base, "fewer nodes", change, why))
            continue
        found.append(
            _priced(
                base,
                "fewer nodes",
                change,
                base.seconds_with(now, model),
                node_count=model.nodes,
                assumptions=("planned micro-batches are divided among the nodes that are there",),
                step=model,
            )
        )
    return found


def _why_too_few(nodes: int, world: Sequence[TimingEvent], memory: GPUMemory | str, training: Mapping[str, Any]) -> str:
    """Return why a model that ranks share does not fit on so many nodes, of which each holds more of it; "" if it
    does, or that is not known."""
    if not isinstance(memory, GPUMemory):
        return ""
    there = memory.used_with(sharing_of(world[-1], str(training.get("strategy") or "ddp"), nodes))
    if there <= FITS * memory.total:
        return ""
    return (
        f"each GPU would need {format_bytes(there)} of its {format_bytes(memory.total)}, as it holds more of the model"
    )


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
        if price.sku == base.price.sku:
            continue
        change, ratio = f"DTRAIN_GPU_TYPE = {price.sku}", base.price.speed / price.speed
        if why := _why_not_sku(price, base, memory, today):
            found.append(_refused(base, "other SKU", change, why, sku=price.sku))
            continue
        slower = replace(now, computing=now.computing * ratio) if now else None
        seconds = base.seconds_with(now, slower) if now and slower else base.seconds * ratio
        note = f"{price.gpu} instead of {base.price.gpu}, {1 / ratio:.2g} times as fast by a rough guess"
        found.append(_priced(base, "other SKU", change, seconds, price=price, assumptions=(note,)))
    return found


def _why_not_sku(price: SkuPrice, base: BaseRun, memory: GPUMemory | str, today: date) -> str:
    if why := explain_unavailable(price, base.tier, today):
        return why
    if price.gpus != base.price.gpus:
        return f"{price.gpus} GPUs in a node instead of {base.price.gpus}: not the same ranks"
    if isinstance(memory, GPUMemory):
        if memory.used > FITS * price.gpu_memory_gib * 2**30:
            return f"its GPU of {price.gpu_memory_gib} GiB is too small for the {memory.used / 2**30:.3g} GiB in use"
    elif price.gpu_memory_gib < base.price.gpu_memory_gib:
        return f"its GPU of {price.gpu_memory_gib} GiB may be too small: {memory}"
    return ""


def _price_spot(base: BaseRun) -> list[Change]:
    change = "DTRAIN_TIER = spot"
    why = "" if base.tier == "dedicated" else "its nodes are Spot already"
    if why := why or explain_unavailable(base.price, "spot", None):
        return [_refused(base, "spot", change, why, tier="spot")]
    return [_priced(base, "spot", change, base.seconds, tier="spot")]


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
    change, why = "training.batch_size_per_gpu", ""
    if now is None:
        why = "no timing of its steps is known"
    elif training.get("max_steps"):
        why = "max_steps is fixed: a larger batch would be more work"
    elif isinstance(memory, GPUMemory) and (memory.fraction >= MEMORY_LOW or memory.batch_at() == memory.batch):
        why = f"GPU memory is {memory.fraction:.0%} full"
    elif read_events(OutOfMemoryEvent, events):
        why = "memory ran out in this job"
    if why or now is None:
        return [_refused(base, "larger batch", change, why)]
    if isinstance(memory, GPUMemory):
        batch, note = memory.batch_at(), _batch_words(memory, training)
        change, factor = f"{change} = {batch} (now {memory.batch})", batch / memory.batch
    else:
        ranked = communication_strategies(world, training)
        more = next((item for item in ranked if item.name == "larger micro-batch"), None)
        if more is None:
            return [_refused(base, "larger batch", change, memory)]
        factor = more.samples_per_second * more.step_seconds / now.samples
        change, note, batch = more.change, more.note, None
    then = now.with_batch(factor)
    seconds = base.seconds_with(now, then)
    return [_priced(base, "larger batch", change, seconds, assumptions=(note,), step=then, batch_size=batch)]


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


def _price_smaller_model(base: BaseRun, now: StepModel | None) -> list[Change]:
    change = "half the parameters (model_args)"
    if now is None:
        return [_refused(base, "smaller model", change, "no timing of its steps is known")]
    then = replace(now, computing=now.computing / 2, communication=now.communication / 2)
    note = "computing and gradients halve at best; check the validation loss"
    return [_priced(base, "smaller model", change, base.seconds_with(now, then), assumptions=(note,), step=then)]
