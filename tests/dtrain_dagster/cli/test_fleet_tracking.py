"""What a fleet writes to a real MLflow, of processes that end within a second; `tests/e2e` has it of trainings."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain_dagster.cli.tracking import record_fleet
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.runner import FleetRunner
from dtrain_dagster.fleet.source import ListedJobs
from harness.tables import copy_tables
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig
from trainer.observability.mlflow_sink import begin_run
from trainer.rundir import TRACKING

LIMITS = FleetLimits(budget_usd=1.0, nodes=2, usd_per_node_hour=3.06, margin_seconds=5.0)
ROOT = Path(__file__).parents[3]
WORK = ROOT / "tests" / "dtrain_dagster" / "fleet" / "small_work.py"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LocalClusterManager]:
    made = LocalClusterManager(tmp_path / "home")
    yield made
    made.cleanup_cluster()


def job_of(home: Path, name: str, tracking_uri: str | None, ending: str = "succeeds", nodes: int = 1) -> FleetJob:
    job = JobConfig(
        job_id=name,
        run_dir=str(home / "storage" / "jobs" / name),
        dataset=DatasetRef(uri="script:small_work.py"),
        training=DistributedTrainingConfig(world_size=2),
        tracking=TrackingConfig(tensorboard=False, mlflow_tracking_uri=tracking_uri, mlflow_experiment="e"),
    )
    command = (sys.executable, str(WORK), "0.2", ending)
    return FleetJob(job_id=name, nodes=nodes, node_seconds=0.2, startup_seconds=2.0, config=job, command=command)


def test_a_trial_whose_values_do_not_go_together_is_in_no_run(tmp_path: Path) -> None:
    """Of a search that is cancelled, say: such a job was never ordered."""
    records = FleetRecords(tmp_path, "search")
    records.write_limits(LIMITS, time.time())
    entry = records.add(FleetJob(job_id="search-0000", node_seconds=1.0, problem="no training: window"), 0)
    assert record_fleet(records, [entry], "dedicated") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_tracked_job_has_one_run_whoever_writes_it(manager: LocalClusterManager) -> None:
    from mlflow.tracking import MlflowClient

    home = manager.home
    copy_tables(home / "mlflow.db")
    uri = f"sqlite:///{home}/mlflow.db"
    records = FleetRecords(home, "small")
    records.write_limits(LIMITS, time.time())
    client = MlflowClient(uri)
    jobs = [job_of(home, "good", uri), job_of(home, "bad", uri, ending="fails"), job_of(home, "out", None)]
    jobs.append(job_of(home, "wide", uri, nodes=3))
    FleetRunner(manager, records, ListedJobs(jobs), env={"PYTHONPATH": str(ROOT)}).run()
    for job in jobs[:2]:  # as their nodes do
        job.rundir.write_json(TRACKING, {"mlflow_run_id": begin_run(client, uri, job.trained)})
    jobs[0].rundir.storage.write("result.json", b"{")  # its end is told without it
    ended: list[int] = []
    for standings in (records.standings()[1:], records.standings(), records.standings()):
        said = record_fleet(records, standings, "dedicated")
        assert said == ["in MLflow: experiment e, run small (`dtrain ui mlflow`)"]
        experiment = client.get_experiment_by_name("e")
        assert experiment is not None
        found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
        ended.append(found["small"].info.end_time)
    assert ended[0] < ended[1] == ended[2], "the last one had nothing to add"
    assert found.keys() == {"bad", "good", "small"}
    parent = found.pop("small")
    for name, (status, state) in {"good": ("FINISHED", "succeeded"), "bad": ("FAILED", "failed")}.items():
        run = found[name]
        assert (run.info.status, run.data.tags["state"]) == (status, state)
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert "it was to fail" in found["bad"].data.tags["reason"]
    assert "**failed: " in found["bad"].data.tags["mlflow.note.content"]
    assert (parent.info.status, parent.data.metrics["jobs/failed"]) == ("FAILED", 1)
    assert "1 of 3 jobs succeeded" in parent.data.tags["mlflow.note.content"]
    paid = sum(run.data.metrics["cost/total_usd"] for run in found.values())
    assert parent.data.metrics["cost/total_usd"] == pytest.approx(paid)
    assert paid > 0


def test_a_server_that_does_not_answer_is_told_and_ends_no_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    records = FleetRecords(tmp_path, "small")
    records.write_limits(FleetLimits(budget_usd=1.0, nodes=1, usd_per_node_hour=3.06), time.time())
    with socket.create_server(("127.0.0.1", 0)) as server:
        tracking = TrackingConfig(mlflow_tracking_uri=f"http://127.0.0.1:{server.getsockname()[1]}")
        config = JobConfig(job_id="one", run_dir=str(tmp_path / "one"), dataset=DatasetRef(uri="/d"), tracking=tracking)
        entry = records.add(FleetJob(job_id="one", node_seconds=1.0, config=config), 0)
        [told] = record_fleet(records, [entry], "dedicated")
    assert told.startswith("MLflow does not have all of fleet small: ")


def test_a_run_that_somebody_has_deleted_hides_no_other_job_of_its_fleet(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    copy_tables(tmp_path / "mlflow.db")
    client = MlflowClient(uri := f"sqlite:///{tmp_path}/mlflow.db")
    records = FleetRecords(tmp_path, "small")
    records.write_limits(LIMITS, time.time())
    for number, job in enumerate([job_of(tmp_path, "deleted", uri), job_of(tmp_path, "kept", uri)]):
        records.keep(replace(records.add(job, number), state=FleetState.FAILED, reason="it was to fail"))
        job.rundir.write_job(job.trained)
        job.rundir.write_json(TRACKING, {"mlflow_run_id": (run_id := begin_run(client, uri, job.trained))})
        if job.job_id == "deleted":
            client.delete_run(run_id)
    told, where = record_fleet(records, records.standings(), "dedicated")
    assert told.startswith("MLflow does not have all of deleted: ")
    assert where.startswith("in MLflow: experiment e, run small")
    assert client.get_run(run_id).data.tags["state"] == "failed"
