"""The `timing` events of a job, and the few figures that everything else is made of. Pure.

A *window* is what rank 0 reports of consecutive steps: every ``log_frequency`` of them at first, then once a second.
Records of older trainers have none, and a field that is missing means «not known»: whatever reads windows works with
those that are there.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.documents.events import TimingEvent, WireTime, read_events
from trainer.performance.link import Link, fit_collective

SEGMENTS = ("input", "forward", "backward", "communication", "waiting", "optimizer", "checkpoint", "other")
"""Parts of a step, in the order in which they are drawn; they sum to a rank's step time."""
COMMUNICATION_LIMIT = 0.20
"""Share of training time that exposed wire may take before people are told."""


def windows(events: Iterable[Mapping[str, Any]]) -> list[TimingEvent]:
    """The ``timing`` events that can be read, in order of time. A run directory is input: one event that is damaged
    takes no report with it."""
    return sorted(read_events(TimingEvent, events), key=lambda window: window.time)


def settled(found: Sequence[TimingEvent]) -> list[TimingEvent]:
    """Without the first window of each generation, in which buckets are made and caches are cold, where enough
    remain to do without it."""
    by_generation: dict[int, list[TimingEvent]] = defaultdict(list)
    for window in found:
        by_generation[window.generation].append(window)
    return [window for group in by_generation.values() for window in (group[1:] if len(group) > 3 else group)]


def worlds(found: Sequence[TimingEvent]) -> list[list[TimingEvent]]:
    """Windows of the same ranks on the same nodes, together; those that trained longest first."""
    groups: dict[tuple[int, ...], list[TimingEvent]] = defaultdict(list)
    for window in found:
        groups[window.nodes].append(window)
    return sorted(groups.values(), key=seconds_of, reverse=True)


def seconds_of(found: Sequence[TimingEvent]) -> float:
    return sum(window.total_seconds for window in found)


def shares(found: Sequence[TimingEvent]) -> dict[str, float]:
    """Of the time of these windows, how much went into each segment, mean over ranks; they add up to 1."""
    total = seconds_of(found)
    if not total:
        return {}
    return {name: sum(window.mean(name) * window.steps for window in found) / total for name in SEGMENTS}


def typical_share(found: Sequence[TimingEvent], segment: str) -> float:
    """The median over windows: what one window that was held up by something else cannot spoil."""
    return statistics.median(window.mean(segment) / window.seconds for window in found) if found else 0.0


def typical_collectives(found: Sequence[TimingEvent]) -> list[WireTime]:
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
