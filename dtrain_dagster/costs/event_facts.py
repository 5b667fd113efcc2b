"""The events of a job that the ledger uses, typed. Damaged events are left out and counted."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain_dagster.costs.money import SECOND, is_finite, microseconds
from trainer.documents.events import (
    EndEvent,
    HangEvent,
    MembershipEvent,
    PhaseEvent,
    StepEvent,
    TimingEvent,
    read_event,
)

LARGEST = 10**12
"""Largest number of steps or seconds that is believed."""
_UNKNOWN: Any = {"samples": (), "segments": {}, "typical": {}}
KINDS = ("membership", "phase", "timing", "step", "link", "hang", "end")


@dataclass(slots=True)
class EventFacts:
    """The readable events, in order of time."""

    memberships: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    phases: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """Phases of rank 0 by generation: (time, what it had done until then)."""
    windows: dict[int, list[TimingEvent]] = field(default_factory=lambda: defaultdict(list))
    links: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Ends of link probes, which follow a window."""
    hangs: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Hangs of any rank: (time, how long nothing had moved)."""
    ends: list[tuple[int, int, str]] = field(default_factory=list)
    first_at: dict[int, int] = field(default_factory=dict)
    left_out: int = 0
    has_timing: bool = False


def read_facts(events: Iterable[Mapping[str, Any]]) -> EventFacts:
    facts = EventFacts()
    steps: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
    for item in events:
        try:
            kind = item["kind"]
            if kind not in KINDS:
                continue
            generation, rank, time = int(item["generation"]), int(item["rank"]), microseconds(item["time"])
            if kind == "end":
                facts.ends.append((generation, time, read_event(EndEvent, item).status))
            elif kind == "hang":
                waited = _positive(read_event(HangEvent, item).waited_seconds)
                facts.hangs[generation].append((time, microseconds(waited)))
            if rank != 0:
                continue
            if kind == "membership":
                facts.memberships.setdefault(generation, _membership(read_event(MembershipEvent, item), time))
            elif kind == "phase":
                facts.phases[generation].append((time, read_event(PhaseEvent, item).name))
            elif kind == "link":
                facts.links[generation].append(time)
            elif kind == "timing":
                window = _window(item)
                facts.windows[generation].append(window)
                facts.has_timing = True
            elif kind == "step":
                told = read_event(StepEvent, item)
                steps[generation].append((time, _count(told.step), _positive(told.step_seconds)))
            facts.first_at[generation] = min(time, facts.first_at.get(generation, time))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            facts.left_out += 1
    for generation, rows in steps.items():
        if generation not in facts.windows:
            facts.windows[generation] = _windows_of_steps(rows, facts.memberships.get(generation))
    for listed in (*facts.phases.values(), facts.ends):
        listed.sort()  # type: ignore[attr-defined]
    for found in facts.windows.values():
        found.sort(key=lambda window: window.time)
    return facts


def _membership(event: MembershipEvent, time: int) -> dict[str, Any]:
    nodes, joined = (frozenset(map(int, listed)) for listed in (event.nodes, event.joined))
    if not nodes or event.seconds < 0:
        raise ValueError("no membership")
    began = time - microseconds(event.seconds)
    return {"nodes": nodes, "joined": joined, "time": time, "began": began, "step": _count(event.step)}


def _window(item: Mapping[str, Any]) -> TimingEvent:
    """Return the timing window of an event; raise ValueError, among others, for one that cannot be used."""
    window = read_event(TimingEvent, item)
    _positive(window.seconds)
    if _count(window.steps) == 0 or _count(window.step) < window.steps:
        raise ValueError("no window")
    if not all(is_finite(value) and value >= 0 for values in window.segments.values() for value in values):
        raise ValueError("no segments")
    return window


def _windows_of_steps(rows: Sequence[tuple[int, int, float]], told: Mapping[str, Any] | None) -> list[TimingEvent]:
    """Windows without segments, of a trainer that does not time them."""
    found: list[TimingEvent] = []
    before = told["step"] if told else None
    typical = statistics.median_low([b[1] - a[1] for a, b in itertools.pairwise(rows)] or [1])
    for time, step, seconds in sorted(rows):
        steps = step - before if before is not None else typical
        before = step
        if steps > 0:
            nodes = tuple(sorted(told["nodes"])) if told else ()
            known = TimingEvent(time=time / SECOND, step=step, steps=steps, seconds=seconds, nodes=nodes, **_UNKNOWN)
            found.append(known)
    return found


def _positive(value: Any) -> float:
    """Seconds. Less than a microsecond is none."""
    if not is_finite(value) or not 1e-6 <= value < LARGEST:
        raise ValueError("not a duration")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not 0 <= int(value) < LARGEST:
        raise ValueError("not a count")
    return int(value)
