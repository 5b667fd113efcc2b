"""What the next run of this training should be given, from what this one used of its nodes: `ResourceOptimizer`. Pure.

Less than half used: fewer nodes, a smaller SKU or nodes that may be taken away (R5.3), each with the dollars that it
saves and the seconds that it costs. GPU memory less than 70 % full: a larger batch (R3.4), from the memory that a
sample takes. What cannot be told is said, and nothing is recommended for it.

A run is its steps, which a change makes shorter or longer by the model of `dtrain_dagster.monitoring.step_model`, its
evaluations, which follow the computing in them, and the rest, which is taken to stay as it was.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

from dtrain_dagster.costs.estimate import Interval
from dtrain_dagster.costs.prices import PriceError, SkuPrice, Tier
from dtrain_dagster.costs.tracker import CostTracker, paid_wall_seconds
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.monitoring.gpu_memory import MEMORY_LOW, MEMORY_TARGET, GPUMemory, gpu_memory
from dtrain_dagster.monitoring.step_model import WORTH_IT, StepModel, step_model
from dtrain_dagster.monitoring.strategies import on_fewer_nodes
from dtrain_dagster.monitoring.windows import seconds_of, settled, windows, worlds
from dtrain_dagster.planning.choices import EVICTIONS_PER_NODE_HOUR, with_evictions
from dtrain_dagster.support.formatting import dollars, duration

LOW_UTILIZATION = 0.5
"""Below it, less is recommended (R5.3)."""
FITS = 0.9
"""Share of a smaller GPU's memory that a training may be known to need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """Of the processors that the training is paid for, mean over the job's machines and its time."""

    fraction: float
    of: Literal["GPU", "CPU"]
    machines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    title: str
    sentence: str
    """What it would do, with its figures and what they leave out."""
    setting: str
    """What to change."""
    saved_usd: float
    """Of what this run has cost."""
    lost_seconds: float
    """Negative: it would be quicker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    """All that is said of one job."""

    utilization: Utilization | None
    recommendations: tuple[Recommendation, ...]
    not_known: tuple[str, ...]
    """What nothing is recommended about, and why."""


class ResourceOptimizer:
    """Looks at one finished job. ``prices``: of the SKUs that may be had instead; ``training``: the trainer's
    configuration."""

    def __init__(
        self,
        events: Sequence[Mapping[str, Any]],
        usage: Sequence[NodeUsage],
        *,
        price: SkuPrice,
        tier: Tier,
        training: Mapping[str, Any],
        prices: Iterable[SkuPrice],
        today: date,
        price_words: str,
    ) -> None:
        self.price, self.tier, self.training, self.price_words = price, tier, training, price_words
        self._prices = [
            item for item in prices if not (item.retired_on and date.fromisoformat(item.retired_on) <= today)
        ]
        self._events = [item for item in events if item.get("kind") in ("node", "out_of_memory")]
        found = settled(windows(events))
        groups = worlds(found)
        self._world = groups[0] if groups else []
        now = step_model(self._world) if self._world else None
        self._now = now if now and now.samples else None
        self.usd = CostTracker("", usage, tier).total_usd
        self.wall_seconds = paid_wall_seconds(usage)
        self._step_seconds = min(self.wall_seconds, seconds_of(windows(events)))
        evaluations = sum(float(item.get("seconds") or 0.0) for item in events if item.get("kind") == "evaluation")
        self._evaluation_seconds = min(self.wall_seconds - self._step_seconds, evaluations)

    @property
    def utilization(self) -> Utilization | None:
        """None where no node was looked at."""
        return utilization(self._events)

    @property
    def memory(self) -> GPUMemory | str:
        """Of the fullest GPU, or why nothing can be said of it."""
        if not self._world:
            return "the job recorded no timing of its steps"
        return gpu_memory(self._world, self._events, self.training)

    def optimization(self) -> Optimization:
        return Optimization(
            utilization=self.utilization, recommendations=self.recommendations(), not_known=self.not_known()
        )

    def recommendations(self) -> tuple[Recommendation, ...]:
        """What is worth it, the most dollars first."""
        used = self.utilization
        found: list[Recommendation] = []
        if used and used.fraction < LOW_UTILIZATION:
            found += [*self._fewer_nodes(used), *self._smaller_sku(used), *self._low_priority(used)]
        found += self._larger_batch()
        return tuple(sorted(found, key=lambda item: item.saved_usd, reverse=True))

    def not_known(self) -> tuple[str, ...]:
        """What nothing is recommended about, and why."""
        used, memory, said = self.utilization, self.memory, []
        if used is None:
            said.append("utilisation: no node was looked at (training.monitor_interval_seconds)")
        elif used.fraction < LOW_UTILIZATION and not self._now:
            said.append("fewer nodes, a smaller SKU: the job recorded no timing of its steps (training.timing)")
        elif used.fraction < LOW_UTILIZATION and used.of == "CPU":
            said.append("a smaller SKU: the table of speeds is of GPUs, and this ran on processors")
        if isinstance(memory, str):
            said.append(f"batch size: {memory}")
        return tuple(said)

    def _fewer_nodes(self, used: Utilization) -> list[Recommendation]:
        if not self._now:
            return []
        rows = [
            (*self._with(model, self.usd * model.nodes / self._now.nodes), model)
            for model in on_fewer_nodes(self._world)
        ]
        if not rows:
            return []
        usd, seconds, model = min(rows, key=lambda row: row[0])
        parts = [
            f"{1000 * item.seconds:.3g} ms on {item.nodes} ({item.communication / item.seconds:.0%} communication)"
            for item in (self._now, model)
        ]
        why = f"{_low(used)} A step takes {parts[0]} and {parts[1]} node(s)"
        return self._worth_it(f"{model.nodes} node(s)", why, self._nodes_setting(model.nodes), usd, seconds)

    def _nodes_setting(self, count: int) -> str:
        assert self._now
        steps = int(self.training.get("gradient_accumulation_steps") or 0) * self._now.nodes
        if steps and steps % count == 0:
            return f"DTRAIN_NODES = {count}, gradient_accumulation_steps = {steps // count}: the global batch stays"
        return f"DTRAIN_NODES = {count}, more.world_size = {self._world[-1].world_size}: the global batch stays"

    def _smaller_sku(self, used: Utilization) -> list[Recommendation]:
        """With as many GPUs in each node. All of forward and backward pass is taken to be as much slower as the GPU is:
        what a GPU that idles waits for does not get slower, so this is what it loses at most."""
        if not self._now or used.of != "GPU":
            return []
        memory = self.memory
        rows = []
        for price in self._prices:
            if price.gpus != self.price.gpus or price.speed >= self.price.speed or not _offered(price, self.tier):
                continue
            if isinstance(memory, GPUMemory) and memory.used > FITS * price.gpu_memory_gib * 2**30:
                continue
            model = replace(self._now, computing=self._now.computing * self.price.speed / price.speed)
            ratio = price.usd_per_hour(self.tier) / self.price.usd_per_hour(self.tier)
            rows.append((*self._with(model, self.usd * ratio), price))
        if not rows:
            return []
        usd, seconds, price = min(rows, key=lambda row: row[0])
        now, then = (dollars(item.usd_per_hour(self.tier)) for item in (self.price, price))
        why = (
            f"{_low(used)} A node with {price.gpu} costs {then} an hour instead of {now} and computes "
            f"{price.speed / self.price.speed:.2g} times as fast, {price.speed_note.split(':')[0]}; at most"
        )
        return self._worth_it(price.sku, why, f"DTRAIN_GPU_TYPE = {price.sku}", usd, seconds)

    def _low_priority(self, used: Utilization) -> list[Recommendation]:
        if self.tier != "dedicated" or not _offered(self.price, "low_priority") or not self.wall_seconds:
            return []
        wall, nodes = self.wall_seconds, self._now.nodes if self._now else 1
        seconds = with_evictions(Interval(low=wall, expected=wall, high=wall), nodes).expected
        ratio = self.price.usd_per_hour("low_priority") / self.price.usd_per_hour("dedicated")
        why = (
            f"{_low(used)} Low-priority nodes cost {ratio:.0%} of dedicated ones and may be taken away: "
            f"{EVICTIONS_PER_NODE_HOUR:.0%} of them in an hour are assumed"
        )
        usd = self.usd * ratio * seconds / wall
        return self._worth_it("low priority", why, "DTRAIN_TIER = low_priority", usd, seconds)

    def _larger_batch(self) -> list[Recommendation]:
        memory = self.memory
        if isinstance(memory, str) or memory.fraction >= MEMORY_LOW or not self._now:
            return []
        batch = memory.batch_at()
        if batch == memory.batch:
            return []
        usd, seconds = self._with(self._now.with_batch(batch / memory.batch), self.usd)
        saved = f"{dollars(self.usd - usd)} and {duration(max(0.0, self.wall_seconds - seconds))}"
        sentence = (
            f"GPU memory is {memory.fraction:.0%} full at its fullest, {_gib(memory.used)} of {_gib(memory.total)}: "
            f"{_gib(memory.state)} for weights, gradients and moments, {memory.bytes_per_sample / 2**20:.3g} MiB for "
            f"each of {memory.batch} samples. {batch} of them would fill {MEMORY_TARGET:.0%}. "
            f"{batch_words(memory, self.training)} Fewer steps save {saved} ({self.price_words}); larger operations "
            "are more efficient besides, which is not counted"
        )
        return [
            Recommendation(
                title="a larger batch",
                sentence=sentence,
                setting=f"training.batch_size_per_gpu = {batch} (now {memory.batch})",
                saved_usd=self.usd - usd,
                lost_seconds=seconds - self.wall_seconds,
            )
        ]

    def _with(self, model: StepModel, usd: float) -> tuple[float, float]:
        """(dollars, seconds) of the job with another step. ``usd``: what it would cost in the time that it took."""
        assert self._now
        longer = self._now.samples_per_second / model.samples_per_second - 1
        work = [item.computing / item.samples for item in (self._now, model)]
        seconds = self.wall_seconds + self._step_seconds * longer
        seconds += self._evaluation_seconds * (work[1] / work[0] - 1 if work[0] else 0.0)
        return (usd * seconds / self.wall_seconds if self.wall_seconds else usd), seconds

    def _worth_it(self, title: str, why: str, setting: str, usd: float, seconds: float) -> list[Recommendation]:
        saved, lost = self.usd - usd, seconds - self.wall_seconds
        if saved < WORTH_IT * self.usd or not saved:
            return []
        time = f"{duration(abs(lost))} {'longer' if lost >= 0 else 'shorter'} than {duration(self.wall_seconds)}"
        cost = f"{dollars(usd)} instead of {dollars(self.usd)}, {saved / self.usd:.0%} less ({self.price_words})"
        sentence = f"{why}: {cost}, and {time}"
        return [Recommendation(title=title, sentence=sentence, setting=setting, saved_usd=saved, lost_seconds=lost)]


def utilization(events: Iterable[Mapping[str, Any]]) -> Utilization | None:
    """From the ``node`` events: of GPUs where there are some, else of processors. Several nodes may be one machine, as
    on a local cluster: each tells its own share of the processors, and they add up; of GPUs each tells the same."""
    looks = [item for item in events if item.get("kind") == "node"]
    has_gpu = any(item.get("gpu_utilization") is not None for item in looks)
    field = "gpu_utilization" if has_gpu else "cpu_percent"
    machines: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in looks:
        if item.get(field) is not None:
            machines[str(item.get("hostname", item["node_id"]))][int(item["node_id"])].append(item[field] / 100)
    if not machines:
        return None
    over_nodes = statistics.fmean if has_gpu else math.fsum
    busy = [min(1.0, over_nodes(map(statistics.fmean, nodes.values()))) for nodes in machines.values()]
    return Utilization(fraction=statistics.fmean(busy), of="GPU" if has_gpu else "CPU", machines=len(machines))


def batch_words(memory: GPUMemory, training: Mapping[str, Any]) -> str:
    """What the larger batch does to the global batch and the learning rate, and how to keep both."""
    world, steps = int(training.get("world_size") or 1), int(training.get("gradient_accumulation_steps") or 1)
    batch = memory.batch_at()
    now, then = (size * steps * world for size in (memory.batch, batch))
    words = f"The global batch grows from {now} to {then} samples, steps get {then / now:.3g} times as few"
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
    return words + "."


def _low(used: Utilization) -> str:
    return f"{used.of} utilisation was {used.fraction:.0%}, below {LOW_UTILIZATION:.0%}."


def _offered(price: SkuPrice, tier: Tier) -> bool:
    try:
        price.figure(tier)
    except PriceError:
        return False
    return True


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
