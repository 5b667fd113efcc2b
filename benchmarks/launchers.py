"""Launchers of a training on three nodes, with the same trainer and model: clusters of this project, and torchrun.

`benchmarks.recovery` strikes their nodes and measures; nothing is measured here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.host import free_port
from dtrain_dagster.clusters.managers import EngineClusterManager, LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from harness.engines.engine_training import Training
from harness.engines.machines import Machines
from harness.metadata_service import MetadataService
from harness.namespaces import Hosts
from harness.waiting import until
from trainer.elastic.generation import Generation
from trainer.elastic.generation_record import generations
from trainer.node.environment import node_mark
from trainer.node.processes import marked, signal_all
from trainer.rundir import RunDir

NODES = 3
Fault = Literal["kill", "freeze", "cut", "warned", "none"]


def make_job(folder: Path, config: dict[str, Any]) -> RunDir:
    """Write a job, and return its run directory."""
    rundir = RunDir(str(folder / "storage" / "jobs" / "one"))
    rundir.make()
    rundir.write_json("job.json", {"job_id": "one", "run_dir": rundir.uri, **config})
    return rundir


class Cluster(Training):
    """A cluster of this project, whose supervisor starts another node a second after one is lost."""

    def __init__(
        self,
        home: Path,
        config: dict[str, Any],
        fault: Fault = "kill",
        hosts: Hosts | None = None,
        machines: Machines | None = None,
        metadata: MetadataService | None = None,
    ) -> None:
        """``fault``: what `strike` does to a node; ``hosts``: one for each node, needed for a cut; ``machines``: of a
        real engine, which sees the parent folder of ``home``, instead of the local cluster; ``metadata``: what tells
        machines of SLURM that they are taken away, needed for a warning."""
        rundir = make_job(home, config)
        manager: LocalClusterManager | EngineClusterManager = LocalClusterManager(
            home, LaunchSettings(max_replacements=1000)
        )
        if machines is not None:
            settings = LaunchSettings(engine=machines.kind, cluster_name="recovery", max_replacements=1000)
            options = machines.options(home.parent)
            if metadata is not None:  # each job's machine has its id
                options |= {"setup": f"export DTRAIN_METADATA_URL={metadata.url}/$SLURM_JOB_ID"}
            manager = EngineClusterManager(home, settings, options)
        super().__init__(manager, rundir, NODES, hosts.local_cluster if hosts else ())
        self._fault, self._hosts, self._mended_at = fault, hosts, 0.0
        self._machines, self._metadata = machines, metadata

    def strike(self, node: int) -> float:
        """Kill a node's agent and ranks, or stop them as a machine that hangs does, or take down the link of its host,
        of which no connection is told, or have its machine told that it is taken away; return when, in Unix seconds."""
        found, at = self.pids(node), time.time()
        if self._metadata is not None and self._machines is not None:
            newest = max(item.incarnation for item in self.rundir.nodes() if item.node_id == node)
            jobs = self._machines.jobs(self.launch())
            [name] = [job.id for job in jobs if (job.node_id, job.incarnation) == (node, newest)]
            self._metadata.announce(name)
        elif self._hosts:
            self._hosts.cut(node)
        else:
            signal_all(found, signal.SIGKILL if self._fault == "kill" else signal.SIGSTOP)
        return at

    def mend(self, node: int) -> None:
        """Let a frozen node go on, or bring up its link: it asks to be let in again. A killed one is replaced by the
        supervisor."""
        self._mended_at = time.time()
        if self._hosts:
            self._hosts.restore(node)
        elif self._fault == "freeze":
            signal_all(self.pids(node), signal.SIGCONT)

    def returned_at(self, node: int) -> float:
        """Return when the node was mended, or its replacement was started, in Unix seconds."""
        if self._fault not in ("kill", "warned"):
            return self._mended_at
        return max(item.started_at for item in self.rundir.nodes() if item.node_id == node)

    def pids(self, node: int) -> set[int]:
        """Return the processes of a node's newest stay: its ranks, and on an engine its agent."""
        newest = max((item.incarnation for item in self.rundir.nodes() if item.node_id == node), default=0)
        agents = {process.pid for process in self.processes(f"--node {node} --incarnation {newest}")}
        return agents | marked(node_mark(self.launch(), node, newest))

    def generation(self, number: int = 0) -> Generation:
        """Return the record on which the members of a generation agreed; 0: of the newest one."""
        return generations(self.rundir.storage)[number - 1]

    def begins_at(self, generation: int) -> int:
        """Return the steps done when a generation begins: steps up to there that it reports belong to the one
        before."""
        return self.generation(generation).step

    def node_of_rank(self, rank: int) -> int:
        """Return the node of a rank in the newest generation."""
        return self.generation().members[rank].node

    @property
    def warns(self) -> bool:
        """Whether a node is told before it is struck."""
        return self._metadata is not None

    @property
    def running(self) -> bool:
        """True while the job is in no final state."""
        return not self.status().state.is_final

    def close(self) -> None:
        """Cancel the job, and bring all links up."""
        super().close()
        if self._hosts:
            for node in range(NODES):
                self._hosts.restore(node)


class Torchrun:
    """Torchrun with one agent per node: a node is an agent and all its processes. ``tuned`` makes it as fast as its
    options allow. The methods are those of `Cluster`."""

    warns = False

    def __init__(self, folder: Path, config: dict[str, Any], tuned: bool) -> None:
        self.folder, self.tuned, self.rundir, self.port = folder, tuned, make_job(folder, config), free_port()
        self.agents: dict[int, psutil.Popen] = {}
        self.started: dict[int, float] = {}
        self.store: subprocess.Popen[bytes] | None = None

    def submit(self) -> None:
        """Start the store, if tuned, and an agent on each node."""
        if self.tuned:  # a store in a process of its own: the job would die with the agent that has the store
            program = (
                "import time; from torch.distributed import TCPStore\n"
                f"store = TCPStore('127.0.0.1', {self.port}, is_master=True)\n"
                "print('ready', flush=True)\nwhile True: time.sleep(60)"
            )
            self.store = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            assert self.store.stdout
            self.store.stdout.readline()
        for node in range(NODES):
            self.mend(node)
            if node == 0 and not self.tuned:  # node 0 gets the store: no race may decide which node has it
                until(lambda: _is_listening(self.port), "the store")

    def command(self) -> list[str]:
        """Return the command line of an agent."""
        options = ["--nnodes=1:3", "--max-restarts=3"]
        if self.tuned:
            conf = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
            options = ["--nnodes=2:3", "--max-restarts=1000", "--monitor-interval=0.2", f"--rdzv-conf={conf}"]
        place = [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        options += [*place, "--rdzv-backend=c10d", "--rdzv-id=job"]
        program = ["-m", "trainer", "--config", f"{self.rundir.uri}/job.json"]
        return [sys.executable, "-m", "torch.distributed.run", *options, *program]

    def strike(self, node: int) -> float:
        """Send SIGKILL to the agent of a node and to all its descendants, and return when, in Unix seconds."""
        agent = self.agents.pop(node)
        found, at = [agent, *agent.children(recursive=True)], time.time()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()
        return at

    def mend(self, node: int) -> None:
        """Start an agent in the place of this node."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self.tuned:
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.started[node] = time.time()
        with open(self.folder / f"agent-{node}.log", "ab") as log:
            own = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            self.agents[node] = psutil.Popen(self.command(), env=environment, **own)

    def returned_at(self, node: int) -> float:
        """Return when the newest agent of a node was started, in Unix seconds."""
        return self.started[node]

    def node_of_rank(self, rank: int) -> int:
        """Return the node of a rank, found by the environment of its worker; raise LookupError if no agent has it."""
        for node, agent in self.agents.items():
            for process in agent.children(recursive=True):
                if process.environ().get("RANK") == str(rank):
                    return node
        raise LookupError(f"no agent has rank {rank}")

    def begins_at(self, generation: int) -> int:
        """Return 0: all steps that a generation reports are its own."""
        return 0

    @property
    def running(self) -> bool:
        """True while an agent runs."""
        return any(agent.poll() is None for agent in self.agents.values())

    def close(self) -> None:
        """End all agents and the store."""
        for node in list(self.agents):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.strike(node)
        if self.store is not None:
            self.store.kill()
            self.store.wait()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
