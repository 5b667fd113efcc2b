"""The default cluster: nodes are process groups on this machine, under a supervisor that outlives the submitter.

Nothing has to be started or paid for. Only what is this machine's belongs here: its size.
"""

from __future__ import annotations

import os
from pathlib import Path

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.supervision.manager import SupervisedClusterManager
from dtrain_dagster.clusters.supervision.submit import LaunchSettings

RANKS_PER_CORE = 8
"""The most processes that this machine is asked to carry, for each of its cores."""


class LocalClusterManager(SupervisedClusterManager):
    """A cluster on this machine. Its jobs are ``<home>/storage/jobs/<job_id>``. ``gpu_type`` is the SKU whose price is
    used as a stand-in; ``threads_per_rank`` sets OMP_NUM_THREADS (None: cores / ranks). For a job that regroups,
    ``max_replacements`` lost nodes are replaced, each after ``replacement_delay_seconds``."""

    def __init__(
        self,
        home: Path,
        cluster_name: str = "local",
        gpu_type: str = "Standard_NC6s_v3",
        processes_per_node: int = 1,
        threads_per_rank: int | None = None,
        max_replacements: int = 6,
        replacement_delay_seconds: float = 1.0,
    ) -> None:
        settings = LaunchSettings(
            cluster_name=cluster_name,
            sku=gpu_type,
            threads_per_rank=threads_per_rank,
            max_replacements=max_replacements,
            replacement_delay_seconds=replacement_delay_seconds,
        )
        super().__init__(home, settings, processes_per_node)

    def check_size(self, node_count: int, processes_per_node: int) -> None:
        if node_count < 1:
            raise ClusterError(f"DTRAIN_NODES={node_count}: a cluster needs at least one node; set 1 or more")
        if processes_per_node < 1:
            raise ClusterError(
                f"DTRAIN_PROCESSES_PER_NODE={processes_per_node}: a node runs at least one; set 1 or more"
            )
        ranks = node_count * processes_per_node
        if ranks > self._most_ranks:
            raise ClusterError(
                f"DTRAIN_NODES={node_count} x DTRAIN_PROCESSES_PER_NODE={processes_per_node} is {ranks} processes on "
                f"{os.cpu_count()} cores; the local cluster takes at most {RANKS_PER_CORE} per core, "
                f"{self._most_ranks} here: set fewer"
            )

    @property
    def most_nodes(self) -> int:
        return self._most_ranks // self.processes_per_node

    @property
    def _most_ranks(self) -> int:
        return RANKS_PER_CORE * (os.cpu_count() or 1)
