"""A real SLURM that has lost its state gives the ids of earlier jobs to others: these are left alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.settings.slurm import SlurmSettings
from harness.engines.slurm_cluster import SlurmCluster, missing
from harness.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    if why := missing():
        pytest.skip(why)
    with SlurmCluster(nodes=1) as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment().items():
            patch.setenv(name, value)
        yield made


def states(cluster: SlurmCluster) -> dict[str, str]:
    """The name of each job that SLURM knows → its state."""
    lines = cluster.ask("squeue", "-h", "--states=all", "-o", "%j %T").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def test_another_job_of_the_same_id_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    launch: dict[str, Any] = {"token": os.urandom(24).hex(), "launch": 1, "node_count": 1}
    engine = SlurmEngine(SlurmSettings(), str(tmp_path), lambda *_: ["/bin/sh", "-c", "echo done; sleep 100"])
    first = engine.submit(launch, 0, 1)
    until(lambda: engine.read_log(first) is not None, "its log", pause=0.1)
    cluster.kill("slurmctld")
    cluster.kill("n1")
    shutil.rmtree(cluster.folder / "state")
    (cluster.folder / "state").mkdir()
    cluster.start("slurmctld")
    cluster.start("n1")
    cluster.wait_for_answer()
    cluster.wait_for_nodes()
    again = cluster.ask(
        "sbatch", "--parsable", "--job-name=a-persons", "--output=/dev/null", "--wrap=sleep 100"
    ).strip()
    assert again == first
    cluster.wait(lambda: states(cluster) == {"a-persons": "RUNNING"}, "the other job")
    assert engine.list_jobs(launch) == []
    engine.cancel([first], force=False)
    engine.cancel([first], force=True)
    assert engine.submit(launch, 0, 1) == first, "it has run, by the file of its output"
    time.sleep(2)
    assert states(cluster) == {"a-persons": "RUNNING"}
