"""Trainings that are started at the same moment, on one machine and in one tracking database."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from dtrain_dagster.costs.money import SECOND
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.jobs.progress import follow_job
from dtrain_dagster.jobs.start import start_job
from harness.small_job import write_dataset
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig
from trainer.engine.finalize import MODEL, WEIGHTS
from trainer.rundir import RESULT, RunDir

STEPS = 4


@pytest.mark.long
def test_of_jobs_that_start_at_once_nothing_is_lost(tmp_path: Path):
    """Results, weights, checkpoints, steps, samples, events, bills, and runs in MLflow, whose database is still to be
    made by whoever comes first."""
    dataset = DatasetRef(uri=str(write_dataset(tmp_path / "dataset")))
    home, database = tmp_path / "home", f"sqlite:///{tmp_path}/home/mlflow.db"
    manager = LocalClusterManager(home, LaunchSettings(threads_per_rank=1, max_replacements=0))
    training = DistributedTrainingConfig(world_size=1, threads_per_rank=1, max_steps=STEPS, epochs=10**6)
    jobs = [
        JobConfig(
            job_id=f"job-{number:02d}",
            run_dir=f"{manager.folder}/job-{number:02d}",
            dataset=dataset,
            training=training,
            tracking=TrackingConfig(mlflow_tracking_uri=database, mlflow_run_name=f"job-{number:02d}"),
        )
        for number in range(2)
    ]
    env = {"DTRAIN_CACHE": str(home / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            lacks = list(pool.map(lambda job: find_lacking(manager, job, env), jobs))
        stays = [stay for job in jobs for stay in manager.node_usage(job.job_id)]
        bills = [CostTracker(manager.cluster_name, manager.node_usage(job.job_id), "dedicated") for job in jobs]
    finally:
        manager.cleanup_cluster()
    assert lacks == [[], []]
    whole = sum(round((stay.ended_at - stay.started_at) * SECOND) for stay in stays)
    billed = sum(node.microseconds for bill in bills for node in bill.nodes)
    assert abs(whole - billed) <= len(stays)  # each stay is rounded to the microsecond once


def find_lacking(manager: LocalClusterManager, job: JobConfig, env: dict[str, str]) -> list[str]:
    """Start a job and follow it to its end, as a Dagster run does; return what it must leave behind and did not."""
    rundir, followed = RunDir(job.run_dir), list[dict[str, Any]]()
    start_job(manager, job, 1, 1, env)
    for status, _ in follow_job(manager, rundir, job.job_id, take=followed.extend):
        last = status
    result, model = rundir.read_json(RESULT) or {}, rundir.read_json(MODEL) or {}
    weights = hashlib.sha256(rundir.storage.read(WEIGHTS)).hexdigest()
    on_disk = list(rundir.events())
    is_there = {
        "state": last.state == JobState.SUCCEEDED,
        "result": result.get("status") == "succeeded" and result.get("steps") == STEPS,
        "weights": weights == model.get("file_sha256"),
        "last checkpoint": (rundir.latest_checkpoint() or ("", 0))[1] == STEPS,
        "steps": [item["step"] for item in followed if item["kind"] == "step"][-1] == STEPS,
        "samples": result.get("samples_seen") == STEPS * job.training.global_batch_size,
        "events": sorted(map(str, followed)) == sorted(map(str, on_disk)) and bool(on_disk),
        "run in MLflow": is_tracked(job, result["mlflow_run_id"]),
    }
    return [name for name, there in is_there.items() if not there]


def is_tracked(job: JobConfig, run_id: str) -> bool:
    """Whether the job's run in MLflow has ended, with its last step."""
    from mlflow import MlflowClient

    client = MlflowClient(job.tracking.mlflow_tracking_uri)
    run = client.get_run(run_id)
    steps: Sequence[int] = [
        metric.step for name in run.data.metrics for metric in client.get_metric_history(run_id, name)
    ]
    return run.info.status == "FINISHED" and max(steps, default=0) == STEPS
