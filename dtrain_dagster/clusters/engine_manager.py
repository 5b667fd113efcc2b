"""The cluster of an engine that runs nodes for us: SLURM, Kubernetes or Ray, from its options.

It chooses the engine by the kind of cluster, and stands above the rooms of all engines for that. What all clusters with
a supervisor share is in `supervision.manager`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.ray.engine import RayEngine
from dtrain_dagster.clusters.slurm.engine import SlurmEngine, describe_account
from dtrain_dagster.clusters.supervision.engine import Engine, agent_command
from dtrain_dagster.clusters.supervision.manager import SupervisedClusterManager
from dtrain_dagster.clusters.supervision.submit import LaunchSettings
from dtrain_dagster.settings.cluster_kinds import KINDS
from dtrain_dagster.settings.environment import MOST_NODES
from dtrain_dagster.settings.kubernetes import KubernetesSettings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.settings.slurm import SlurmSettings
from trainer.node.environment import STOP_GRACE, read_duration
from trainer.rundir import LOGS


class EngineClusterManager(SupervisedClusterManager):
    """A cluster whose nodes are one-node jobs of an engine. They come only for a submitted job."""

    brings_nodes_later = True

    def __init__(
        self, home: Path, settings: LaunchSettings, engine_options: Mapping[str, Any], processes_per_node: int = 1
    ) -> None:
        super().__init__(home, settings, processes_per_node, engine_options)
        self.python = engine_options.get("python") or self.python

    def check_size(self, node_count: int, processes_per_node: int) -> None:
        words = KINDS[self.settings.engine].words
        if not 1 <= node_count <= MOST_NODES:
            raise ClusterError(f"DTRAIN_NODES={node_count}: the {words} is asked for 1 to {MOST_NODES} nodes")
        if processes_per_node < 1:
            raise ClusterError(
                f"DTRAIN_PROCESSES_PER_NODE={processes_per_node}: a node runs at least one; set 1 or more"
            )

    def describe_account(self, job_id: str) -> list[str]:
        if self.settings.engine != "slurm":
            return []
        return describe_account(self.engine_options or {}, self.rundir(job_id))

    @property
    def most_nodes(self) -> int:
        return MOST_NODES


def open_engine(
    kind: str, options: Mapping[str, Any], run_dir: str, secret: str, environment: Mapping[str, str]
) -> Engine:
    """Return the engine of a kind of cluster, for the nodes of one job. ``secret``: the path of the file with the
    launch's secret. Raise `ClusterError` for a kind without an engine."""

    def command(launch: Mapping[str, Any], node_id: int, incarnation: int) -> Sequence[str]:
        python = options.get("python")
        return agent_command(launch, run_dir, secret, node_id, incarnation, **({"python": python} if python else {}))

    grace = read_duration(*STOP_GRACE, environment) + 10.0  # the agent ends its ranks in order within it
    if kind == "kubernetes":
        return KubernetesEngine(KubernetesSettings.of(options), run_dir, command, grace)
    if kind == "slurm":
        return SlurmEngine(SlurmSettings.of(options), Path(run_dir) / LOGS, command)
    if kind == "ray":
        return RayEngine(RaySettings.of(options), Path(run_dir) / LOGS, command)
    raise ClusterError(f"DTRAIN_CLUSTER={kind!r} has no engine that runs nodes")
