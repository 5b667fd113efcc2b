"""Advice from what a job used of its nodes: `ResourceOptimizer` for the next run of one that has ended, `savings` for
one that costs more than estimated and goes on. Pure.

Time and cost of each change are a row of `dtrain_dagster.planning.options`; here is decided which are worth a word.

A running job can be given other nodes or another tier from its checkpoint: that saves on what is left, and pays for
starting again (`BaseRun.restart_seconds`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Literal

from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.costs.tracker import CostTracker, paid_wall_seconds
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.monitoring.gpu_memory import MEMORY_LOW, GPUMemory, gpu_memory
from dtrain_dagster.monitoring.step_model import longest_world, step_model
from dtrain_dagster.monitoring.windows import seconds_of, settled, windows
from dtrain_dagster.planning.options import BaseRun, Change, best_of, build_options, change_table, worthwhile
from dtrain_dagster.planning.projection import Projection, pauses_left
from dtrain_dagster.settings.tiers import Tier, tier_of
from trainer.documents.events import EvaluationEvent, NodeEvent, OutOfMemoryEvent, TimingEvent, read_events

LOW_UTILIZATION = 0.5
OTHER_NODES = ("fewer nodes", "other SKU", "spot")
"""Changes of the nodes alone."""
STILL_THERE_SECONDS = 60.0
"""Nodes whose intervals end within so long of the last end count as there: their clocks and looks differ."""


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
        self.price, self.tier, self.training = price, tier, training
        self._prices, self._today = tuple(prices), today
        self._events = [item for item in events if item.get("kind") in (NodeEvent.kind, OutOfMemoryEvent.kind)]
        self._world = longest_world(settled(windows(events)))
        tracker = CostTracker("", usage, tier)
        self.usd, self._node_hours = tracker.total_usd, tracker.node_hours
        self.wall_seconds = paid_wall_seconds(usage)
        self._step_seconds = min(self.wall_seconds, seconds_of(windows(events)))
        evaluations = sum(item.seconds or 0.0 for item in read_events(EvaluationEvent, events))
        self._evaluation_seconds = min(self.wall_seconds - self._step_seconds, evaluations)
        self.utilization = utilization(self._events)
        self.memory: GPUMemory | str = "the job recorded no timing of its steps"
        """The memory of the fullest GPU, or why it is not known."""
        if self._world:
            self.memory = gpu_memory(self._world, self._events, training)

    def recommendations(self) -> tuple[Change, ...]:
        """Return the changes that are worth it, the most dollars first."""
        if not self.wall_seconds or not self.usd:
            return ()
        mean_nodes = max(1, round(self._node_hours * 3600 / self.wall_seconds))
        base = BaseRun(
            price=self.price,
            tier=self.tier,
            node_count=step_model(self._world).nodes if self._world else mean_nodes,
            seconds=self.wall_seconds,
            usd=self.usd,
            step_seconds=self._step_seconds,
            evaluation_seconds=self._evaluation_seconds,
        )
        # The table of speeds is of GPUs, and of those only slower ones are for who uses little.
        has_gpus = self._world and self.utilization and self.utilization.of == "GPU"
        slower = [item for item in self._prices if has_gpus and item.speed < self.price.speed]
        rows = build_options(base, self._world, self._events, self.training, slower, self._today)
        kinds = OTHER_NODES if self.utilization and self.utilization.fraction < LOW_UTILIZATION else ()
        found = [*worthwhile(rows, kinds, base.usd), *filter(None, [best_of(rows, "larger batch")])]
        return tuple(sorted(found, key=lambda item: item.saved_usd, reverse=True))

    def not_known(self) -> tuple[str, ...]:
        """Return sentences on what nothing is recommended about, and why."""
        used, memory, said = self.utilization, self.memory, []
        if used is None:
            said.append("utilisation: no node was sampled (training.monitor_interval_seconds)")
        elif used.fraction < LOW_UTILIZATION and not self._world:
            said.append("fewer nodes, a smaller SKU: the job recorded no timing of its steps (training.timing)")
        elif used.fraction < LOW_UTILIZATION and used.of == "CPU":
            said.append("a smaller SKU: the table of speeds is of GPUs, and this ran on processors")
        if isinstance(memory, str):
            said.append(f"batch size: {memory}")
        elif memory.fraction < MEMORY_LOW and self.training.get("max_steps"):
            said.append("batch size: max_steps is fixed, and a larger batch in as many steps is more work")
        return tuple(said)

    def document(self) -> dict[str, Any]:
        used, advice = self.utilization, [asdict(item) for item in self.recommendations()]
        return {"utilization": used and asdict(used), "recommendations": advice, "not_known": self.not_known()}

    def markdown(self) -> str:
        used, lines = self.utilization, "\n".join(f"- {line}" for line in self.not_known())
        missing = f"\n\nNothing is recommended for:\n{lines}" if lines else ""
        said = f"{used.of} utilisation was {used.fraction:.0%}.\n\n" if used else ""
        return said + change_table(self.recommendations()) + missing


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
    if not rest.usd:
        return ()
    rows = build_options(rest, longest_world(found), events, training, table.values(), today)
    return tuple(sorted(worthwhile(rows, OTHER_NODES, rest.usd), key=lambda item: -item.saved_usd))
