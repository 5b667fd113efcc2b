"""What a training would take and cost if one thing about it were changed, and which changes are worth a word:
`ResourceOptimizer` for the next run of one that has ended, `savings` for one that goes on and costs more than
estimated. Pure.

Every change is nodes x seconds x price of a node-hour, start-up included. How a step changes belongs to
`monitoring.strategies`. What evictions of Spot nodes cost is not known, and the change to Spot says so. A running job
can be given other nodes or another tier from its checkpoint: that saves on what is left, and pays for starting again.

Of a GPU's memory a process holds weights, gradients and the two moments of Adam, and data, which do not grow with the
batch, and activations, which do. What else it holds (the driver's context, the allocator's reserve) is counted with the
activations, so that a sample seems larger than it is, and a recommended batch is rather too small than too large.
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
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.monitoring.strategies import (
    WORTH_IT,
    Change,
    StepModel,
    change_table,
    longest_world,
    on_fewer_nodes,
    step_model,
)
from dtrain_dagster.monitoring.windows import seconds_of, settled, windows
from dtrain_dagster.planning.build_plan import explain_unavailable
from dtrain_dagster.planning.projection import Projection, pauses_left
from dtrain_dagster.settings.cluster_kinds import Tier, tier_of
from dtrain_dagster.support.formatting import format_duration
from trainer.documents.events import EvaluationEvent, NodeEvent, OutOfMemoryEvent, TimingEvent, read_events
from trainer.performance.memory import ModelBytes, count_sharing, rank_bytes

LOW_UTILIZATION = 0.5
OTHER_NODES = ("fewer nodes", "other SKU", "spot")
"""Changes of the nodes alone."""
STILL_THERE_SECONDS = 60.0
"""Nodes whose intervals end within so long of the last end count as there: their clocks and looks differ."""
FITS = 0.9
"""Share of another GPU's memory that a training may need to fit there."""


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

    def seconds_with(self, now: StepModel, then: StepModel) -> float:
        """Return the seconds of the run with another step, see the fields."""
        longer = now.samples_per_second / then.samples_per_second - 1
        before, after = (item.computing / item.samples for item in (now, then))
        of_evaluations = self.evaluation_seconds * (after / before - 1 if before else 0.0)
        return self.seconds + self.step_seconds * longer + of_evaluations

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
        time = seconds / self.seconds
        dearer = count * price.usd_per_hour(tier) / (self.node_count * self.price.usd_per_hour(self.tier))
        said = "; ".join(filter(None, [why, again, price.tell_spot(tier)]))
        return Change(
            name=name,
            setting=setting,
            time=time,
            cost=time * dearer,
            why=said,
            run_seconds=self.seconds,
            run_usd=self.usd,
        )


def build_options(
    base: BaseRun,
    world: Sequence[TimingEvent],
    memory: GPUMemory | None,
    training: Mapping[str, Any],
    prices: Iterable[SkuPrice],
    today: date,
) -> list[Change]:
    """Return every possible change of one thing. ``world``: timing of the steps of the world that trained; without any,
    only prices count. ``memory``: of the fullest GPU, where it is known. ``training``: the trainer's
    configuration. ``prices``: of the SKUs that may be bought; those that are retired on ``today`` cannot."""
    now = step_model(world) if world else None
    found = _other_skus(base, now, memory, prices, today)
    if base.tier == "dedicated" and not explain_unavailable(base.price, "spot", None):
        found.append(base.changed("spot", "DTRAIN_TIER = spot", base.seconds, tier="spot"))
    if now is None:
        return found
    why = "planned micro-batches are divided among the nodes that are there"
    is_shared = training.get("strategy") in ("fsdp", "deepspeed")  # then each rank holds more on fewer nodes
    for then in on_fewer_nodes(world):
        fits = not is_shared or memory is None or memory.fraction * now.nodes / then.nodes <= FITS
        if then.nodes < base.node_count and fits:
            setting, seconds = _nodes_setting(then.nodes, now, world, training), base.seconds_with(now, then)
            found.append(base.changed("fewer nodes", setting, seconds, why, node_count=then.nodes))
    return [*found, *_larger_batch(base, now, memory, training)]


def worthwhile(rows: Sequence[Change], kinds: Iterable[str]) -> list[Change]:
    """Return of each kind the row that saves most, if that is at least `WORTH_IT`; the largest saving first."""
    cheapest = (
        min((row for row in rows if row.name == kind), key=lambda row: row.cost, default=None) for kind in kinds
    )
    return sorted((row for row in cheapest if row and row.cost <= 1 - WORTH_IT), key=lambda row: row.cost)


def _nodes_setting(count: int, now: StepModel, world: Sequence[TimingEvent], training: Mapping[str, Any]) -> str:
    steps = int(training.get("gradient_accumulation_steps") or 0) * now.nodes
    if steps and steps % count == 0:
        return f"DTRAIN_NODES = {count}, gradient_accumulation_steps = {steps // count}: the global batch stays"
    return f"DTRAIN_NODES = {count}, more.world_size = {world[-1].world_size}: the global batch stays"


def _other_skus(
    base: BaseRun, now: StepModel | None, memory: GPUMemory | None, prices: Iterable[SkuPrice], today: date
) -> list[Change]:
    """Return changes to SKUs with as many GPUs in each node, which hold the same ranks by what was measured or by their
    size. All of forward and backward pass is taken to be as much slower as the GPU is. That is an upper bound of the
    loss, since the time in which a GPU idles does not grow."""
    needed = memory.used / FITS / 2**30 if memory else base.price.gpu_memory_gib
    found = []
    for price in prices:
        is_alike = price.gpus == base.price.gpus and price.gpu_memory_gib >= needed
        if price.sku == base.price.sku or not is_alike or explain_unavailable(price, base.tier, today):
            continue
        ratio = base.price.speed / price.speed
        seconds = base.seconds_with(now, replace(now, computing=now.computing * ratio)) if now else base.seconds * ratio
        why = f"{price.gpu} instead of {base.price.gpu}, {1 / ratio:.2g} times as fast by a rough guess"
        found.append(base.changed("other SKU", f"DTRAIN_GPU_TYPE = {price.sku}", seconds, why, price=price))
    return found


def _larger_batch(base: BaseRun, now: StepModel, memory: GPUMemory | None, training: Mapping[str, Any]) -> list[Change]:
    """Return a batch as large as the GPU's memory holds, where that was measured. A fixed number of steps with a larger
    batch is more work, not the same work in fewer steps."""
    if training.get("max_steps") or memory is None or memory.fraction >= MEMORY_LOW:
        return []
    if (batch := memory.batch_at()) == memory.batch:
        return []
    ranks, steps = int(training.get("world_size") or 1), int(training.get("gradient_accumulation_steps") or 1)
    before, then = (size * steps * ranks for size in (memory.batch, batch))
    why = (
        f"GPU memory is {memory.fraction:.0%} full at most, with {memory.bytes_per_sample / 2**20:.3g} MiB for each of "
        f"{memory.batch} samples. The global batch grows from {before} to {then} samples, there are "
        f"{then / before:.3g} times fewer steps: check the learning rate (training.lr_scaling)"
    )
    setting = f"training.batch_size_per_gpu = {batch} (now {memory.batch})"
    return [base.changed("larger batch", setting, base.seconds_with(now, now.with_batch(batch / memory.batch)), why)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """Use of the processors that the training is paid for, a mean over the job's machines and its time."""

    fraction: float
    of: Literal["GPU", "CPU"]
    machines: int


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


class ResourceOptimizer:
    """An adviser on one finished job. ``prices``: of the SKUs that may be bought instead."""

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
    ) -> None:
        self.price, self.training = price, training
        self._prices, self._today = tuple(prices), today
        looks = [item for item in events if item.get("kind") in (NodeEvent.kind, OutOfMemoryEvent.kind)]
        self._world, tracker = longest_world(settled(windows(events))), CostTracker("", usage, tier)
        self.usd, self.wall_seconds = tracker.total_usd, paid_wall_seconds(usage)
        step_seconds = min(self.wall_seconds, seconds_of(windows(events)))
        evaluations = sum(item.seconds or 0.0 for item in read_events(EvaluationEvent, events))
        mean_nodes = max(1, round(tracker.node_hours * 3600 / self.wall_seconds)) if self.wall_seconds else 1
        self._base = BaseRun(
            price=price,
            tier=tier,
            node_count=step_model(self._world).nodes if self._world else mean_nodes,
            seconds=self.wall_seconds,
            usd=self.usd,
            step_seconds=step_seconds,
            evaluation_seconds=min(self.wall_seconds - step_seconds, evaluations),
        )
        self.utilization = utilization(looks)
        self.memory = gpu_memory(self._world, looks, training) if self._world else None
        """The memory of the fullest GPU; None where it is not known."""

    def recommendations(self) -> tuple[Change, ...]:
        """Return the changes that are worth it, the most dollars first."""
        if not self.wall_seconds or not self.usd:
            return ()
        # The table of speeds is of GPUs, and of those only slower ones are for who uses little.
        has_gpus = self._world and self.utilization and self.utilization.of == "GPU"
        slower = [item for item in self._prices if has_gpus and item.speed < self.price.speed]
        rows = build_options(self._base, self._world, self.memory, self.training, slower, self._today)
        kinds = OTHER_NODES if self.utilization and self.utilization.fraction < LOW_UTILIZATION else ()
        larger = [row for row in rows if row.name == "larger batch"]
        return tuple(sorted([*worthwhile(rows, kinds), *larger], key=lambda row: row.cost))

    def document(self) -> dict[str, Any]:
        used, advice = self.utilization, [item.document() for item in self.recommendations()]
        return {"utilization": used and asdict(used), "recommendations": advice}

    def markdown(self) -> str:
        used = self.utilization
        said = f"{used.of} utilisation was {used.fraction:.0%}.\n\n" if used else ""
        return said + change_table(self.recommendations())


def rest_of(
    usage: Sequence[NodeUsage],
    table: Mapping[str, SkuPrice],
    projection: Projection,
    plan: Mapping[str, Any],
    view: JobView,
) -> BaseRun:
    """Return the rest of a running job as projected, on the nodes that are present now. ``plan``: the content of
    ``plan.json``. Raise KeyError where the SKU is not in the table, ValueError where no node was ever present."""
    last = max(usage, key=lambda item: item.ended_at)
    count = len({item.node_id for item in usage if item.ended_at >= last.ended_at - STILL_THERE_SECONDS})
    price = {name.casefold(): row for name, row in table.items()}[last.sku.casefold()]
    tier = tier_of(last.tier or plan["tier"])
    usd = max(0.0, projection.at_end.expected - projection.so_far) if projection.at_end else 0.0
    seconds = 3600 * usd / (count * price.usd_per_hour(tier))
    work, phases = plan.get("work") or {}, plan.get("phases") or {}
    step_seconds, evaluation, restart = seconds, 0.0, 0.0
    if view.reports and work.get("steps"):
        step = statistics.median(took for _, took, _ in view.reports)
        step_seconds = min(seconds, step * max(0, work["steps"] - view.step))
        evaluation = min(seconds - step_seconds, pauses_left(view, work, phases)[0])
        training = (plan.get("job") or {}).get("training") or {}
        again = step * float(training.get("checkpoint_frequency") or 0) / 2
        restart = float(phases.get("startup") or 0.0) + again
    return BaseRun(
        price=price,
        tier=tier,
        node_count=count,
        seconds=seconds,
        usd=usd,
        step_seconds=step_seconds,
        evaluation_seconds=evaluation,
        restart_seconds=restart,
    )


def savings(
    rest: BaseRun,
    found: Sequence[TimingEvent],
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    table: Mapping[str, SkuPrice],
    today: date,
) -> tuple[Change, ...]:
    """Return the best change of the nodes of each kind that is worth it on the rest of a job, the largest saving first.
    ``found``, ``events``: how the latest steps went; without any, only prices count. ``today``: for SKUs that are
    retired by then."""
    if not rest.usd or not rest.seconds:
        return ()
    world = longest_world(found)
    memory = gpu_memory(world, events, training) if world else None
    return tuple(worthwhile(build_options(rest, world, memory, training, table.values(), today), OTHER_NODES))


MEMORY_LOW, MEMORY_TARGET = 0.70, 0.85
"""Shares of a GPU's memory: below the first a larger batch is recommended, one that needs the second."""
MULTIPLE, MOST = 8, 64
"""Batches are multiples of the first, and at most the present one times the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUMemory:
    """The fullest GPU of a job, at its fullest, in bytes."""

    used: int
    total: int
    held: float
    """Bytes that do not grow with the batch."""
    batch: int
    """Samples of a micro-batch."""
    ranks: int
    """Ranks that share the GPU."""

    @property
    def fraction(self) -> float:
        return self.used / self.total

    @property
    def bytes_per_sample(self) -> float:
        return (self.used - self.held) / (self.batch * self.ranks)

    def batch_at(self, target: float = MEMORY_TARGET) -> int:
        """Return the batch that fills this share of the memory; never smaller than now."""
        room = (target * self.total - self.held) / (self.bytes_per_sample * self.ranks)
        return max(self.batch, int(min(room, MOST * self.batch)) // MULTIPLE * MULTIPLE)


def gpu_memory(
    world: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]], training: Mapping[str, Any]
) -> GPUMemory | None:
    """Return the fullest GPU of a job; None where it is not known, and where memory ran out: then micro-batches went
    through the model in parts, and do not fit as they are."""
    batch = training.get("batch_size_per_gpu") or world[-1].facts.get("local_samples_per_micro_batch")
    samples = read_events(NodeEvent, events)
    looks = [(item, gpu) for item in samples for gpu in item.gpus]
    looks = [(item, gpu) for item, gpu in looks if gpu.get("memory_used_bytes") and gpu.get("memory_total_bytes")]
    if not looks or not batch or read_events(OutOfMemoryEvent, events):
        return None
    item, gpu = max(looks, key=lambda look: look[1]["memory_used_bytes"] / look[1]["memory_total_bytes"])
    here = {other.node_id for other in samples if other.machine == item.machine}
    ranks = max(1, math.ceil(sum(node in here for node in world[-1].nodes) / len(item.gpus)))
    used, facts, size = int(gpu["memory_used_bytes"]), world[-1].facts, world[-1].world_size
    parameters = int(facts.get("parameters_bytes") or 0)
    sharing = count_sharing(str(training.get("strategy") or "ddp"), size, max(1, size // len(set(world[-1].nodes))))
    state = rank_bytes(ModelBytes(parameters=parameters, trained=parameters), sharing).held
    held = ranks * max(state, int(facts.get("held_bytes") or 0))
    return GPUMemory(
        used=used, total=int(gpu["memory_total_bytes"]), held=min(held, 0.9 * used), batch=int(batch), ranks=ranks
    )
