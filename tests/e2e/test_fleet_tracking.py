"""The jobs of a fleet in a real MLflow: one run for each, whatever becomes of the job and of the orchestrator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.money import usd
from harness.small_job import write_dataset
from harness.tables import copy_tables
from tests.e2e.fleet_story import PACED_MODEL, PRICE, ROOT, FleetShell
from trainer.rundir import TRACKING


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[FleetShell]:
    write_dataset(tmp_path / "dataset")
    (tmp_path / "slow_models.py").write_text(PACED_MODEL)
    home = tmp_path / "home"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")},
        "DTRAIN_HOME": str(home),
        "DTRAIN_FACTORY_MODULES": "slow_models",
        "DTRAIN_OPTIONS": "command_tracking=mlflow",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }
    yield FleetShell(tmp_path, home, environment, str(home / "storage" / "jobs"))
    LocalClusterManager(home).cleanup_cluster()


def job(name: str, priority: int, steps: int, pause_seconds: float, **arguments: Any) -> dict[str, Any]:
    return {
        "name": name, "priority": priority, "model": "slow_models:paced",
        "set": {
            "training.max_steps": steps, "training.epochs": 100_000, "training.warmup_steps": 1,
            "model.args": {"pause_seconds": pause_seconds, **arguments},
        },
    }  # fmt: skip


def wait(until: Callable[[], object], orchestrator: Any) -> None:
    deadline = time.monotonic() + 300
    while not until():
        assert orchestrator.poll() is None, orchestrator.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_job_is_one_run_below_that_of_the_fleet_with_its_end_and_dollars_also_after_a_kill(
    shell: FleetShell,
) -> None:
    from mlflow.tracking import MlflowClient

    copy_tables(shell.home / "mlflow.db")
    out = job("out", 1, 3, 0.0)
    out["set"]["tracking.mlflow_tracking_uri"] = None
    never = {**job("never", 0, 3, 0.0), "expected_node_minutes": 1e6}
    jobs = [job("good", 3, 100, 0.1), job("bad", 2, 100, 0.0, fails_after=3), out, job("long", 1, 10**6, 0.1), never]
    shell.write(3_000 * PRICE, jobs)

    def has(name: str, state: str) -> bool:
        return bool(shell.kept(name)["state"] == state)

    first = shell.start("fleet", "fleet.yaml")
    wait(lambda: shell.rundir("good").storage.exists(TRACKING) and list(shell.rundir("good").events("step")), first)
    first.kill()
    first.communicate()

    again = shell.start("fleet", "fleet.yaml")
    wait(lambda: has("good", "succeeded") and has("bad", "failed") and has("out", "succeeded"), again)
    wait(lambda: shell.rundir("long").storage.exists(TRACKING) and list(shell.rundir("long").events("step")), again)
    cancelled = shell.run("cancel", "small")
    said = again.communicate()[0]
    assert "in MLflow: experiment dtrain, run small" in said + cancelled

    client = MlflowClient(f"sqlite:///{shell.home}/mlflow.db")
    experiment = client.get_experiment_by_name("dtrain")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert len(client.search_runs([experiment.experiment_id])) == len(runs), "one run for each"
    assert runs.keys() == {"small", "small-good", "small-bad", "small-long"}
    parent = runs.pop("small")
    assert {name: (run.info.status, run.data.tags["state"]) for name, run in runs.items()} == {
        "small-good": ("FINISHED", "succeeded"),
        "small-bad": ("FAILED", "failed"),
        "small-long": ("KILLED", "ended"),
    }
    for name, run in runs.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["dtrain.fleet"] == "small"
        assert run.data.tags["mlflow.source.name"] == "dtrain fleet"
        assert run.data.params["model"] == "slow_models:paced"
        assert [item.dataset.name for item in run.inputs.dataset_inputs]
        assert f"Run directory: `{shell.jobs_uri}/{name}`" in run.data.tags["mlflow.note.content"]
    assert "this model fails on purpose" in runs["small-bad"].data.tags["reason"]
    assert "the fleet was cancelled" in runs["small-long"].data.tags["mlflow.note.content"]
    assert not shell.rundir("never").storage.exists("job.json"), "who was never begun has no run directory"
    good = runs["small-good"]
    assert {"train/loss", "valid/loss", "test/nll", "lost/nodes"} <= good.data.metrics.keys()
    assert good.data.metrics["cost/total_usd"] == pytest.approx(usd(shell.kept("good")["paid_units"]))
    assert "for $" in good.data.tags["mlflow.note.content"]
    assert good.data.params["model.pause_seconds"] == "0.1"
    files = {item.path for item in client.list_artifacts(good.info.run_id)}
    assert {"job.json", "result.json", "evaluation.json", "reports"} <= files
    assert parent.info.status == "KILLED"
    figures = parent.data.metrics
    assert (figures["jobs/succeeded"], figures["jobs/failed"], figures["jobs/ended"]) == (1, 1, 2)
    nested = [run.data.metrics.get("cost/total_usd", 0.0) for run in runs.values()]
    assert figures["cost/total_usd"] == pytest.approx(sum(nested))

    before = parent.info.end_time
    shell.run("fleet", "fleet.yaml")
    assert len(client.search_runs([experiment.experiment_id])) == 4
    assert client.get_run(parent.info.run_id).info.end_time == before, "nothing has come since"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_start_of_a_fleet_can_be_kept_out_of_mlflow(shell: FleetShell) -> None:
    shell.write(3_000 * PRICE, [job("one", 0, 3, 0.0)])
    off = FleetShell(
        shell.folder, shell.home, {**shell.environment, "DTRAIN_OPTIONS": "command_tracking=off"}, shell.jobs_uri
    )
    said = off.run("fleet", "fleet.yaml")
    assert off.kept("one")["state"] == "succeeded", said
    assert "MLflow" not in said
    assert not (shell.home / "mlflow.db").exists()
