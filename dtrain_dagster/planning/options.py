"""The table of changes: what a training would take and cost if one thing about it were changed, each priced once. Pure.

The alert of a cost overrun and the advice after a run print rows of it (`optimizer`). Every row is nodes x seconds x
price of a node-hour, start-up included. How a step changes belongs to `monitoring.step_model`. What evictions of Spot
nodes cost is not known, and the row of Spot says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.monitoring.gpu_memory import MEMORY_LOW, GPUMemory, gpu_memory, sharing_of
from dtrain_dagster.monitoring.step_model import WORTH_IT, StepModel, step_model
from dtrain_dagster.monitoring.strategies import on_fewer_nodes
from dtrain_dagster.planning.choices import explain_unavailable
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.events import OutOfMemoryEvent, TimingEvent, read_events

FITS = 0.9
"""Share of another GPU's memory that a training may need to fit there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a training, and its time and dollars with it."""

    name: str
    setting: str
    """The action, with the setting."""
    seconds: float
    usd: float
    saved_usd: float
    """Dollars saved against the run as it is; negative where the change is dearer."""
    lost_seconds: float
    """Seconds lost; negative where it is quicker."""
    why: str

    @property
    def text(self) -> str:
        saved = dollars(self.saved_usd)
        return f"{self.name}: {self.setting}: saves {saved}" + (f" ({self.why})" if self.why else "")


def change_table(found: Iterable[Change]) -> str:
    rows = ["| what | change | saves | takes | why |", "|---|---|---|---|---|"]
    for item in found:
        took = f"{format_duration(abs(item.lost_seconds))} {'more' if item.lost_seconds >= 0 else 'less'}"
        rows.append(f"| **{item.name}** | {item.setting} | {dollars(item.saved_usd)} | {took} | {item.why} |")
    return "\n".join(rows) if len(rows) > 2 else "These figures do not suggest any change."


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRun:
    """The run that changes are compared with: a whole one, finished or expected, or the rest of a running one."""

    price: SkuPrice
    tier: Tier
    node_count: int
    """Nodes that are paid for."""
    seconds: float
    """Paid wall-clock seconds as it is."""
    usd: float
    """Dollars as it is. Nodes may have been there for a part of the time only: changes keep that share."""
    step_seconds: float = 0.0
    """Seconds of ``seconds`` in which steps are done: another step makes these longer or shorter…"""
    evaluation_seconds: float = 0.0
    """…and these follow the computing of a step. Start-up, saves and finish stay as they are."""
    restart_seconds: float = 0.0
    """What a change of nodes costs besides: the start-up, and the steps since the last checkpoint once more."""

    def usd_of(self, seconds: float, node_count: int, price: SkuPrice, tier: Tier) -> float:
        """Return the dollars of these nodes for that long, if they are there for the same share of the time."""
        whole = self.node_count * self.seconds * self.price.usd_per_hour(self.tier) / 3600
        share = self.usd / whole if whole else 1.0
        return seconds * node_count / 3600 * price.usd_per_hour(tier) * share

    def seconds_with(self, now: StepModel, then: StepModel) -> float:
        """Return the seconds of the run with another step, see the fields."""
        longer = now.samples_per_second / then.samples_per_second - 1
        before, after = (item.computing / item.samples for item in (now, then))
        return (
            self.seconds
            + self.step_seconds * longer
            + self.evaluation_seconds * (after / before - 1 if before else 0.0)
        )

    def changed(
        self,
        name: str,
        setting: str,
        seconds: float,
        why: str = "",
        *,
        node_count: int | None = None,
        price: SkuPrice | None = None,
        tier: Tier | None = None,
    ) -> Change:
        """Return a change. ``seconds``: as long as the run takes with it, without a restart."""
        price, tier, count = price or self.price, tier or self.tier, node_count or self.node_count
        again = ""
        if self.restart_seconds and (price.sku, tier, count) != (self.price.sku, self.tier, self.node_count):
            seconds += self.restart_seconds
            again = f"{format_duration(self.restart_seconds)} for starting again from the checkpoint are in it"
        usd = self.usd_of(seconds, count, price, tier)
        return Change(
            name=name,
            setting=setting,
            seconds=seconds,
            usd=usd,
            saved_usd=self.usd - usd,
            lost_seconds=seconds - self.seconds,
            why="; ".join(filter(None, [why, again, price.tell_spot(tier)])),
        )


def build_options(
    base: BaseRun,
    world: Sequence[TimingEvent],
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    prices: Iterable[SkuPrice],
    today: date,
) -> list[Change]:
    """Return every possible change of one thing.

    ``world``: timing of the steps of the world that trained; without any, only prices count. ``events``: for the memory
    of the GPUs. ``training``: the trainer's configuration. ``prices``: of the SKUs that may be bought; those that are
    retired on ``today`` cannot.
    """
    now = step_model(world) if world else None
    memory = gpu_memory(world, events, training) if world else "no timing of its steps is known"
    found = _other_skus(base, now, memory, prices, today)
    if base.tier == "dedicated" and not explain_unavailable(base.price, "spot", None):
        found.append(base.changed("spot", "DTRAIN_TIER = spot", base.seconds, tier="spot"))
    if now is None:
        return found
    note = "planned micro-batches are divided among the nodes that are there"
    for model in on_fewer_nodes(world):
        if model.nodes < base.node_count and _fits_on(model.nodes, world, memory, training):
            setting, seconds = _nodes_setting(model.nodes, now, world, training), base.seconds_with(now, model)
            found.append(base.changed("fewer nodes", setting, seconds, note, node_count=model.nodes))
    return [*found, *_larger_batch(base, now, memory, events, training)]


def best_of(options: Iterable[Change], name: str) -> Change | None:
    """Return the change of that name that saves most; None where there is none."""
    return max((item for item in options if item.name == name), key=lambda item: item.saved_usd, default=None)


def worthwhile(rows: Sequence[Change], kinds: Iterable[str], usd: float) -> list[Change]:
    """Return the best row of each kind that saves at least `WORTH_IT` of a run of ``usd``."""
    best = (best_of(rows, name) for name in kinds)
    return [item for item in best if item and 0 < item.saved_usd >= WORTH_IT * usd]


def _fits_on(nodes: int, world: Sequence[TimingEvent], memory: GPUMemory | str, training: Mapping[str, Any]) -> bool:
    """Return whether a model that ranks share fits on so many nodes, as far as that is known."""
    if not isinstance(memory, GPUMemory):
        return True
    sharing = sharing_of(world[-1], str(training.get("strategy") or "ddp"), nodes)
    return memory.used_with(sharing) <= FITS * memory.total


def _nodes_setting(count: int, now: StepModel, world: Sequence[TimingEvent], training: Mapping[str, Any]) -> str:
    steps = int(training.get("gradient_accumulation_steps") or 0) * now.nodes
    if steps and steps % count == 0:
        return f"DTRAIN_NODES = {count}, gradient_accumulation_steps = {steps // count}: the global batch stays"
    return f"DTRAIN_NODES = {count}, more.world_size = {world[-1].world_size}: the global batch stays"


def _other_skus(
    base: BaseRun, now: StepModel | None, memory: GPUMemory | str, prices: Iterable[SkuPrice], today: date
) -> list[Change]:
    """Return changes to SKUs with as many GPUs in each node. All of forward and backward pass is taken to be as much
    slower as the GPU is. That is an upper bound of the loss, since the time in which a GPU idles does not grow."""
    found = []
    for price in prices:
        if price.sku == base.price.sku or not _is_offered(price, base, memory, today):
            continue
        ratio = base.price.speed / price.speed
        slower = replace(now, computing=now.computing * ratio) if now else None
        seconds = base.seconds_with(now, slower) if now and slower else base.seconds * ratio
        note = f"{price.gpu} instead of {base.price.gpu}, {1 / ratio:.2g} times as fast by a rough guess"
        found.append(base.changed("other SKU", f"DTRAIN_GPU_TYPE = {price.sku}", seconds, note, price=price))
    return found


def _is_offered(price: SkuPrice, base: BaseRun, memory: GPUMemory | str, today: date) -> bool:
    """Return whether such nodes can be bought and hold the same ranks, by what was measured or by their size."""
    if explain_unavailable(price, base.tier, today) or price.gpus != base.price.gpus:
        return False
    if isinstance(memory, GPUMemory):
        return memory.used <= FITS * price.gpu_memory_gib * 2**30
    return price.gpu_memory_gib >= base.price.gpu_memory_gib


def _larger_batch(
    base: BaseRun,
    now: StepModel,
    memory: GPUMemory | str,
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
) -> list[Change]:
    """Return a batch as large as the GPU's memory holds, where that was measured. A fixed number of steps with a larger
    batch is more work, not the same work in fewer steps."""
    if training.get("max_steps") or read_events(OutOfMemoryEvent, events) or not isinstance(memory, GPUMemory):
        return []
    batch = memory.batch_at()
    if memory.fraction >= MEMORY_LOW or batch == memory.batch:
        return []
    seconds = base.seconds_with(now, now.with_batch(batch / memory.batch))
    setting = f"training.batch_size_per_gpu = {batch} (now {memory.batch})"
    return [base.changed("larger batch", setting, seconds, _batch_words(memory, training))]


def _batch_words(memory: GPUMemory, training: Mapping[str, Any]) -> str:
    """Return in words what a batch that the memory holds does to the global batch, and how to keep that."""
    ranks, steps = int(training.get("world_size") or 1), int(training.get("gradient_accumulation_steps") or 1)
    batch = memory.batch_at()
    now, then = (size * steps * ranks for size in (memory.batch, batch))
    words = (
        f"GPU memory is {memory.fraction:.0%} full at most, with {memory.bytes_per_sample / 2**20:.3g} MiB for each of "
        f"{memory.batch} samples. The global batch grows from {now} to {then} samples, there are {then / now:.3g} "
        "times fewer steps: check the learning rate (training.lr_scaling)"
    )
    fitting = [part for part in range(2, steps + 1) if steps % part == 0 and part * memory.batch <= batch]
    if fitting:
        part = max(fitting)
        words += (
            f". With batch_size_per_gpu = {part * memory.batch} and gradient_accumulation_steps = {steps // part} both "
            "stay as they are"
        )
    return words
