"""A job's performance from its records: pure functions from events to figures, one verdict, and recommended changes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.tracker import bill_usage
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.verdict import Goodput, describe_performance, goodput
from dtrain_dagster.monitoring.diagnosis import Diagnosis, diagnose
from dtrain_dagster.monitoring.strategies import Change, strategies
from dtrain_dagster.monitoring.windows import (
    SEGMENTS,
    seconds_of,
    settled,
    shares,
    throughput,
    windows,
    worlds,
)
from trainer.documents.events import StepEvent, TimingEvent, read_events


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPerformance:
    """A rank of the world that trained longest: milliseconds per step of each segment, mean over the steps."""

    rank: int
    node_id: int
    samples_per_second: float | None
    milliseconds: dict[str, float]


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
    goodput: Goodput
    recommendations: tuple[Change, ...]
    """Changes that would gain more than noise, the largest gain first."""
    ranks: tuple[RankPerformance, ...]


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
    milliseconds = sorted(1000 * step.step_seconds for step in steps if step.step_seconds is not None)
    timed = windows(events)
    found = settled(timed)
    diagnosis, good = diagnose(events), goodput(ledger(bill_usage(usage)[0], events))
    pace = throughput(timed, steps)
    rate = pace.samples_per_second or 0.0
    return Performance(
        verdict=describe_performance(diagnosis, good),
        diagnosis=diagnosis,
        samples_per_second=rate,
        samples_per_second_per_rank=rate / world_size if pace.per_rank is None else pace.per_rank,
        step_milliseconds_median=statistics.median(milliseconds),
        step_milliseconds_p95=milliseconds[min(len(milliseconds) - 1, int(0.95 * len(milliseconds)))],
        segment_shares=shares(found),
        goodput=good,
        recommendations=strategies(found, training),
        ranks=_ranks(timed),
    )


def _ranks(found: Sequence[TimingEvent]) -> tuple[RankPerformance, ...]:
    groups = worlds(settled(found))
    if not groups:
        return ()
    world = groups[0]
    steps = sum(window.steps for window in world)
    mine = [window for window in found if window.nodes == world[-1].nodes]
    seconds = seconds_of(mine) if all(len(item.samples) == item.world_size for item in mine) else 0.0

    def mean(segment: str, rank: int) -> float:
        values = ((window.segments.get(segment) or (0.0,) * window.world_size)[rank] * window.steps for window in world)
        return 1000 * sum(values) / steps

    return tuple(
        RankPerformance(
            rank=rank,
            node_id=node,
            samples_per_second=sum(window.samples[rank] for window in mine) / seconds if seconds else None,
            milliseconds={segment: mean(segment, rank) for segment in SEGMENTS},
        )
        for rank, node in enumerate(world[-1].nodes)
    )
