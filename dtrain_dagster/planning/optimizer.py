"""Advice for the next run of a training, from what this run used of its nodes: `ResourceOptimizer`. Pure.

Less than half used: fewer nodes, a smaller SKU or Spot nodes, each with the dollars that it saves and
the seconds that it costs. GPU memory less than 70 % full: a larger batch, from the memory that a sample takes. What
cannot be determined is said, and nothing is recommended for it.

Time and cost of each are a row of `dtrain_dagster.planning.options`; this module decides which rows are worth reporting
for a run, and in which words.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any, Literal

from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.costs.tracker import CostTracker, paid_wall_seconds
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.monitoring.gpu_memory import MEMORY_LOW, MEMORY_TARGET, GPUMemory, gpu_memory
from dtrain_dagster.monitoring.step_model import step_model
from dtrain_dagster.monitoring.windows import seconds_of, settled, windows, worlds
from dtrain_dagster.planning.options import BaseRun, Change, best_of, build_options, change_table
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.events import EvaluationEvent, NodeEvent, OutOfMemoryEvent, read_events

LOW_UTILIZATION = 0.5
"""Utilization below which less is recommended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """Use of the processors that the training is paid for, a mean over the job's machines and its time."""

    fraction: float
    of: Literal["GPU", "CPU"]
    machines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    """All advice on one job."""

    utilization: Utilization | None
    recommendations: tuple[Change, ...]
    not_known: tuple[str, ...]
    """Sentences on what nothing is recommended about, and why."""

    def document(self) -> dict[str, Any]:
        """Return the advice for JSON."""
        used = asdict(self.utilization) if self.utilization else None
        advice = [item.document() for item in self.recommendations]
        return {"utilization": used, "recommendations": advice, "not_known": self.not_known}

    @property
    def markdown(self) -> str:
        """Return the changes for the next run, and the settings for which none can be recommended."""
        lines = "\n".join(f"- {line}" for line in self.not_known)
        return change_table(self.recommendations) + (f"\n\nNothing is recommended for:\n{lines}" if lines else "")


class ResourceOptimizer:
    """An adviser on one finished job. ``prices``: of the SKUs that may be bought instead; ``training``: the trainer's
    configuration; ``startup_seconds``: of its nodes, which evictions of Spot nodes buy again, None where not known."""

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
        startup_seconds: float | None = None,
    ) -> None:
        self.price, self.tier, self.training, self.price_words = price, tier, training, price_words
        self._prices, self._today, self._startup_seconds = tuple(prices), today, startup_seconds
        self._events = [item for item in events if item.get("kind") in (NodeEvent.kind, OutOfMemoryEvent.kind)]
        found = settled(windows(events))
        groups = worlds(found)
        self._world = groups[0] if groups else []
        now = step_model(self._world) if self._world else None
        self._now = now if now and now.samples else None
        tracker = CostTracker("", usage, tier)
        self.usd, self._node_hours = tracker.total_usd, tracker.node_hours
        self.wall_seconds = paid_wall_seconds(usage)
        self._step_seconds = min(self.wall_seconds, seconds_of(windows(events)))
        evaluations = sum(item.seconds or 0.0 for item in read_events(EvaluationEvent, events))
        self._evaluation_seconds = min(self.wall_seconds - self._step_seconds, evaluations)

    @property
    def utilization(self) -> Utilization | None:
        """Return the utilization; None where no node was measured."""
        return utilization(self._events)

    @property
    def memory(self) -> GPUMemory | str:
        """Return the memory of the fullest GPU, or why it is not known."""
        if not self._world:
            return "the job recorded no timing of its steps"
        return gpu_memory(self._world, self._events, self.training)

    def optimization(self) -> Optimization:
        """Return all advice on the job."""
        return Optimization(
            utilization=self.utilization, recommendations=self.recommendations(), not_known=self.not_known()
        )

    def recommendations(self) -> tuple[Change, ...]:
        """Return the changes that are worth it, the most dollars first."""
        used, rows = self.utilization, self._rows()
        found: list[Change] = []
        if used and used.fraction < LOW_UTILIZATION:
            found += self._fewer_nodes(best_of(rows, "fewer nodes"), used)
            found += self._smaller_sku(rows, used)
            found += self._spot(best_of(rows, "spot"), used)
        found += self._larger_batch(best_of(rows, "larger batch"))
        return tuple(sorted(found, key=lambda item: item.saved_usd, reverse=True))

    def not_known(self) -> tuple[str, ...]:
        """Return sentences on what nothing is recommended about, and why."""
        used, memory, said = self.utilization, self.memory, []
        if used is None:
            said.append("utilisation: no node was sampled (training.monitor_interval_seconds)")
        elif used.fraction < LOW_UTILIZATION and not self._now:
            said.append("fewer nodes, a smaller SKU: the job recorded no timing of its steps (training.timing)")
        elif used.fraction < LOW_UTILIZATION and used.of == "CPU":
            said.append("a smaller SKU: the table of speeds is of GPUs, and this ran on processors")
        if isinstance(memory, str):
            said.append(f"batch size: {memory}")
        elif memory.fraction < MEMORY_LOW and self.training.get("max_steps"):
            said.append("batch size: max_steps is fixed, and a larger batch in as many steps is more work")
        return tuple(said)

    def _rows(self) -> tuple[Change, ...]:
        if not self.wall_seconds or not self.usd:
            return ()
        base = BaseRun(
            price=self.price,
            tier=self.tier,
            node_count=self._now.nodes if self._now else max(1, round(self._node_hours * 3600 / self.wall_seconds)),
            seconds=self.wall_seconds,
            usd=self.usd,
            step_seconds=self._step_seconds,
            evaluation_seconds=self._evaluation_seconds,
            startup_seconds=self._startup_seconds,
        )
        world = self._world if self._now else []
        return build_options(base, world, self._events, self.training, self._prices, self._today)

    def _fewer_nodes(self, option: Change | None, used: Utilization) -> list[Change]:
        if not self._now or not option or not option.step:
            return []
        parts = [
            f"{1000 * item.seconds:.3g} ms on {item.nodes} ({item.communication / item.seconds:.0%} communication)"
            for item in (self._now, option.step)
        ]
        why = f"{_low(used)} A step takes {parts[0]} and {parts[1]} node(s)"
        return self._worth_it(f"{option.node_count} node(s)", why, option)

    def _smaller_sku(self, options: Iterable[Change], used: Utilization) -> list[Change]:
        """Return the cheapest of the slower SKUs."""
        if not self._now or used.of != "GPU":
            return []
        smaller = {item.sku: item for item in self._prices if item.speed < self.price.speed}
        option = best_of([item for item in options if item.sku in smaller], "other SKU")
        if not option:
            return []
        price = smaller[option.sku]
        now, then = (dollars(item.usd_per_hour(self.tier)) for item in (self.price, price))
        why = (
            f"{_low(used)} A node with {price.gpu} costs {then} an hour instead of {now} and computes "
            f"{price.speed / self.price.speed:.2g} times as fast, {price.speed_note.split(':')[0]}; at most"
        )
        return self._worth_it(price.sku, why, option)

    def _spot(self, option: Change | None, used: Utilization) -> list[Change]:
        if not option:
            return []
        spot = self.price.figure("spot")
        ratio = spot.usd_per_hour / self.price.usd_per_hour("dedicated")
        why = f"{_low(used)} Spot nodes cost {ratio:.0%} of dedicated ones ({spot.recorded_on}); {option.why}"
        return self._worth_it("Spot", why, option)

    def _larger_batch(self, option: Change | None) -> list[Change]:
        memory = self.memory
        if isinstance(memory, str) or not option:
            return []
        saved = f"{dollars(option.saved_usd)} and {format_duration(max(0.0, -option.lost_seconds))}"
        sentence = (
            f"GPU memory is {memory.fraction:.0%} full at most, {_gib(memory.used)} of {_gib(memory.total)}: "
            f"{_gib(memory.state)} for weights, gradients and moments, {memory.bytes_per_sample / 2**20:.3g} MiB for "
            f"each of {memory.batch} samples. {option.batch_size} of them would fill {MEMORY_TARGET:.0%}. "
            f"{batch_words(memory, self.training)} Fewer steps save {saved} ({self.price_words}); {option.why}"
        )
        return [replace(option, name="a larger batch", why=sentence)]

    def _worth_it(self, title: str, why: str, option: Change) -> list[Change]:
        if not option.is_worth_it(self.usd) or not option.usd:
            return []
        saved, lost = option.saved_usd, option.lost_seconds
        longer = "longer" if lost >= 0 else "shorter"
        time = f"{format_duration(abs(lost))} {longer} than {format_duration(self.wall_seconds)}"
        cost = f"{dollars(option.usd.expected)} instead of {dollars(self.usd)}, {saved / self.usd:.0%} less"
        return [replace(option, name=title, why=f"{why}: {cost} ({self.price_words}), and {time}")]


def utilization(events: Iterable[Mapping[str, Any]]) -> Utilization | None:
    """Return the utilization from the ``node`` events: of GPUs where there are some, else of processors. Several nodes
    may be one machine, as on a local cluster: each reports its own share of the processors, and they add up; of GPUs
    each reports the same."""
    looks = read_events(NodeEvent, events)
    has_gpu = any(item.gpu_utilization is not None for item in looks)
    machines: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in looks:
        percent = item.gpu_utilization if has_gpu else item.cpu_percent
        if percent is not None:
            machines[item.machine][item.node_id].append(percent / 100)
    if not machines:
        return None
    over_nodes = statistics.fmean if has_gpu else math.fsum
    busy = [min(1.0, over_nodes(map(statistics.fmean, nodes.values()))) for nodes in machines.values()]
    return Utilization(fraction=statistics.fmean(busy), of="GPU" if has_gpu else "CPU", machines=len(machines))


def batch_words(memory: GPUMemory, training: Mapping[str, Any]) -> str:
    """Return in words what the larger batch does to the global batch and the learning rate, and how to keep both."""
    world, steps = int(training.get("world_size") or 1), int(training.get("gradient_accumulation_steps") or 1)
    batch = memory.batch_at()
    now, then = (size * steps * world for size in (memory.batch, batch))
    words = f"The global batch grows from {now} to {then} samples, there are {then / now:.3g} times fewer steps"
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


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
