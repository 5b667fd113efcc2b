"""`dtrain train` writes to MLflow, a real one in the home."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_job import write_dataset

from dtrain_dagster.cli.main import main
from tests.tables import copy_tables


@pytest.mark.slow
def test_a_training_of_the_command_line_is_in_mlflow_with_its_dollars_and_goes_on_in_the_same_run(
    tmp_path: Path,
) -> None:
    from mlflow.tracking import MlflowClient

    home = tmp_path / "home"
    home.mkdir()
    copy_tables(home / "mlflow.db")
    dataset = write_dataset(tmp_path / "dataset")
    env = {"DTRAIN_HOME": str(home), "DTRAIN_NODES": "1", "DTRAIN_THREADS_PER_RANK": "1"}
    settings = ("model.args.channels=4", "training.max_steps=8", "training.warmup_steps=1")
    asked = ["train", "--dataset", str(dataset), "--model", "tcn", "--name", "one"]
    asked += [word for setting in settings for word in ("--set", setting)]
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(main, asked, env=env)
    assert done.exit_code == 0, done.output
    assert "in MLflow: experiment dtrain, run one" in done.output
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    [experiment] = [found for found in client.search_experiments() if found.name == "dtrain"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["model.channels"] == "4"
    assert run.data.metrics["cost/total_usd"] > 0
    assert {"train/loss", "valid/loss", "test/nll", "system/node_0/cpu_percent"} <= run.data.metrics.keys()
    assert run.data.tags["mlflow.source.name"] == "dtrain train"
    assert "for $" in run.data.tags["mlflow.note.content"]
    assert {"job.json", "result.json", "reports"} <= {item.path for item in client.list_artifacts(run.info.run_id)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["setting", "option"])
def test_tracking_can_be_switched_off(how: str, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset")
    env = {"DTRAIN_HOME": str(tmp_path / "home"), "DTRAIN_NODES": "1", "DTRAIN_THREADS_PER_RANK": "1"}
    env |= {"DTRAIN_COMMAND_TRACKING": "off"} if how == "setting" else {}
    more = ["--set", "tracking.mlflow_tracking_uri=null"] if how == "option" else []
    asked = ["train", "--dataset", str(dataset), "--model", "tcn", "--set", "training.max_steps=4", *more]
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(main, [*asked, "--set", "training.warmup_steps=1"], env=env)
    assert done.exit_code == 0, done.output
    assert "MLflow" not in done.output
    assert not (tmp_path / "home" / "mlflow.db").exists()
