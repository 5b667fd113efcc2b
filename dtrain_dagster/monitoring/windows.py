"""The `timing` events of a job, and the few figures that all other analyses use. Pure.

A *window* is a report of rank 0 on consecutive steps: every ``log_frequency`` of them at first, then once a second.
Records of older trainers have none, and a field that is missing means ``not known``: readers of windows work with those
that exist.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.documents.events import CollectiveTiming, StepEvent, TimingEvent, read_events
from trainer.performance.link import Link, fit_collective

NOISE_FACTOR = 3.5
"""Robust standard errors by which a figure must exceed the noise."""

TELLING = ("timing", "link", "checkpoint")
"""Events that tell what slows steps."""
KEPT_WINDOWS, LATEST_WINDOWS = 40, 10
"""Windows that are kept of a running job, and those that decide about communication."""
KEPT_EVENTS = 10 * KEPT_WINDOWS
"""Upper bound of the events kept: saves and links are reported where no windows are (``training.timing``)."""
SEGMENTS = ("input", "forward", "backward", "communication", "waiting", "optimizer", "checkpoint", "other")
"""Parts of a step, in the order in which they are drawn; they sum to a rank's step time."""
COMMUNICATION_LIMIT = 0.20
"""The share of training time above which communication is reported: `COMMUNICATION_SEGMENTS` together."""
COMMUNICATION_SEGMENTS = ("communication", "waiting")
"""The parts of a step that communication costs: the wire, and waiting at collectives."""


def windows(events: Iterable[Mapping[str, Any]]) -> list[TimingEvent]:
    """Return the ``timing`` events that can be read, in order of time."""
    return sorted(read_events(TimingEvent, events), key=lambda window: window.time)


def settled(found: Sequence[TimingEvent]) -> list[TimingEvent]:
    """Return the windows without the first of each generation, whose caches are cold, if enough remain."""
    by_generation: dict[int, list[TimingEvent]] = defaultdict(list)
    for window in found:
        by_generation[window.generation].append(window)
    return [window for group in by_generation.values() for window in (group[1:] if len(group) > 3 else group)]


def worlds(found: Sequence[TimingEvent]) -> list[list[TimingEvent]]:
    """Return groups of windows of the same ranks on the same nodes; those that trained longest first."""
    groups: dict[tuple[int, ...], list[TimingEvent]] = defaultdict(list)
    for window in found:
        groups[window.nodes].append(window)
    return sorted(groups.values(), key=seconds_of, reverse=True)


def seconds_of(found: Sequence[TimingEvent]) -> float:
    return sum(window.total_seconds for window in found)


def shares(found: Sequence[TimingEvent]) -> dict[str, float]:
    """Return the share of each segment in the time of these windows, mean over ranks; they add up to 1."""
    total = seconds_of(found)
    if not total:
        return {}
    return {name: sum(window.mean(name) * window.steps for window in found) / total for name in SEGMENTS}


def exceeds_limit(found: Sequence[TimingEvent], segments: Sequence[str] = COMMUNICATION_SEGMENTS) -> bool:
    """Return whether these segments exceed `COMMUNICATION_LIMIT`, and not only by one window that hung."""
    part = shares(found)
    usual = statistics.median(shares_by_window(found, segments)) if found else 0.0
    return sum(part.get(name, 0.0) for name in segments) > COMMUNICATION_LIMIT and usual > COMMUNICATION_LIMIT / 2


def shares_by_window(found: Sequence[TimingEvent], segments: Sequence[str]) -> list[float]:
    return [window.mean(*segments) / window.seconds for window in found]


def typical_share(found: Sequence[TimingEvent], segment: str) -> float:
    """Return the median share over windows, which one window with a disturbance cannot spoil."""
    return statistics.median(shares_by_window(found, [segment])) if found else 0.0


def typical_collectives(found: Sequence[TimingEvent]) -> list[CollectiveTiming]:
    """Return each collective of a step, by name, as medians over the windows of one world."""
    by_name: dict[str, list[CollectiveTiming]] = defaultdict(list)
    for window in found:
        for item in window.collectives:
            by_name[item.name].append(item)
    return [_typical(items) for items in by_name.values()]


def collective_link(collectives: Iterable[CollectiveTiming]) -> Link | None:
    """Return the seconds of a collective by its bytes, fitted to these; None if their sizes are too similar."""
    return fit_collective((item.bytes, item.wire_seconds) for item in collectives)


def latency_share(link: Link, collectives: Iterable[CollectiveTiming], exposed_seconds: float) -> float:
    """Return the share of a step's exposed communication that does not depend on the bytes: latency of the network, and
    passing data from thread to thread."""
    moving = sum(item.bytes * link.seconds_per_byte * (1 - item.overlap) for item in collectives)
    return 1 - min(1.0, moving / exposed_seconds) if exposed_seconds > 0 else 0.0


def _typical(items: Sequence[CollectiveTiming]) -> CollectiveTiming:
    rates = [item.bandwidth_bytes_per_second for item in items if item.bandwidth_bytes_per_second]
    return CollectiveTiming(
        name=items[-1].name,
        bytes=items[-1].bytes,
        wire_seconds=statistics.median(item.wire_seconds for item in items),
        waiting_seconds=_medians([item.waiting_seconds for item in items]),
        overlapped_seconds=_medians([item.overlapped_seconds for item in items]),
        bandwidth_bytes_per_second=statistics.median(rates) if rates else None,
    )


def _medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=False))


def median_error(values: Sequence[float]) -> float:
    """Return the robust standard error of the median of these values, in their unit."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * spread / math.sqrt(len(values))


def is_steadily_above(limit: float, values: Sequence[float]) -> bool:
    """Return whether values are above the limit by more than their noise. On a machine that does other work too,
    processes that wait for a processor look like a network that is slow now and then."""
    return statistics.median(values) - NOISE_FACTOR * median_error(values) > limit


def ranks_that_share_cores(window: TimingEvent) -> tuple[int, ...]:
    """Return the ranks on machines that have more ranks than cores; none for GPUs, or where that is not known."""
    if not window.machines or not window.cores or window.facts.get("device", "cpu") != "cpu":
        return ()
    rows = enumerate(zip(window.machines, window.cores, strict=True))
    return tuple(rank for rank, (machine, cores) in rows if 0 < cores < window.machines.count(machine))


def with_own_cores(found: Sequence[TimingEvent]) -> list[TimingEvent]:
    """Return the windows in which no ranks share cores: only these tell what communication costs."""
    return [window for window in found if not ranks_that_share_cores(window)]


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was trained so far; `after` adds events as they come."""

    seconds: float = 0.0
    rank_seconds: float = 0.0
    """Seconds times ranks."""
    samples: int = 0
    reported_seconds: float = 0.0
    reported_samples: float = 0.0
    """Those of `step` events, each of which stands for one step."""

    def after(self, event: TimingEvent | StepEvent) -> Throughput:
        if isinstance(event, StepEvent):
            if not event.step_seconds or event.samples_per_second is None:
                return self
            samples = self.reported_samples + event.samples_per_second * event.step_seconds
            return replace(self, reported_seconds=self.reported_seconds + event.step_seconds, reported_samples=samples)
        if not event.samples or len(event.samples) != event.world_size:
            return self
        return replace(
            self,
            seconds=self.seconds + event.total_seconds,
            rank_seconds=self.rank_seconds + event.total_seconds * event.world_size,
            samples=self.samples + sum(event.samples),
        )

    @property
    def samples_per_second(self) -> float | None:
        """The samples of all nodes per second; None where nothing was recorded."""
        if self.seconds:
            return self.samples / self.seconds
        return self.reported_samples / self.reported_seconds if self.reported_seconds else None

    @property
    def per_rank(self) -> float | None:
        """The samples of a rank per second, mean over ranks; None where no windows were recorded."""
        return self.samples / self.rank_seconds if self.rank_seconds else None


def throughput(found: Iterable[TimingEvent], steps: Iterable[StepEvent] = ()) -> Throughput:
    whole = Throughput()
    for window in found:
        whole = whole.after(window)
    for step in steps:
        whole = whole.after(step)
    return whole


def keep(recent: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the events to decide from: those kept so far and these, back to the oldest of the latest windows."""
    found = [*recent, *(item for item in events if item["kind"] in TELLING)][-KEPT_EVENTS:]
    timing = [place for place, item in enumerate(found) if item["kind"] == "timing"]
    return tuple(found[timing[-KEPT_WINDOWS] :] if len(timing) > KEPT_WINDOWS else found)
