"""The `timing` events of a job as typed windows, and the few figures that everything else is made of. Pure.

A *window* is what rank 0 reports of consecutive steps: every ``log_frequency`` of them at first, then once a second.
Records of older trainers have none, and a field that is missing means «not known»: whatever reads windows works with
those that are there.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.performance.link import Link, fit_collective

SEGMENTS = ("input", "forward", "backward", "communication", "waiting", "optimizer", "checkpoint", "other")
"""Parts of a step, in the order in which they are drawn; they sum to a rank's step time."""
COMMUNICATION_LIMIT = 0.20
"""Share of training time that exposed wire may take before people are told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireTime:
    """One collective of a step, by name: means over the steps of a window, or medians over windows."""

    name: str
    bytes: int
    wire_seconds: float
    waiting_seconds: tuple[float, ...] = ()
    overlapped_seconds: tuple[float, ...] = ()
    bandwidth_bytes_per_second: float | None = None

    @property
    def overlap(self) -> float:
        """Share of its own duration that the backward pass hid, mean over ranks."""
        own = self.wire_seconds * max(1, len(self.overlapped_seconds)) + sum(self.waiting_seconds)
        return min(1.0, sum(self.overlapped_seconds) / own) if own > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingWindow:
    """What the ranks of one world did in some consecutive steps. Seconds are means per step, one for each rank."""

    time: float
    """When it ended; Unix seconds."""
    step: int
    steps: int
    seconds: float
    """Of one step."""
    nodes: tuple[int, ...]
    samples: tuple[int, ...]
    segments: Mapping[str, tuple[float, ...]]
    typical: Mapping[str, tuple[float, ...]]
    """Medians over the window's steps: ``input``, ``compute`` (forward, backward, optimizer), ``late``."""
    collectives: tuple[WireTime, ...] = ()
    generation: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """``topology``, ``backend``, ``device``, ``micro_batches``, ``local_samples_per_micro_batch``…"""

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def total_seconds(self) -> float:
        return self.seconds * self.steps

    def mean(self, segment: str) -> float:
        """Seconds per step, mean over ranks; 0 where it was not measured."""
        values = self.segments.get(segment)
        return statistics.fmean(values) if values else 0.0


def windows(events: Iterable[Mapping[str, Any]]) -> list[TimingWindow]:
    """The ``timing`` events that can be read, in order of time."""
    found = []
    for item in events:
        if item.get("kind") == "timing":
            # A run directory is input: one event that is damaged takes no report with it.
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                if (window := _window(item)) is not None:
                    found.append(window)
    return sorted(found, key=lambda window: window.time)


def settled(found: Sequence[TimingWindow]) -> list[TimingWindow]:
    """Without the first window of each generation, in which buckets are made and caches are cold, where enough
    remain to do without it."""
    by_generation: dict[int, list[TimingWindow]] = defaultdict(list)
    for window in found:
        by_generation[window.generation].append(window)
    return [window for group in by_generation.values() for window in (group[1:] if len(group) > 3 else group)]


def worlds(found: Sequence[TimingWindow]) -> list[list[TimingWindow]]:
    """Windows of the same ranks on the same nodes, together; those that trained longest first."""
    groups: dict[tuple[int, ...], list[TimingWindow]] = defaultdict(list)
    for window in found:
        groups[window.nodes].append(window)
    return sorted(groups.values(), key=seconds_of, reverse=True)


def seconds_of(found: Sequence[TimingWindow]) -> float:
    return sum(window.total_seconds for window in found)


def shares(found: Sequence[TimingWindow]) -> dict[str, float]:
    """Of the time of these windows, how much went into each segment, mean over ranks; they add up to 1."""
    total = seconds_of(found)
    if not total:
        return {}
    return {name: sum(window.mean(name) * window.steps for window in found) / total for name in SEGMENTS}


def typical_share(found: Sequence[TimingWindow], segment: str) -> float:
    """The median over windows: what one window that was held up by something else cannot spoil."""
    return statistics.median(window.mean(segment) / window.seconds for window in found) if found else 0.0


def typical_collectives(found: Sequence[TimingWindow]) -> list[WireTime]:
    """Each collective of a step, by name, as medians over the windows of one world."""
    by_name: dict[str, list[WireTime]] = defaultdict(list)
    for window in found:
        for item in window.collectives:
            by_name[item.name].append(item)
    return [_typical(items) for items in by_name.values()]


def collective_link(collectives: Iterable[WireTime]) -> Link | None:
    """What a collective takes in the world that has these; None where their sizes are too much alike to tell."""
    return fit_collective((item.bytes, item.wire_seconds) for item in collectives)


def latency_share(link: Link, collectives: Iterable[WireTime], exposed_seconds: float) -> float:
    """Of the wire time of a step that nothing hides, how much is there however few bytes are moved: latency of the
    network, and handing over from thread to thread."""
    moving = sum(item.bytes * link.seconds_per_byte * (1 - item.overlap) for item in collectives)
    return 1 - min(1.0, moving / exposed_seconds) if exposed_seconds > 0 else 0.0


def _typical(items: Sequence[WireTime]) -> WireTime:
    rates = [item.bandwidth_bytes_per_second for item in items if item.bandwidth_bytes_per_second]
    return WireTime(
        name=items[-1].name,
        bytes=items[-1].bytes,
        wire_seconds=statistics.median(item.wire_seconds for item in items),
        waiting_seconds=_medians([item.waiting_seconds for item in items]),
        overlapped_seconds=_medians([item.overlapped_seconds for item in items]),
        bandwidth_bytes_per_second=statistics.median(rates) if rates else None,
    )


def _medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=False))


def _window(item: Mapping[str, Any]) -> TimingWindow | None:
    """None where it says too little to be of use."""
    nodes = tuple(int(node) for node in item.get("nodes") or ())
    size = len(nodes)
    segments = {
        name: tuple(map(float, values)) for name, values in (item.get("segments") or {}).items() if len(values) == size
    }
    # What the segments of the ranks sum to, so that shares add up; the wall clock where there are none.
    sums = [sum(values) for values in zip(*segments.values(), strict=True)]
    seconds = statistics.fmean(sums) if sums else float(item.get("seconds") or 0.0)
    if not nodes or not 0 < seconds < math.inf or not item.get("steps"):
        return None
    typical = {
        name: tuple(map(float, values)) for name, values in (item.get("typical") or {}).items() if len(values) == size
    }
    return TimingWindow(
        time=float(item.get("time", 0.0)),
        step=int(item.get("step", 0)),
        steps=int(item["steps"]),
        seconds=seconds,
        nodes=nodes,
        samples=tuple(map(int, item.get("samples") or ())),
        segments=segments,
        typical=typical,
        collectives=tuple(_collective(row) for row in item.get("collectives") or ()),
        generation=int(item.get("generation", 0)),
        facts={name: value for name, value in item.items() if isinstance(value, int | float | str)},
    )


def _collective(row: Mapping[str, Any]) -> WireTime:
    return WireTime(
        name=str(row.get("name", "")),
        bytes=int(row.get("bytes") or 0),
        wire_seconds=float(row.get("wire_seconds") or 0.0),
        waiting_seconds=tuple(map(float, row.get("waiting_seconds") or ())),
        overlapped_seconds=tuple(map(float, row.get("overlapped_seconds") or ())),
        bandwidth_bytes_per_second=row.get("bandwidth_bytes_per_second"),
    )
