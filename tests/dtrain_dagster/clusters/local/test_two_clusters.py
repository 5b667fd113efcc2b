"""Two clusters whose jobs are in one home: neither sees the other's as its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain_dagster.clusters.base import OWNER, JobSpec, JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from trainer.rundir import RunDir

JOB = "train-00000000-11111111"


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[tuple[LocalClusterManager, LocalClusterManager]]:
    """One with a job that runs, and one without."""
    here, there = (LocalClusterManager(tmp_path, LaunchSettings(cluster_name=name)) for name in ("here", "there"))
    rundir = RunDir(f"file://{tmp_path}/storage/jobs/{JOB}")
    rundir.write_json(OWNER, {"dagster_run_id": "a run that has ended"})
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    here.provision_cluster(1, "Standard_NC6s_v3")
    there.provision_cluster(2, "Standard_NC24ads_A100_v4")
    here.submit_job(JobSpec(job_id=JOB, run_dir=rundir.uri, command=command, node_count=1))
    yield here, there
    here.cancel_job(JOB)


def test_a_job_is_of_one_cluster(clusters: tuple[LocalClusterManager, LocalClusterManager]) -> None:
    here, there = clusters
    assert [job.job_id for job in here.active_jobs()] == [job.job_id for job in here.list_jobs()] == [JOB]
    assert here.pools()[0].work == (JOB,)
    assert [orphan.name for orphan in here.find_orphans(())] == [JOB]
    assert not there.active_jobs()
    assert not there.list_jobs()
    assert not there.find_orphans(())
    [pool] = there.pools()
    assert (pool.work, pool.node_count, pool.sku) == ((), 2, "Standard_NC24ads_A100_v4")
    assert not there.monitor_health().running_jobs
    assert there.scale_down(pool), "it idles, whatever runs elsewhere"
    there.cleanup_cluster()
    assert there.job_status(JOB).state is JobState.RUNNING, "it is found by its name, and was not ended"
    here.cancel_job(JOB)
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    there.submit_job(JobSpec(job_id=JOB, run_dir=here.rundir(JOB).uri, command=command, node_count=1))
    assert [job.job_id for job in there.active_jobs()] == [JOB], "it goes on elsewhere, and is of that cluster"
    assert not here.active_jobs()
    assert not here.pools()[0].work
