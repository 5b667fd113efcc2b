"""The placer of this machine: nodes are process groups that stand in for machines, each with a log and a mark of its
own. Which processes belong to one is in `trainer.node`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.exit_policy import PlacedNode
from dtrain_dagster.clusters.supervision.placer import Placer
from trainer.comm.launch_secret import write_launch_secret
from trainer.documents.presences import NodePresence
from trainer.node.environment import Seat, choose_port
from trainer.node.line_log import LineLog
from trainer.node.node_processes import NodeProcesses, Spawn, header_of, make_node, spawn_process
from trainer.node.processes import descendants, kill_all, marked
from trainer.rundir import LOGS, RunDir
from trainer.runtime.clock import SteadyClock

_PR_SET_CHILD_SUBREAPER = 36
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class LocalPlacer(Placer):
    """Starts, watches and ends the process groups of this machine that stand in for nodes."""

    poll_seconds = 0.05

    def __init__(
        self,
        rundir: RunDir,
        secret: Path,
        clock: SteadyClock,
        spawn: Spawn = spawn_process,
    ) -> None:
        super().__init__(rundir, secret, clock)
        self.spawn = spawn
        self.port = 0
        self.beat = 0.0
        self.nodes: dict[int, tuple[NodeProcesses, NodePresence]] = {}
        """The newest incarnation of each node of this launch."""

    def begin_launch(self, launch: Mapping[str, Any]) -> None:
        """Choose the port of rank 0, and write a new secret. From here on orphans of the nodes' processes, such as
        daemons, become children of this process, so that they can be found, and ended, with the job."""
        if _libc:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.launch, self.nodes = launch, {}
        self.port = choose_port(launch["master_port"])
        write_launch_secret(self.secret)

    def start(self, node_id: int, incarnation: int) -> None:
        log = LineLog(self.rundir.storage.local_path(f"{LOGS}/node-{node_id}.log"), header_of(self.launch, incarnation))
        place = {"node_id": node_id, "launch": self.launch["launch"], "incarnation": incarnation}
        here = NodePresence(**place, started_at=(now := self.clock.now()), last_seen_at=now)
        seat = Seat(node_id=node_id, incarnation=incarnation, master_port=self.port, secret=str(self.secret))
        node = make_node(self.launch, seat, log)
        self.nodes[node_id] = node, here
        self.rundir.write_node(here)
        node.start(self.launch, self.clock.variables(), self.spawn)

    def look(self) -> Mapping[int, PlacedNode]:
        """Pass on what the processes have printed, refresh the presences now and then, and see what has ended."""
        if beat := time.monotonic() - self.beat > presences.HEARTBEAT_SECONDS:
            self.beat = time.monotonic()
            _reap_orphans({process.pid for node, _ in self.nodes.values() for _, process in node.processes})
        for node_id, (node, _) in self.nodes.items():
            if not node.gone:
                node.log.pump()
                if beat:
                    self._write_presence(node_id, last_seen_at=self.clock.now())
            if node.look():
                self._write_presence(node_id, ended_at=self.clock.now(), exit_codes=node.ended_codes)
        return {node_id: _placed(node, presence) for node_id, (node, presence) in self.nodes.items()}

    def end(self, node_ids: Iterable[int], grace: float) -> None:
        """Send SIGTERM now and SIGKILL after ``grace`` seconds; with no grace, SIGKILL at once: a frozen process
        answers to nothing else."""
        for node_id in node_ids:
            node = self.nodes[node_id][0]
            node.end(grace)
            if grace <= 0:
                node.kill()

    def collect_logs(self, node_id: int) -> None:
        node = self.nodes[node_id][0]
        if not node.gone:
            node.log.pump()

    def sweep(self, seconds: float) -> None:
        """Kill the processes that descend from this job's, in no node's group."""
        if self.launch:  # else nothing was started
            kill_all(self._strays, seconds)

    def _strays(self) -> set[int]:
        """Return the processes that the nodes of this job have left: by its mark, and by descent."""
        token = self.launch["token"]
        return (marked(token) | descendants(os.getpid(), token)) - {os.getpid()}

    def _write_presence(self, node_id: int, **changes: Any) -> None:
        node, presence = self.nodes[node_id]
        presence = replace(presence, clock_jump_seconds=self.clock.jump(), **changes)
        self.nodes[node_id] = node, presence
        self.write_presence(presence)


def _reap_orphans(own: Container[int]) -> None:
    """Reap adopted orphans that have ended; the ends of the ``own`` processes are left to who started them."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return  # it hides the others until it is looked at, which is soon
            os.waitpid(ended.si_pid, os.WNOHANG)


def _placed(node: NodeProcesses, presence: NodePresence) -> PlacedNode:
    return PlacedNode(
        node_id=presence.node_id,
        incarnation=presence.incarnation,
        codes=node.codes,
        state="gone" if node.gone else "running",
        gone_seconds=None if node.gone_at is None else time.monotonic() - node.gone_at,
        presence=presence,
    )
