"""The clusters whose jobs have a supervisor: this machine, and an engine that runs nodes for us (SLURM, Kubernetes or
Ray), which is chosen by the kind of cluster. The module stands above the rooms of all engines for that.

What these clusters share is in `supervision.manager`. What they differ in belongs here: how many nodes there may be,
and what is shown of a launch beforehand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.hosts import HostRecord
from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.ray.engine import RayEngine
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.submission import Request, others_like_first, shell_line
from dtrain_dagster.clusters.supervision.engine import Engine, agent_command
from dtrain_dagster.clusters.supervision.manager import SupervisedClusterManager
from dtrain_dagster.clusters.supervision.submit import LaunchSettings
from dtrain_dagster.settings.cluster_kinds import KINDS
from dtrain_dagster.settings.engines import ENGINES as ENGINE_SETTINGS
from dtrain_dagster.settings.environment import MOST_NODES
from trainer.node.environment import Seat
from trainer.node.node_processes import environment_of
from trainer.rundir import RunDir

RANKS_PER_CORE = 8
"""The most processes that this machine is asked to carry, for each of its cores."""


class LocalClusterManager(SupervisedClusterManager):
    """A cluster on this machine."""

    def check_size(self, node_count: int, processes_per_node: int) -> None:
        super().check_size(node_count, processes_per_node)
        ranks = node_count * processes_per_node
        if ranks > self._most_ranks:
            raise ClusterError(
                f"DTRAIN_NODES={node_count} x DTRAIN_PROCESSES_PER_NODE={processes_per_node} is {ranks} processes on "
                f"{os.cpu_count()} cores; the local cluster takes at most {RANKS_PER_CORE} per core, "
                f"{self._most_ranks} here: set fewer"
            )

    def preview_launch(self, launch: Mapping[str, Any], rundir: RunDir, secret: Path) -> list[Request]:
        per_node, count = launch["processes_per_node"], launch["node_count"]
        port = launch["master_port"] or "a free port"
        seat = Seat(node_id=0, master_port=0, secret=str(secret))
        lines = []
        for local_rank in range(per_node):
            _, whole = environment_of(launch, seat, local_rank, {}, os.environ)
            own = {name: value for name, value in whole.items() if os.environ.get(name) != value}
            lines.append(shell_line(launch["command"], own | {"MASTER_PORT": port}))
        more = "" if per_node == 1 else f" * {per_node} + LOCAL_RANK"
        others = others_like_first(count, f"with NODE_RANK, GROUP_RANK = K and RANK = K{more}")
        title = "node 0: its processes on this machine, with these variables besides those of this shell"
        return [Request(title=title, form="sh", text="\n".join([*lines, *([others] if others else [])]))]

    @property
    def most_nodes(self) -> int:
        return self._most_ranks // self.processes_per_node

    @property
    def _most_ranks(self) -> int:
        return RANKS_PER_CORE * (os.cpu_count() or 1)


class EngineClusterManager(SupervisedClusterManager):
    """A cluster whose nodes are one-node jobs of an engine. They come only for a submitted job."""

    brings_nodes_later = True

    def __init__(
        self, home: Path, settings: LaunchSettings, engine_options: Mapping[str, Any], processes_per_node: int = 1
    ) -> None:
        super().__init__(home, settings, processes_per_node, engine_options)
        self.python = engine_options.get("python") or self.python

    def check_size(self, node_count: int, processes_per_node: int) -> None:
        super().check_size(node_count, processes_per_node)
        if node_count > MOST_NODES:
            words = KINDS[self.settings.engine].words
            raise ClusterError(f"DTRAIN_NODES={node_count}: the {words} is asked for 1 to {MOST_NODES} nodes")

    def host_record(self) -> HostRecord | None:
        return HostRecord.of_cluster(self.home, self.settings.cluster_key)

    def preview_launch(self, launch: Mapping[str, Any], rundir: RunDir, secret: Path) -> list[Request]:
        engine = open_engine(self.settings.engine, self.engine_options or {}, rundir.uri, str(secret))
        return engine.describe(launch)

    @property
    def most_nodes(self) -> int:
        return MOST_NODES


ENGINES: Mapping[str, type[Engine]] = {"slurm": SlurmEngine, "kubernetes": KubernetesEngine, "ray": RayEngine}
"""Kind of cluster → what runs its nodes."""


def open_engine(kind: str, options: Mapping[str, Any], run_dir: str, secret: str) -> Engine:
    """Return the engine of a kind of cluster, for the nodes of one job. ``options``: of
    `dtrain_dagster.settings.engines`. ``secret``: the path of the file with the launch's secret. Raise `ClusterError`
    for a kind without one."""
    if (engine := ENGINES.get(kind)) is None:
        raise ClusterError(f"DTRAIN_CLUSTER={kind!r} has no engine that runs nodes")
    if unknown := sorted(options.keys() - ENGINE_SETTINGS[kind].model_fields.keys()):
        raise ClusterError(f"{', '.join(unknown)}: no options of {kind} in this version; submit the job again")

    def command(launch: Mapping[str, Any], node_id: int, incarnation: int) -> Sequence[str]:
        python = options.get("python") or sys.executable
        return agent_command(launch, run_dir, secret, node_id, incarnation, python, engine.hold_seconds)

    return engine(ENGINE_SETTINGS[kind].of(options), run_dir, command)
