"""The default cluster: «nodes» are process groups on this machine, under a supervisor that outlives who started it.

There is nothing to start and nothing to pay. Cluster state is one small file; all about a job is in its run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from dtrain_dagster.clusters.base import (
    ClusterConfig,
    ClusterError,
    ClusterHealth,
    GPUClusterManager,
    JobSpec,
    JobState,
    JobStatus,
    NodeHealth,
    NodeUsage,
)
from dtrain_dagster.clusters.supervisor import HEARTBEAT_SECONDS, LOCK, tail, try_lock
from trainer.rundir import LAUNCH, LOGS, STATUS, NodePresence, RunDir
from trainer.storage import Storage

RANKS_PER_CORE = 8
START_SECONDS = 20.0
"""How long a supervisor may take to say that it has the job."""
STALE_SECONDS = 5 * HEARTBEAT_SECONDS


class LocalClusterManager(GPUClusterManager):
    """A cluster on this machine. Any number of manager objects, in any process, see the same cluster."""

    def __init__(
        self, home: Path, cluster_name: str = "local", gpu_type: str = "Standard_NC6s_v3", processes_per_node: int = 1
    ) -> None:
        self.home, self.cluster_name, self.gpu_type = Path(home), cluster_name, gpu_type
        self.processes_per_node = processes_per_node
        self.state = Storage(str(self.home / "clusters" / cluster_name))
        self.jobs_dir = self.home / "storage" / "jobs"

    def provision_cluster(self, node_count: int, gpu_type: str) -> ClusterConfig:
        cores = os.cpu_count() or 1
        ranks = node_count * self.processes_per_node
        if node_count < 1:
            raise ClusterError(f"DTRAIN_NODES={node_count}: a cluster needs at least one node")
        if ranks > RANKS_PER_CORE * cores:
            raise ClusterError(
                f"DTRAIN_NODES={node_count} x DTRAIN_PROCESSES_PER_NODE={self.processes_per_node} is {ranks} processes "
                f"on {cores} cores; the local cluster takes at most {RANKS_PER_CORE} per core: ask for fewer"
            )
        config = ClusterConfig(
            cluster_name=self.cluster_name,
            node_count=node_count,
            gpu_type=gpu_type,
            auto_scale_enabled=True,
            min_nodes=0,
            max_nodes=RANKS_PER_CORE * cores,
            idle_timeout_minutes=10,
            processes_per_node=self.processes_per_node,
        )
        self._write(config)
        return config

    def scale_cluster(self, target_nodes: int) -> bool:
        config = self._config()
        if config is None:
            raise ClusterError(f"cluster {self.cluster_name!r} is not provisioned: there is nothing to scale")
        if not config.min_nodes <= target_nodes <= config.max_nodes:
            raise ClusterError(
                f"{target_nodes} nodes are outside {config.min_nodes} to {config.max_nodes} of this cluster"
            )
        if target_nodes == config.node_count:
            return False
        self._write(replace(config, node_count=target_nodes))
        return True

    def monitor_health(self) -> ClusterHealth:
        """A node that a running job has lost is unhealthy; one without work is healthy."""
        config = self._config()
        if config is None:
            return ClusterHealth(cluster_name=self.cluster_name, healthy=True, nodes=(), message="not provisioned")
        running = [status for status in self.list_jobs() if not status.state.is_final]
        presences = {node.node_id: (status, node) for status in running for node in self._latest_nodes(status.job_id)}
        nodes = []
        for node_id in range(max([config.node_count, *(node_id + 1 for node_id in presences)])):
            if node_id not in presences:
                nodes.append(NodeHealth(node_id=node_id, healthy=True, message="ready"))
                continue
            status, presence = presences[node_id]
            nodes.append(_node_health(status.job_id, presence, time.time()))
        return ClusterHealth(
            cluster_name=self.cluster_name,
            healthy=all(node.healthy for node in nodes),
            nodes=tuple(nodes),
            running_jobs=tuple(status.job_id for status in running),
        )

    def cleanup_cluster(self) -> None:
        for status in self.list_jobs():
            if not status.state.is_final:
                self.cancel_job(status.job_id)
        self.state.delete("cluster.json")

    def submit_job(self, spec: JobSpec) -> None:
        rundir = RunDir(spec.run_dir)
        if not rundir.storage.is_local:
            raise ClusterError(f"the local cluster needs a run directory on this machine, not {spec.run_dir}")
        folder = rundir.storage.local_path()
        with self._submitting(folder):
            if _running(folder):
                return
            status = rundir.read_json(STATUS)
            if status and status["state"] == JobState.SUCCEEDED:
                return
            launch = {
                "job_id": spec.job_id,
                "command": list(spec.command),
                "node_count": spec.node_count,
                "processes_per_node": spec.processes_per_node,
                "env": dict(spec.env),
                "master_port": spec.master_port,
                "generation": max([rundir.last_generation(), *(node.generation for node in rundir.nodes())]) + 1,
                "sku": self.gpu_type,
            }
            rundir.storage.delete(STATUS)  # from here on, only the new supervisor says how the job stands
            rundir.write_json(LAUNCH, launch)
            self._start_supervisor(folder, rundir)

    def _start_supervisor(self, folder: Path, rundir: RunDir) -> None:
        """Start it in a session of its own, and wait until it has said that it has the job."""
        logs = folder / LOGS
        logs.mkdir(exist_ok=True)
        with open(logs / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dtrain_dagster.clusters.supervisor", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        deadline = time.monotonic() + START_SECONDS
        while rundir.read_json(STATUS) is None:
            if process.poll() is not None and rundir.read_json(STATUS) is None:
                said = tail(logs / "supervisor.log", 12)
                raise ClusterError(
                    f"the supervisor of {folder.name} ended at once (exit code {process.returncode}):\n{said}"
                )
            if time.monotonic() > deadline:
                process.kill()
                raise ClusterError(
                    f"the supervisor of {folder.name} did not start in {START_SECONDS:.0f} s; see {logs}"
                )
            time.sleep(0.05)

    def job_status(self, job_id: str) -> JobStatus:
        rundir, launch = self._rundir(job_id), None
        running = _running(self.jobs_dir / job_id)
        status = rundir.read_json(STATUS)
        if status is None:
            launch = rundir.read_json(LAUNCH)
            if launch is None:
                raise ClusterError(f"no job {job_id!r} on cluster {self.cluster_name!r}; `dtrain jobs` lists them")
            state = JobState.QUEUED if running else JobState.FAILED
            message = "starting" if running else "it never started; see its logs"
            return JobStatus(job_id=job_id, state=state, message=message)
        state, message, ended_at = JobState(status["state"]), status["message"], status["ended_at"]
        if not state.is_final and not running:
            # Read again: it may have ended between the two looks.
            status = rundir.read_json(STATUS) or status
            state, message, ended_at = JobState(status["state"]), status["message"], status["ended_at"]
            if not state.is_final:
                state, message = JobState.FAILED, "the supervisor died; its processes were ended with it"
                ended_at = max((_end(node) for node in self._latest_nodes(job_id)), default=status["started_at"])
        alive = 0 if state.is_final else sum(node.ended_at is None for node in self._latest_nodes(job_id))
        return JobStatus(
            job_id=job_id,
            state=state,
            message=message,
            nodes_alive=alive,
            started_at=status["started_at"],
            ended_at=ended_at,
        )

    def list_jobs(self) -> list[JobStatus]:
        jobs = []
        for name in Storage(str(self.jobs_dir)).list():
            with contextlib.suppress(ClusterError):  # a folder that is no job
                jobs.append(self.job_status(name))
        return sorted(jobs, key=lambda job: job.started_at or 0.0, reverse=True)

    def cancel_job(self, job_id: str) -> None:
        rundir, folder = self._rundir(job_id), self.jobs_dir / job_id
        status = rundir.read_json(STATUS)
        while _running(folder):
            status = rundir.read_json(STATUS) or status
            if status:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status["pid"], signal.SIGTERM)
            time.sleep(0.1)

    def job_logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
        storage = self._rundir(job_id).storage
        wanted = (
            [f"node-{node_id}.log"] if node_id is not None else [n for n in storage.list(LOGS) if n.startswith("node-")]
        )
        parts = []
        for name in wanted:
            try:
                lines = storage.read(f"{LOGS}/{name}").decode(errors="replace").splitlines()
            except FileNotFoundError:
                raise ClusterError(f"job {job_id!r} has no node {node_id}") from None
            parts += [f"=== {name} ==="] if node_id is None else []
            parts += lines[-tail:] if tail is not None else lines
        return "\n".join(parts)

    def node_usage(self, job_id: str) -> list[NodeUsage]:
        rundir = self._rundir(job_id)
        launch = rundir.read_json(LAUNCH) or {}
        running = _running(self.jobs_dir / job_id)
        now = time.time()
        return [
            NodeUsage(
                node_id=node.node_id,
                sku=launch.get("sku", self.gpu_type),
                started_at=node.started_at,
                ended_at=now if running and node.ended_at is None else _end(node),
            )
            for node in rundir.nodes()
        ]

    def _rundir(self, job_id: str) -> RunDir:
        return RunDir(str(self.jobs_dir / job_id))

    def _latest_nodes(self, job_id: str) -> list[NodePresence]:
        nodes = self._rundir(job_id).nodes()
        latest = max((node.generation for node in nodes), default=0)
        return [node for node in nodes if node.generation == latest]

    def _config(self) -> ClusterConfig | None:
        try:
            return ClusterConfig(**json.loads(self.state.read("cluster.json")))
        except FileNotFoundError:
            return None

    def _write(self, config: ClusterConfig) -> None:
        self.state.write("cluster.json", json.dumps(asdict(config), indent=2).encode())

    @contextlib.contextmanager
    def _submitting(self, folder: Path) -> Iterator[None]:
        """One submission of a job at a time, over all processes."""
        import fcntl

        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / "submit.lock", "a")  # noqa: SIM115 - closed below
        except OSError as error:
            raise ClusterError(f"cannot write the run directory {folder}: {error.strerror}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _running(folder: Path) -> bool:
    """Does a supervisor live? Its lock says so; process ids, which are used again, are not asked."""
    if not (folder / LOCK).exists():
        return False
    lock = try_lock(folder)
    if lock is None:
        return True
    lock.close()
    return False


def _end(node: NodePresence) -> float:
    """When a node ended; for one whose supervisor died, when it was last seen."""
    return node.ended_at or node.last_seen_at or node.started_at


def _node_health(job_id: str, node: NodePresence, now: float) -> NodeHealth:
    if node.ended_at is not None:
        left = f"left {job_id} with exit codes {list(node.exit_codes)}"
        return NodeHealth(node_id=node.node_id, healthy=not any(node.exit_codes), message=left)
    silent = now - (node.last_seen_at or node.started_at)
    if silent > STALE_SECONDS:
        return NodeHealth(node_id=node.node_id, healthy=False, message=f"not seen for {silent:.0f} s in {job_id}")
    return NodeHealth(node_id=node.node_id, healthy=True, message=f"works on {job_id}")
