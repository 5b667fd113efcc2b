"""`dtrain train` writes to MLflow, a real one in the home: trainings that are interrupted. One that is not is in
test_training.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.jobs.orders import script_of
from dtrain_dagster.jobs.view import last_step
from harness.small_job import write_dataset
from harness.tables import copy_tables
from trainer.rundir import TRACKING, RunDir

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
from trainer import DistributedConfig, Trainer

class Points(Dataset):
    def __init__(self, seed):
        self.read = 0
        self.inputs = torch.randn(64, 2, generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, position):
        self.read += 1
        if self.read > 100 and Path("full").exists():
            raise OSError("the disk is full")
        return self.inputs[position], (self.inputs[position, 0] > 0).long()

def accuracy(scores, targets):
    return (scores.argmax(dim=1) == targets).float()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, int(sys.argv[1])), nn.Tanh(), nn.Linear(int(sys.argv[1]), 2))
config = DistributedConfig(batch_size_per_gpu=16, epochs=3, log_frequency=1, learning_rate=0.05)
Trainer(model, config, metrics={"accuracy": accuracy}).fit(Points(0), Points(1), Points(2))
"""


def run_of(home: Path) -> Any:
    """The one run of the home's MLflow."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    [experiment] = [found for found in client.search_experiments() if found.name == "dtrain"]
    [run] = client.search_runs([experiment.experiment_id])
    return run, {item.path for item in client.list_artifacts(run.info.run_id)}


def ordered(folder: Path, *words: str, code: int = 0, **environment: str) -> str:
    env = {"DTRAIN_HOME": str(folder / "home"), "DTRAIN_NODES": "1", "DTRAIN_THREADS_PER_RANK": "1", **environment}
    with contextlib.chdir(folder):
        done = CliRunner().invoke(main, ["train", *words], env=env)
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.long
@pytest.mark.slow
def test_the_training_of_a_script_goes_on_by_its_name_and_is_in_mlflow_with_its_own_metrics(tmp_path: Path) -> None:
    copy_tables(tmp_path / "home" / "mlflow.db")
    (tmp_path / "points.py").write_text(SCRIPT)
    (tmp_path / "full").touch()
    words = ("--script", "points.py", "--name", "points", "--set", "training.seed=3", "--", "8")
    assert "the disk is full" in ordered(tmp_path, *words, code=1)
    (tmp_path / "full").unlink()
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
    elsewhere.mkdir()
    said = ordered(elsewhere, "--name", "points", "--change", "training.epochs=4", DTRAIN_HOME=str(home))
    assert json.loads((home / "storage/jobs/points/result.json").read_text())["epochs"] == 4
    assert (kept := script_of(home, "points")) is not None
    assert (kept.folder, kept.arguments) == (str(tmp_path), ("8",))
    assert kept.overrides == ("training.seed=3", "training.epochs=4"), "its page goes on with that, too"
    assert "in MLflow: experiment dtrain, run points" in said
    run, artifacts = run_of(tmp_path / "home")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "points")
    params = run.data.params
    assert (params["seed"], params["learning_rate"], params["model.class"]) == ("3", "0.05", "Sequential")
    assert params["dataset"] == "script:points.py"
    metrics = run.data.metrics
    assert {
        "train/loss",
        "valid/loss",
        "valid/accuracy",
        "test/accuracy",
        "lost/nodes",
    } <= metrics.keys()
    assert 0.5 < metrics["test/accuracy"] <= 1
    assert metrics["cost/total_usd"] > 0
    assert run.data.tags["mlflow.source.name"] == "points.py"
    assert "Run directory: `" in run.data.tags["mlflow.note.content"]
    assert {"job.json", "result.json", "reports"} <= artifacts


def interrupted(folder: Path, words: Sequence[str], until: Callable[[], object], **environment: str) -> str:
    """What a training has said that is paced, and ended by Ctrl-C once this holds."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
    pace = json.dumps([{"kind": "sleep", "at": "backward", "node": 0, "seconds": 0.3, "every": True}])
    env = own | {"DTRAIN_HOME": str(folder / "home"), "DTRAIN_NODES": "1", "DTRAIN_FAULTS": pace, **environment}
    command = [sys.executable, "-c", "from dtrain_dagster.cli.main import main; main()", "train", *words]
    process = subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not until():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 130, said
    return said


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_training_that_goes_on_can_be_kept_out_of_mlflow_and_comes_back_to_its_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    copy_tables(tmp_path / "home" / "mlflow.db")
    asked = ["--dataset", str(write_dataset(tmp_path / "dataset")), "--model", "tcn", "--name", "one"]
    for setting in (
        "model.args.channels=4", "training.max_steps=400", "training.epochs=1000", "training.warmup_steps=1",
        "training.log_frequency=1", "training.checkpoint_frequency=2",
    ):  # fmt: skip
        asked += ["--set", setting]
    rundir = RunDir(str(tmp_path / "home" / "storage" / "jobs" / "one"))
    client = MlflowClient(f"sqlite:///{tmp_path}/home/mlflow.db")

    def losses() -> set[int]:
        """The steps whose loss MLflow has."""
        if client.get_experiment_by_name("dtrain") is None or not rundir.storage.exists(TRACKING):
            return set()
        run, _ = run_of(tmp_path / "home")
        return {metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")}

    interrupted(tmp_path, asked, losses)
    begun, run_id, stopped = losses(), run_of(tmp_path / "home")[0].info.run_id, last_step(rundir)
    assert stopped is not None
    null = ["--set", "tracking.mlflow_tracking_uri=null"]
    said = interrupted(tmp_path, [*asked, *null], lambda: (last_step(rundir) or (0, 0.0))[0] > stopped[0] + 5)
    assert "MLflow" not in said
    assert losses() == begun
    assert "in MLflow: experiment dtrain, run one" in ordered(tmp_path, *asked)
    run, _ = run_of(tmp_path / "home")
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert max(losses()) == 400
    assert stopped[0] + 3 not in losses(), "of the launch that was kept out"
