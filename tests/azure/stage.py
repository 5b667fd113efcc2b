"""A cluster of its own in an emulated workspace, and scripts that really run on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager
from dtrain_dagster.clusters.base import JobSpec, JobStatus
from dtrain_dagster.support.user_code import stage_for_nodes
from harness.azure.emulator import Emulator
from harness.waiting import until
from tests.azure.workspace import options

V100, A100, H100 = "Standard_NC6s_v3", "Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5"
T4 = "Standard_NC4as_T4_v3"
TIMING = {
    "create_seconds": 0.1, "delete_seconds": 0.1, "boot_seconds": 0.1, "leave_seconds": 0.1,
    "allocation_retry_seconds": 0.3, "grace_seconds": 1.0, "visible_seconds": 0.0, "listed_seconds": 0.0,
    "refusal_seconds": 0.0,
}  # fmt: skip
"""How long things take at the start of each test."""
SCRIPT = """
import os, sys, time
from trainer.rundir import RunDir
from trainer.runtime.launch import Launch
rundir, launch, rank = RunDir(sys.argv[1]), Launch.read(os.environ).number, int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} in launch {launch}", flush=True)
def succeed():
    if rank == 0:
        rundir.write_json("result.json", {"status": "succeeded", "launch": launch})
"""
"""How the program of a real process begins."""
Steps = tuple[dict[str, Any], ...]
SAYS: Steps = ({"say": "rank {RANK} of {WORLD_SIZE} in launch {LAUNCH}"},)
"""How a played one does."""
DONE: Steps = ({"write": "result.json", "content": {"status": "succeeded", "launch": "{LAUNCH}"}},)
LAST_ONE_DONE: Steps = ({"stay": 2}, *DONE)
WAITS: Steps = ({"await": "go.json"}, *DONE)
FAILS: Steps = ({"exit": 1},)
FOREVER: Steps = ({"stay": None},)


class Stage:
    """A cluster of its own in the shared workspace."""

    def __init__(self, emulator: Emulator, folder: Path, name: str) -> None:
        self.emulator, self.folder, self.name = emulator, folder, name
        self.storage = str(folder / "storage")
        """Where run directories are: a folder of this machine, for speed, unless a test says otherwise."""
        self._is_played = True

    def manager(self, run: str | None = "run-1", tends: bool = True, **fields: Any) -> AzureMLClusterManager:
        """A manager that nobody else has: what it knows, it has read."""
        chosen: dict[str, Any] = {
            "cluster_name": self.name,
            "chain": (V100, A100, H100),
            "start_seconds": 1.0,
            "storage_uri": self.storage,
            **fields,
        }
        return AzureMLClusterManager(options(self.emulator, **chosen), self.folder, dagster_run_id=run, tends=tends)

    def spec(
        self, manager: AzureMLClusterManager, program: Steps | str = DONE, nodes: int = 2, **fields: Any
    ) -> JobSpec:
        """A job whose nodes are played (`harness.azure.emulator.played`), or real processes where ``program`` is the
        text of a script."""
        job_id = f"{self.name}-job"
        run_dir = f"{manager.jobs_uri}/{job_id}"
        self._is_played = not isinstance(program, str)
        command: tuple[str, ...] = ("played", run_dir, json.dumps([*SAYS, *program]))
        if isinstance(program, str):
            command = (sys.executable, "-c", SCRIPT + program, run_dir)
        return JobSpec(job_id=job_id, run_dir=run_dir, command=command, node_count=nodes, elastic=True, **fields)

    def stage_code(self, folder: Path, *of_the_job: Any) -> Any:
        """What goes along with a job: nodes that are played need no `trainer`, which is hundreds of files."""
        if not self._is_played:
            return stage_for_nodes(folder, *of_the_job)
        return (folder / "played.txt").write_text("nothing of it runs")

    def run(self, program: Steps | str = DONE, nodes: int = 2, **fields: Any) -> tuple[AzureMLClusterManager, JobSpec]:
        """Provision and submit."""
        manager = self.manager(**fields)
        manager.provision_cluster(nodes, V100)
        spec = self.spec(manager, program, nodes)
        manager.submit_job(spec)
        return manager, spec

    def control(self, verb: str, **asked: Any) -> Any:
        return self.emulator.control(verb, **asked)

    def jobs(self) -> dict[str, Any]:
        found = self.control("state")["jobs"]
        return {name: job for name, job in found.items() if name.startswith(self.name)}

    def computes(self) -> dict[str, Any]:
        found = self.control("state")["computes"]
        return {name: compute for name, compute in found.items() if name.startswith(f"{self.name}-")}

    def asked(self, operation: str) -> list[dict[str, Any]]:
        return [seen for seen in self.control("requests", operation=operation) if f"/{self.name}-" in seen["path"]]


def end(manager: AzureMLClusterManager, spec: JobSpec, seconds: float = 90) -> JobStatus:
    def final() -> JobStatus | None:
        status = manager.job_status(spec.job_id)
        return status if status.state.is_final else None

    found: JobStatus = until(final, f"the end of {spec.job_id}", seconds, pause=0.2)
    return found
