"""The interface between the supervisor of a job and whatever runs its nodes.

A `Placer` starts nodes, says how they are, ends them and brings their logs. It decides nothing: which node is replaced,
and when a job has failed, is in `clusters.exit_policy` for all placers alike. How a node of an engine stands, from what
its own presence and the engine say, is told by pure functions, for which `agent_placer` gathers the two.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.exit_policy import PlacedNode, describe_exit
from dtrain_dagster.clusters.hosts import Exclusion, HostEvent
from dtrain_dagster.clusters.supervision.engine import EngineJob
from trainer.documents.presences import NodePresence
from trainer.documents.reader import warn_once
from trainer.exit_codes import EVICTED, LOST, is_loss
from trainer.rundir import RunDir
from trainer.runtime.clock import SteadyClock

KILLED = -9
SETTLE_SECONDS = 1.0
"""Seconds after which a presence without an end is believed where the engine says that its job has ended: the last word
of a node may take a moment through shared storage."""
WORD_SECONDS = 10.0
"""Seconds for which a node that says that it was evicted waits for the engine's word on why."""
ABANDON_SECONDS = 5.0
"""Seconds after which a node that is ended by force counts as gone, though its engine does not say so: its machine may
not answer. Whatever still runs of it is in no generation any more."""
HANDOVER_SECONDS = 60.0
"""Seconds that a node has for its end in order where its successor waits for it."""
LEAD_SECONDS = 600.0
"""Seconds before a node's time limit at which its successor is submitted; of a short limit, half of it."""
LEAST_RUN_SECONDS = 60.0
"""Seconds that a node has to have run for its time limit to count as planned: one that is shorter than a start would
be bought for ever."""


class Placer(ABC):
    """What runs the nodes of one job. One thread calls it."""

    poll_seconds: float
    """Seconds between two looks."""

    def __init__(self, rundir: RunDir, secret: Path, clock: SteadyClock) -> None:
        self.rundir, self.secret, self.clock = rundir, secret, clock
        self.launch: Mapping[str, Any] = {}

    @abstractmethod
    def begin_launch(self, launch: Mapping[str, Any]) -> None:
        """Prepare a launch (as in ``launch.json``): its secret, its port. Nodes of an earlier one are forgotten."""

    def resume_launch(self, launch: Mapping[str, Any]) -> set[int]:
        """Find the nodes of a launch that another supervisor began, and return their ids. Raise `NotImplementedError`
        where nodes end with their supervisor."""
        raise NotImplementedError

    @abstractmethod
    def start(self, node_id: int, incarnation: int) -> None:
        """Start one incarnation of a node. Raise `trainer.node.environment.LaunchError` where that is impossible for
        good, OSError where it may succeed later."""

    @abstractmethod
    def look(self) -> Mapping[int, PlacedNode]:
        """Return the newest incarnation of each node that was started; write what is new about their presences."""

    @abstractmethod
    def end(self, node_ids: Iterable[int], grace: float) -> None:
        """Ask these nodes to end (SIGTERM), and end them by force after ``grace`` seconds, while `look` is called. A
        second call can only shorten the grace."""

    @abstractmethod
    def sweep(self, seconds: float) -> None:
        """End whatever the nodes of this job may have left behind, for at most that long."""

    def collect_logs(self, node_id: int) -> None:  # noqa: B027 - agents write into the run directory themselves
        """Bring what the node has printed into the run directory, before somebody reads it there."""

    def how_to_enter(self, node_id: int) -> str:
        """Return the command that opens a shell on a node that is kept, or what there is instead."""
        return ""

    def exclusions(self) -> Sequence[Exclusion]:
        """Return the hosts on which no node is placed now."""
        return ()

    def write_presence(self, presence: NodePresence) -> None:
        """Write the presence of a node, where that is possible."""
        try:
            self.rundir.write_node(presence)
        except OSError as error:  # a full disk must not end the watching
            warn_once(f"could not write the presence of node {presence.node_id}: {error}")


def say(text: str) -> None:
    """Write a line into the supervisor's log."""
    print(text, flush=True)  # noqa: T201


@dataclass(kw_only=True, slots=True)
class NodeRecord:
    """What is known of one incarnation of a node. Times are of `time.monotonic` where nothing else is said."""

    node_id: int
    incarnation: int
    made_at: float
    """The time at which it was decided on, in Unix seconds."""
    excluded: tuple[str, ...] = ()
    """The hosts on which it is not placed."""
    is_anywhere: bool = False
    """Whether it is placed wherever there is room, since it found no place but on excluded hosts."""
    is_cut_off: bool = False
    """Whether it is gone without having said so: its agent was killed, or its machine was."""
    taken_at: float | None = None
    """When the engine has confirmed its job, in Unix seconds."""
    job_id: str | None = None
    """The id of its job; None as long as the engine has not confirmed one."""
    job: EngineJob | None = None
    """What the engine said last."""
    presence: NodePresence | None = None
    """What the node said last."""
    reason: str = ""
    """Why it could not be submitted."""
    refused: int | None = None
    """The exit code of one that the engine refuses."""
    force_at: float | None = None
    """When it is ended by force; None where it is not to end."""
    is_end_told: bool = False
    is_end_forced: bool = False
    is_abandoned: bool = False
    is_handing_over: bool = False
    """Whether it ends in favour of its successor."""
    gone_at: float | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether the node has said that it has ended."""
        return self.presence is not None and self.presence.ended_at is not None


def view_node(record: NodeRecord, size: int, now: float) -> PlacedNode:
    """Return how a node stands, of ``size`` ranks, at ``now`` (Unix seconds)."""
    presence, job = record.presence, record.job
    codes = exit_codes_of(record, size, now)
    is_gone = record.gone_at is not None or codes is not None
    waits = presence is None and (job is None or job.state == "pending")
    is_kept = not is_gone and presence is not None and presence.kept_since is not None
    if is_kept and presence is not None:
        codes = (presence.exit_codes + (KILLED,) * size)[:size]
    return PlacedNode(
        node_id=record.node_id,
        incarnation=record.incarnation,
        codes=codes if codes is not None else (None,) * size,
        state="gone" if is_gone else "kept" if is_kept else "pending" if waits else "running",
        gone_seconds=None if record.gone_at is None else time.monotonic() - record.gone_at,
        presence=presence,
        reason=(job.reason if job else "") or record.reason,
        queued_at=((job.submitted_at if job else None) or record.made_at) if waits else None,
        is_taken=is_gone and is_taken_away(record),
    )


def is_taken_away(record: NodeRecord) -> bool:
    """Return whether a node was taken away, or left since it was told that it would be: nothing has failed."""
    is_warned = record.presence is not None and record.presence.leaves_at is not None
    return is_warned or (record.job is not None and record.job.cause == "taken")


def exit_codes_of(record: NodeRecord, size: int, now: float) -> tuple[int, ...] | None:
    """Return the exit codes of a node of which nothing is left; None for one that is there, or may be."""
    presence, job = record.presence, record.job
    if record.refused is not None:
        return (record.refused,) * size
    if presence is not None and presence.ended_at is not None:
        codes = (presence.exit_codes + (KILLED,) * size)[:size]
        if EVICTED not in codes or record.force_at is not None:
            return codes
        as_lost = tuple(LOST if code == EVICTED else code for code in codes)
        if presence.leaves_at is not None:
            return as_lost
        if job is not None and job.state == "ended":
            return as_lost if job.lost else codes
        return codes if now - presence.ended_at > WORD_SECONDS else None  # why it was evicted is not known yet
    if job is not None and job.state == "ended":
        if presence is not None and not record.is_abandoned and now - (job.ended_at or now) < SETTLE_SECONDS:
            return None
        return (_code_of(job, has_begun=presence is not None),) * size
    return (KILLED,) * size if record.is_abandoned else None


def _code_of(job: EngineJob, has_begun: bool) -> int:
    """Return the exit code of ranks that wrote none, from the end of their job. An agent that began and is gone
    without a word was killed, whatever its code."""
    if job.lost:
        return LOST if not has_begun else KILLED
    if job.exit_code is None or (has_begun and job.exit_code >= 0) or job.exit_code == 0:
        return KILLED
    return job.exit_code


def close_presence(record: NodeRecord, size: int, now: float) -> NodePresence | None:
    """Return the presence of a node that is gone, with its end; None for one that never began, which costs nothing. A
    node that was cut off was there for as long as it was seen, or for as long as its engine says."""
    presence, job = record.presence, record.job
    if presence is None or presence.ended_at is not None:
        return presence
    seen = presence.last_seen_at or presence.started_at
    ended_at = seen
    if job is not None and job.state == "ended" and job.ended_at is not None:
        ended_at = min(max(seen, job.ended_at), now)
    codes = exit_codes_of(record, size, now) or (KILLED,) * size
    return replace(presence, ended_at=ended_at, exit_codes=codes)


def find_fault(
    record: NodeRecord, others: Iterable[NodeRecord], size: int, job_id: str, now: float
) -> HostEvent | None:
    """Return what the end of a node says of its host, None where it says nothing: it was taken away or ended by us, its
    program failed, or so many others were lost with it that it is not the doing of one machine. ``others``: of the
    job; ``size``: its ranks."""
    job, presence = record.job, record.presence
    started = presence.started_at if presence is not None else job.started_at if job is not None else None
    if job is None or not job.host or started is None or record.force_at is not None:
        return None
    if presence is not None and presence.preflight:
        return HostEvent(host=job.host, at=now, kind="unfit", why=presence.preflight, job_id=job_id)
    codes = exit_codes_of(record, size, now) or ()
    # Where the agent lives to tell it, a rank that was killed has used too much memory, or has crashed by itself.
    is_own = LOST in codes or (record.is_cut_off and any(map(is_loss, codes)))
    if is_taken_away(record) or job.cause == "program" or not (is_own or job.cause == "machine"):
        return None
    gone = [other.gone_at is not None for other in others]
    if all(gone) or 2 * (1 + sum(gone)) > 1 + len(gone):
        return None
    ended = presence.ended_at or presence.heard_at(now) if presence is not None else job.ended_at or now
    why = job.reason or ", ".join(dict.fromkeys(map(describe_exit, codes)))
    seconds = max(0.0, ended - started)
    return HostEvent(host=job.host, at=now, kind="lost", seconds=seconds, why=why, job_id=job_id)


def is_ready(successor: NodeRecord | None) -> bool:
    """Return whether a successor is there, is fit, and waits for the place of the node before it."""
    return successor is not None and successor.presence is not None and successor.presence.ready_at is not None


def is_successor_due(record: NodeRecord, now: float) -> bool:
    """Return whether the successor of a node is to be submitted: it is told that its machine will be taken away, or its
    time limit is near, or has come."""
    if record.presence is not None and record.presence.kept_since is not None:
        return False
    job = record.job
    if record.presence is not None and record.presence.leaves_at is not None and record.presence.ended_at is None:
        return True
    if job is None or record.presence is None:
        return False
    started = job.started_at or record.presence.started_at
    if job.state == "ended":
        ended = job.ended_at or now
        return job.is_planned and ended - started >= LEAST_RUN_SECONDS
    if job.ends_at is None or job.state != "running":
        return False
    length = job.ends_at - started
    return length >= LEAST_RUN_SECONDS and job.ends_at - now < min(LEAD_SECONDS, length / 2)
