"""What a job's page says first of lost nodes: a banner while one is missing, a line once all are back. Pure.

A change is the event of a generation that differs from the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.exit_policy import describe_exit
from dtrain_dagster.clusters.presence import find_latest_presences
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.events import MembershipEvent
from trainer.documents.presences import NodePresence
from trainer.documents.schemas import START

ASKED = frozenset({143, -15, 0})
"""Exit codes of a node that was asked to end, and of one that had nothing more to do: neither is a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossNotice:
    """What the page says, and whether a node is missing now."""

    is_open: bool
    title: str
    words: str = ""


def missing_nodes(
    changes: Sequence[MembershipEvent], nodes: Sequence[NodePresence], state: str
) -> dict[int, MembershipEvent | NodePresence]:
    """Return each node that a running job lacks, with the change that lost it, or, before there is one, its end."""
    missing: dict[int, MembershipEvent | NodePresence] = {}
    if state != JobState.RUNNING:
        return {}
    last = max((node.launch for node in nodes), default=0)
    began = min((node.started_at for node in nodes if node.launch == last > 1), default=0.0)
    for change in (each for each in changes if each.time >= began):  # what an earlier launch lacked is no matter now
        missing |= dict.fromkeys(change.lost, change)
        for back in change.joined:
            missing.pop(back, None)
    for node in find_latest_presences(nodes):
        if node.ended_at is not None and not ASKED.issuperset(node.exit_codes):
            missing.setdefault(node.node_id, node)
    return missing


def losses_of(changes: Sequence[MembershipEvent], state: str) -> list[MembershipEvent]:
    """Return the changes in which nodes were lost. Those with which a cancelled launch ended are none."""
    found: list[MembershipEvent] = []
    ends = state == JobState.CANCELLED
    for change in reversed(changes):
        ends = change.reason == START or (ends and change.was_asked)
        if change.lost and not ends:
            found.append(change)
    return found[::-1]


def changes_to_mark(changes: Sequence[MembershipEvent], state: str) -> list[dict[str, Any]]:
    """Return the changes that are marked on a curve: losses, and what came back from one."""
    lost = losses_of(changes, state)
    marked = [change for change in changes if change in lost or (change.joined and change.reason != START)]
    return [
        {
            "step": change.step,
            "lost": list(change.lost),
            "joined": list(change.joined),
            "was_asked": change.was_asked,
        }
        for change in marked
    ]


def tell_losses(
    changes: Sequence[MembershipEvent],
    nodes: Sequence[NodePresence],
    state: str,
    now: float,
    usd: float | None = None,
    excluded: Sequence[Mapping[str, Any]] = (),
) -> LossNotice | None:
    """Return what the page says of lost nodes; None where none was lost. ``usd``: what losses have cost, None where
    that is not known yet; ``excluded``: the hosts that get no nodes, as ``status.json`` has them."""
    missing, found = missing_nodes(changes, nodes, state), losses_of(changes, state)
    notice = _of_missing(missing, nodes, now) if missing else _of_past(found, state, usd) if found else None
    hosts = [
        f"Host {each['host']} gets no nodes until {datetime.fromtimestamp(each['until'], UTC):%H:%M} UTC: "
        f"{each['why']}. `dtrain status --lift {each['host']}` ends that."
        for each in excluded
        if each["until"] > now
    ]
    if not hosts or state not in (JobState.RUNNING, JobState.QUEUED):
        return notice
    notice = notice or LossNotice(is_open=False, title="Excluded: " + ", ".join(each["host"] for each in excluded))
    return replace(notice, words=" ".join(filter(None, (notice.words, *hosts))))


def _of_past(found: Sequence[MembershipEvent], state: str, usd: float | None) -> LossNotice:
    count = "1 loss" if len(found) == 1 else f"{len(found)} losses"
    did = "survived" if state in (JobState.RUNNING, JobState.SUCCEEDED) else "before the end"
    told = [f"{count} {did}", f"{sum(change.seconds for change in found):.2f} s without a step"]
    told += [dollars(usd)] if usd is not None else []
    steps = ", ".join(f"node {_listed(change.lost)} at step {change.step}" for change in found[-3:])
    more = "the last three: " if len(found) > 3 else ""
    return LossNotice(is_open=False, title=", ".join(told), words=f"{more}{steps}")


def _of_missing(
    missing: Mapping[int, MembershipEvent | NodePresence], nodes: Sequence[NodePresence], now: float
) -> LossNotice:
    what, were = ("Node", "was") if len(missing) == 1 else ("Nodes", "were")
    asked = all(isinstance(item, MembershipEvent) and item.was_asked for item in missing.values())
    title = f"{what} {_listed(sorted(missing))} {'left when asked to' if asked else f'{were} lost'}"
    last = max(missing.values(), key=_when)
    ago = format_duration(max(0.0, now - _when(last)))
    there = sum(node.ended_at is None and node.node_id not in missing for node in find_latest_presences(nodes))
    if isinstance(last, MembershipEvent):
        words = f"{ago} ago, at step {last.step}. The others go on: {there} of {there + len(missing)} nodes train."
    else:
        rest = "The others are about to go on without it." if there else "No other node is there to go on."
        words = f"{ago} ago: {', '.join(map(describe_exit, last.exit_codes))}. {rest}"
    return LossNotice(is_open=True, title=title, words=words)


def _when(item: MembershipEvent | NodePresence) -> float:
    return item.time if isinstance(item, MembershipEvent) else item.ended_at or item.started_at


def _listed(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))
