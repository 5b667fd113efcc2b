"""The events of a job that the ledger uses, typed. Damaged events are left out and counted."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain_dagster.costs.money import SECOND, microseconds
from trainer.documents.events import (
    EndEvent,
    Event,
    HangEvent,
    LinkEvent,
    MembershipEvent,
    PhaseEvent,
    StepEvent,
    TimingEvent,
    read_event,
)

LARGEST = 10**12
"""Largest number of steps or seconds that is believed."""
_UNKNOWN: Any = {"samples": (), "segments": {}, "typical": {}}
KINDS: Mapping[str, type[Event]] = {
    kind.kind: kind for kind in (MembershipEvent, PhaseEvent, TimingEvent, StepEvent, LinkEvent, HangEvent, EndEvent)
}


@dataclass(slots=True)
class EventFacts:
    """The readable events, in order of time, by generation; of rank 0, except for hangs and ends."""

    memberships: dict[int, MembershipEvent] = field(default_factory=dict)
    phases: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """(time, what rank 0 had done until then)"""
    windows: dict[int, list[TimingEvent]] = field(default_factory=lambda: defaultdict(list))
    links: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Ends of link probes, which follow a window."""
    hangs: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """(time, how long nothing had moved)"""
    ends: list[tuple[int, int, str]] = field(default_factory=list)
    first_at: dict[int, int] = field(default_factory=dict)
    left_out: int = 0
    has_timing: bool = False


def read_facts(events: Iterable[Mapping[str, Any]]) -> EventFacts:
    facts = EventFacts()
    steps: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
    for item in events:
        kind = KINDS.get(str(item.get("kind")))
        if kind is None:
            continue
        try:
            event = read_event(kind, item)
            generation, time = event.generation, microseconds(event.time)
            if isinstance(event, EndEvent):
                facts.ends.append((generation, time, event.status))
            elif isinstance(event, HangEvent):
                facts.hangs[generation].append((time, microseconds(_believed(event.waited_seconds))))
            if event.rank != 0:
                continue
            if isinstance(event, MembershipEvent):
                is_told = event.step is not None and 0 <= event.step < LARGEST
                if not event.nodes or not is_told or not 0 <= event.seconds < LARGEST:
                    raise ValueError("no membership")
                facts.memberships.setdefault(generation, event)
            elif isinstance(event, PhaseEvent):
                facts.phases[generation].append((time, event.name))
            elif isinstance(event, LinkEvent):
                facts.links[generation].append(time)
            elif isinstance(event, TimingEvent):
                _believed(event.seconds)
                if not event.steps <= event.step < LARGEST or any(min(row) < 0 for row in event.segments.values()):
                    raise ValueError("no window")
                facts.windows[generation].append(event)
                facts.has_timing = True
            elif isinstance(event, StepEvent):
                if not 0 <= event.step < LARGEST:
                    raise ValueError("no step")
                steps[generation].append((time, event.step, _believed(event.step_seconds or 0.0)))
            facts.first_at[generation] = min(time, facts.first_at.get(generation, time))
        except (ValueError, OverflowError):
            facts.left_out += 1
    for generation, rows in steps.items():
        if generation not in facts.windows:
            facts.windows[generation] = _windows_of_steps(rows, facts.memberships.get(generation))
    for listed in (*facts.phases.values(), facts.ends):
        listed.sort()  # type: ignore[attr-defined]
    for found in facts.windows.values():
        found.sort(key=lambda window: window.time)
    return facts


def _windows_of_steps(rows: Sequence[tuple[int, int, float]], told: MembershipEvent | None) -> list[TimingEvent]:
    """Windows without segments, of a trainer that does not time them."""
    found: list[TimingEvent] = []
    before = told.step if told else None
    typical = statistics.median_low([b[1] - a[1] for a, b in itertools.pairwise(rows)] or [1])
    for time, step, seconds in sorted(rows):
        steps = step - before if before is not None else typical
        before = step
        if steps > 0:
            nodes = tuple(sorted(told.nodes)) if told else ()
            known = TimingEvent(time=time / SECOND, step=step, steps=steps, seconds=seconds, nodes=nodes, **_UNKNOWN)
            found.append(known)
    return found


def _believed(seconds: float) -> float:
    """Seconds. Less than a microsecond is none."""
    if not 1e-6 <= seconds < LARGEST:
        raise ValueError("not a duration")
    return seconds
