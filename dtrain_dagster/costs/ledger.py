"""The ledger: every paid node-second is in one row, and the rows sum to the bill exactly. Pure.

What nodes did while they were members of a generation is in `dtrain_dagster.costs.timeline`; here it is laid onto what
was paid for. What no record explains is a row of its own.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dtrain_dagster.costs.money import SECOND, split, usd
from dtrain_dagster.costs.timeline import NEVER, CostCause, Mix, Span, Term, Timeline, timeline
from dtrain_dagster.costs.tracker import NodeCost

IN_STEPS = (CostCause.PRODUCTIVE, CostCause.COMMUNICATION, CostCause.WAITING, CostCause.INPUT)
"""Time in steps that counted; `Ledger.goodput` is their share."""
CLOSING = 60 * SECOND
"""Microseconds after the job's end in which its processes may be closing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """Time and dollars of one node for one cause."""

    node_id: int
    cause: CostCause
    microseconds: int
    units: int
    """Cost in the units of `dtrain_dagster.costs.money`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Entries of one cause, added up."""

    microseconds: int
    units: int

    @property
    def seconds(self) -> float:
        return self.microseconds / SECOND

    @property
    def usd(self) -> float:
        return usd(self.units)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The entries of a job's bill and the sums over them."""

    entries: tuple[LedgerEntry, ...]
    notes: tuple[str, ...]

    @property
    def microseconds(self) -> int:
        return sum(entry.microseconds for entry in self.entries)

    @property
    def units(self) -> int:
        return sum(entry.units for entry in self.entries)

    @property
    def goodput(self) -> float:
        """Return the share of the paid node-time that was spent in steps that counted."""
        whole = self.microseconds
        return sum(entry.microseconds for entry in self.entries if entry.cause in IN_STEPS) / whole if whole else 0.0

    def causes(self) -> dict[CostCause, Row]:
        sums: dict[CostCause, list[int]] = defaultdict(lambda: [0, 0])
        for entry in self.entries:
            row = sums[entry.cause]
            row[0] += entry.microseconds
            row[1] += entry.units
        return {cause: Row(microseconds=sums[cause][0], units=sums[cause][1]) for cause in CostCause if cause in sums}


def ledger(
    intervals: Sequence[NodeCost],
    events: Iterable[Mapping[str, object]],
    running: bool = False,
    is_script: bool = False,
) -> Ledger:
    """Return the ledger of what was paid (`CostTracker.nodes`) and a job's events, in order of time. ``running``: it
    has not ended; ``is_script``: it is a program that writes no events, and not a training."""
    line = timeline(events, running)
    if is_script and not line.terms:
        line = replace(line, silent=CostCause.SCRIPT)
    sums: dict[tuple[int, CostCause], list[int]] = defaultdict(lambda: [0, 0])
    longest = _longest_startup(intervals, line)
    for interval in intervals:
        for began, ended, mix in _pieces(interval, intervals, line, longest):
            for cause, part in zip(mix, split(ended - began, list(mix.values())), strict=True):
                if part:
                    row = sums[interval.node_id, cause]
                    row[0] += part
                    row[1] += part * interval.nano_usd_per_hour
    entries = tuple(
        LedgerEntry(node_id=node, cause=cause, microseconds=time, units=units)
        for (node, cause), (time, units) in sums.items()
    )
    return Ledger(entries=entries, notes=line.notes)


def _pieces(
    interval: NodeCost, intervals: Sequence[NodeCost], line: Timeline, longest: int
) -> Iterator[tuple[int, int, Mix]]:
    """Return a paid interval without gaps: what its node did when, as far as is known, and what the gaps mean."""
    if interval.is_probe:  # its own run directory says what it was spent on
        yield interval.began, interval.ended, {CostCause.PROBE: 1.0}
        return
    begun = _within(interval.preflight_until, interval, interval.began)
    left = max(begun, _within(interval.kept_since, interval, interval.ended))
    if begun > interval.began:
        yield interval.began, begun, {CostCause.PREFLIGHT: 1.0}
    if left > begun:
        yield from _work(replace(interval, began=begun, ended=left), intervals, line, longest)
    if interval.ended > left:
        yield left, interval.ended, {CostCause.KEPT: 1.0}


def _within(at: int | None, interval: NodeCost, default: int) -> int:
    return default if at is None else min(max(at, interval.began), interval.ended)


def _work(
    interval: NodeCost, intervals: Sequence[NodeCost], line: Timeline, longest: int
) -> Iterator[tuple[int, int, Mix]]:
    """Return the part of a paid interval in which its node started and worked, as `_pieces` does."""
    at = interval.began
    for span in _spans(interval, line):
        began, ended = max(at, span.began), min(interval.ended, span.ended)
        if ended > began:
            if began > at:
                yield from _gap(at, began, interval, intervals, line, longest)
            yield began, ended, span.by_node.get(interval.node_id, span.mix)
            at = ended
    yield from _gap(at, interval.ended, interval, intervals, line, longest)


def _spans(interval: NodeCost, line: Timeline) -> list[Span]:
    """Return the spans of the terms that this interval of the node was a member of."""
    found: list[Span] = []
    was_in = False
    for term in line.terms:
        is_in = _is_member(interval, term)
        found += [span for span in term.spans if (was_in if span.is_regroup else is_in)]
        was_in = is_in
    return sorted(found, key=lambda span: span.began)


def _gap(
    began: int, ended: int, interval: NodeCost, intervals: Sequence[NodeCost], line: Timeline, longest: int
) -> Iterator[tuple[int, int, Mix]]:
    """Paid time in which the node did nothing that is known as a member of a generation."""
    terms = [term for term in line.terms if _is_member(interval, term)]
    if not line.terms:  # a program that reports nothing, or nobody got so far, or what was reported is damaged
        marks = [(NEVER, CostCause.UNEXPLAINED if line.left_out else line.silent)]
    elif not terms:
        over = line.ended if line.ended > interval.began else NEVER
        marks = [(min(over, interval.began + longest), CostCause.STARTUP), (NEVER, CostCause.IDLE)]
    else:
        formed, there = terms[0].formed, began
        if terms[0].is_fresh:  # paid, and not all were there yet
            mates = [item.began for item in intervals if _is_member(item, terms[0])]
            there = min(formed, max(mates))
        marks = [(there, CostCause.PROVISIONING), (formed, CostCause.STARTUP)]
        for before, term in itertools.pairwise(line.terms):
            if term.formed > formed:
                marks.append((term.formed, _left(interval, before)))
        marks += [(line.ended, _left(interval, line.terms[-1])), (line.ended + CLOSING, CostCause.FINISH)]
        marks.append((NEVER, CostCause.IDLE))
    for mark, cause in marks:
        end = min(mark, ended)
        if end > began:
            yield began, end, {cause: 1.0}
            began = end


def _left(interval: NodeCost, term: Term) -> CostCause:
    """Return the cause of a term in which a node did nothing that is known: members might have."""
    return CostCause.UNEXPLAINED if _is_member(interval, term) else CostCause.LOST


def _longest_startup(intervals: Sequence[NodeCost], line: Timeline) -> int:
    """Return the most microseconds that a node took to join: one that never did was starting for that long."""
    took = []
    for interval in intervals:
        formed = [term.formed for term in line.terms if _is_member(interval, term)]
        if formed:
            took.append(formed[0] - interval.began)
    return max(took, default=NEVER)


def _is_member(interval: NodeCost, term: Term) -> bool:
    return term.has(interval.node_id) and interval.began <= term.formed < interval.ended
