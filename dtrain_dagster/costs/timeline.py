"""The activity of each generation's members over time, from a job's events. Pure; `dtrain_dagster.costs.ledger` prices
it.

Rank 0's ``phase`` events say what the time since the one before was spent on, and leave no gap: ranks go in step, so
that holds for all members. Within the training phase the ``timing`` windows say what each rank did. What cannot be read
is left out and counted, and nothing here raises.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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


class CostCause(StrEnum):
    """The cause of a paid node-second, in the order in which causes are shown, and what it means."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> CostCause:
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    PRODUCTIVE = "productive", "forward, backward, optimizer, and the votes and reports of a step"
    SCRIPT = "script", "your own program, which does not say what it does"
    COMMUNICATION = "exposed communication", "communication that no computation hides"
    WAITING = "waiting for a straggler", "for the slowest rank, in a step"
    INPUT = "input", "for the next batch"
    CHECKPOINT = "checkpoint", "held up by a save, or waiting for the rank that saved"
    EVALUATION = "evaluation", "of the validation split"
    FINISH = "finish", "test split, baselines, final weights, result, processes closing"
    PROBE = "probe", "a short run of this training, which its plan rests on"
    PROVISIONING = "provisioning", "paid while other nodes of the launch were still being bought"
    PREFLIGHT = "pre-flight", "checks of a node before it joins"
    STARTUP = "start-up", "from a node's start until it trains: process, data, model, joining"
    LOST = "lost to a failure", "steps done again, noticing a loss, regrouping, nodes paid for but dead or frozen"
    KEPT = "kept for debugging", "a failed node, left in place for a person to look at"
    IDLE = "idle", "paid after the job's end, or never part of the training"
    UNEXPLAINED = "unexplained", "no record says what it was for"


Mix = Mapping[CostCause, float]
"""The causes of an interval of time; the figures are weights."""

SEGMENT_CAUSES = {
    "input": CostCause.INPUT,
    "communication": CostCause.COMMUNICATION,
    "waiting": CostCause.WAITING,
    "checkpoint": CostCause.CHECKPOINT,
    "forward": CostCause.PRODUCTIVE,
    "backward": CostCause.PRODUCTIVE,
    "optimizer": CostCause.PRODUCTIVE,
    "other": CostCause.PRODUCTIVE,  # votes and reports: what a training cannot do without
}
PHASE_CAUSES = {
    "startup": CostCause.STARTUP,
    "data": CostCause.STARTUP,
    "evaluation": CostCause.EVALUATION,
    "finalise": CostCause.FINISH,
    "regroup": CostCause.LOST,
    "links": CostCause.COMMUNICATION,  # a probe of them; no phase of the trainer's own
}
IN_STEPS = ("training", "checkpoint")
"""Phases whose time the windows divide: the time that a save holds up is a segment of theirs."""
NEVER = 1 << 62
MOST_SPANS = 1500
"""Spans of a generation's windows; of more windows, neighbours are taken together."""
LARGEST = 10**12
"""Largest number of steps or seconds that is believed."""
_UNKNOWN: Any = {"samples": (), "segments": {}, "typical": {}}
KINDS: Mapping[str, type[Event]] = {
    kind.kind: kind for kind in (MembershipEvent, PhaseEvent, TimingEvent, StepEvent, LinkEvent, HangEvent, EndEvent)
}


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of the members of a generation, in microseconds."""

    began: int
    ended: int
    mix: Mix
    by_node: Mapping[int, Mix] = field(default_factory=dict)
    """Mixes of the nodes for which more is known."""
    is_regroup: bool = False
    """Whether it concerns only members of the generation before, not newcomers."""


@dataclass(slots=True)
class Term:
    """A generation at work: its readable events, of rank 0 except for hangs and ends, and what its members did."""

    number: int
    first_at: int = NEVER
    """Time of its first event in microseconds, as all times here."""
    membership: MembershipEvent | None = None
    phases: list[tuple[int, str]] = field(default_factory=list)
    """(time, what rank 0 had done until then)"""
    windows: list[TimingEvent] = field(default_factory=list)
    has_timing: bool = False
    reports: list[tuple[int, int, float]] = field(default_factory=list)
    """(time, step, seconds of a step)"""
    links: list[int] = field(default_factory=list)
    """Ends of link probes, which follow a window."""
    hangs: list[tuple[int, int]] = field(default_factory=list)
    """(time, how long nothing had moved)"""
    ends: list[tuple[int, str]] = field(default_factory=list)
    formed: int = 0
    until: int = NEVER
    """When the next one began to form."""
    nodes: frozenset[int] | None = None
    """Nodes of the generation; None: not known, so all."""
    is_fresh: bool = True
    """Whether no member was in the generation before: a launch begins."""
    step: int = 0
    spans: list[Span] = field(default_factory=list)

    def has(self, node: int) -> bool:
        return self.nodes is None or node in self.nodes


@dataclass(frozen=True, slots=True)
class Timeline:
    """The terms of a job and its end."""

    terms: tuple[Term, ...]
    ended: int
    """Time at which the job reported its end; `NEVER` if it did not."""
    notes: tuple[str, ...]
    left_out: int
    silent: CostCause = CostCause.STARTUP
    """The cause of the time of nodes that report nothing at all."""


def timeline(events: Iterable[Mapping[str, Any]], running: bool = False) -> Timeline:
    """Return the timeline of a job's events. ``running``: the time after its last report counts like that before."""
    terms, left_out = _read_terms(events)
    for before, term in zip([None, *terms], terms, strict=False):
        _begin(term, before)
    ended = max((time for time, _ in terms[-1].ends), default=NEVER) if terms else NEVER
    kept = _kept_steps(terms)
    for term, after in itertools.zip_longest(terms, terms[1:]):
        _fill(term, after, kept, ended, running)
    notes = []
    if left_out:
        notes.append(f"{left_out} event(s) could not be read and were left out")
    if terms and not any(term.has_timing for term in terms):
        notes.append(
            "the trainer recorded no timing (training.timing): input, communication, waiting and saving are within "
            f"'{CostCause.PRODUCTIVE}'"
        )
    return Timeline(tuple(terms), ended, tuple(notes), left_out)


def _read_terms(events: Iterable[Mapping[str, Any]]) -> tuple[list[Term], int]:
    """Return the generations that rank 0 tells of, in their order, and how many events cannot be read."""
    terms: dict[int, Term] = {}
    left_out = 0
    for item in events:
        if (kind := KINDS.get(str(item.get("kind")))) is None:
            continue
        try:
            event = read_event(kind, item)
            term = terms.setdefault(event.generation, Term(event.generation))
            _add(term, event, microseconds(event.time))
        except (ValueError, OverflowError):
            left_out += 1
    found = [terms[number] for number in sorted(terms) if terms[number].first_at < NEVER]
    for term in found:
        if not term.has_timing:
            term.windows = _windows_of_steps(term)
        term.windows.sort(key=lambda window: window.time)
        term.phases.sort()
    return found, left_out


def _add(term: Term, event: Event, time: int) -> None:
    """Add an event to its generation. Raise ValueError or OverflowError for one that cannot be."""
    if isinstance(event, EndEvent):
        term.ends.append((time, event.status))
    elif isinstance(event, HangEvent):
        term.hangs.append((time, microseconds(_believed(event.waited_seconds))))
    if event.rank != 0:
        return
    if isinstance(event, MembershipEvent):
        is_told = event.step is not None and 0 <= event.step < LARGEST
        if not event.nodes or not is_told or not 0 <= event.seconds < LARGEST:
            raise ValueError("no membership")
        term.membership = term.membership or event
    elif isinstance(event, PhaseEvent):
        term.phases.append((time, event.name))
    elif isinstance(event, LinkEvent):
        term.links.append(time)
    elif isinstance(event, TimingEvent):
        _believed(event.seconds)
        if not event.steps <= event.step < LARGEST or any(min(row) < 0 for row in event.segments.values()):
            raise ValueError("no window")
        term.windows.append(event)
        term.has_timing = True
    elif isinstance(event, StepEvent):
        if not 0 <= event.step < LARGEST:
            raise ValueError("no step")
        term.reports.append((time, event.step, _believed(event.step_seconds or 0.0)))
    term.first_at = min(time, term.first_at)


def _believed(seconds: float) -> float:
    """Seconds. Less than a microsecond is none."""
    if not 1e-6 <= seconds < LARGEST:
        raise ValueError("not a duration")
    return seconds


def _windows_of_steps(term: Term) -> list[TimingEvent]:
    """Windows without segments, of a trainer that does not time them."""
    found: list[TimingEvent] = []
    told = term.membership
    before, nodes = (told.step, tuple(sorted(told.nodes))) if told else (None, ())
    typical = statistics.median_low([b[1] - a[1] for a, b in itertools.pairwise(term.reports)] or [1])
    for time, step, seconds in sorted(term.reports):
        steps = step - before if before is not None else typical
        before = step
        if steps > 0:
            known = TimingEvent(time=time / SECOND, step=step, steps=steps, seconds=seconds, nodes=nodes, **_UNKNOWN)
            found.append(known)
    return found


def _begin(term: Term, before: Term | None) -> None:
    """Find out when a term began and with whom, which ends the one before."""
    told, first = term.membership, term.windows[0] if term.windows else None
    if told is not None:
        term.nodes, term.is_fresh = frozenset(told.nodes), {*told.nodes} <= {*told.joined}
        term.formed, term.step = microseconds(told.time), told.step or 0
        began = term.formed - microseconds(told.seconds)
    else:  # a world of fixed ranks, or one whose end came before it could say who is in it
        term.nodes = frozenset(first.nodes) if first and first.nodes else None
        term.formed = began = min(term.first_at, _began(first)) if first else term.first_at
        term.step = first.step - first.steps if first else 0
    if before is not None:
        before.until = max(before.formed, term.formed if term.is_fresh else began)


def _began(window: TimingEvent) -> int:
    return microseconds(window.time - window.total_seconds)


def _fill(term: Term, after: Term | None, kept: Mapping[int, int], ended: int, running: bool) -> None:
    """Put what the members of a term did into its spans."""
    if after is not None and not after.is_fresh:
        after.spans.append(Span(term.until, after.formed, {CostCause.LOST: 1.0}, is_regroup=True))
    in_steps: list[tuple[int, int, str]] = []
    for began, until, name in _phases(term, after, ended, running):
        if name in IN_STEPS and (name == "training" or term.has_timing):
            in_steps.append((began, until, name))
        else:
            cause = CostCause.CHECKPOINT if name in IN_STEPS else PHASE_CAUSES.get(name, CostCause.UNEXPLAINED)
            term.spans.append(Span(began, until, {cause: 1.0}))
    before, balance = -NEVER, 0.0
    for together in _batches(term.windows):
        end = microseconds(together[-1].time)
        pieces = _clip(in_steps, before, end)
        measured = sum(microseconds(window.total_seconds) for window in together)
        # A window is reported a little after its last step, now sooner, now later: what one has too much of, another
        # lacks. Only what no window of the term has measured is without an explanation.
        balance += sum(until - began for began, until, _ in pieces) - measured
        more, balance = max(0.0, balance) if term.has_timing else 0.0, min(0.0, balance)
        hung = max((waited for time, waited in term.hangs if before < time <= end), default=0)
        common, by_node = _mixes(together, kept, hung / max(1, measured))
        if more:
            for mix in (common, *by_node.values()):
                mix[CostCause.UNEXPLAINED] += more / SECOND
        term.spans += [Span(began, until, common, by_node) for began, until, _ in pieces]
        before = max(before, end)
    _rest(term, after, _clip(in_steps, before, NEVER))
    term.spans.sort(key=lambda span: (span.began, span.ended))


def _phases(term: Term, after: Term | None, ended: int, running: bool) -> list[tuple[int, int, str]]:
    """(began, ended, name) of what rank 0 did from the term's start to its end, without gaps."""
    found, at, windows = [], term.formed, term.windows
    phases = list(term.phases)
    for time in term.links:
        place = bisect_right(windows, time / SECOND, key=lambda window: window.time)
        phases += [(microseconds(windows[place - 1].time) if place else time, "training"), (time, "links")]
    if not any(term.formed < time <= term.until for time, _ in phases) and windows:
        # No phases are known: steps, and what is between them.
        phases += [(_began(windows[0]), "startup"), (microseconds(windows[-1].time), "training")]
    for time, name in sorted(phases):
        if at < time <= term.until:
            found.append((at, time, name))
            at = time
    name = "regroup"
    if after is not None or (running and ended == NEVER):
        name = "training"
    elif ended < NEVER or (found and found[-1][2] == "finalise") or (windows and not term.phases):
        name = "regroup" if any(status == "failed" for _, status in term.ends) else "finalise"
    until = min(term.until, ended)
    return [*found, (at, until, name)] if until > at else found


Sums = defaultdict[CostCause, float]


def _mixes(together: Sequence[TimingEvent], kept: Mapping[int, int], hung: float) -> tuple[Sums, dict[int, Sums]]:
    """Return the seconds of these windows by cause: of any node, and of those whose ranks were timed. Steps that were
    done again later are lost, and so is the share of the time in which nothing moved: of what took longest, for that is
    where a rank was."""
    common, by_node = Sums(float), dict[int, Sums]()
    for window in together:
        share = min(window.steps, max(0, kept[id(window)])) / window.steps
        for mix, sums in [({CostCause.PRODUCTIVE: 1.0}, common)] + [
            (mix, by_node.setdefault(node, Sums(float))) for node, mix in node_mixes(window).items()
        ]:
            scale = window.total_seconds / sum(mix.values())
            for cause, value in mix.items():
                sums[cause] += scale * share * value
            sums[CostCause.LOST] += scale * (1 - share) * sum(mix.values())
    for sums in (common, *by_node.values()) if hung else ():
        left = min(1.0, hung) * sum(sums.values())
        for cause in sorted(sums, key=lambda cause: -sums[cause]):
            part = min(left, sums[cause])
            sums[cause] -= part
            sums[CostCause.LOST] += part
            left -= part
    return common, by_node


def _rest(term: Term, after: Term | None, pieces: Sequence[tuple[int, int, str]]) -> None:
    """Training time after the last window of a term. Steps that count though no window tells of them took as long as
    those before; the rest went into noticing that a node was lost, or is lost itself."""
    found = term.windows
    mixes = node_mixes(found[-1]) if found else {}
    left = NEVER
    if after is not None:
        if found:
            left = microseconds(max(0, after.step - found[-1].step) * found[-1].seconds)
        elif after.step <= term.step:
            left = 0
    for began, ended, name in pieces:
        if name == "checkpoint":
            term.spans.append(Span(began, ended, {CostCause.CHECKPOINT: 1.0}))
            continue
        middle = min(ended, began + left)
        left -= middle - began
        if middle > began:
            term.spans.append(Span(began, middle, {CostCause.PRODUCTIVE: 1.0}, mixes))
        if ended > middle:
            term.spans.append(Span(middle, ended, {CostCause.LOST: 1.0}))


def _batches(found: Sequence[TimingEvent]) -> Iterator[Sequence[TimingEvent]]:
    size = -(-len(found) // MOST_SPANS)
    for _, world in itertools.groupby(found, key=lambda window: window.nodes):
        mine = list(world)
        yield from (mine[place : place + size] for place in range(0, len(mine), size))


def node_mixes(window: TimingEvent) -> dict[int, Mix]:
    """Return the mix of each node, a mean over its ranks. Waiting for a rank that saved counts as checkpoint."""
    if not window.segments:
        return {}
    size = window.world_size
    values = {name: window.segments.get(name, (0.0,) * size) for name in SEGMENT_CAUSES}
    longest = max(values["checkpoint"])
    by_node: dict[int, dict[CostCause, float]] = {node: defaultdict(float) for node in window.nodes}
    for rank, node in enumerate(window.nodes):
        for name, cause in SEGMENT_CAUSES.items():
            by_node[node][cause] += values[name][rank]
        waited = min(values["waiting"][rank], longest - values["checkpoint"][rank])
        by_node[node][CostCause.WAITING] -= waited
        by_node[node][CostCause.CHECKPOINT] += waited
    return {node: mix for node, mix in by_node.items() if sum(mix.values()) > 0}


def _kept_steps(terms: Sequence[Term]) -> dict[int, int]:
    """Return for each window, by its identity, the steps that were not done again later."""
    kept, earliest = {}, None
    for term in reversed(terms):
        for window in reversed(term.windows):
            first = window.step - window.steps
            kept[id(window)] = window.steps if earliest is None else max(0, min(window.steps, earliest - first))
            earliest = first if earliest is None else min(earliest, first)
        earliest = term.step if earliest is None else min(earliest, term.step)
    return kept


def _clip(pieces: Sequence[tuple[int, int, str]], began: int, ended: int) -> list[tuple[int, int, str]]:
    cut = ((max(start, began), min(end, ended), name) for start, end, name in pieces)
    return [(start, end, name) for start, end, name in cut if end > start]
