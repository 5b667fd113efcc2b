"""The durations of a finished run, read from its records. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dtrain_dagster.costs.estimate import Measured
from dtrain_dagster.monitoring.windows import COMMUNICATION_SEGMENTS, settled, shares, windows
from trainer.documents.events import EvaluationEvent, PhaseEvent, StepEvent, TimingEvent, read_events
from trainer.documents.presences import NodePresence

SLOW_PARTS = 3
OUTLIER = 3.0
"""Times the median from which an interval is an outlier: something else was going on."""
SETTLED_FROM = 12
"""Number of intervals from which only the second half is typical: while rank 0 opens its trackers, which is seconds of
Python, its steps take several times as long."""


def read_measured(
    events: Sequence[dict[str, Any]],
    nodes: Sequence[NodePresence],
    node_count: int,
    global_batch_size: int,
    keeps_cache: bool,
) -> Measured:
    """Return the durations of a finished run. ``keeps_cache``: shards that it unpacked are there for the next. Pure."""
    launch = max(node.launch for node in nodes)
    nodes = [node for node in nodes if node.launch == launch]
    begin = min(node.started_at for node in nodes)
    events = [item for item in events if item["time"] >= begin]  # their generations count regroups, not launches
    end = max(node.ended_at or node.started_at for node in nodes)
    phases = [phase for phase in read_events(PhaseEvent, events) if phase.rank == 0]
    seconds = {phase.name: phase.seconds for phase in phases}  # running sums: the last one counts
    ready = max(phase.time for phase in phases if phase.name == "startup")
    saves = sum(phase.name == "checkpoint" for phase in phases)
    judged = [item.seconds or 0.0 for item in read_events(EvaluationEvent, events) if item.split == "valid"]
    evaluation = statistics.fmean(judged[1:] or judged or [0.0])
    training, judging, saving = (seconds.get(name, 0.0) for name in ("training", "evaluation", "checkpoint"))

    timed = windows(events)
    parts = shares(settled(timed))
    growing = sum(parts[name] for name in ("input", "forward", "backward")) if parts else 1.0
    intervals = _intervals(events, timed, global_batch_size)
    sizes = [1 - growing + growing * fill for _, _, fill in intervals]
    full = [each / size for (_, each, _), size in zip(intervals, sizes, strict=True)]
    full = full[len(full) // 2 if len(full) >= SETTLED_FROM else 1 :] or full
    limit = OUTLIER * statistics.median(full)
    full = [min(each, limit) for each in full]
    typical = statistics.fmean(full)
    usual = sum(count * typical * size for (count, _, _), size in zip(intervals, sizes, strict=True))
    startup = ready - begin - (seconds.get("data", 0.0) if keeps_cache else 0.0)
    return Measured(
        node_count=node_count,
        startup_seconds=max(0.0, startup),
        warm_up_seconds=max(0.0, training - usual) + max(0.0, judging - evaluation * len(judged)),
        step_seconds=typical,
        step_spread=step_spread(full),
        sample_share=growing,
        compute_share=sum(parts[name] for name in ("forward", "backward", "optimizer")) if parts else 1.0,
        communication_share=sum(parts.get(name, 0.0) for name in COMMUNICATION_SEGMENTS),
        evaluation_seconds=evaluation,
        checkpoint_seconds=saving / max(1, saves),
        finish_seconds=max(0.0, end - ready - training - judging - saving - seconds.get("regroup", 0.0)),
    )


def step_spread(intervals: Sequence[float]) -> float:
    """Return the relative standard deviation of the mean of these seconds per step, one interval after the other.

    Intervals that vary by themselves average out. A machine that is slower for some of them does not: a training meets
    other such times than its probe did. So what `SLOW_PARTS` parts of the probe differ by, beyond what their intervals
    explain, counts in full.
    """
    if len(intervals) < 2:
        return 0.0
    mean = statistics.fmean(intervals)
    fast = statistics.variance(intervals)
    if len(intervals) < 2 * SLOW_PARTS:
        return math.sqrt(fast / len(intervals)) / mean
    edges = [round(part * len(intervals) / SLOW_PARTS) for part in range(SLOW_PARTS + 1)]
    parts = [intervals[first:last] for first, last in pairwise(edges)]
    # Differences of neighbours hold only what varies from one interval to the next.
    quick = sum((after - before) ** 2 for before, after in pairwise(intervals)) / 2 / (len(intervals) - 1)
    slow = statistics.variance(map(statistics.fmean, parts)) - quick * SLOW_PARTS / len(intervals)
    return math.sqrt(fast / len(intervals) + max(0.0, slow)) / mean


def _intervals(
    events: Sequence[Mapping[str, Any]], timed: Sequence[TimingEvent], global_batch_size: int
) -> list[tuple[int, float, float]]:
    """Return (steps, seconds of each, how full their batches were) from one ``step`` event to the next."""
    fills = {item.step: sum(item.samples) / (item.steps * global_batch_size) for item in timed if item.samples}
    found, before = [], 0
    for item in read_events(StepEvent, events):
        count = item.step - before
        if count > 0 and item.step_seconds is not None:  # not one of steps that a regroup did again
            found.append((count, item.step_seconds, fills.get(item.step, 1.0)))
            before = item.step
    return found
