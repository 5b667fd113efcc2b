"""The rank that keeps the others waiting in a hang, from what each rank sees (``hang`` events,
`trainer.engine.reports`). Pure.

The number of a collective is the same on all ranks. So the others wait for a rank that has not entered the newest one,
also where nobody waits *in* a collective, since the processor is ahead of the GPU until it asks for a result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.documents.events import HangEvent, read_events
from trainer.documents.schemas import NO_COLLECTIVE, START

SETTLE_SECONDS = 10.0
"""Seconds within which all ranks of a hang report; a rank that has not by then is silent."""
SILENT = "it is frozen, cut off, in code that never lets go of the interpreter, or busy outside of a step"
MOST_NAMES = 6
"""Ranks that are named; of more, the rest is counted."""
Report = Mapping[str, Any]


def unresolved(reports: Sequence[Report], events: Iterable[Report]) -> tuple[Report, ...]:
    """Return the reports of the newest hang that nothing has ended, each rank's latest. ``reports``: those so far."""
    events = list(events)
    hangs = [*reports, *({key: item[key] for key in item if key != "stacks"} for item in _of(events, "hang"))]
    if not hangs or any(item.get("status") == "succeeded" for item in _of(events, "end")):
        return ()
    newest = max(map(_position, hangs))
    done = [_position(item) for item in _of(events, "step")]
    # An evaluation comes after its step, and a new generation may do steps once more.
    done += [(generation, step + 0.5) for generation, step in map(_position, _of(events, "evaluation"))]
    done += [_position(item) for item in _of(events, "membership") if item["reason"] == START]
    if any(position > newest for position in done):
        return ()
    latest = {item["rank"]: item for item in hangs if _position(item) == newest}
    return tuple(latest[rank] for rank in sorted(latest))


def hang_verdict(rows: Iterable[Report]) -> str:
    """Return one sentence on an unresolved hang: which rank never arrived where the others wait, and where it is."""
    reports = read_events(HangEvent, rows)
    nodes = max((item.nodes for item in reports), key=len)
    known = {item.rank: item for item in reports}
    silent = [rank for rank in range(len(nodes)) if rank not in known]
    furthest = max(item.sequence for item in reports)
    there = [item for item in reports if item.sequence == furthest]
    behind = [item for item in reports if item.sequence < furthest]
    # A rank that waits in an earlier one is no culprit if there is another: in a broadcast some end before others.
    missing = [item for item in behind if _is_busy(item)] or ([] if silent else behind)
    waiting = [item for item in reports if item not in missing]
    step = f"step {reports[0].step}"
    seconds = max(item.waited_seconds for item in waiting)
    if missing or silent:
        first = min(item.sequence for item in missing) + 1 if missing else min(item.sequence for item in waiting)
        collective = f"the {_name(reports, first)} of {step}"
        if not missing:
            return f"{_silence(silent, nodes)}; {_waiting(waiting, seconds, f'in {collective}')}"
        names, stand = _ranks([item.rank for item in missing], nodes), _stands(missing, furthest)
        also = f"; {_silence(silent, nodes)}" if silent else ""
        return f"{names} never entered {collective}: {stand}{also}; {_waiting(waiting, seconds, 'there')}"
    collective = f"the {_name(there, furthest)} of {step}"
    gone_on = [item for item in there if _is_busy(item)]
    waiting = [item for item in there if item not in gone_on]
    if waiting and gone_on:
        left = _ranks([item.rank for item in gone_on], nodes)
        has = "has" if len(gone_on) == 1 else "have"
        return f"{left} {has} left {collective}, a message was lost: {_waiting(waiting, seconds, 'in it')}"
    if waiting:
        return f"all ranks are in {collective}, which has not ended for {seconds:.0f} s: check the network"
    stand = _stands(there, furthest)
    return f"{step} has not ended for {seconds:.0f} s, and no rank is known to wait for another: {stand}"


@dataclass(slots=True)
class HangNews:
    """Gives each verdict once, and again when it changes, after all ranks have reported or have had the time to."""

    began: float | None = None
    told: set[str] = field(default_factory=set)

    def tell(self, reports: Sequence[Report], now: float, is_final: bool) -> Iterator[str]:
        """Yield the verdict if it is new; ``is_final``: without waiting for more ranks."""
        if not reports:
            self.began = None
            return
        self.began = now if self.began is None else self.began
        members = max(len(item.nodes) for item in read_events(HangEvent, reports))
        if len(reports) < members and now - self.began < SETTLE_SECONDS and not is_final:
            return
        sentence = hang_verdict(reports)
        if sentence not in self.told:
            self.told.add(sentence)
            yield sentence


def _of(events: Iterable[Report], kind: str) -> list[Report]:
    return [item for item in events if item["kind"] == kind]


def _position(item: Report) -> tuple[int, float]:
    return item["generation"], item["step"]


def _is_busy(item: HangEvent) -> bool:
    """Return whether the rank does something else than wait in a collective, as far as can be seen."""
    return item.operation == NO_COLLECTIVE


def _name(there: Sequence[HangEvent], sequence: int) -> str:
    """Return the name of this collective, without its size and owner."""
    recent = (entry for item in there for entry in item.recent)
    names = [str(entry.get("what")) for entry in recent if entry.get("sequence") == sequence]
    names += [item.operation for item in there if not _is_busy(item)]
    return re.sub(r" \([\d,.]+ bytes\)$| of the step$", "", names[0]) if names else "next collective"


def _stands(items: Sequence[HangEvent], furthest: int) -> str:
    """Return where each of the ranks is, or the first few."""
    found = []
    for item in items[:MOST_NAMES]:
        who = "it" if len(items) == 1 else f"rank {item.rank}"
        if not _is_busy(item) and item.sequence < furthest:
            found.append(f"{who} is still in the {_name([item], item.sequence)} before it")
        else:
            found.append(f"{who} is in {item.where}")
    return "; ".join(found)


def _silence(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    says, why = ("says", SILENT) if len(ranks) == 1 else ("say", SILENT.replace("it is", "each is"))
    return f"{_ranks(ranks, nodes)} {says} nothing ({why})"


def _waiting(items: Sequence[HangEvent], seconds: float, where: str) -> str:
    ranks = [item.rank for item in items]
    return f"{_ranks(ranks, [])} {'has' if len(ranks) == 1 else 'have'} been waiting {where} for {seconds:.0f} s"


def _ranks(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    """``rank 1 (node 2)``, ``ranks 0 and 2``, ``ranks 0, 1, 2, 3 and 60 more``; nodes where they are of use."""
    names = [f"{rank} (node {nodes[rank]})" if rank < len(nodes) else str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > MOST_NAMES:
        names = [*names[:MOST_NAMES], f"{len(names) - MOST_NAMES} more"]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
