"""The placer of every engine that runs nodes for us: SLURM, Kubernetes, Ray. Each node is a job of the engine that runs
the node agent (`trainer.node`).

How a node stands is told twice: by its own presence in the run directory, within a moment, and by the engine, now and
then. What follows from the two is decided in `placer`; how an engine is asked belongs to the rooms of the engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.exit_policy import PlacedNode
from dtrain_dagster.clusters.hosts import Exclusion, HostRecord
from dtrain_dagster.clusters.supervision.engine import Engine, EngineJob, EngineUnreachableError
from dtrain_dagster.clusters.supervision.placer import (
    ABANDON_SECONDS,
    HANDOVER_SECONDS,
    NodeRecord,
    Placer,
    close_presence,
    find_fault,
    is_ready,
    is_successor_due,
    say,
    view_node,
)
from trainer.comm.launch_secret import write_launch_secret
from trainer.documents.presences import stale_seconds
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.exit_codes import UNUSABLE
from trainer.node.environment import LaunchError
from trainer.rundir import LOGS, RunDir
from trainer.runtime.clock import SteadyClock

LOOK_SECONDS = 0.2
"""Seconds between two looks at the presences of a small job."""
LOOK_SECONDS_PER_NODE = 0.005
"""The same for each node of a large one: shared storage answers some hundred requests a second to each client."""
EXCLUSION_PATIENCE_SECONDS = 60.0
"""Seconds that a node waits for its place before it may have one on an excluded host, too."""
MOST_SUCCESSORS = 4
"""Successors of one node that are tried, one after the other; a lost node is replaced in any case."""
LISTED_SECONDS = 60.0
"""Seconds within which an engine lists a job that it has taken."""
LEAVE_SECONDS = 3.0
"""Seconds within which the job of a node that has ended by itself ends too. A job that is cancelled before is told as
cancelled in the engine's account, though nothing was wrong with it."""


class AgentPlacer(Placer):
    """Has an engine run the agents of nodes, and follows them by their presences and by the engine's word."""

    def __init__(self, rundir: RunDir, engine: Engine, secret: Path, clock: SteadyClock, hosts: HostRecord) -> None:
        """``hosts``: of the cluster, which all its jobs share."""
        super().__init__(rundir, secret, clock)
        self.engine, self.hosts = engine, hosts
        self.poll_seconds = LOOK_SECONDS
        self.nodes: dict[int, NodeRecord] = {}
        """The incarnation of each node that counts: the newest one, but for successors that wait for their turn."""
        self.successors: dict[int, NodeRecord] = {}
        """Incarnations that take over from one whose time limit is near or whose machine will be taken away, by
        node."""
        self._handed_over: tuple[int, float] | None = None
        """The last node that was told to make way for its successor, and when, in Unix seconds."""
        self._asked_at = float("-inf")
        self._asks_now = False
        """Whether something has ended that the engine may explain, so that it is asked at once."""

    def begin_launch(self, launch: Mapping[str, Any]) -> None:
        self._take(launch)
        write_launch_secret(self.secret)

    def resume_launch(self, launch: Mapping[str, Any]) -> set[int]:
        """Find the nodes of a launch that another supervisor began: by their presences, and in the engine's queue. A
        node that neither knows is submitted again by the caller, which the engine does not do twice."""
        self._take(launch)
        for presence in self.rundir.nodes(skip_damaged=True):
            if presence.launch == launch["launch"]:
                self._find(presence.node_id, presence.incarnation)
        try:
            for job in self.engine.list_jobs(launch):
                self._find(job.node_id, job.incarnation)
        except EngineUnreachableError as error:
            say(f"{error}: its queue is looked at later")
        return set(self.nodes)

    def start(self, node_id: int, incarnation: int) -> None:
        """Submit an incarnation of a node; one that the engine cannot be told of now is submitted in a later look. What
        the end of the one before says of its host is recorded first."""
        if (before := self.nodes.get(node_id)) is not None:
            self._note_fault(before)
        self.nodes[node_id] = self._submit(self._record(node_id, incarnation))

    def look(self) -> Mapping[int, PlacedNode]:
        """Read the presences, ask the engine where it is time, and carry on with what has begun: submissions, ends,
        successors."""
        for record in self._present():
            self._read_presence(record)
        is_asked = self._ask_engine()
        for record in self._present():
            self._carry_on(record, is_asked)
        self._hand_over()
        return {node_id: view_node(record, self._size, self._now()) for node_id, record in self.nodes.items()}

    def exclusions(self) -> Sequence[Exclusion]:
        try:
            return self.hosts.excluded(self._now())
        except OSError as error:
            warn_once(f"the record of hosts cannot be read: {error}")
            return ()

    def how_to_enter(self, node_id: int) -> str:
        record = self.nodes[node_id]
        address = record.presence.host if record.presence is not None else ""
        return self.engine.how_to_enter(record.job, address) if record.job is not None else ""

    def end(self, node_ids: Iterable[int], grace: float) -> None:
        ending, force_at = set(node_ids), time.monotonic() + grace
        for record in self._present():
            if record.node_id in ending:
                record.force_at = min(force_at, record.force_at or float("inf"))

    def sweep(self, seconds: float) -> None:
        """End all jobs that the engine still has of this launch, and wait for at most that long for their end. Those of
        nodes that have ended by themselves may take a moment."""
        begun = time.monotonic()
        leaving = {
            (record.node_id, record.incarnation)
            for record in self._all()
            if record.presence is not None and record.presence.ended_at is not None and record.force_at is None
        }
        while self.launch:
            if time.monotonic() - begun > LEAVE_SECONDS:
                leaving.clear()
            try:
                left = [job for job in self.engine.list_jobs(self.launch) if job.state != "ended"]
                if not left:
                    return
                if over := [job.id for job in left if (job.node_id, job.incarnation) not in leaving]:
                    self.engine.cancel(over, force=True)
            except (EngineUnreachableError, LaunchError) as error:  # agents end as soon as they read the status
                warn_once(f"cannot see what the engine may have left: {error}")
            if time.monotonic() - begun > seconds:
                return
            time.sleep(LOOK_SECONDS)

    # ---

    @property
    def _size(self) -> int:
        return int(self.launch["processes_per_node"])

    def _now(self) -> float:
        return self.clock.now()

    def _take(self, launch: Mapping[str, Any]) -> None:
        self.launch, self.nodes, self.successors = launch, {}, {}
        self.poll_seconds = max(LOOK_SECONDS, LOOK_SECONDS_PER_NODE * launch["node_count"])

    def _record(self, node_id: int, incarnation: int) -> NodeRecord:
        return NodeRecord(node_id=node_id, incarnation=incarnation, made_at=self._now())

    def _find(self, node_id: int, incarnation: int) -> None:
        """Take in an incarnation that was found. One whose predecessor is still at work is its successor."""
        if node_id in self.nodes and self.nodes[node_id].incarnation >= incarnation:
            return
        record = self._submit(self._record(node_id, incarnation))  # the id of its job, which is there
        before = self.rundir.read_node(self.launch["launch"], node_id, incarnation - 1) if incarnation > 1 else None
        if node_id in self.nodes and before is not None and before.ended_at is None:
            self.successors[node_id] = record
        else:
            self.nodes[node_id] = record

    def _submit(self, record: NodeRecord) -> NodeRecord:
        """Submit an incarnation, and return its record. Raise `LaunchError` where it is refused."""
        record.excluded = () if record.is_anywhere else tuple(each.host for each in self.exclusions())
        try:
            record.job_id = self.engine.submit(self.launch, record.node_id, record.incarnation, record.excluded)
        except EngineUnreachableError as error:
            warn_once(f"node {record.node_id} waits to be submitted: {error}")
            record.reason = str(error)
        except LaunchError as error:
            if not record.excluded:
                raise
            say(f"node {record.node_id} may be placed on {', '.join(record.excluded)} again: without these {error}")
            return self._submit_anywhere(record)
        else:
            record.reason, record.taken_at = "", self._now()
        return record

    def _submit_anywhere(self, record: NodeRecord) -> NodeRecord:
        """Submit a node again, to be placed on any host, as another incarnation: SLURM keeps a refused job as one of
        its name."""
        record.incarnation, record.is_anywhere, record.made_at = record.incarnation + 1, True, self._now()
        record.job = record.job_id = None
        return self._submit(record)

    def _all(self) -> list[NodeRecord]:
        return [*self.successors.values(), *self.nodes.values()]

    def _present(self) -> list[NodeRecord]:
        """Return the records of nodes of which something may be left."""
        return [record for record in self._all() if record.gone_at is None]

    def _read_presence(self, record: NodeRecord) -> None:
        try:
            presence = self.rundir.read_node(self.launch["launch"], record.node_id, record.incarnation)
        except (OSError, DamagedError) as error:
            warn_once(f"the presence of node {record.node_id} cannot be read: {error}")
            return
        if presence is not None:
            self._asks_now |= presence.ended_at is not None and not record.has_ended
            record.presence = presence

    def _ask_engine(self) -> bool:
        """Ask the engine how its jobs stand where it is time for that; return whether it was."""
        now = time.monotonic()
        if not self._present() or (not self._asks_now and now - self._asked_at < self.engine.poll_seconds):
            return False
        self._asked_at, self._asks_now = now, False
        try:
            jobs = {(job.node_id, job.incarnation): job for job in self.engine.list_jobs(self.launch)}
        except EngineUnreachableError as error:
            warn_once(f"the engine cannot be queried: {error}")
            return True
        for record in self._all():
            if (job := jobs.get((record.node_id, record.incarnation))) is not None:
                record.job, record.job_id = job, job.id
            elif not self._is_heard(record):
                record.job = _forgotten_job(record, self._now())
        return True

    def _is_heard(self, record: NodeRecord) -> bool:
        """Return whether a node says that it is there: an engine that has lost its memory proves nothing."""
        now, presence = self._now(), record.presence
        return presence is not None and now - presence.heard_at(now) < stale_seconds(self.rundir.storage)

    def _carry_on(self, record: NodeRecord, is_asked: bool) -> None:
        """Submit, cancel or close a node, where that is due. ``is_asked``: the engine was just asked."""
        if record.force_at is not None:
            self._end(record, record.force_at)
        elif record.job_id is None and is_asked:
            try:
                self._submit(record)
            except LaunchError as error:
                self._write_log(record.node_id, str(error))
                record.refused, record.reason, record.gone_at = UNUSABLE, str(error), time.monotonic()
                return
        if view_node(record, self._size, self._now()).state == "gone":
            self._close(record)
        elif is_asked and self._finds_no_place(record):
            excluded = ", ".join(record.excluded)
            say(f"node {record.node_id} finds no place but on {excluded}: it may be placed there again")
            try:
                self.engine.cancel([record.job_id or ""], force=True)
            except EngineUnreachableError as error:
                warn_once(f"node {record.node_id} cannot be submitted again: {error}")
            else:
                self._submit_anywhere(record)

    def _finds_no_place(self, record: NodeRecord) -> bool:
        """Return whether a node has waited long, and may not be placed everywhere: a verdict on hosts may be wrong, and
        may leave no other."""
        job, waited = record.job, self._now() - record.made_at
        waits = record.presence is None and job is not None and job.state == "pending" and not job.host
        return waits and record.force_at is None and bool(record.excluded) and waited >= EXCLUSION_PATIENCE_SECONDS

    def _end(self, record: NodeRecord, force_at: float) -> None:
        """Tell the engine that a node has to end: in order first, by force once its grace is over."""
        now = time.monotonic()
        force = now >= force_at
        if record.job_id is None:  # it may have been submitted, with the answer lost
            record.is_abandoned = force
        elif (force and not record.is_end_forced) or not record.is_end_told:
            try:
                self.engine.cancel([record.job_id], force)
                record.is_end_told, record.is_end_forced, self._asks_now = True, force, True
            except EngineUnreachableError as error:
                warn_once(f"node {record.node_id} cannot be ended through its engine: {error}")
        record.is_abandoned |= now - force_at > ABANDON_SECONDS

    def _close(self, record: NodeRecord) -> None:
        """Write the end that a node could not write itself, bring its output where it wrote none, and count it gone."""
        said, record.presence = record.presence, close_presence(record, self._size, self._now())
        record.is_cut_off = said is None or record.presence != said
        record.gone_at = time.monotonic()
        if record.presence is not None and record.is_cut_off:
            self.write_presence(record.presence)
        if said is None and record.job_id is not None:
            try:
                if printed := self.engine.read_log(record.job_id):
                    self._write_log(record.node_id, printed)
            except EngineUnreachableError as error:
                warn_once(f"the output of node {record.node_id} cannot be read: {error}")

    def _hand_over(self) -> None:
        """Submit successors of nodes whose time limit is near, end the old ones once theirs run, and let them count
        once the old ones are gone."""
        if not self.launch.get("elastic"):
            return
        for node_id, record in self.nodes.items():
            successor = self.successors.get(node_id)
            if record.force_at is None and successor is None:
                if is_successor_due(record, self._now()):
                    why = record.presence.leaves_because if record.presence is not None else ""
                    say(f"node {node_id} leaves soon ({why or 'time limit'}): its successor is submitted")
                    self._submit_successor(node_id, record.incarnation + 1)
            elif successor is not None and successor.gone_at is not None:
                tried = successor.incarnation - record.incarnation
                if record.gone_at is None and tried < MOST_SUCCESSORS and successor.refused is None:
                    self._note_fault(successor)
                    self._submit_successor(node_id, successor.incarnation + 1)
            elif is_ready(successor) and record.force_at is None and record.gone_at is None:
                if not self._has_settled():
                    continue  # one after the other, so that the others hold the state of the training
                record.force_at, record.is_handing_over = time.monotonic() + HANDOVER_SECONDS, True
                self._handed_over = node_id, self._now()
        for node_id in [n for n in self.successors if n in self.nodes and self.nodes[n].gone_at is not None]:
            if self.nodes[node_id].force_at is None or self.nodes[node_id].is_handing_over:
                self.nodes[node_id] = self.successors.pop(node_id)

    def _submit_successor(self, node_id: int, incarnation: int) -> None:
        """Submit a successor, also in the place of one that was lost, or unfit, before it could take over."""
        following = self._record(node_id, incarnation)
        try:
            self.successors[node_id] = self._submit(following)
        except LaunchError as error:
            warn_once(f"the successor of node {node_id} is refused: {error}")

    def _note_fault(self, record: NodeRecord) -> None:
        """Record what the end of a node says of its host, and tell whether that excludes it."""
        others = [each for key, each in self.nodes.items() if key != record.node_id]
        fault = find_fault(record, others, self._size, self.launch["job_id"], self._now())
        if fault is None:
            return
        before = {each.host for each in self.exclusions()}
        try:
            self.hosts.add(fault)
        except OSError as error:  # a full disk must not end the watching
            warn_once(f"the record of hosts cannot be written: {error}")
        for found in self.exclusions():
            if found.host not in before:
                say(f"host {found.host} is excluded: {found.why}; `dtrain status --lift {found.host}` lifts it")

    def _has_settled(self) -> bool:
        """Return whether the last node that was handed over trains again with the others, or has had its time."""
        if self._handed_over is None:
            return True
        node_id, since = self._handed_over
        if self._now() - since > HANDOVER_SECONDS:
            return True
        if node_id in self.successors:
            return False  # the one before it has not gone yet
        try:
            newest = presences.newest_generation(self.rundir)
        except (OSError, DamagedError):
            return False
        begun = self.nodes[node_id].presence
        return newest is not None and begun is not None and newest.formed_at > since and node_id in newest.nodes

    def _write_log(self, node_id: int, text: str) -> None:
        """Append text to a node's log, for whoever looks for what it said."""
        path = self.rundir.storage.local_path(f"{LOGS}/node-{node_id}.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644), "a") as file:
                file.write(text.rstrip("\n") + "\n")
        except OSError as error:
            warn_once(f"could not write the log of node {node_id}: {error}")


def _forgotten_job(record: NodeRecord, now: float) -> EngineJob | None:
    """Return the job that the engine knows no longer, as one that has ended: somebody has deleted it, or it ended while
    no supervisor looked. None for one that may just not be listed yet."""
    job, presence = record.job, record.presence
    if job is not None and job.state == "ended":
        return job
    if job is None:
        is_new = presence is None and now - (record.taken_at or now) < LISTED_SECONDS
        if record.job_id is None or is_new:
            return None
        job = EngineJob(
            id=record.job_id,
            node_id=record.node_id,
            incarnation=record.incarnation,
            state="running",
            host=presence.host if presence else "",
            started_at=presence.started_at if presence else None,
            ended_at=presence.last_seen_at if presence else None,
        )
    reason = job.reason or "the engine no longer knows it"
    return replace(job, state="ended", lost=True, reason=reason, ended_at=job.ended_at or now)
