"""Launchers of a training on three nodes: the local cluster and torchrun, with the same trainer, model and machine.

`benchmarks.recovery` kills their nodes and measures; nothing is measured here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from dtrain_dagster.clusters.base import JobSpec
from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.namespaces import Hosts
from trainer.elastic.generation_record import generations
from trainer.node.environment import node_mark
from trainer.node.processes import marked
from trainer.rundir import LAUNCH, RunDir

NODES = 3


class Launcher(Protocol):
    """A launcher that starts a job on three nodes, kills one of them, and lets another take its place."""

    rundir: RunDir

    def start(self) -> None:
        """Start the job on all nodes."""
        ...

    def kill(self, node: int) -> None:
        """Send SIGKILL to all processes of a node."""

    def replace(self, node: int) -> None:
        """Start another node in the place of a killed one; do nothing where the launcher does it by itself."""

    def replaced_at(self, node: int) -> float:
        """Return when the process of the newest node in this place was started, in Unix seconds."""

    def node_of_rank(self, rank: int) -> int:
        """Return the node on which a rank runs."""
        ...

    def begins_at(self, generation: int) -> int:
        """Return the steps done when a generation begins: steps up to there that it reports belong to the one
        before."""

    @property
    def running(self) -> bool:
        """True while the job runs."""
        ...

    def close(self) -> None:
        """End the job and all its processes."""
        ...


class Ours:
    """The local cluster, whose supervisor starts another node a second after one is lost."""

    def __init__(self, home: Path, config: dict[str, Any], hosts: Hosts | None = None) -> None:
        """``hosts``: one for each node, instead of loopback for all."""
        self.hosts = hosts
        self.cluster = LocalClusterManager(home, max_replacements=1000)
        self.rundir = RunDir(str(home / "storage" / "jobs" / "job"))
        self.rundir.make()
        self.rundir.write_json("job.json", {"job_id": "job", "run_dir": self.rundir.uri, **config})

    def start(self) -> None:
        """Submit the job to the local cluster."""
        place = self.hosts.local_cluster if self.hosts else []
        command = (*place, sys.executable, "-m", "trainer", "--config", f"{self.rundir.uri}/job.json")
        self.cluster.submit_job(
            JobSpec(job_id="job", run_dir=self.rundir.uri, command=command, node_count=NODES, elastic=True)
        )

    def kill(self, node: int) -> None:
        """Send SIGKILL to the process group of the node's newest stay."""
        self._signal(node, signal.SIGKILL)

    def _signal(self, node: int, number: int) -> None:
        launch = self.rundir.read_json(LAUNCH) or {}
        stay = max(item.incarnation for item in self.rundir.nodes() if item.node_id == node)
        [pid] = [pid for pid in marked(node_mark(launch, node, stay)) if os.getpgid(pid) == pid]
        os.killpg(pid, number)

    def replace(self, node: int) -> None:
        """Do nothing: the supervisor replaces the node."""

    def replaced_at(self, node: int) -> float:
        """Return the start of the node's newest stay, in Unix seconds."""
        return max(item.started_at for item in self.rundir.nodes() if item.node_id == node)

    def node_of_rank(self, rank: int) -> int:
        """Return the node of a rank in the newest generation."""
        return generations(self.rundir.storage)[-1].members[rank].node

    def begins_at(self, generation: int) -> int:
        """Return the step that the members of the generation agreed on."""
        return generations(self.rundir.storage)[generation - 1].step

    @property
    def running(self) -> bool:
        """True while the job is in no final state."""
        return not self.cluster.job_status("job").state.is_final

    def close(self) -> None:
        """Cancel the job."""
        self.cluster.cancel_job("job")


class Freezing(Ours):
    """The local cluster, where a node hangs instead of being killed, and goes on when the others train without it."""

    def __init__(self, home: Path, config: dict[str, Any], hosts: Hosts | None = None) -> None:
        super().__init__(home, config, hosts)
        self._thawed_at = 0.0

    def kill(self, node: int) -> None:
        """Stop the processes of a node, as a machine that hangs does."""
        self._signal(node, signal.SIGSTOP)

    def replace(self, node: int) -> None:
        """Let the frozen processes go on: they ask to be let in again."""
        self._thawed_at = time.time()
        self._signal(node, signal.SIGCONT)

    def replaced_at(self, node: int) -> float:
        """Return when they went on."""
        return self._thawed_at


class Cutting(Ours):
    """The local cluster with each node on a host of its own, where a cable is pulled, and plugged in again when the
    others train without it. The node itself runs on."""

    hosts: Hosts

    def __init__(self, home: Path, config: dict[str, Any], hosts: Hosts | None) -> None:
        """Raise ValueError without hosts."""
        if hosts is None:
            raise ValueError("a cable is pulled of a host: give hosts")
        super().__init__(home, config, hosts)
        self._restored_at = 0.0

    def kill(self, node: int) -> None:
        """Take down the link of a node's host: no connection is told of it."""
        self.hosts.cut(node)

    def replace(self, node: int) -> None:
        """Bring the link up: the node asks to be let in again."""
        self._restored_at = time.time()
        self.hosts.restore(node)

    def replaced_at(self, node: int) -> float:
        """Return when the link was brought up."""
        return self._restored_at

    def close(self) -> None:
        """Cancel the job, and bring all links up."""
        super().close()
        for node in range(NODES):
            self.hosts.restore(node)


class Torchrun:
    """Torchrun with one agent per node: a node is an agent and all its processes. ``tuned`` makes it as fast as its
    options allow."""

    def __init__(self, folder: Path, config: dict[str, Any], tuned: bool) -> None:
        self.folder, self.tuned = folder, tuned
        self.rundir = RunDir(str(folder / "run"))
        self.rundir.make()
        self.rundir.write_json("job.json", {"job_id": "job", "run_dir": self.rundir.uri, **config})
        self.port = _free_port()
        self.agents: dict[int, psutil.Popen] = {}
        self.started: dict[int, float] = {}
        self.store: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
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
            self.replace(node)
            if node == 0 and not self.tuned:
                _wait_for_port(self.port)  # node 0 gets the store: no race may decide which node has it

    def command(self) -> list[str]:
        """Return the command line of an agent."""
        options = ["--nnodes=1:3", "--max-restarts=3"]
        if self.tuned:
            conf = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
            options = ["--nnodes=2:3", "--max-restarts=1000", "--monitor-interval=0.2", f"--rdzv-conf={conf}"]
        return [
            sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=1", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job", "--local-addr=127.0.0.1",
            "-m", "trainer", "--config", f"{self.rundir.uri}/job.json",
        ]  # fmt: skip

    def kill(self, node: int) -> None:
        """Send SIGKILL to the agent of a node and to all its descendants."""
        agent = self.agents.pop(node)
        for process in [agent, *agent.children(recursive=True)]:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        agent.wait()

    def replace(self, node: int) -> None:
        """Start an agent in the place of this node."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self.tuned:
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.started[node] = time.time()
        with open(self.folder / f"agent-{node}.log", "ab") as log:
            self.agents[node] = psutil.Popen(
                self.command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def replaced_at(self, node: int) -> float:
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
            try:
                self.kill(node)
            except psutil.NoSuchProcess:
                continue
        if self.store is not None:
            self.store.kill()
            self.store.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens on port {port}")
