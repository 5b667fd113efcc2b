"""The supervisor of one job: it starts, watches, replaces and ends nodes through a `Placer`, and records the status.

It is one plain process that imports nothing heavy. Its entry is `dtrain_dagster.clusters.supervise`.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.exit_policy import (
    PREEMPTIONS,
    ExitDecision,
    PlacedNode,
    ProcessEnd,
    blame,
    decide_after_exit,
    decide_plainly,
    exit_code,
    is_failure,
)
from dtrain_dagster.clusters.notices import WAIT_SECONDS, Announcement, describe_kept
from dtrain_dagster.clusters.presence import HEARTBEAT_SECONDS
from dtrain_dagster.clusters.resume_advice import explain_failure, explain_giving_up
from dtrain_dagster.clusters.supervision.launch import outlives_supervisor
from dtrain_dagster.clusters.supervision.placer import Placer, say
from dtrain_dagster.support.formatting import format_duration
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.exit_codes import EVICTED, UNUSABLE
from trainer.node.environment import STOP_GRACE, LaunchError, read_duration
from trainer.rundir import LAUNCH, STATUS, RunDir
from trainer.runtime.clock import SteadyClock

MAX_RELAUNCHES = 3
"""Times that a job whose nodes could not regroup is started again before a person has to look."""
KILL_SECONDS = 5.0
"""Seconds beyond the grace in which nodes that are ended by force are gone."""


class Supervisor:
    """The supervisor of one job: it decides when its nodes are started, replaced and ended."""

    def __init__(
        self, rundir: RunDir, placer: Placer, clock: SteadyClock, announce: Callable[[Announcement, int], object]
    ) -> None:
        """``announce``: has people told this of a launch, and returns at once."""
        self.cancelled = False
        signal.signal(signal.SIGTERM, self._on_cancel)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored is inherited, and loses all exit codes
        self.rundir, self.placer, self.clock, self.announce = rundir, placer, clock, announce
        self.launch: dict[str, Any] = rundir.read_json(LAUNCH) or {}
        self.started_at = clock.now()
        self.stop_grace = STOP_GRACE[1]
        self.beat = 0.0
        self.nodes: Mapping[int, PlacedNode] = {}
        """The newest incarnation of each node of this launch, as it was seen last."""
        self.replacements = self.preemptions = self.relaunches = 0
        """Nodes that took the place of lost ones, and of ones that were taken away, and launches after the first."""
        self.failure: ProcessEnd | None = None
        self.is_ending = False
        """Whether all nodes are ended: none trains on for another that comes in its place."""
        self.kept: tuple[Mapping[str, Any], ...] = ()
        """The nodes that are left in place for a person, as ``status.json`` has them."""
        self._said = ""
        self._told_of_wait = 0
        """The last launch of which people were told that it waits."""

    def run(self, resumes: bool = False) -> JobState:
        """Run the job from start to end, or from where an earlier supervisor left it (``resumes``), and return its
        final state, which ``status.json`` holds as well. After a fault of the supervisor itself everything is ended."""
        try:
            return self._run(resumes)
        except Exception as error:
            traceback.print_exc()
            self._end_nodes(0.0)
            return self._finish(JobState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}", 1)

    def _run(self, resumes: bool) -> JobState:
        try:
            self.stop_grace = read_duration(*STOP_GRACE, self.launch["env"], os.environ)
            if resumes:
                self._resume()
            else:
                if outlives_supervisor(self.launch):  # on record before a node is asked for: each is found again
                    self._write_status(self._state())
                self._start_nodes()
        except (LaunchError, OSError) as error:
            self._end_nodes(0.0)
            return self._finish(JobState.FAILED, str(error), UNUSABLE)
        self._write_status(self._state())
        decision = self._watch()
        ends = self._ends()  # but for our own doing
        if decision is not None and decision.action == "fail":
            self._keep_failed()
        self._end_nodes(self.stop_grace)
        if decision is None:
            return self._finish(JobState.CANCELLED, "cancelled", EVICTED)
        for node in self.nodes.values():
            self.placer.collect_logs(node.node_id)
        if decision.action == "fail" and self.failure:
            return self._finish(
                JobState.FAILED, explain_failure(self.rundir, self.launch, self.failure), exit_code(self.failure.code)
            )
        if decision.action == "give_up":
            return self._give_up(decision.reason, ends)
        return self._finish(JobState.SUCCEEDED, "", 0)

    def _start_nodes(self) -> None:
        self.placer.begin_launch(self.launch)
        if self.launch["launch"] > 1:
            self.announce("goes_on", self.launch["launch"])
        for node_id in range(self.launch["node_count"]):
            self.placer.start(node_id, 1)
        self.nodes = self.placer.look()

    def _resume(self) -> None:
        """Go on with the nodes of a supervisor that died; those that it had not come to are started."""
        status = self.rundir.read_json(STATUS) or {}
        self.replacements, self.preemptions = status.get("replacements", 0), status.get("preemptions", 0)
        self.started_at = status.get("started_at") or self.started_at
        if status:  # who waits for it waits no longer: an engine may take its time for many nodes
            self.rundir.write_json(STATUS, status | {"pid": os.getpid()})
        found = self.placer.resume_launch(self.launch)
        say(f"another supervisor continues launch {self.launch['launch']}: nodes {sorted(found)} are there")
        for node_id in set(range(self.launch["node_count"])) - found:
            self.placer.start(node_id, 1)
        self.nodes = self.placer.look()

    def _watch(self) -> ExitDecision | None:
        """Do what the policy says until the job is over. Return the last decision, or None if it was cancelled."""
        deadline: float | None = None
        while True:
            self._look()
            decision = self._decide()
            alive = any(node.runs for node in self.nodes.values())
            # A cancellation that comes when all is done already is one that came too late.
            if self.cancelled and (alive or decision.action == "relaunch"):
                return None
            if decision.action == "replace":
                self._replace(decision.nodes)
            elif decision.action == "relaunch":
                try:
                    self._relaunch(len(decision.nodes))
                except (LaunchError, OSError) as error:
                    return ExitDecision(action="give_up", reason=f"the nodes could not be started again: {error}")
            elif decision.action in ("fail", "dismiss"):
                deadline = deadline or time.monotonic() + self.stop_grace
                if not alive or time.monotonic() > deadline:
                    return decision
            elif decision.action != "wait":
                return decision
            self._pause()

    def _keep_failed(self) -> None:
        """Wait while nodes whose processes failed are left in place for a person, the others ended. The job goes on
        meanwhile: its nodes are there and are paid for, and a cancellation ends them."""
        kept = [node for node in self.nodes.values() if node.state == "kept"]
        if not kept or self.failure is None:
            return
        others = [each.node_id for each in self.nodes.values() if each.state in ("pending", "running")]
        self.placer.end(others, self.stop_grace)
        self.kept = tuple(
            {
                "node_id": node.node_id,
                "until": node.presence.kept_until if node.presence is not None else None,
                "how": self.placer.how_to_enter(node.node_id),
            }
            for node in kept
        )
        message = f"failed: {explain_failure(self.rundir, self.launch, self.failure)}"
        self._write_status(JobState.RUNNING, message)
        for line in describe_kept(self.kept):
            say(line)
        self.announce("kept", self.launch["launch"])
        while any(node.state == "kept" for node in self.nodes.values()) and not self.cancelled:
            self._pause()
            self.nodes = self.placer.look()
            self._end_useless()
        self.kept = ()

    def _decide(self) -> ExitDecision:
        facts = [*self.nodes.values()]
        elastic = self.launch["elastic"]
        if elastic:
            done = any(0 in node.codes for node in facts) or not any(node.runs for node in facts)
            decision = decide_after_exit(
                facts,
                finished=done and (self.rundir.read_result() or {}).get("status") == "succeeded",
                replacements_left=self.launch["max_replacements"] - self.replacements,
                launches_left=MAX_RELAUNCHES - self.relaunches,
                delay_seconds=self.launch["replacement_delay_seconds"],
                preemptions_left=PREEMPTIONS * self.launch["max_replacements"] - self.preemptions,
            )
        else:
            decision = decide_plainly(facts)
        if decision.action == "fail" and self.failure is None:
            failures = [end for end in self._ends() if end.code and (is_failure(end.code) or not elastic)]
            self.failure = min(failures, key=blame)
        return decision

    def _replace(self, lost: Sequence[int]) -> None:
        """Start another node in the place of each lost one. A node that cannot be started counts as lost."""
        for node_id in lost:
            before = self.nodes[node_id]
            self.replacements += not before.is_taken
            self.preemptions += before.is_taken
            why = f" ({before.reason})" if before.reason else ""
            say(f"node {node_id} is lost {[*before.codes]}{why}: starting incarnation {before.incarnation + 1}")
            try:
                self.placer.start(node_id, before.incarnation + 1)
            except (LaunchError, OSError) as error:
                say(f"could not start it: {error}")
                self.placer.end([node_id], 0.0)
        self.nodes = self.placer.look()
        self._write_status(self._state(), self._said)

    def _relaunch(self, node_count: int) -> None:
        """Start again with this many nodes; the trainer goes on from the latest checkpoint."""
        self.relaunches += 1
        self.launch |= {"launch": self.launch["launch"] + 1, "node_count": node_count}
        say(f"the nodes could not regroup: launch {self.launch['launch']} with {node_count} of them")
        self.rundir.write_json(LAUNCH, self.launch)
        self._start_nodes()
        self._write_status(self._state())

    def _look(self) -> None:
        """See how the nodes are, and end what is left of those that are lost."""
        self.nodes = self.placer.look()
        self._end_useless()
        waiting = describe_waiting(self.nodes.values(), self.clock.now())
        if waiting.partition(";")[0] != self._said.partition(";")[0]:  # not each second that it waits
            say(waiting or "all nodes have their places")
            self._said = waiting
            self._write_status(self._state(), waiting)
        launch = self.launch["launch"]
        if waiting and launch != self._told_of_wait and self._waits_long():
            self._told_of_wait = launch
            self._write_status(self._state(), waiting)  # with how long it has been: the notice repeats it
            self.announce("waits", launch)

    def _waits_long(self) -> bool:
        since = [node.queued_at for node in self.nodes.values() if node.state == "pending" and node.queued_at]
        return bool(since) and self.clock.now() - min(since) >= WAIT_SECONDS

    def _state(self) -> JobState:
        """Return the state of a job that goes on: queued as long as no node has had its place."""
        placed = any(node.state != "pending" for node in self.nodes.values())
        return JobState.RUNNING if placed else JobState.QUEUED

    def _end_useless(self) -> None:
        for node in self.nodes.values():
            is_useless = not node.runs or (self.launch["elastic"] and node.is_lost)
            if is_useless and node.state not in ("kept", "gone"):
                self.placer.end([node.node_id], self.stop_grace)

    def _pause(self) -> None:
        """End frozen nodes now and then, and wait a moment."""
        if self.launch["elastic"] and time.monotonic() - self.beat > HEARTBEAT_SECONDS:
            self.beat = time.monotonic()
            self._end_frozen()
        time.sleep(self.placer.poll_seconds)

    def _end_frozen(self) -> None:
        """Kill nodes that the others train without and that do not ask to come back: they are lost, and replaced."""
        try:
            newest = presences.newest_generation(self.rundir)
        except DamagedError as error:  # the members will say so
            return warn_once(f"frozen nodes cannot be found: {error}")
        if newest is None or self.clock.now() - newest.formed_at < newest.patience_seconds:
            return
        for node in self.nodes.values():
            if node.runs and node.presence and newest.leaves_out(node.presence):
                say(f"node {node.node_id} was left out of generation {newest.number} and does not answer: ending it")
                self.placer.end([node.node_id], 0.0)

    def _end_nodes(self, grace: float) -> None:
        """SIGTERM to every node, SIGKILL to what is left after ``grace`` seconds. Returns when nothing is left."""
        self.is_ending = True
        self._write_status(self._state(), self._said)
        self.nodes = self.placer.look()
        self.placer.end([node.node_id for node in self.nodes.values() if node.gone_seconds is None], grace)
        deadline = time.monotonic() + grace + KILL_SECONDS
        while not all(node.gone_seconds is not None for node in self.nodes.values()) and time.monotonic() < deadline:
            self.nodes = self.placer.look()
            time.sleep(self.placer.poll_seconds)
        self.placer.sweep(KILL_SECONDS)
        self.nodes = self.placer.look()

    def _ends(self) -> list[ProcessEnd]:
        """Return the ends of the processes that have ended, in order of their ranks."""
        size = self.launch["processes_per_node"]
        return [
            ProcessEnd(node.node_id * size + local_rank, node.node_id, code)
            for node in self.nodes.values()
            for local_rank, code in enumerate(node.codes)
            if code is not None
        ]

    def _give_up(self, reason: str, ends: Sequence[ProcessEnd]) -> JobState:
        """Fail with words on how to continue: the training so far is in the latest checkpoint."""
        cause = min((end for end in ends if end.code), key=blame, default=None)
        message = explain_giving_up(self.rundir, self.launch["job_id"], reason, ends, cause)
        return self._finish(JobState.FAILED, message, exit_code(cause.code) if cause else 1)

    def _finish(self, state: JobState, message: str, code: int) -> JobState:
        self._write_status(state, message, code)
        return state

    def _write_status(self, state: JobState, message: str = "", code: int | None = None) -> None:
        status = {
            "job_id": self.launch["job_id"],
            "state": state,
            "message": message,
            "launch": self.launch["launch"],
            "replacements": self.replacements,
            "preemptions": self.preemptions,
            "kept": list(self.kept),
            **({"is_ending": True} if self.is_ending and not state.is_final else {}),
            "excluded_hosts": [asdict(each) for each in self.placer.exclusions()],
            "pid": os.getpid(),
            "started_at": self.started_at,
            "ended_at": self.clock.now() if state.is_final else None,
            "stop_grace_seconds": self.stop_grace,
            "exit_code": code,
            "exit_codes": {str(end.rank): end.code for end in self._ends()},
        }
        self.rundir.write_json(STATUS, status)

    def _on_cancel(self, *_: object) -> None:
        self.cancelled = True


def describe_waiting(nodes: Iterable[PlacedNode], now: float) -> str:
    """Return which nodes wait for a place, why, and for how long; "" where none does. Pure. What may change from look
    to look stands after the first ``;``."""
    pending = sorted((node for node in nodes if node.state == "pending"), key=lambda node: node.node_id)
    if not pending:
        return ""
    reasons = sorted({node.reason for node in pending if node.reason})
    since = min((node.queued_at for node in pending if node.queued_at), default=now)
    which = ", ".join(str(node.node_id) for node in pending)
    why = f" ({' | '.join(reasons)})" if reasons else ""
    return f"waiting for node {which}{why}; for {format_duration(max(0.0, now - since))} so far"


def begin_clock(rundir: RunDir) -> SteadyClock:
    """Return the clock of a supervisor and of all its children. It starts from the newest time that
    this run directory has recorded: a clock that was set back in between must not make a node present twice at once."""
    return SteadyClock.begin(not_before=max(map(presences.end_of, rundir.nodes()), default=0.0))
