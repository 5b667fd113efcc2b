"""A cluster of its own in an emulated workspace, and scripts that really run on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager
from dtrain_dagster.clusters.base import JobSpec, JobStatus
from harness.azure.emulator import Emulator
from tests.azure.workspace import options

V100, A100, H100 = "Standard_NC6s_v3", "Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5"
T4 = "Standard_NC4as_T4_v3"
SCRIPT = """
import os, sys, time
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir
rundir, launch, rank = RunDir(sys.argv[1]), int(os.environ["DTRAIN_LAUNCH"]), int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} in launch {launch}", flush=True)
def succeed():
    if rank == 0:
        rundir.write_json("result.json", {"status": "succeeded", "launch": launch})
"""
DONE = "succeed()"
LAST_ONE_DONE = """
while launch < 2:
    time.sleep(0.1)
succeed()
"""
FOREVER = "time.sleep(600)"


class Stage:
    """A cluster of its own in the shared workspace."""

    def __init__(self, emulator: Emulator, folder: Path, name: str) -> None:
        self.emulator, self.folder, self.name = emulator, folder, name

    def manager(self, run: str | None = "run-1", tends: bool = True, **fields: Any) -> AzureMLClusterManager:
        """A manager that nobody else has: what it knows, it has read."""
        chosen: dict[str, Any] = {
            "cluster_name": self.name,
            "chain": (V100, A100, H100),
            "start_seconds": 1.0,
            **fields,
        }
        return AzureMLClusterManager(options(self.emulator, **chosen), self.folder, dagster_run_id=run, tends=tends)

    def spec(self, manager: AzureMLClusterManager, script: str = DONE, nodes: int = 2, **fields: Any) -> JobSpec:
        job_id = f"{self.name}-job"
        run_dir = f"{manager.jobs_uri}/{job_id}"
        command = (sys.executable, "-c", SCRIPT + script, run_dir)
        return JobSpec(job_id=job_id, run_dir=run_dir, command=command, node_count=nodes, elastic=True, **fields)

    def run(self, script: str = DONE, nodes: int = 2, **fields: Any) -> tuple[AzureMLClusterManager, JobSpec]:
        """Provision and submit."""
        manager = self.manager(**fields)
        manager.provision_cluster(nodes, V100)
        spec = self.spec(manager, script, nodes)
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


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail(f"waited {seconds:.0f} s in vain for {what}")


def end(manager: AzureMLClusterManager, spec: JobSpec, seconds: float = 90) -> JobStatus:
    def final() -> JobStatus | None:
        status = manager.job_status(spec.job_id)
        return status if status.state.is_final else None

    found: JobStatus = wait_for(final, f"the end of {spec.job_id}", seconds)
    return found
