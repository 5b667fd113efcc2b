"""Advice from what a job used of its nodes: `ResourceOptimizer` for the next run of one that has ended, `savings` for
one that costs more than estimated and goes on. Pure.

Time and cost of each change are a row of `dtrain_dagster.planning.options`; this module decides which rows are worth
reporting. Less than half used: fewer nodes, a smaller SKU or Spot nodes. GPU memory less than 70 % full: a larger
batch. What cannot be determined is said, and nothing is recommended for it.

A change that keeps a running job as it is (other nodes, another tier) can be made from its checkpoint: it saves on what
is left. One that changes the training saves in another run like this one.
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
from dtrain_dagster.monitoring.gpu_memory import MEMORY_LOW, GPUMemory, gpu_memory
from dtrain_dagster.monitoring.step_model import step_model
from dtrain_dagster.monitoring.windows import seconds_of, settled, windows, worlds
from dtrain_dagster.planning.options import BaseRun, Change, best_of, build_options, change_table
from dtrain_dagster.planning.projection import Projection, pauses_left
from dtrain_dagster.settings.tiers import Tier, tier_of
from trainer.documents.events import EvaluationEvent, NodeEvent, OutOfMemoryEvent, TimingEvent, read_events

LOW_UTILIZATION = 0.5
"""Utilization below which less is recommended."""
OTHER_NODES, OTHER_TRAINING = ("fewer nodes", "other SKU", "spot"), ("larger batch",)
"""Changes of the nodes alone, and of the training."""
LEFT, ANOTHER = "of what is left, from the checkpoint", "in another run like this one"
STILL_THERE_SECONDS = 60.0
"""Nodes whose intervals end within so long of the last end count as there: their clocks and looks differ."""


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
        used = self.utilization
        lines = "\n".join(f"- {line}" for line in self.not_known)
        missing = f"\n\nNothing is recommended for:\n{lines}" if lines else ""
        said = f"{used.of} utilisation was {used.fraction:.0%}.\n\n" if used else ""
        return said + change_table(self.recommendations) + missing


class ResourceOptimizer:
    """An adviser on one finished job. ``prices``: of the SKUs that may be bought instead; ``training``: the trainer's
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
    ) -> None:
        self.price, self.tier, self.training = price, tier, training
        self._prices, self._today = tuple(prices), today
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
        )
        # The table of speeds is of GPUs, and of those only slower ones are for who uses little.
        has_gpus = self._now and self.utilization and self.utilization.of == "GPU"
        slower = [item for item in self._prices if has_gpus and item.speed < self.price.speed]
        rows = build_options(base, self._world if self._now else [], self._events, self.training, slower, self._today)
        kinds = OTHER_NODES if self.utilization and self.utilization.fraction < LOW_UTILIZATION else ()
        found = worthwhile(rows, kinds, base.usd)
        if not isinstance(self.memory, str):
            found += filter(None, [best_of(rows, "larger batch")])
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


def worthwhile(rows: Sequence[Change], kinds: Iterable[str], usd: float) -> list[Change]:
    """Return the best row of each kind that is worth it, for a run of ``usd``."""
    return [item for name in kinds if (item := best_of(rows, name)) and item.is_worth_it(usd)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaidNodes:
    """The nodes that are paid for at this time."""

    price: SkuPrice
    tier: Tier
    node_count: int


def paid_nodes(usage: Sequence[NodeUsage], table: Mapping[str, SkuPrice], tier: str) -> PaidNodes:
    """Return the nodes that are present at the latest look. ``tier``: of those that do not say theirs. Raise KeyError
    where the SKU is not in the table, ValueError where no node was ever present."""
    last = max(usage, key=lambda item: item.ended_at)
    there = {item.node_id for item in usage if item.ended_at >= last.ended_at - STILL_THERE_SECONDS}
    by_name = {name.casefold(): row for name, row in table.items()}
    return PaidNodes(price=by_name[last.sku.casefold()], tier=tier_of(last.tier or tier), node_count=len(there))


def rest_and_whole(
    nodes: PaidNodes, projection: Projection, plan: Mapping[str, Any], view: JobView
) -> tuple[BaseRun, BaseRun]:
    """Return the rest of a running job, and the whole of it as projected, both on the present nodes.

    ``plan``: the content of ``plan.json``. Phases that were not measured are taken from there.
    """
    usd_whole = projection.at_end.expected if projection.at_end else projection.so_far
    usd_left = max(0.0, usd_whole - projection.so_far)
    work, phases = plan.get("work") or {}, plan.get("phases") or {}
    steps = int(work.get("steps") or 0)
    planned = {name: float(phases.get(name) or 0.0) for name in ("startup", "evaluation", "checkpoint", "finish")}
    planned["steps"] = float(phases.get("steps") or 0.0)
    left, restart = planned, 0.0
    if view.reports and steps:
        share, step = max(0.0, 1 - view.step / steps), statistics.median(item[1] for item in view.reports)
        evaluation, checkpoint = pauses_left(view, work, phases)
        left = planned | {"startup": 0.0, "steps": share * steps * step}
        left |= {"evaluation": evaluation, "checkpoint": checkpoint}
        training = (plan.get("job") or {}).get("training") or {}
        restart = planned["startup"] + step * float(training.get("checkpoint_frequency") or 0) / 2
    whole = planned if planned["steps"] else left | {"startup": planned["startup"]}
    return _base_run(nodes, usd_left, left, restart), _base_run(nodes, usd_whole, whole, 0.0)


def savings(
    rest: BaseRun,
    whole: BaseRun,
    found: Sequence[TimingEvent],
    events: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any],
    table: Mapping[str, SkuPrice],
    today: date,
) -> tuple[Change, ...]:
    """Return the best option of each kind that is worth it, the largest saving first. ``found``, ``events``: how the
    latest steps went; without any, only prices count. ``today``: for SKUs that are retired by then."""
    groups = worlds(found)
    world = groups[0] if groups and step_model(groups[0]).samples else []
    told: list[Change] = []
    for base, kinds, when in ((rest, OTHER_NODES, LEFT), (whole, OTHER_TRAINING, ANOTHER)):
        rows = build_options(base, world, events, training, table.values(), today) if base.usd > 0 else ()
        told += [replace(item, of=when) for item in worthwhile(rows, kinds, base.usd)]
    return tuple(sorted(told, key=lambda item: -item.saved_usd))


def _base_run(nodes: PaidNodes, usd: float, phases: Mapping[str, float], restart: float) -> BaseRun:
    """Phases are brought to the length that the dollars pay for: what is projected and what is timed differ a little.
    Where nothing is known of them, all of it is steps."""
    seconds = 3600 * usd / (nodes.node_count * nodes.price.usd_per_hour(nodes.tier))
    total = sum(phases.values()) if phases["steps"] else 0.0
    return BaseRun(
        price=nodes.price,
        tier=nodes.tier,
        node_count=nodes.node_count,
        seconds=seconds,
        usd=usd,
        step_seconds=seconds * phases["steps"] / total if total else seconds,
        evaluation_seconds=seconds * phases["evaluation"] / total if total else 0.0,
        restart_seconds=restart,
    )
