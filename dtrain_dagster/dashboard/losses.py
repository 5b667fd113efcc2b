"""What a job's page says first of lost nodes: a banner while one is missing, a line once all are back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.exit_policy import describe_exit
from dtrain_dagster.clusters.presence import find_latest_presences
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import NodePresence

ASKED = frozenset({143, -15, 0})
"""Exit codes of a node that was asked to end, and of one that had nothing more to do: neither is a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A new generation that differs from the one before."""

    time: float
    step: int | None
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    seconds: float
    """Seconds for which no rank trained."""
    was_asked: bool
    """Whether the node left because it was asked to: by an eviction, or as all are when the job is cancelled."""
    is_start: bool = False
    """Whether it is the first of a launch: the job was started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossNotice:
    """What the page says, and whether a node is missing now."""

    is_open: bool
    title: str
    words: str = ""


def missing_nodes(
    changes: Sequence[Change], nodes: Sequence[NodePresence], state: str
) -> dict[int, Change | NodePresence]:
    """Return each node that a running job lacks, with the change that lost it; with its end, where the others have not
    formed a generation without it yet."""
    missing: dict[int, Change | NodePresence] = {}
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


def losses_of(changes: Sequence[Change], state: str) -> list[Change]:
    """Return the changes in which nodes were lost. Those with which a cancelled launch ended are none."""
    found: list[Change] = []
    ends = state == JobState.CANCELLED
    for change in reversed(changes):
        ends = change.is_start or (ends and change.was_asked)
        if change.lost and not ends:
            found.append(change)
    return found[::-1]


def changes_to_mark(changes: Sequence[Change], state: str) -> list[Change]:
    """Return the changes that are marked on a curve: losses, and what came back from one."""
    lost = losses_of(changes, state)
    return [change for change in changes if change in lost or (change.joined and not change.is_start)]


def tell_losses(
    changes: Sequence[Change],
    nodes: Sequence[NodePresence],
    state: str,
    now: float,
    usd: float | None = None,
    excluded: Sequence[Mapping[str, Any]] = (),
) -> LossNotice | None:
    """Return what the page says of lost nodes; None where none was lost. ``usd``: what losses have cost, None where
    that is not known yet; ``excluded``: the hosts that get no nodes, as ``status.json`` has them."""
    notice = _tell_losses(changes, nodes, state, now, usd)
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


def _tell_losses(
    changes: Sequence[Change], nodes: Sequence[NodePresence], state: str, now: float, usd: float | None
) -> LossNotice | None:
    missing = missing_nodes(changes, nodes, state)
    if missing:
        there = {node.node_id for node in find_latest_presences(nodes) if node.ended_at is None} - missing.keys()
        return LossNotice(is_open=True, title=_title(missing), words=_now(missing, changes, nodes, len(there), now))
    found = losses_of(changes, state)
    if not found:
        return None
    count = "1 loss" if len(found) == 1 else f"{len(found)} losses"
    did = "survived" if state in (JobState.RUNNING, JobState.SUCCEEDED) else "before the end"
    told = [f"{count} {did}", f"{sum(change.seconds for change in found):.2f} s without a step"]
    told += [dollars(usd)] if usd is not None else []
    steps = ", ".join(f"node {_listed(change.lost)} at step {change.step}" for change in found[-3:])
    more = "the last three: " if len(found) > 3 else ""
    return LossNotice(is_open=False, title=", ".join(told), words=f"{more}{steps}")


def _title(missing: Mapping[int, Change | NodePresence]) -> str:
    what = "Node" if len(missing) == 1 else "Nodes"
    asked = all(isinstance(item, Change) and item.was_asked for item in missing.values())
    did = "left when asked to" if asked else "was lost" if len(missing) == 1 else "were lost"
    return f"{what} {_listed(sorted(missing))} {did}"


def _now(
    missing: Mapping[int, Change | NodePresence],
    changes: Sequence[Change],
    nodes: Sequence[NodePresence],
    there: int,
    now: float,
) -> str:
    replaced = {node.node_id for node in find_latest_presences(nodes) if _is_replacement(node, changes)}
    last = max(missing.values(), key=_when)
    ago = format_duration(max(0.0, now - _when(last)))
    if isinstance(last, Change):
        words = f"{ago} ago, at step {last.step}. The others go on: {there} of {there + len(missing)} nodes train."
    else:
        words = f"{ago} ago: {', '.join(map(describe_exit, last.exit_codes))}. " + (
            "The others are about to go on without it." if there else "No other node is there to go on."
        )
    if replaced >= missing.keys():
        return f"{words} A replacement has started and has not joined yet."
    return f"{words} No replacement has started yet."


def _is_replacement(node: NodePresence, changes: Sequence[Change]) -> bool:
    """Return whether a node that is there has started since it trained last: one that froze is there, too."""
    joined = [change.time for change in changes if node.node_id in change.joined]
    return node.ended_at is None and (node.started_at > joined[-1] if joined else node.incarnation > 1)


def _when(item: Change | NodePresence) -> float:
    return item.time if isinstance(item, Change) else item.ended_at or item.started_at


def _listed(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))
