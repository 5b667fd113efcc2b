"""What a job's page says first: why the job has failed or was cancelled (cause, exit code, last lines), and which nodes
it has lost (a banner while one is missing, a line once all are back). Pure but for the log.

The cluster's message about the end (``status.json``) has a first line with the reason, and below it the last lines of
the log of the process that failed first, where the cluster can read them. A change of nodes is the event of a
generation that differs from the one before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.exit_policy import describe_exit
from dtrain_dagster.clusters.notices import describe_kept
from dtrain_dagster.clusters.presence import find_latest_presences
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.events import MembershipEvent
from trainer.documents.presences import NodePresence
from trainer.documents.schemas import START
from trainer.node.line_log import last_lines
from trainer.printable import visible
from trainer.rundir import LOGS, RunDir
from trainer.secrets.redaction import redact

LAST_LINES = 20
MOST_WORDS = 300
"""The most characters of the one line that the list of jobs has."""
MOST_CHARACTERS = 4000
"""The most characters of a reason, and of a line."""
_BEFORE_LOG = re.compile(r";?\s*(?:the end of its log|it said):\s*$")
_NOBODY = "No process was left to record how it ended"
_FIRST = re.compile(r"rank \d+ on node (\d+) failed first")
_ERROR = re.compile(r"(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The end of a job that did not succeed, in words."""

    title: str
    """The state and the exit code."""
    cause: str = ""
    """The error itself, in one line; "" where none was written."""
    reason: str = ""
    """What the cluster says of it."""
    lines: tuple[str, ...] = ()
    """The last lines of the log of the process that failed first; none where they cannot be read."""
    lines_of: str = ""
    """Whose lines they are."""
    nodes: str = ""
    """How the processes of each node ended."""
    advice: str
    """How to go on."""


def describe_failure(
    state: str,
    status: Mapping[str, Any],
    result: Mapping[str, Any],
    nodes: Sequence[NodePresence],
    tail: Mapping[int, str],
    advice: str,
) -> Failure | None:
    """Return the failure of a job; None for a job in another state. ``status``, ``result``: the contents of the files
    of the last launch, empty without one; ``tail``: the end of the log of each node, as far as it can be read."""
    if state == "cancelled":  # somebody wanted it: there is nothing to explain
        return Failure(title=state, advice=_safe(advice))
    if state != "failed":
        return None
    first, _, rest = str(status.get("message") or "").partition("\n")
    reason, lines = _BEFORE_LOG.sub("", first), rest.splitlines()
    latest = find_latest_presences(nodes)
    bad = [node.node_id for node in latest if any(node.exit_codes)]
    named = _FIRST.search(first)
    node = int(named[1]) if named else next((each for each in bad if tail.get(each)), None)
    if not lines and node is not None:
        lines = tail.get(node, "").splitlines()
    if not reason:
        reason = _NOBODY if not result.get("error") else ""
    lines = [line for line in lines if line.strip()][-LAST_LINES:]
    if len(lines) > 1 and lines[-1].strip() in lines[-2]:  # the trainer prints its error below the traceback
        lines.pop()
    return Failure(
        title=_title(status, result),
        cause=_cause(result, lines),
        reason=_safe(reason),
        lines=tuple(map(_safe, lines)),
        lines_of=f"node {node}" if node is not None and lines else "",
        nodes="; ".join(f"node {node.node_id}: {_ends(node)}" for node in latest if node.exit_codes),
        advice="" if advice.partition(":")[0] in first else _safe(advice),
    )


def end_in_words(state: str, status: Mapping[str, Any], result: Mapping[str, Any], launch: Mapping[str, Any]) -> str:
    """Return why a job failed, was cancelled, or waits, in one line; "" for others, unless a node of it is kept. Pure.

    ``status``, ``result``, ``launch``: the content of these files of the run directory.
    """
    first, _, rest = str(status.get("message") or "").strip().partition("\n")
    said = _safe(_BEFORE_LOG.sub("", first))
    if state == JobState.FAILED:
        mine = result if result.get("launch") in (None, launch.get("launch")) else {}
        title, said = _title(status, mine), _cause(mine, rest.splitlines()) or said
        if mine.get("status") == "budget":
            said = f"{title}: {said}" if said else title
        else:
            said = said or (_NOBODY if title == "failed" else title)
    elif state == JobState.CANCELLED:
        said = said or "somebody cancelled it"
    elif state == JobState.QUEUED:
        said = said or "waits for nodes"
    else:
        kept = describe_kept(status.get("kept") or ()) if state == JobState.RUNNING else []
        said = "; ".join([*kept, said]) if kept else ""
    return said[:MOST_WORDS]


def read_failure(
    rundir: RunDir, state: str, status: Mapping[str, Any], result: Mapping[str, Any], advice: str
) -> Failure | None:
    """Return the failure of the job in this run directory; None for a job in another state."""
    nodes, tail = rundir.nodes(skip_damaged=True), {}
    if state == "failed" and rundir.storage.is_local:
        for node in {node.node_id for node in find_latest_presences(nodes) if any(node.exit_codes)}:
            tail[node] = last_lines(rundir.storage.local_path(f"{LOGS}/node-{node}.log"), LAST_LINES)
    return describe_failure(state, status, result, nodes, tail, advice)


def _title(status: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    if result.get("status") == "budget":
        return "stopped by its budget"
    code = status.get("exit_code")
    return f"failed: {describe_exit(code)}" if isinstance(code, int) else "failed"


def _cause(result: Mapping[str, Any], lines: Sequence[str]) -> str:
    if error := str(result.get("error") or "").strip():
        return _safe(error.splitlines()[0])
    found = [match[0] for line in lines if (match := _ERROR.match(line.strip()))]
    return _safe(found[-1]) if found else ""


def _ends(node: NodePresence) -> str:
    codes = sorted(set(node.exit_codes), key=abs, reverse=True)
    return ", ".join(describe_exit(code) if code else "exit code 0" for code in codes)


def _safe(text: str) -> str:
    return visible(redact(text[:MOST_CHARACTERS]))


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
) -> LossNotice | None:
    """Return what the page says of lost nodes; None where none was lost. ``usd``: what losses have cost, None where
    that is not known yet."""
    missing, found = missing_nodes(changes, nodes, state), losses_of(changes, state)
    if missing:
        return _of_missing(missing, nodes, now)
    return _of_past(found, state, usd) if found else None


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
