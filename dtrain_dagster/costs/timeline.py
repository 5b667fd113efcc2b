"""The activity of each generation's members over time, from a job's events. Pure; `dtrain_dagster.costs.ledger` prices
it.

Rank 0's ``phase`` events say what the time since the one before was spent on, and leave no gap: ranks go in step, so
that holds for all members. Within the training phase the ``timing`` windows say what each rank did. What cannot be read
is left out and counted, and nothing here raises.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from dtrain_dagster.costs.event_facts import EventFacts, read_facts
from dtrain_dagster.costs.money import SECOND, microseconds
from trainer.documents.events import TimingEvent


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
MOST_WINDOWS = 1500
"""Windows of a generation that are kept; neighbours beyond are merged."""


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
    """A generation at work."""

    number: int
    formed: int
    """In microseconds; ``until`` as well: when the next one began to form."""
    until: int
    nodes: frozenset[int] | None
    """Nodes of the generation; None: not known, so all."""
    is_fresh: bool
    """Whether no member was in the generation before: a launch begins."""
    step: int
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
    facts = read_facts(events)
    terms = _terms(facts)
    last = max((time for generation, time, _ in facts.ends if terms and generation == terms[-1].number), default=NEVER)
    kept = _kept_steps(terms, facts.windows)
    for place, term in enumerate(terms):
        after = terms[place + 1] if place + 1 < len(terms) else None
        _fill(term, after, facts, kept, last, running)
    notes = []
    if facts.left_out:
        notes.append(f"{facts.left_out} event(s) could not be read and were left out")
    if terms and not facts.has_timing:
        notes.append(
            "the trainer recorded no timing (training.timing): input, communication, waiting and saving are within "
            f"'{CostCause.PRODUCTIVE}'"
        )
    return Timeline(tuple(terms), last, tuple(notes), facts.left_out)


def _terms(facts: EventFacts) -> list[Term]:
    terms: list[Term] = []
    for number in sorted(facts.first_at):
        told = facts.memberships.get(number)
        found = facts.windows.get(number) or []
        if told is not None:
            nodes: frozenset[int] | None = frozenset(told.nodes)
            fresh, formed, step = {*told.nodes} <= {*told.joined}, microseconds(told.time), told.step or 0
            began = formed - microseconds(told.seconds)
        else:  # a world of fixed ranks, or one whose end came before it could say who is in it
            nodes = frozenset(found[0].nodes) if found and found[0].nodes else None
            first = microseconds(found[0].time - found[0].total_seconds) if found else NEVER
            formed = began = min(facts.first_at[number], first)
            fresh, step = True, found[0].step - found[0].steps if found else 0
        if terms:
            terms[-1].until = max(terms[-1].formed, formed if fresh else began)
        terms.append(Term(number, formed, NEVER, nodes, fresh, step))
    return terms


def _fill(
    term: Term, after: Term | None, facts: EventFacts, kept: Mapping[int, int], ended: int, running: bool
) -> None:
    """Put what the members of a term did into its spans."""
    found = facts.windows.get(term.number) or []
    if after is not None and not after.is_fresh:
        after.spans.append(Span(term.until, after.formed, {CostCause.LOST: 1.0}, is_regroup=True))
    in_steps: list[tuple[int, int, str]] = []
    for began, until, name in _phases(term, after, facts, ended, running):
        if name in IN_STEPS:
            in_steps.append((began, until, name))
        else:
            term.spans.append(Span(began, until, {PHASE_CAUSES.get(name, CostCause.UNEXPLAINED): 1.0}))
    before, balance = -NEVER, 0.0
    for together in _batches(found):
        window, counted = merge_spans(together), sum(kept[id(item)] for item in together)
        end = microseconds(window.time)
        pieces = _clip(in_steps, before, end)
        # A window is reported a little after its last step, now sooner, now later: what one has too much of, another
        # lacks. Only what no window of the term has measured is without an explanation.
        balance += sum(ended - began for began, ended, _ in pieces) - microseconds(window.total_seconds)
        more, balance = max(0.0, balance), min(0.0, balance)
        hung = max((waited for time, waited in facts.hangs.get(term.number, ()) if before < time <= end), default=0)
        _divide(term, window, pieces, counted, hung, more)
        before = max(before, end)
    _rest(term, after, found, _clip(in_steps, before, NEVER))
    term.spans.sort(key=lambda span: (span.began, span.ended))


def _phases(term: Term, after: Term | None, facts: EventFacts, ended: int, running: bool) -> list[tuple[int, int, str]]:
    """(began, ended, name) of what rank 0 did from the term's start to its end, without gaps."""
    found, at = [], term.formed
    phases = list(facts.phases.get(term.number, ()))
    windows = facts.windows.get(term.number) or []
    for time in facts.links.get(term.number, ()):
        place = bisect_right(windows, time / SECOND, key=lambda window: window.time)
        began = microseconds(windows[place - 1].time) if place else time
        phases += [(began, "training"), (time, "links")]
    for time, name in sorted(phases):
        if at < time <= term.until:
            found.append((at, time, name))
            at = time
    if not found and windows:  # no phases are known: steps, and what is between them
        first, last = microseconds(windows[0].time - windows[0].total_seconds), microseconds(windows[-1].time)
        for time, name in ((first, "startup"), (last, "training")):
            if time > at:
                found.append((at, time, name))
                at = time
    if after is not None or (running and ended == NEVER):
        name = "training"
    elif ended < NEVER or (found and found[-1][2] == "finalise"):
        failed = any(status == "failed" for number, _, status in facts.ends if number == term.number)
        name = "regroup" if failed else "finalise"
    else:
        name = "finalise" if windows and not facts.phases.get(term.number) else "regroup"
    until = min(term.until, ended)
    return [*found, (at, until, name)] if until > at else found


def _divide(
    term: Term, window: TimingEvent, pieces: Sequence[tuple[int, int, str]], kept: int, hung: int, more: float
) -> None:
    """The training time that a window measured, by what its ranks did. ``more``: microseconds beyond its steps, which
    are not explained. Steps that were done again later are lost, and so is the time in which nothing moved."""
    timed = bool(window.segments)
    for began, ended, name in pieces:
        if not timed and name == "checkpoint":
            term.spans.append(Span(began, ended, {CostCause.CHECKPOINT: 1.0}))
    pieces = [piece for piece in pieces if timed or piece[2] != "checkpoint"]
    share = min(window.steps, max(0, kept)) / window.steps
    if not timed:
        more = 0.0
    idle = min(1.0, hung / max(1, microseconds(window.total_seconds)))
    mixes = {
        node: _counted(_hung(mix, idle), share, more, window.total_seconds) for node, mix in node_mixes(window).items()
    }
    common = _counted(_hung({CostCause.PRODUCTIVE: 1.0}, idle), share, more, window.total_seconds)
    for began, ended, _ in pieces:
        term.spans.append(Span(began, ended, common, mixes))


def _counted(mix: Mix, share: float, more: float, seconds: float) -> Mix:
    """A mix of which only a share counts; ``more``: microseconds beside the window's own."""
    total = sum(mix.values())
    scale = microseconds(seconds) / total
    result = {cause: value * scale * share for cause, value in mix.items() if value > 0 and share > 0}
    if share < 1:
        result[CostCause.LOST] = result.get(CostCause.LOST, 0.0) + scale * total * (1 - share)
    if more > 0:
        result[CostCause.UNEXPLAINED] = result.get(CostCause.UNEXPLAINED, 0.0) + more
    return result


def _hung(mix: Mix, share: float) -> Mix:
    """A mix of which this share is lost: of what took longest, for that is where a rank was when nothing moved."""
    if not share:
        return mix
    left = whole = share * sum(mix.values())
    result = dict(mix)
    for cause in sorted(mix, key=lambda cause: -mix[cause]):
        part = min(left, result[cause])
        result[cause] -= part
        left -= part
    result[CostCause.LOST] = whole - left
    return result


def _rest(term: Term, after: Term | None, found: Sequence[TimingEvent], pieces: Sequence[tuple[int, int, str]]) -> None:
    """Training time after the last window of a term. Steps that count though no window tells of them took as long as
    those before; the rest went into noticing that a node was lost, or is lost itself."""
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


def merge_spans(together: Sequence[TimingEvent]) -> TimingEvent:
    """Return consecutive windows of one world as one: seconds are means over all their steps."""
    if len(together) == 1:
        return together[0]
    last, steps = together[-1], sum(window.steps for window in together)

    def mean(values: Iterable[float]) -> float:
        return sum(value * window.steps for value, window in zip(values, together, strict=True)) / steps

    nothing = (0.0,) * last.world_size
    names = {name for window in together for name in window.segments}
    segments = {
        name: tuple(
            mean(column) for column in zip(*(window.segments.get(name, nothing) for window in together), strict=True)
        )
        for name in names
    }
    return replace(last, steps=steps, seconds=mean(window.seconds for window in together), segments=segments)


def _batches(found: Sequence[TimingEvent]) -> Iterator[Sequence[TimingEvent]]:
    size = -(-len(found) // MOST_WINDOWS)
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


def _kept_steps(terms: Sequence[Term], found: Mapping[int, Sequence[TimingEvent]]) -> dict[int, int]:
    """Return for each window, by its identity, the steps that were not done again later."""
    kept, earliest = {}, None
    for term in reversed(terms):
        for window in reversed(found.get(term.number) or []):
            first = window.step - window.steps
            kept[id(window)] = window.steps if earliest is None else max(0, min(window.steps, earliest - first))
            earliest = first if earliest is None else min(earliest, first)
        earliest = term.step if earliest is None else min(earliest, term.step)
    return kept


def _clip(pieces: Sequence[tuple[int, int, str]], began: int, ended: int) -> list[tuple[int, int, str]]:
    cut = ((max(start, began), min(end, ended), name) for start, end, name in pieces)
    return [(start, end, name) for start, end, name in cut if end > start]
