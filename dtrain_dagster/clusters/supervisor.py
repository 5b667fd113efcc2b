"""Runs one job's processes on this machine and outlives whoever started it: ``python -m …clusters.supervisor DIR``.

Each node is a process group of its own with a log of its own. It writes when each node was there, how the job stands,
and how it ended; it holds a lock on the run directory for as long as it lives, which is how others know that
it does. It is one plain process with one thread and imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from dtrain_dagster.clusters.base import JobState
from trainer.rundir import LAUNCH, LOGS, STATUS, NodePresence, RunDir

LOCK = "supervisor.lock"
HEARTBEAT_SECONDS = 2.0
POLL_SECONDS = 0.1
PEER_GRACE_SECONDS = 10.0
"""After one process failed, how long its peers may take to notice by themselves and say so in their logs."""
STOP_GRACE_SECONDS = 8.0
"""Between SIGTERM and SIGKILL: time for a checkpoint."""
LOCK_SECONDS = 2.0
EXIT_UNUSABLE, EXIT_STOPPED = 2, 143

_libc = ctypes.CDLL(None)


@dataclass(slots=True)
class Node:
    """One process group."""

    node_id: int
    presence: NodePresence
    log: IO[bytes]
    processes: list[tuple[int, subprocess.Popen[bytes]]] = field(default_factory=list)
    """(rank, process)."""

    @property
    def alive(self) -> bool:
        return any(process.poll() is None for _, process in self.processes)


def try_lock(run_dir: Path) -> IO[str] | None:
    """The supervisor's lock, held until the file is closed or the process ends; None if another process holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    file = open(run_dir / LOCK, "a")  # noqa: SIM115 - the lock lives as long as the file is open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


class Supervisor:
    """Starts, watches and ends the processes of one job."""

    def __init__(self, run_dir: str) -> None:
        self.rundir = RunDir(run_dir)
        self.launch: dict[str, Any] = self.rundir.read_json(LAUNCH) or {}
        self.generation = int(self.launch["generation"])
        self.nodes: list[Node] = []
        self.started_at = time.time()
        self.cancelled = False
        signal.signal(signal.SIGTERM, self._on_cancel)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> JobState:
        """The whole life of the job."""
        try:
            port = self._port()
        except OSError as error:
            message = (
                f"master port {self.launch['master_port']} is in use on this machine ({error.strerror}): choose "
                "another (training.master_port), or leave it out and a free one is taken"
            )
            return self._finish(JobState.FAILED, message)
        for node_id in range(self.launch["node_count"]):
            self._start_node(node_id, port)
        self._write_status(JobState.RUNNING)
        failed = self._watch()
        self._end_nodes()
        if self.cancelled:
            return self._finish(JobState.CANCELLED, "cancelled")
        if failed is None:
            return self._finish(JobState.SUCCEEDED, "")
        return self._finish(JobState.FAILED, self._explain(*failed))

    def _port(self) -> int:
        """The port asked for, if it can be bound, else a free one."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.launch["master_port"] or 0))
            return probe.getsockname()[1]

    def _start_node(self, node_id: int, port: int) -> None:
        per_node, count = self.launch["processes_per_node"], self.launch["node_count"]
        path = self.rundir.storage.local_path(f"{LOGS}/node-{node_id}.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        log = open(path, "ab", buffering=0)  # noqa: SIM115 - closed when the node has ended
        log.write(f"--- generation {self.generation}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        now = time.time()
        node = Node(node_id, NodePresence(node_id=node_id, generation=self.generation, started_at=now), log)
        self.nodes.append(node)
        self.rundir.write_node(node.presence)
        group = 0
        for local_rank in range(per_node):
            rank = node_id * per_node + local_rank
            environment = os.environ | self.launch["env"] | {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(count * per_node),
                "LOCAL_WORLD_SIZE": str(per_node),
                "NODE_RANK": str(node_id),
                "GROUP_RANK": str(node_id),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "DTRAIN_GENERATION": str(self.generation),
                "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            # The parent has one thread, so code between fork and exec is safe here; it asks the kernel to kill the
            # process when the supervisor dies, however that happens.
            process = subprocess.Popen(
                self.launch["command"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=group,
                preexec_fn=_die_with_parent,
            )
            group = group or process.pid
            node.processes.append((rank, process))

    def _watch(self) -> tuple[int, int] | None:
        """Until all processes have ended, or one failed and its peers have had their grace, or the job is cancelled.
        (rank, exit code) of the process that failed first, or None."""
        failed: tuple[int, int] | None = None
        deadline = beat = 0.0
        while not self.cancelled:
            alive = False
            for node in self.nodes:
                for rank, process in node.processes:
                    code = process.poll()
                    alive = alive or code is None
                    if code and failed is None:
                        failed, deadline = (rank, code), time.monotonic() + PEER_GRACE_SECONDS
                self._note_end(node)
            if not alive or (failed and time.monotonic() > deadline):
                break
            if time.monotonic() - beat > HEARTBEAT_SECONDS:
                beat = time.monotonic()
                self._heartbeat()
            time.sleep(POLL_SECONDS)
        return failed

    def _end_nodes(self) -> None:
        """SIGTERM to every group, SIGKILL to what is left after the grace. Returns when nothing is left."""
        self._signal(signal.SIGTERM)
        grace = float(self.launch.get("stop_grace_seconds") or STOP_GRACE_SECONDS)
        deadline = time.monotonic() + grace
        while any(_group_alive(node) for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._signal(signal.SIGKILL)
        for node in self.nodes:
            for _, process in node.processes:
                process.wait()
            self._note_end(node)
            node.log.close()

    def _signal(self, number: signal.Signals) -> None:
        for node in self.nodes:
            if node.processes:
                try:
                    os.killpg(node.processes[0][1].pid, number)
                except (ProcessLookupError, PermissionError):
                    continue

    def _note_end(self, node: Node) -> None:
        """Write the node's end, once."""
        if node.alive or node.presence.ended_at is not None:
            return
        codes = tuple(process.returncode for _, process in node.processes)
        self._write_presence(node, ended_at=time.time(), exit_codes=codes)

    def _heartbeat(self) -> None:
        for node in self.nodes:
            if node.alive:
                self._write_presence(node, last_seen_at=time.time())

    def _write_presence(self, node: Node, **changes: Any) -> None:
        node.presence = replace(node.presence, **changes)
        try:
            self.rundir.write_node(node.presence)
        except OSError as error:  # a full disk must not end the watching
            print(f"could not write the presence of node {node.node_id}: {error}", flush=True)  # noqa: T201 - its log

    def _explain(self, rank: int, code: int) -> str:
        """Which process failed first, how, and what it said last."""
        node = next(node for node in self.nodes if rank in dict(node.processes))
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == EXIT_UNUSABLE:
            how += ", unusable configuration or data"
        elif code == EXIT_STOPPED:
            how += ", stopped by SIGTERM"
        said = tail(self.rundir.storage.local_path(f"{LOGS}/node-{node.node_id}.log"), 12)
        return f"rank {rank} on node {node.node_id} failed first ({how}); the end of its log:\n{said}"

    def _finish(self, state: JobState, message: str) -> JobState:
        self._write_status(state, message, time.time())
        return state

    def _write_status(self, state: JobState, message: str = "", ended_at: float | None = None) -> None:
        self.rundir.write_json(
            STATUS,
            {
                "job_id": self.launch["job_id"],
                "state": state,
                "message": message,
                "generation": self.generation,
                "pid": os.getpid(),
                "started_at": self.started_at,
                "ended_at": ended_at,
            },
        )

    def _on_cancel(self, *_: object) -> None:
        self.cancelled = True


def tail(path: Path, lines: int) -> str:
    """The last lines of a log; "" if there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def _group_alive(node: Node) -> bool:
    """Does any process of the group live, children of the node's processes included?"""
    for _, process in node.processes:
        process.poll()  # reap, or a zombie would count as alive
    try:
        os.killpg(node.processes[0][1].pid, 0)
    except (ProcessLookupError, IndexError):
        return False
    return True


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> int:
    run_dir = sys.argv[1]
    folder, deadline = Path(RunDir(run_dir).storage.local_path()), time.monotonic() + LOCK_SECONDS
    while (lock := try_lock(folder)) is None and time.monotonic() < deadline:
        time.sleep(0.05)  # whoever asks «does it run?» holds the lock for a moment
    if lock is None:
        print("another supervisor has this job", flush=True)  # noqa: T201 - its log
        return 0
    supervisor = Supervisor(run_dir)
    try:
        state = supervisor.run()
    except Exception as error:
        supervisor._end_nodes()
        supervisor._finish(JobState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}")
        raise
    print(json.dumps({"state": state}), flush=True)  # noqa: T201 - its log
    return 0


if __name__ == "__main__":
    sys.exit(main())
