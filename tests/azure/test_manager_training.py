"""Two nodes train on the emulator, a node is lost with its job, and the next launch goes on from the checkpoint."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager
from dtrain_dagster.clusters.base import JobSpec, JobState
from harness.azure.emulator import Emulator
from harness.small_job import write_dataset
from tests.azure.workspace import options
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.rundir import LAUNCH, RESULT, RunDir

JOB_ID = "train-two-nodes"


@pytest.mark.long  # each time: a lost node on Blob in e2e/test_azure.py, lost launches in test_manager.py
def test_a_training_goes_on_from_its_checkpoint_when_a_node_is_lost(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.use(monkeypatch)
    manager = AzureMLClusterManager(options(emulator), tmp_path / "home", dagster_run_id="run-1")
    dataset = write_dataset(tmp_path / "dataset")
    rundir = RunDir(f"{manager.jobs_uri}/{JOB_ID}")
    job = JobConfig(
        job_id=JOB_ID,
        run_dir=rundir.uri,
        dataset=DatasetRef(uri=str(dataset)),
        model=FactoryConfig(factory="tcn"),
        loss=FactoryConfig(factory="student_t"),
        training=DistributedTrainingConfig(
            world_size=2, max_steps=150, checkpoint_frequency=10, warmup_steps=5, threads_per_rank=1, epochs=100
        ),
        tracking=TrackingConfig(tensorboard=False),
    )
    rundir.write_job(job)
    manager.provision_cluster(2, "Standard_NC6s_v3")
    spec = JobSpec(
        job_id=JOB_ID,
        run_dir=rundir.uri,
        command=(sys.executable, "-m", "trainer", "--config", f"{rundir.uri}/job.json"),
        node_count=2,
        elastic=True,
        env={"DTRAIN_CACHE": str(tmp_path / "cache")},
    )
    manager.submit_job(spec)
    _wait(manager, lambda: rundir.latest_checkpoint() is not None)
    emulator.control("fault", fault="lose", job=f"{JOB_ID}-l1", node=1)

    follower = AzureMLClusterManager(options(emulator), tmp_path / "home", dagster_run_id="run-2")  # the first has died
    _wait(follower, lambda: follower.job_status(JOB_ID).state.is_final)

    status, launch = follower.job_status(JOB_ID), rundir.read_json(LAUNCH)
    assert status.state is JobState.SUCCEEDED, status.message
    result = rundir.read_json(RESULT)
    assert (result["status"], result["steps"], result["launch"]) == ("succeeded", 150, 2)
    assert (launch["launch"], launch["node_count"]) == (2, 2)
    assert list(rundir.events("resume")), "the second launch went on from a checkpoint"
    assert result["weights_equal_on_ranks"]
    usage = follower.node_usage(JOB_ID)
    assert len(usage) == 4
    assert all(stay.ended_at > stay.started_at and stay.sku == "Standard_NC6s_v3" for stay in usage)
    bought = emulator.control("bought")["jobs"]
    assert set(bought) == {f"{JOB_ID}-l1", f"{JOB_ID}-l2"}
    assert "launch 2" in follower.job_logs(JOB_ID, node_id=0)
    follower.cleanup_cluster()
    assert emulator.control("bought")["alive_nodes"] == 0


def _wait(manager: AzureMLClusterManager, condition, seconds: float = 200) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, manager.job_status(JOB_ID)
        status = manager.job_status(JOB_ID)
        assert status.state not in (JobState.FAILED, JobState.CANCELLED), status.message
        time.sleep(0.2)
