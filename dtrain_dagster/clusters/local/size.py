"""The size that a cluster on this machine can have.

How a launch of that size is started is in `dtrain_dagster.clusters.supervision.submit`.
"""

from __future__ import annotations

import os

from dtrain_dagster.clusters.base import ClusterError

RANKS_PER_CORE = 8


def most_ranks() -> int:
    """Return the largest number of processes that this machine is asked to carry."""
    return RANKS_PER_CORE * (os.cpu_count() or 1)


def check_size(node_count: int, processes_per_node: int) -> None:
    """Raise `ClusterError` for a cluster size that this machine cannot have."""
    if node_count < 1:
        raise ClusterError(f"DTRAIN_NODES={node_count}: a cluster needs at least one node; set 1 or more")
    if processes_per_node < 1:
        raise ClusterError(f"DTRAIN_PROCESSES_PER_NODE={processes_per_node}: a node runs at least one; set 1 or more")
    ranks = node_count * processes_per_node
    if ranks > most_ranks():
        raise ClusterError(
            f"DTRAIN_NODES={node_count} x DTRAIN_PROCESSES_PER_NODE={processes_per_node} is {ranks} processes on "
            f"{os.cpu_count()} cores; the local cluster takes at most {RANKS_PER_CORE} per core, {most_ranks()} here: "
            "set fewer"
        )
