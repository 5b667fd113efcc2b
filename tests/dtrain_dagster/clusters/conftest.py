"""A local cluster in a folder of its own, and scripts that really run on it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain_dagster.clusters.base import JobSpec, JobStatus
from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.waiting import until


@dataclass
class Cluster:
    """A manager, and a folder in which every process of its jobs can be recognised."""

    manager: LocalClusterManager
    folder: Path

    def spec(self, job_id: str, script: str, nodes: int = 2, processes: int = 1, **fields: Any) -> JobSpec:
        """A job that runs this Python source, its working folder in ``OUT``."""
        path = self.folder / f"{job_id}.py"
        source = f"import os, sys, time\nfrom pathlib import Path\nOUT = Path({str(self.folder)!r})\n"
        path.write_text(source + "RANK = int(os.environ['RANK'])\n" + textwrap.dedent(script))
        return JobSpec(
            job_id=job_id,
            run_dir=str(self.run_dir(job_id)),
            command=(sys.executable, str(path)),
            node_count=nodes,
            processes_per_node=processes,
            **fields,
        )

    def submit(self, job_id: str, script: str, **fields: Any) -> None:
        self.manager.submit_job(self.spec(job_id, script, **fields))

    def wait(self, job_id: str) -> JobStatus:
        """The final status."""

        def final() -> JobStatus | None:
            status = self.manager.job_status(job_id)
            return status if status.state.is_final else None

        found: JobStatus = until(final, f"job {job_id} to end")
        return found

    def wait_for_file(self, name: str) -> Path:
        path = self.folder / name
        until(path.exists, name)
        return path

    def run_dir(self, job_id: str) -> Path:
        return self.manager.folder / job_id

    def status_file(self, job_id: str) -> dict[str, Any]:
        return json.loads((self.run_dir(job_id) / "status.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """Everything alive that works for these jobs, supervisors included."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(self.folder) in word for word in words):
                found.append(process)
        return [process for process in found if process.pid != os.getpid()]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(LocalClusterManager(tmp_path / "home"), tmp_path)
    yield made
    for process in made.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was found
            process.kill()
