"""What a finished job's records say about its speed: pure functions from events to figures and one verdict."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("startup", "data", "training", "evaluation", "checkpoint", "regroup", "finalise")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePerformance:
    """One node over the whole job (R3.1). GPU figures are None where the node has none."""

    node_id: int
    samples: int
    samples_per_second: float | None
    cpu_percent: float | None
    memory_used_gib: float | None
    gpu_utilization: float | None
    gpu_memory_percent: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Performance:
    """One job."""

    verdict: str
    """The bottleneck in one sentence, with its evidence."""
    samples_per_second: float
    """Over all nodes, in the training phase: median over the logged stretches."""
    step_milliseconds_median: float
    step_milliseconds_p95: float
    phase_seconds: dict[str, float]
    nodes: tuple[NodePerformance, ...]


def summarise(
    events: Sequence[Mapping[str, Any]], phase_seconds: Mapping[str, float], world_size: int, paid_seconds: float
) -> Performance:
    """`Performance` of a job, from its records. ``paid_seconds``: first node's start to last node's end."""
    steps = [item for item in events if item["kind"] == "step"]
    if not steps:
        raise ValueError("the job recorded no step: there is nothing to report on")
    by_node: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for item in events:
        if item["kind"] == "node":
            by_node[int(item["node_id"])].append(item)
    milliseconds = sorted(1000 * item["step_seconds"] for item in steps)
    phases = {name: float(phase_seconds.get(name, 0.0)) for name in PHASES}
    phases["outside the trainer"] = max(0.0, paid_seconds - sum(phases.values()))
    return Performance(
        verdict=verdict(phases, world_size),
        samples_per_second=statistics.median(item["samples_per_second"] for item in steps),
        step_milliseconds_median=statistics.median(milliseconds),
        step_milliseconds_p95=milliseconds[min(len(milliseconds) - 1, int(0.95 * len(milliseconds)))],
        phase_seconds=phases,
        nodes=tuple(_node(node, rows) for node, rows in sorted(by_node.items())),
    )


def verdict(phases: Mapping[str, float], world_size: int) -> str:
    """Which phase took most of the time that was paid for, and what that share is."""
    total = sum(phases.values()) or 1.0
    training = phases["training"] / total
    name, seconds = max(phases.items(), key=lambda item: item[1])
    if name == "training":
        return f"Training itself took {training:.0%} of the {total:.0f} s that {world_size} rank(s) were paid for."
    return (
        f"Not training but «{name}» took most of the time: {seconds:.0f} of {total:.0f} s ({seconds / total:.0%}); "
        f"training took {training:.0%}. A longer training would make that share smaller."
    )


def _node(node_id: int, rows: Sequence[Mapping[str, Any]]) -> NodePerformance:
    memory = _mean(rows, "memory_used_bytes")
    return NodePerformance(
        node_id=node_id,
        samples=len(rows),
        samples_per_second=_mean([row for row in rows if row.get("samples_per_second")], "samples_per_second"),
        cpu_percent=_mean(rows, "cpu_percent"),
        memory_used_gib=memory / 2**30 if memory is not None else None,
        gpu_utilization=_mean(rows, "gpu_utilization"),
        gpu_memory_percent=_mean(rows, "gpu_memory_percent"),
    )


def _mean(rows: Sequence[Mapping[str, Any]], field: str) -> float | None:
    values = [row[field] for row in rows if row.get(field) is not None]
    return statistics.fmean(values) if values else None
