"""A cluster whose jobs have a supervisor on this machine: the local one, and those of engines (SLURM, Kubernetes, Ray).

The size of the cluster is one small file of ours; its nodes come with each job. What is asked of a job is in `jobs`.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import (
    ClusterConfig,
    ClusterError,
    ClusterHealth,
    GPUClusterManager,
    InUseError,
    JobSpec,
    JobStatus,
    NodeHealth,
    NodePool,
    Orphan,
)
from dtrain_dagster.clusters.supervision.jobs import LaunchSettings, SupervisedJobs
from dtrain_dagster.costs.usage import NodeUsage
from trainer.documents import schemas
from trainer.documents.reader import MARK_BYTES, read_document
from trainer.errors import DamagedError
from trainer.storage.open import open_storage

END_SECONDS = 25.0
"""Seconds for which one tick of a sensor waits for the end of an orphan."""
CLUSTER = "cluster.json"
_CONFIG = schemas.record(
    {"cluster_name": schemas.text, "node_count": schemas.whole(1), "gpu_type": schemas.text,
     "auto_scale_enabled": schemas.flag, "min_nodes": schemas.count, "max_nodes": schemas.count,
     "idle_timeout_minutes": schemas.count},
    processes_per_node=schemas.whole(1), tier=schemas.optional(schemas.text),
)  # fmt: skip


class SupervisedClusterManager(GPUClusterManager):
    """A cluster whose state is in ``<home>/clusters/<kind>.<cluster_name>``. Any number of manager objects, in any
    process, see the same cluster and jobs."""

    def __init__(
        self,
        home: Path,
        settings: LaunchSettings,
        processes_per_node: int = 1,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.home, self.cluster_name = Path(home).absolute(), settings.cluster_name
        self.processes_per_node = processes_per_node
        self.state = open_storage(str(self.home / "clusters" / settings.cluster_key))
        self.jobs = SupervisedJobs(self.home, settings, self.state, engine_options)
        self.use = self.jobs.use

    @abstractmethod
    def check_size(self, node_count: int, processes_per_node: int) -> None:
        """Raise `ClusterError` for a size that this cluster cannot have."""

    @property
    @abstractmethod
    def most_nodes(self) -> int:
        """The largest number of nodes that this cluster is asked for."""

    def provision_cluster(self, node_count: int, gpu_type: str) -> ClusterConfig:
        self.check_size(node_count, self.processes_per_node)
        self.use.begin("provisioned")
        config = ClusterConfig(
            cluster_name=self.cluster_name,
            node_count=node_count,
            gpu_type=gpu_type,
            auto_scale_enabled=True,
            min_nodes=0,
            max_nodes=self.most_nodes,
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
                f"{target_nodes} nodes are outside {config.min_nodes} to {config.max_nodes}, the limits of cluster "
                f"{self.cluster_name!r}"
            )
        if target_nodes == config.node_count:
            return False
        self._write(replace(config, node_count=target_nodes))
        return True

    def monitor_health(self) -> ClusterHealth:
        """Return the health of each node: one that a running job has lost, or that is silent, is unhealthy."""
        config = self._config()
        running = [status.job_id for status in self.active_jobs()]
        damaged: list[str] = []
        seen: dict[int, list[NodeHealth]] = {node_id: [] for node_id in range(config.node_count if config else 0)}
        for job_id in running:
            try:
                views = presences.job_health(self.jobs.rundir(job_id), job_id, time.time())
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for view in views:
                seen.setdefault(view.node_id, []).append(view)
        nodes = tuple(
            NodeHealth(
                node_id=node_id,
                healthy=all(view.healthy for view in views),
                message="; ".join(view.message for view in views) or "ready",
            )
            for node_id, views in sorted(seen.items())
        )
        return ClusterHealth(
            cluster_name=self.cluster_name,
            healthy=all(node.healthy for node in nodes) and not damaged,
            nodes=nodes,
            running_jobs=tuple(running),
            message="; ".join([*([] if config else ["not provisioned"]), *damaged]),
        )

    def pools(self) -> list[NodePool]:
        """Return one pool; none where nothing is provisioned and nothing runs."""
        config, jobs = self._config(), self.active_jobs()
        at_work = sum(job.nodes_alive for job in jobs)
        nodes = max(at_work, config.node_count if config else 0)
        if not nodes and not jobs:
            return []
        return [
            NodePool(
                name=self.cluster_name,
                sku=config.gpu_type if config else self.jobs.settings.sku,
                states={"running": at_work, "idle": nodes - at_work},
                node_count=nodes,
                work=tuple(job.job_id for job in jobs),
                used_at=self.use.used_at(),
            )
        ]

    def scale_down(self, pool: NodePool, force: bool = False) -> bool:
        """Forget the cluster: it has no nodes without a job. Every run directory is opened before, whatever the marks
        say."""
        with self.use.giving_back(pool.used_at):
            running = self.jobs.running()
            for job_id in running:
                self.jobs.active.enter(job_id)
            if running:
                raise InUseError(f"{', '.join(running)} runs by now")
            self.state.delete(CLUSTER)
        return True

    def cleanup_cluster(self) -> None:
        running = self.jobs.running()
        for job_id in running:
            self.jobs.ask_to_end(job_id)  # all at once, then wait for each
        for job_id in running:
            self.cancel_job(job_id)
        self.state.delete(CLUSTER)

    def submit_job(self, spec: JobSpec) -> None:
        self.check_size(spec.node_count, spec.processes_per_node)
        self.jobs.submit(spec)

    def job_status(self, job_id: str) -> JobStatus:
        return self.jobs.status(job_id)

    def wait(self, seen: JobStatus) -> None:
        self.jobs.wait(seen, self.poll_seconds)

    def list_jobs(self, prefix: str = "") -> list[JobStatus]:
        return self.jobs.list_jobs(prefix)

    def active_jobs(self) -> list[JobStatus]:
        return self.jobs.list_active()

    def cancel_job(self, job_id: str) -> None:
        self.jobs.end(job_id)

    def job_logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
        return self.jobs.logs(job_id, node_id, tail)

    def node_usage(self, job_id: str) -> list[NodeUsage]:
        return self.jobs.usage(job_id)

    def find_orphans(self, live_runs: Collection[str]) -> list[Orphan]:
        return self.jobs.find_orphans(live_runs)

    def end_orphan(self, orphan: Orphan) -> bool:
        orphan.refuse_new_owner(self.jobs.rundir(orphan.name))
        return self.jobs.end(orphan.name, END_SECONDS)

    def _config(self) -> ClusterConfig | None:
        found = read_document(self.state, CLUSTER, _CONFIG, MARK_BYTES)
        if found is None:
            return None
        names = [field.name for field in fields(ClusterConfig)]
        return ClusterConfig(**{name: found[name] for name in names if name in found})

    def _write(self, config: ClusterConfig) -> None:
        self.state.write(CLUSTER, json.dumps(asdict(config), indent=2).encode())
