"""Runs one job's processes on this machine and outlives whoever started it: ``python -m …clusters.supervisor DIR``.

Each node is a process group of its own with a log of its own. The supervisor writes when each node was there, how the
job stands and how it ended, and holds the run directory's lock for as long as it lives. It is one plain process with
one thread and imports nothing heavy, so that it is up in a moment and costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.linelog import LineLog
from dtrain_dagster.clusters.lock import acquire
from dtrain_dagster.clusters.reaper import Reaper, group_alive, signal_group
from trainer.rundir import LAUNCH, LOGS, STATUS, NodePresence, RunDir

HEARTBEAT_SECONDS = 2.0
POLL_SECONDS = 0.05
PEER_GRACE = "DTRAIN_PEER_GRACE_SECONDS", 10.0
"""After one process failed: how long its peers may take to notice by themselves and say so in their logs."""
STOP_GRACE = "DTRAIN_STOP_GRACE_SECONDS", 8.0
"""Between SIGTERM and SIGKILL: time for a checkpoint."""
LOG_TAIL_LINES = 12
EXIT_UNUSABLE, EXIT_STOPPED = 2, 143
KILL_SECONDS = 5.0

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class LaunchError(ValueError):
    """What was asked for cannot be started. The message names the setting and the remedy."""


@dataclass(slots=True)
class Node:
    """One process group."""

    presence: NodePresence
    log: LineLog
    processes: list[tuple[int, subprocess.Popen[bytes]]] = field(default_factory=list)
    """(rank, process), in order; the first one leads the group."""
    group: int | None = None
    ended: set[int] = field(default_factory=set)
    """Ranks whose end has been noticed."""
    gone: bool = False
    """Nothing of the group is left, children of its processes included."""

    @property
    def alive(self) -> bool:
        return any(process.poll() is None for _, process in self.processes)


@dataclass(frozen=True, slots=True)
class Failure:
    """How the process that failed first ended."""

    rank: int
    node_id: int
    code: int
    """Exit code, or minus the number of the signal."""


class Supervisor:
    """Starts, watches and ends the processes of one job."""

    def __init__(self, run_dir: str) -> None:
        self.cancelled = False
        signal.signal(signal.SIGTERM, self._on_cancel)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored is inherited, and loses all exit codes
        self.rundir = RunDir(run_dir)
        self.launch: dict[str, Any] = self.rundir.read_json(LAUNCH) or {}
        self.number = int(self.launch["launch"])
        self.started_at = time.time()
        self.stop_grace = STOP_GRACE[1]
        self.beat = 0.0
        self.nodes: list[Node] = []
        self.reaper = Reaper()

    def run(self) -> JobState:
        """The whole life of the job. How it ended is in ``status.json`` as well."""
        try:
            port = choose_port(self.launch["master_port"])
            peer_grace, self.stop_grace = self._setting(*PEER_GRACE), self._setting(*STOP_GRACE)
            for node_id in range(self.launch["node_count"]):
                self._start_node(node_id, port)
        except (LaunchError, OSError) as error:
            self._end_nodes(0.0)
            return self._finish(JobState.FAILED, str(error), EXIT_UNUSABLE)
        self._write_status(JobState.RUNNING)
        failure = self._watch(peer_grace)
        # A cancellation that comes when all is done already is one that came too late.
        cancelled = self.cancelled and any(node.alive for node in self.nodes)
        failure = failure or self._first_failure()  # of processes that ended since the last look
        self._end_nodes(self.stop_grace)
        if cancelled:
            return self._finish(JobState.CANCELLED, "cancelled", EXIT_STOPPED)
        if failure is None:
            return self._finish(JobState.SUCCEEDED, "", 0)
        code = failure.code if failure.code > 0 else 128 - failure.code
        return self._finish(JobState.FAILED, self._explain(failure), code)

    def abandon(self, error: BaseException) -> None:
        """End everything after a fault of the supervisor itself."""
        self._end_nodes(0.0)
        self._finish(JobState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}", 1)

    def _setting(self, name: str, default: float) -> float:
        """A duration from the job's environment, else from the supervisor's own."""
        text = self.launch["env"].get(name) or os.environ.get(name) or str(default)
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise LaunchError(f"{name}={text!r} must be a number of seconds, such as {default:g}")
        return seconds

    def _start_node(self, node_id: int, port: int) -> None:
        path = self.rundir.storage.local_path(f"{LOGS}/node-{node_id}.log")
        log = LineLog(path, f"--- launch {self.number}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---")
        now = time.time()
        presence = NodePresence(node_id=node_id, launch=self.number, started_at=now, last_seen_at=now)
        node = Node(presence, log)
        self.nodes.append(node)
        self.rundir.write_node(presence)
        for local_rank in range(self.launch["processes_per_node"]):
            variables = rank_environment(self.launch, node_id, local_rank, port)
            pipe = log.open_pipe()
            try:
                # This process has one thread, so Python code between fork and exec is safe; and the thread that starts
                # the children is the one whose end the kernel watches.
                process = subprocess.Popen(
                    self.launch["command"],
                    env=merge_environment(os.environ, self.launch, variables),
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    process_group=node.group or 0,  # the first process starts a group, the others join it
                    preexec_fn=partial(_die_with, os.getpid()) if _libc else None,
                )
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
                self.reaper.watch(node.group)

    def _watch(self, peer_grace: float) -> Failure | None:
        """Until all processes have ended, or one failed and its peers have had their grace, or the job is cancelled."""
        failure: Failure | None = None
        deadline = 0.0
        while True:
            found = self._first_failure()
            if found and failure is None:
                failure, deadline = found, time.monotonic() + peer_grace
            if self.cancelled or not any(node.alive for node in self.nodes):
                return failure
            if failure and time.monotonic() > deadline:
                return failure
            self._pause()

    def _first_failure(self) -> Failure | None:
        """Of the processes that failed since the last look, the one to blame."""
        failed = [failure for node in self.nodes for failure in self._note_ends(node)]
        return min(failed, key=blame, default=None)

    def _pause(self) -> None:
        """Pass on what the processes have printed, say now and then that they are there, and wait a moment."""
        beat = time.monotonic() - self.beat > HEARTBEAT_SECONDS
        if beat:
            self.beat = time.monotonic()
            self._all_gone()  # forgets groups that have gone: their numbers are free for others now
        for node in self.nodes:
            node.log.pump()
            if beat and node.alive:
                self._write_presence(node, last_seen_at=time.time())
        time.sleep(POLL_SECONDS)

    def _note_ends(self, node: Node) -> list[Failure]:
        """Processes of the node that failed since the last look; writes the node's end when all have ended."""
        failed = []
        for rank, process in node.processes:
            code = process.poll()
            if code is None or rank in node.ended:
                continue
            node.ended.add(rank)
            if code:
                failed.append(Failure(rank, node.presence.node_id, code))
        if not node.alive and node.presence.ended_at is None:
            codes = tuple(process.returncode for _, process in node.processes)
            self._write_presence(node, ended_at=time.time(), exit_codes=codes)
        return failed

    def _end_nodes(self, grace: float) -> None:
        """SIGTERM to every group, SIGKILL to what is left after ``grace`` seconds. Returns when nothing is left."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while not self._all_gone() and time.monotonic() < deadline:
            self._pause()
        self._signal(signal.SIGKILL)
        for node in self.nodes:
            for _, process in node.processes:
                process.wait()
            self._note_ends(node)
        deadline = time.monotonic() + KILL_SECONDS
        while not self._all_gone() and time.monotonic() < deadline:
            self._pause()
        for node in self.nodes:
            node.log.close()

    def _all_gone(self) -> bool:
        for node in self.nodes:
            if not node.alive and not node.gone:
                self._note_ends(node)
                node.gone = node.group is None or not group_alive(node.group)
                if node.gone and node.group is not None:
                    self.reaper.forget(node.group)
        return all(node.gone for node in self.nodes)

    def _signal(self, number: int) -> None:
        for node in self.nodes:
            if not node.gone and node.group is not None:
                signal_group(node.group, number)

    def _write_presence(self, node: Node, **changes: Any) -> None:
        node.presence = replace(node.presence, **changes)
        try:
            self.rundir.write_node(node.presence)
        except OSError as error:  # a full disk must not end the watching
            _say(f"could not write the presence of node {node.presence.node_id}: {error}")

    def _explain(self, failure: Failure) -> str:
        said = last_lines(self.rundir.storage.local_path(f"{LOGS}/node-{failure.node_id}.log"), LOG_TAIL_LINES)
        how = describe_exit(failure.code)
        return f"rank {failure.rank} on node {failure.node_id} failed first ({how}); the end of its log:\n{said}"

    def _finish(self, state: JobState, message: str, exit_code: int) -> JobState:
        self._write_status(state, message, exit_code)
        return state

    def _write_status(self, state: JobState, message: str = "", exit_code: int | None = None) -> None:
        ranks = [(rank, process.returncode) for node in self.nodes for rank, process in node.processes]
        status = {
            "job_id": self.launch["job_id"],
            "state": state,
            "message": message,
            "launch": self.number,
            "pid": os.getpid(),
            "started_at": self.started_at,
            "ended_at": time.time() if state.is_final else None,
            "stop_grace_seconds": self.stop_grace,
            "exit_code": exit_code,
            "exit_codes": {str(rank): code for rank, code in ranks if code is not None},
        }
        self.rundir.write_json(STATUS, status)

    def _on_cancel(self, *_: object) -> None:
        self.cancelled = True


def choose_port(wanted: int | None) -> int:
    """A port of this machine that is free now: the wanted one, or any. `LaunchError` if the wanted one is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise LaunchError(
                f"master port {wanted} cannot be used on this machine ({error.strerror}): choose another "
                "(training.master_port), or leave it out and a free one is taken"
            ) from error
        return probe.getsockname()[1]


def rank_environment(launch: Mapping[str, Any], node_id: int, local_rank: int, port: int) -> dict[str, Any]:
    """torchrun's variables for one process; for one that regroups, the launch and the stay as well."""
    per_node, count = launch["processes_per_node"], launch["node_count"]
    elastic = {"DTRAIN_LAUNCH": launch["launch"], "DTRAIN_STAY": 1} if launch["elastic"] else {}
    return {
        "RANK": node_id * per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "NODE_RANK": node_id,
        "GROUP_RANK": node_id,
        "WORLD_SIZE": count * per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PYTHONUNBUFFERED": 1,
        **elastic,
    }


def merge_environment(
    inherited: Mapping[str, str], launch: Mapping[str, Any], variables: Mapping[str, Any]
) -> dict[str, str]:
    """What a process gets, later ones winning: defaults, the submitter's environment, the setting for threads, what
    the job asks for, its place in the world."""
    ranks = launch["node_count"] * launch["processes_per_node"]
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),  # or every rank takes all cores
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",  # all nodes are on this machine
    }
    threads = {"OMP_NUM_THREADS": str(launch["threads_per_rank"])} if launch["threads_per_rank"] else {}
    places = {name: str(value) for name, value in variables.items()}
    return {**defaults, **inherited, **threads, **launch["env"], **places}


def blame(failure: Failure) -> tuple[int, int]:
    """Sorts failures that were noticed at the same moment: the likeliest cause first. A process that was killed, or
    that refuses its configuration, takes its peers down; that a peer was lost is what the others die of."""
    if failure.code in (EXIT_STOPPED, -signal.SIGTERM):
        return 3, failure.rank
    return (0 if failure.code < 0 else 1 if failure.code == EXIT_UNUSABLE else 2), failure.rank


def describe_exit(code: int) -> str:
    """``exit code 2, unusable configuration or data``, ``killed by SIGKILL``…"""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    about = {EXIT_UNUSABLE: ", unusable configuration or data", EXIT_STOPPED: ", stopped by SIGTERM"}
    return f"exit code {code}{about.get(code, '')}"


def last_lines(path: Path, lines: int) -> str:
    """The last lines of a log, read from its end; "" if there is none."""
    block, data = 8192, b""
    try:
        with open(path, "rb") as file:
            position = file.seek(0, os.SEEK_END)
            while position > 0 and data.count(b"\n") <= lines:
                step = min(block, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
                block *= 2
    except FileNotFoundError:
        return ""
    return "\n".join(data.decode(errors="replace").splitlines()[-lines:]) if lines > 0 else ""


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the supervisor's log


def main(arguments: Sequence[str]) -> int:
    """``DIR``: the run directory. ``DIR FD``: with the descriptor of its lock, which the submitter already holds."""
    run_dir = arguments[0]
    lock = int(arguments[1]) if len(arguments) > 1 else acquire(RunDir(run_dir).storage.local_path())
    if lock is None:
        _say("another supervisor has this job")
        return 1
    supervisor = Supervisor(run_dir)
    try:
        state = supervisor.run()
    except Exception as error:
        supervisor.abandon(error)
        raise
    _say(json.dumps({"state": state}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
