"""The supervisor's process: ``python -m dtrain_dagster.clusters.supervise DIR`` (see `supervision.supervisor`).

It chooses the placer by the launch, and stands above the rooms of all kinds of clusters for that. On this machine each
node is a process group, with a log and a mark of its own; which processes belong to it is in `trainer.node`.

The manager of a cluster starts the supervisor (`supervision.submit`) and knows it by its name only. It starts in a
moment and outlives the submitting process, so its imports must be light.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.hosts import Exclusion, HostRecord
from dtrain_dagster.clusters.job_notices import (
    RETRIES,
    has_end_to_tell,
    tell,
    tell_of_end,
    wait_patience_seconds,
)
from dtrain_dagster.clusters.notice_claims import notice_addresses
from dtrain_dagster.clusters.supervision.placer import PlacedNode, Placer
from dtrain_dagster.clusters.supervision.private_files import PrivateFiles
from dtrain_dagster.clusters.supervision.reaper import Reaper, reap_orphans, supervised
from dtrain_dagster.clusters.supervision.settle import has_ended, outlives_supervisor, settle_status, supervisor_mark
from dtrain_dagster.clusters.supervision.supervisor import Supervisor, begin_clock
from dtrain_dagster.settings.cluster_kinds import cluster_key
from dtrain_dagster.support.job_lock import acquire
from trainer.comm.descriptors import raise_descriptor_limit
from trainer.comm.launch_secret import SecretFile, file_by_hand
from trainer.documents.presences import NodePresence
from trainer.documents.reader import warn_once
from trainer.errors import ConfigError
from trainer.exit_codes import UNUSABLE
from trainer.node.environment import LaunchError, Seat, choose_port
from trainer.node.line_log import LineLog
from trainer.node.node_processes import NodeProcesses, Spawn, header_of, make_node, spawn_process
from trainer.node.preflight import Wanted, judge_node, read_setting
from trainer.node.preflight_measures import Errand, Measuring, look_lightly
from trainer.node.processes import descendants, kill_all, marked
from trainer.rundir import LAUNCH, LOGS, RunDir
from trainer.runtime.clock import SteadyClock

RESUME = "--resume"
"""The argument of a supervisor that goes on with the nodes of one that died."""


class LocalPlacer:
    """Starts, watches and ends the process groups of this machine that stand in for nodes."""

    poll_seconds = 0.05

    def __init__(
        self,
        rundir: RunDir,
        secret: SecretFile,
        clock: SteadyClock,
        reaper: Reaper,
        spawn: Spawn = spawn_process,
    ) -> None:
        self.rundir, self.secret, self.clock, self.reaper, self.spawn = rundir, secret, clock, reaper, spawn
        self.parent = os.getppid()
        self.launch: Mapping[str, Any] = {}
        self.port = 0
        self.beat = 0.0
        self.nodes: dict[int, tuple[NodeProcesses, NodePresence]] = {}
        """The newest incarnation of each node of this launch."""

    def begin_launch(self, launch: Mapping[str, Any]) -> None:
        """Choose the port of rank 0, and write a new secret."""
        self.launch, self.nodes = launch, {}
        self._check_fitness()
        self.port = choose_port(launch["master_port"])
        self.secret.renew()

    def _check_fitness(self) -> None:
        """Make the pre-flight of this machine, once for all nodes, which share it. Raise `LaunchError` where it is not
        fit."""
        setting = self.launch.get("preflight", "")
        mode, command = read_setting(setting)
        if mode == "off":
            return
        folder = str(self.rundir.storage.local_path())
        if not setting:
            found = look_lightly(folder)
        else:
            measuring = Measuring(
                Errand(run_dir=folder, mode=mode, command=command), {**os.environ, **self.launch["env"]}
            )
            while not measuring.is_over():
                time.sleep(self.poll_seconds)
            found = measuring.result()
        judged = judge_node(found, Wanted(is_room_needed=bool(setting)))
        for words, each in (("failed", judged.failed), ("warning", judged.warned)):
            for text in each:
                _say(f"pre-flight {words}: {text}")
        if judged.failed:
            raise LaunchError(
                f"this machine failed its pre-flight: {judged.why}. Repair that, or set DTRAIN_PREFLIGHT=off"
            )

    def resume_launch(self, launch: Mapping[str, Any]) -> set[int]:
        """Raise NotImplementedError: these nodes end with their supervisor."""
        raise NotImplementedError

    def start(self, node_id: int, incarnation: int) -> None:
        """Start one process group, as `Placer.start` says."""
        log = LineLog(self.rundir.storage.local_path(f"{LOGS}/node-{node_id}.log"), header_of(self.launch, incarnation))
        place = {"node_id": node_id, "launch": self.launch["launch"], "incarnation": incarnation}
        here = NodePresence(**place, started_at=(now := self.clock.now()), last_seen_at=now)
        seat = Seat(node_id=node_id, incarnation=incarnation, master_port=self.port, secret=str(self.secret.path))
        node = make_node(self.launch, seat, log)
        self.nodes[node_id] = node, here
        self.rundir.write_node(here)
        node.start(self.launch, self.clock.variables(), self.spawn, self.reaper.watch)

    def look(self) -> Mapping[int, PlacedNode]:
        """Pass on what the processes have printed, refresh the presences now and then, and see what has ended."""
        if beat := time.monotonic() - self.beat > presences.HEARTBEAT_SECONDS:
            self.beat = time.monotonic()
            reap_orphans({process.pid for node, _ in self.nodes.values() for _, process in node.processes})
        for node_id, (node, _) in self.nodes.items():
            if not node.gone:
                node.log.pump()
                if beat:
                    self._write_presence(node_id, last_seen_at=self.clock.now())
            if node.look():
                self._write_presence(node_id, ended_at=self.clock.now(), exit_codes=node.ended_codes)
                if node.group is not None:
                    self.reaper.forget(node.group)  # its number is free for others now
        return {node_id: _placed(node, presence) for node_id, (node, presence) in self.nodes.items()}

    def end(self, node_ids: Iterable[int], grace: float) -> None:
        """Send SIGTERM now and SIGKILL after ``grace`` seconds; with no grace, SIGKILL at once: a frozen process
        answers to nothing else."""
        for node_id in node_ids:
            node = self.nodes[node_id][0]
            node.end(grace)
            if grace <= 0:
                node.kill()

    def how_to_enter(self, node_id: int) -> str:
        """Return nothing: its nodes are processes of this machine, and none is kept."""
        return ""

    def exclusions(self) -> Sequence[Exclusion]:
        """Return none: its nodes share one machine."""
        return ()

    def collect_logs(self, node_id: int) -> None:
        """Write what the node's processes have printed into its log."""
        node = self.nodes[node_id][0]
        if not node.gone:
            node.log.pump()

    def sweep(self, seconds: float) -> None:
        """Kill the processes that descend from this job's, in no node's group."""
        if self.launch:  # else nothing was started
            kill_all(self._strays, seconds)

    def _strays(self) -> set[int]:
        """Return the processes that descend from this job's, in no node's group and without its mark."""
        above = {self.parent} if os.getppid() == self.parent else set()
        token = self.launch["token"]
        found = marked(token).union(*(descendants(pid, token) for pid in (os.getpid(), *above)))
        return found - {os.getpid(), *above}

    def _write_presence(self, node_id: int, **changes: Any) -> None:
        node, presence = self.nodes[node_id]
        presence = replace(presence, clock_jump_seconds=self.clock.jump(), **changes)
        self.nodes[node_id] = node, presence
        try:
            self.rundir.write_node(presence)
        except OSError as error:  # a full disk must not end the watching
            warn_once(f"could not write the presence of node {node_id}: {error}")


def _placed(node: NodeProcesses, presence: NodePresence) -> PlacedNode:
    return PlacedNode(
        node_id=presence.node_id,
        incarnation=presence.incarnation,
        codes=node.codes,
        state="gone" if node.gone else "running",
        gone_at=node.gone_at,
        presence=presence,
    )


def make_placer(
    launch: Mapping[str, Any], rundir: RunDir, secret: SecretFile, clock: SteadyClock, reaper: Reaper
) -> Placer:
    """Return the placer of a launch: that of its ``engine``, else this machine's."""
    if not outlives_supervisor(launch):
        return LocalPlacer(rundir, secret, clock, reaper)
    from dtrain_dagster.clusters.managers import open_engine
    from dtrain_dagster.clusters.supervision.agent_placer import AgentPlacer

    files = PrivateFiles.beside(secret.path)
    options = files.read_options()
    environment = {**os.environ, **launch["env"]}
    engine = open_engine(launch["engine"], options, rundir.uri, str(secret.path), environment)
    key = cluster_key(launch["engine"], launch.get("cluster_name", "local"))
    return AgentPlacer(rundir, engine, secret, clock, HostRecord.of_cluster(files.home, key))


def supervise(rundir: RunDir, secret: SecretFile, clock: SteadyClock, resumes: bool, reaper: Reaper) -> int:
    """Run a supervisor's whole life, under its reaper, and return the exit code."""
    try:
        placer = make_placer(rundir.read_json(LAUNCH) or {}, rundir, secret, clock, reaper)
    except ClusterError as error:
        _say(str(error))
        return UNUSABLE
    supervisor = Supervisor(rundir, placer, clock, reaper, wait_patience_seconds())
    try:
        state = supervisor.run(resumes)
    except Exception as error:
        supervisor.abandon(error)
        raise
    _say(json.dumps({"state": state}))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the supervisor and return its exit code.

    ``DIR``: the run directory. ``DIR FD FILE``: with the descriptor of its lock, which the submitter already holds, and
    the file for the secrets of launches. ``--resume`` at the end: go on with the nodes of a supervisor that died.
    """
    rundir = RunDir(arguments[0])
    lock = int(arguments[1]) if len(arguments) > 1 else acquire(rundir.storage.local_path())
    if lock is None:
        _say("another supervisor has this job")
        return 1
    try:
        secret = SecretFile(Path(arguments[2])) if len(arguments) > 2 else file_by_hand(os.environ)
    except ConfigError as error:
        _say(str(error))
        return UNUSABLE
    launch = rundir.read_json(LAUNCH) or {}
    clock = begin_clock(rundir)
    raise_descriptor_limit()

    def afterwards() -> None:
        if outlives_supervisor(launch) and not has_ended(rundir):
            return  # its nodes go on, and whoever looks at the job next starts another supervisor
        secret.remove()
        PrivateFiles.beside(secret.path).remove_options()
        presences.close(rundir, clock.now())
        if notice_addresses():  # people are told, whoever looks; else the next one who looks settles it
            settle_status(rundir, sweeps=False)

    work = partial(supervise, rundir, secret, clock, RESUME in arguments)
    code = supervised(work, supervisor_mark(launch), afterwards, partial(tell, rundir, retries=RETRIES))
    if has_end_to_tell(rundir):
        os.close(lock)  # the job may be started again meanwhile
        tell_of_end(rundir, RETRIES)
    return code


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the supervisor's log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
