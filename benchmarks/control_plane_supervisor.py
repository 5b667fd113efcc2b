"""The part of `benchmarks.control_plane` that measures one look of the supervisor of an engine's nodes."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.supervision.agent_placer import AgentPlacer
from dtrain_dagster.clusters.supervision.engine import EngineJob
from dtrain_dagster.clusters.supervision.supervisor import begin_clock
from trainer.comm.launch_secret import SecretFile
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir


class StillEngine:
    """An engine whose jobs run and do nothing: what is measured is the supervisor."""

    poll_seconds = 5.0

    def __init__(self, nodes: int) -> None:
        self._jobs = [EngineJob(id=str(node), node_id=node, incarnation=1, state="running") for node in range(nodes)]

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int) -> str:
        """Return the id of the node's job."""
        return str(node_id)

    def list_jobs(self, launch: Mapping[str, Any]) -> Sequence[EngineJob]:
        """Return all jobs."""
        return self._jobs

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        """Do nothing."""

    def read_log(self, job_id: str) -> str | None:
        """Return None: there is no output."""
        return None


def measure_supervisor(nodes: int) -> dict[str, Any]:
    """Return the seconds of one look at so many nodes."""
    folder = tempfile.mkdtemp(prefix="control-plane-")
    try:
        rundir = RunDir(f"{folder}/run")
        placer = AgentPlacer(rundir, StillEngine(nodes), SecretFile(Path(folder, "secret")), begin_clock(rundir))
        placer.begin_launch({"launch": 1, "processes_per_node": 1, "node_count": nodes, "elastic": True, "token": "t"})
        now = time.time()
        for node in range(nodes):
            placer.start(node, 1)
            rundir.write_node(NodePresence(node_id=node, launch=1, started_at=now, last_seen_at=now))
        seconds = []
        for _ in range(20):
            began = time.perf_counter()
            placer.look()
            seconds.append(time.perf_counter() - began)
        return {"supervisor_look_seconds": round(statistics.median(seconds), 4)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
