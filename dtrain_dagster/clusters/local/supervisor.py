"""Runs one job's processes on this machine and outlives its submitter: ``python -m …clusters.supervisor DIR``.

Each node is a process group of its own with a log of its own. The supervisor records when each node was present, the
status of the job and its end, replaces nodes of a job that regroups, and holds the run directory's lock for as long as
it lives. It is one plain process with one thread and imports nothing heavy, so it starts in a moment at no cost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.exit_policy import (
    ExitDecision,
    Failure,
    blame,
    decide_after_exit,
    decide_plainly,
    exit_code,
    is_failure,
)
from dtrain_dagster.clusters.job_notices import RETRIES, has_end_to_tell, notice_addresses, tell_of_end, tell_of_launch
from dtrain_dagster.clusters.local.environment import (
    PEER_GRACE,
    STOP_GRACE,
    LaunchError,
    choose_port,
    merge_environment,
    node_mark,
    rank_environment,
    read_duration,
)
from dtrain_dagster.clusters.local.failure_message import explain_failure, explain_giving_up
from dtrain_dagster.clusters.local.line_log import LineLog
from dtrain_dagster.clusters.local.node import Node, Process, die_with
from dtrain_dagster.clusters.local.processes import descendants, kill_all, marked
from dtrain_dagster.clusters.local.reaper import Reaper, reap_orphans, supervised
from dtrain_dagster.clusters.local.settle import settle_status
from dtrain_dagster.clusters.presence import HEARTBEAT_SECONDS
from dtrain_dagster.support.job_lock import acquire
from trainer.comm.descriptors import raise_descriptor_limit
from trainer.comm.launch_secret import SecretFile, file_by_hand
from trainer.documents.reader import warn_once
from trainer.errors import ConfigError, DamagedError
from trainer.exit_codes import EVICTED, UNUSABLE
from trainer.rundir import LAUNCH, LOGS, STATUS, NodePresence, RunDir
from trainer.runtime.clock import SteadyClock

POLL_SECONDS = 0.05
MAX_RELAUNCHES = 3
"""Times that a job whose nodes could not regroup is started again before a person has to look."""
KILL_SECONDS = 5.0


class Supervisor:
    """The supervisor of one job: it starts, watches, replaces and ends its processes."""

    def __init__(
        self, run_dir: str, secret: SecretFile, reaper: Reaper | None = None, clock: SteadyClock | None = None
    ) -> None:
        self.cancelled = False
        signal.signal(signal.SIGTERM, self._on_cancel)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored is inherited, and loses all exit codes
        self.rundir = RunDir(run_dir)
        self.launch: dict[str, Any] = self.rundir.read_json(LAUNCH) or {}
        self.reaper, self.parent = reaper, os.getppid()
        self.secret = secret
        self.clock = clock or begin_clock(self.rundir)
        self.started_at = self.clock.now()
        self.peer_grace, self.stop_grace = PEER_GRACE[1], STOP_GRACE[1]
        self.beat = 0.0
        self.port = 0
        self.nodes: dict[int, Node] = {}
        """The newest incarnation of each node of this launch."""
        self.replacements = self.relaunches = 0
        self.failure: Failure | None = None

    def run(self) -> JobState:
        """Run the job from start to end and return its final state, which ``status.json`` holds as well."""
        try:
            self.peer_grace, self.stop_grace = self._duration(*PEER_GRACE), self._duration(*STOP_GRACE)
            self._start_nodes()
        except (LaunchError, OSError) as error:
            self._end_nodes(0.0)
            return self._finish(JobState.FAILED, str(error), UNUSABLE)
        self._write_status(JobState.RUNNING)
        decision = self._watch()
        ends = [(node_id, code) for node_id, node in self.nodes.items() for code in node.codes]  # but for our own doing
        self._end_nodes(self.stop_grace)
        if decision is None:
            return self._finish(JobState.CANCELLED, "cancelled", EVICTED)
        if decision.action == "fail" and self.failure:
            return self._finish(
                JobState.FAILED, explain_failure(self.rundir, self.launch, self.failure), exit_code(self.failure.code)
            )
        if decision.action == "give_up":
            return self._give_up(decision.reason, ends)
        return self._finish(JobState.SUCCEEDED, "", 0)

    def abandon(self, error: BaseException) -> None:
        """End everything after a fault of the supervisor itself."""
        self._end_nodes(0.0)
        self._finish(JobState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}", 1)

    def _duration(self, name: str, default: float) -> float:
        return read_duration(name, default, self.launch["env"], os.environ)

    def _start_nodes(self) -> None:
        self.port = choose_port(self.launch["master_port"])
        self.secret.renew()
        if self.launch["launch"] > 1 and self.reaper:
            self.reaper.announce_launch(self.launch["launch"])
        for node_id in range(self.launch["node_count"]):
            self._start_node(node_id)

    def _start_node(self, node_id: int, number: int = 1) -> None:
        path = self.rundir.storage.local_path(f"{LOGS}/node-{node_id}.log")
        which = f"launch {self.launch['launch']}" + (f", incarnation {number}" if number > 1 else "")
        log = LineLog(path, f"--- {which}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---")
        place = {"node_id": node_id, "launch": self.launch["launch"], "incarnation": number}
        here = NodePresence(**place, started_at=(now := self.clock.now()), last_seen_at=now)
        size = self.launch["processes_per_node"]
        node = self.nodes[node_id] = Node(here, log, node_mark(self.launch, node_id, number), size)
        self.rundir.write_node(here)
        for local_rank in range(size):
            variables = rank_environment(self.launch, node_id, local_rank, self.port, number, str(self.secret.path))
            variables |= self.clock.variables()
            environment = merge_environment(os.environ, self.launch, variables)
            pipe = log.open_pipe()
            try:
                process = self._spawn(self.launch["command"], environment, pipe, node.group)
            except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
                raise LaunchError(
                    f"cannot start {self.launch['command'][0]!r}: {error.strerror}; give a program that is on the "
                    "PATH, or its path"
                ) from error
            finally:
                os.close(pipe)
            node.processes.append((variables["RANK"], process))
            if node.group is None:
                node.group = process.pid
                if self.reaper:
                    self.reaper.watch(node.group)

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str], pipe: int, group: int | None) -> Process:
        """Start one process that writes to ``pipe``, in this process group or, without one, in a group of its own."""
        # This process has one thread, so Python code between fork and exec is safe; and the thread that starts the
        # children is the one whose end the kernel watches.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            process_group=group or 0,
            preexec_fn=partial(die_with, os.getpid()),
        )

    def _watch(self) -> ExitDecision | None:
        """Do what the policy says until the job is over. Return the last decision, or None if it was cancelled."""
        deadline: float | None = None
        while True:
            self._look()
            decision = self._decide()
            alive = any(node.alive for node in self.nodes.values())
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
                deadline = deadline or time.monotonic() + self.peer_grace
                if not alive or time.monotonic() > deadline:
                    return decision
            elif decision.action != "wait":
                return decision
            self._pause()

    def _decide(self) -> ExitDecision:
        facts = [node.facts() for node in self.nodes.values()]
        elastic = self.launch["elastic"]
        if elastic:
            done = 0 in (code for node in facts for code in node.codes) or not any(node.runs for node in facts)
            decision = decide_after_exit(
                facts,
                finished=done and (self.rundir.read_result() or {}).get("status") == "succeeded",
                replacements_left=self.launch["max_replacements"] - self.replacements,
                launches_left=MAX_RELAUNCHES - self.relaunches,
                delay_seconds=self.launch["replacement_delay_seconds"],
            )
        else:
            decision = decide_plainly(facts)
        if decision.action == "fail" and self.failure is None:
            per_node = self.launch["processes_per_node"]
            failures = [
                Failure(node.node_id * per_node + local_rank, node.node_id, code)
                for node in facts
                for local_rank, code in enumerate(node.codes)
                if code and (is_failure(code) or not elastic)
            ]
            self.failure = min(failures, key=blame)
        return decision

    def _replace(self, lost: Sequence[int]) -> None:
        """Start another node in the place of each lost one. A node that cannot be started counts as lost."""
        for node_id in lost:
            self.replacements += 1
            before = self.nodes[node_id]
            _say(f"node {node_id} is lost {[*before.codes]}: starting incarnation {before.presence.incarnation + 1}")
            try:
                self._start_node(node_id, before.presence.incarnation + 1)
            except (LaunchError, OSError) as error:
                _say(f"could not start it: {error}")
                self.nodes[node_id].end(0.0)

    def _relaunch(self, node_count: int) -> None:
        """Start again with this many nodes; the trainer goes on from the latest checkpoint."""
        self.relaunches += 1
        self.launch |= {"launch": self.launch["launch"] + 1, "node_count": node_count}
        _say(f"the nodes could not regroup: launch {self.launch['launch']} with {node_count} of them")
        self.rundir.write_json(LAUNCH, self.launch)
        self.nodes = {}
        self._start_nodes()
        self._write_status(JobState.RUNNING)

    def _look(self) -> None:
        """See what has ended, write the end of nodes that are gone, and end what is left of those that are lost."""
        for node in self.nodes.values():
            if node.look():
                codes = tuple(code for _, code in _ranks(node) if code is not None)
                self._write_presence(node, ended_at=self.clock.now(), exit_codes=codes)
                if self.reaper and node.group is not None:
                    self.reaper.forget(node.group)  # its number is free for others now
            elif not node.gone and (not node.alive or (self.launch["elastic"] and node.facts().is_lost)):
                node.end(self.stop_grace)

    def _pause(self) -> None:
        """Pass on what the processes have printed, refresh the presences now and then, and wait a moment."""
        beat = time.monotonic() - self.beat > HEARTBEAT_SECONDS
        if beat:
            self.beat = time.monotonic()
            if self.reaper:
                reap_orphans({process.pid for node in self.nodes.values() for _, process in node.processes})
            if self.launch["elastic"]:
                self._end_frozen()
        for node in self.nodes.values():
            if not node.gone:
                node.log.pump()
                if beat:
                    self._write_presence(node, last_seen_at=self.clock.now())
        time.sleep(POLL_SECONDS)

    def _end_frozen(self) -> None:
        """Kill nodes that the others train without and that do not ask to come back: they are lost, and replaced."""
        try:
            newest = presences.newest_generation(self.rundir)
        except DamagedError as error:  # the members will say so
            return warn_once(f"frozen nodes cannot be found: {error}")
        if newest is None or self.clock.now() - newest.formed_at < newest.patience_seconds:
            return
        for node_id, node in self.nodes.items():
            if node.alive and newest.leaves_out(node.presence):
                _say(f"node {node_id} was left out of generation {newest.number} and does not answer: ending it")
                node.kill()

    def _end_nodes(self, grace: float) -> None:
        """SIGTERM to every node, SIGKILL to what is left after ``grace`` seconds. Returns when nothing is left."""
        for node in self.nodes.values():
            node.end(grace)
        deadline = time.monotonic() + grace + KILL_SECONDS
        while not all(node.gone for node in self.nodes.values()) and time.monotonic() < deadline:
            self._look()
            self._pause()
        kill_all(self._strays, KILL_SECONDS)

    def _strays(self) -> set[int]:
        """Return the processes that descend from this job's, in no node's group and without its mark."""
        above = {self.parent} if self.reaper and os.getppid() == self.parent else set()
        token = self.launch["token"]
        found = marked(token).union(*(descendants(pid, token) for pid in (os.getpid(), *above)))
        return found - {os.getpid(), *above}

    def _write_presence(self, node: Node, **changes: Any) -> None:
        node.presence = replace(node.presence, clock_jump_seconds=self.clock.jump(), **changes)
        try:
            self.rundir.write_node(node.presence)
        except OSError as error:  # a full disk must not end the watching
            _say(f"could not write the presence of node {node.presence.node_id}: {error}")

    def _give_up(self, reason: str, ends: Sequence[tuple[int, int | None]]) -> JobState:
        """Fail with words on how to continue: the training so far is in the latest checkpoint."""
        causes = [Failure(index, node_id, code) for index, (node_id, code) in enumerate(ends) if code]
        cause = min(causes, key=blame, default=None)
        message = explain_giving_up(self.rundir, self.launch["job_id"], reason, ends, cause)
        return self._finish(JobState.FAILED, message, exit_code(cause.code) if cause else 1)

    def _finish(self, state: JobState, message: str, code: int) -> JobState:
        self._write_status(state, message, code)
        return state

    def _write_status(self, state: JobState, message: str = "", code: int | None = None) -> None:
        ranks = [end for node in self.nodes.values() for end in _ranks(node)]
        status = {
            "job_id": self.launch["job_id"],
            "state": state,
            "message": message,
            "launch": self.launch["launch"],
            "replacements": self.replacements,
            "pid": os.getpid(),
            "started_at": self.started_at,
            "ended_at": self.clock.now() if state.is_final else None,
            "stop_grace_seconds": self.stop_grace,
            "exit_code": code,
            "exit_codes": {str(rank): code for rank, code in ranks if code is not None},
        }
        self.rundir.write_json(STATUS, status)

    def _on_cancel(self, *_: object) -> None:
        self.cancelled = True


def _ranks(node: Node) -> list[tuple[int, int | None]]:
    return [(rank, process.returncode) for rank, process in node.processes]


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the supervisor's log


def begin_clock(rundir: RunDir) -> SteadyClock:
    """Return the clock of a supervisor, of its reaper and of all their children. It starts from the newest time that
    this run directory has recorded: a clock that was set back in between must not make a node present twice at once."""
    return SteadyClock.begin(not_before=max(map(presences.end_of, rundir.nodes()), default=0.0))


def supervise(run_dir: str, secret: SecretFile, clock: SteadyClock, reaper: Reaper) -> int:
    """Run a supervisor's whole life, under its reaper, and return the exit code."""
    supervisor = Supervisor(run_dir, secret, reaper, clock)
    try:
        state = supervisor.run()
    except Exception as error:
        supervisor.abandon(error)
        raise
    _say(json.dumps({"state": state}))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the supervisor and return its exit code.

    ``DIR``: the run directory. ``DIR FD FILE``: with the descriptor of its lock, which the submitter already holds, and
    the file for the secrets of launches.
    """
    rundir = RunDir(run_dir := arguments[0])
    lock = int(arguments[1]) if len(arguments) > 1 else acquire(rundir.storage.local_path())
    if lock is None:
        _say("another supervisor has this job")
        return 1
    try:
        secret = SecretFile(Path(arguments[2])) if len(arguments) > 2 else file_by_hand(os.environ)
    except ConfigError as error:
        _say(str(error))
        return UNUSABLE
    token = (rundir.read_json(LAUNCH) or {})["token"]
    clock = begin_clock(rundir)
    raise_descriptor_limit()

    def afterwards() -> None:
        secret.remove()
        presences.close(rundir, clock.now())
        if notice_addresses():  # people are told, whoever looks; else the next one who looks settles it
            settle_status(rundir, sweeps=False)

    work, tell = partial(supervise, run_dir, secret, clock), partial(tell_of_launch, rundir, retries=RETRIES)
    code = supervised(work, token, afterwards, tell)
    if has_end_to_tell(rundir):
        os.close(lock)  # the job may be started again meanwhile
        tell_of_end(rundir, RETRIES)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
