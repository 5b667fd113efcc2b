"""A job's performance from its records: pure functions from events to figures, one verdict, and recommended changes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.tracker import bill_usage
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.verdict import Goodput, judge_job
from dtrain_dagster.monitoring.diagnosis import Diagnosis
from dtrain_dagster.monitoring.step_model import Strategy
from dtrain_dagster.monitoring.strategies import strategies
from dtrain_dagster.monitoring.windows import (
    SEGMENTS,
    Throughput,
    collective_link,
    communication_cost,
    samples_per_second_by_rank,
    settled,
    shares,
    throughput,
    typical_collectives,
    windows,
    worlds,
)
from trainer.documents.events import CollectiveTiming, NodeEvent, StepEvent, TimingEvent, read_events


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePerformance:
    """A node's mean figures over the whole job. GPU figures are None where the node has none."""

    node_id: int
    samples: int
    samples_per_second: float | None
    cpu_percent: float | None
    memory_used_gib: float | None
    gpu_utilization: float | None
    gpu_memory_percent: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPerformance:
    """A rank of the world that trained longest: milliseconds per step of each segment, mean over the steps."""

    rank: int
    node_id: int
    samples_per_second: float | None
    milliseconds: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """The communication of the world that trained longest; shares are of training time, over all worlds. None: not
    known."""

    network_share: float
    waiting_share: float
    overlap: float | None
    """The share of the gradients' time on the network that the backward pass hid."""
    bandwidth_bytes_per_second: float | None
    """The bandwidth of the bus, in the largest collective."""
    latency_milliseconds: float | None
    """The latency of one collective, however few bytes it moves."""
    collectives: tuple[CollectiveTiming, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """The speed-up over one node, divided by the number of nodes: 1.0 is perfect."""

    nodes: int
    efficiency: float | None
    one_node_samples_per_second: float | None
    basis: str
    """The source of the figure, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Performance:
    """The performance of one job."""

    verdict: str
    """The bottleneck in one sentence, with its evidence."""
    diagnosis: Diagnosis
    samples_per_second: float
    """The rate over all nodes while they trained (`dtrain_dagster.monitoring.windows`)."""
    samples_per_second_per_rank: float
    step_milliseconds_median: float
    step_milliseconds_p95: float
    segment_shares: dict[str, float]
    """Each segment's share of training time, mean over ranks; empty where the trainer recorded no timing."""
    communication: Communication | None
    scaling: Scaling
    goodput: Goodput
    recommendations: tuple[Strategy, ...]
    """Changes that would gain more than noise, the largest gain first."""
    ranks: tuple[RankPerformance, ...]
    nodes: tuple[NodePerformance, ...]


def summarise_performance(
    events: Sequence[Mapping[str, Any]],
    world_size: int,
    usage: Sequence[NodeUsage],
    training: Mapping[str, Any] | None = None,
) -> Performance:
    """Return a job's `Performance`, from its records. ``usage``: the paid intervals of its nodes and of its probes';
    ``training``: its trainer's configuration. Raise ValueError for a job without a recorded step."""
    steps = read_events(StepEvent, events)
    if not steps:
        raise ValueError("the job recorded no step: there is nothing to report on")
    by_node: dict[int, list[NodeEvent]] = defaultdict(list)
    for sample in read_events(NodeEvent, events):
        by_node[sample.node_id].append(sample)
    milliseconds = sorted(1000 * step.step_seconds for step in steps if step.step_seconds is not None)
    timed = windows(events)
    found = settled(timed)
    judged = judge_job(events, ledger(bill_usage(usage)[0], events))
    pace = throughput(timed, steps)
    rate = pace.samples_per_second or 0.0
    return Performance(
        verdict=judged.words,
        diagnosis=judged.diagnosis,
        samples_per_second=rate,
        samples_per_second_per_rank=rate / world_size if pace.per_rank is None else pace.per_rank,
        step_milliseconds_median=statistics.median(milliseconds),
        step_milliseconds_p95=milliseconds[min(len(milliseconds) - 1, int(0.95 * len(milliseconds)))],
        segment_shares=shares(found),
        communication=_communication(found),
        scaling=estimate_scaling(found),
        goodput=judged.goodput,
        recommendations=tuple(item for item in strategies(found, events, training) if item.is_worth_it),
        ranks=_ranks(timed),
        nodes=tuple(_node(node, rows, pace) for node, rows in sorted(by_node.items())),
    )


def estimate_scaling(found: Sequence[TimingEvent]) -> Scaling:
    """Return the efficiency against one node: measured where the job has trained on one for some time, else bounded by
    the time that ranks lose to each other."""
    groups = sorted(worlds(found), key=lambda group: len(set(group[-1].nodes)), reverse=True)
    nodes = len(set(groups[0][-1].nodes)) if groups else 0
    alone = [window for window in found if len(set(window.nodes)) == 1]
    one = throughput(alone).samples_per_second
    if nodes == 1:
        words = "one node: nothing to compare"
        return Scaling(nodes=1, efficiency=None, one_node_samples_per_second=one, basis=words)
    if not groups:
        return Scaling(nodes=nodes, efficiency=None, one_node_samples_per_second=None, basis="unknown: no timing")
    rate = throughput(groups[0]).samples_per_second
    if one and rate:
        words = f"measured: {len(alone)} windows of this job were trained on one node"
        return Scaling(nodes=nodes, efficiency=rate / (nodes * one), one_node_samples_per_second=one, basis=words)
    bound = 1 - communication_cost(groups[0]).total
    words = f"one node was not measured; network and waiting leave at most {bound:.0%}"
    return Scaling(nodes=nodes, efficiency=None, one_node_samples_per_second=None, basis=words)


def _communication(found: Sequence[TimingEvent]) -> Communication | None:
    groups = worlds(found)
    if not groups or groups[0][-1].world_size < 2:
        return None
    cost, collectives = communication_cost(found), typical_collectives(groups[0])
    fit = collective_link(collectives)
    buckets = [item for item in collectives if "bucket" in item.name]
    network = sum(item.wire_seconds for item in buckets)
    largest = max(collectives, key=lambda item: item.bytes, default=None)
    return Communication(
        network_share=cost.wire,
        waiting_share=cost.waiting,
        overlap=sum(item.overlap * item.wire_seconds for item in buckets) / network if network else None,
        bandwidth_bytes_per_second=largest.bandwidth_bytes_per_second if largest else None,
        latency_milliseconds=1000 * fit.latency_seconds if fit else None,
        collectives=tuple(collectives),
    )


def _ranks(found: Sequence[TimingEvent]) -> tuple[RankPerformance, ...]:
    groups = worlds(settled(found))
    if not groups:
        return ()
    world = groups[0]
    steps = sum(window.steps for window in world)
    rates = samples_per_second_by_rank([window for window in found if window.nodes == world[-1].nodes])

    def mean(segment: str, rank: int) -> float:
        values = ((window.segments.get(segment) or (0.0,) * window.world_size)[rank] * window.steps for window in world)
        return 1000 * sum(values) / steps

    return tuple(
        RankPerformance(
            rank=rank,
            node_id=node,
            samples_per_second=rates[rank] if rates else None,
            milliseconds={segment: mean(segment, rank) for segment in SEGMENTS},
        )
        for rank, node in enumerate(world[-1].nodes)
    )


def _node(node_id: int, rows: Sequence[NodeEvent], pace: Throughput) -> NodePerformance:
    memory = _mean(row.memory_used_bytes for row in rows)
    return NodePerformance(
        node_id=node_id,
        samples=len(rows),
        samples_per_second=pace.of_node(node_id),
        cpu_percent=_mean(row.cpu_percent for row in rows),
        memory_used_gib=memory / 2**30 if memory is not None else None,
        gpu_utilization=_mean(row.gpu_utilization for row in rows),
        gpu_memory_percent=_mean(row.gpu_memory_percent for row in rows),
    )


def _mean(figures: Iterable[float | None]) -> float | None:
    values = [figure for figure in figures if figure is not None]
    return statistics.fmean(values) if values else None
