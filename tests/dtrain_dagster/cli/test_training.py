"""One training of `dtrain train` that fails and goes on where it was, by the same command: its totals, its bill and its
run in MLflow are of both launches, and the ceilings count it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from shells import Shell

from dtrain_dagster.cli.common import cluster_of
from dtrain_dagster.cli.tracking import as_tracked_before, track
from dtrain_dagster.clusters.base import OWNER
from dtrain_dagster.dashboard.job_board import JobBoard, headline
from dtrain_dagster.jobs.orders import script_of
from dtrain_dagster.jobs.totals import read_phase_totals
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import format_duration
from harness.small_job import write_dataset
from harness.tables import copy_tables
from trainer.config import DatasetRef, JobConfig, TrackingConfig
from trainer.rundir import RunDir

MODEL = """
from pathlib import Path
from typing import Any
from torch import nn

class Halting(nn.Linear):
    seen = 0

    def forward(self, x):
        Halting.seen += self.training
        if Halting.seen > 7 and Path("full").exists():
            raise OSError("the disk is full")
        return super().forward(x.flatten(1))

def make(spec, outputs):
    return Halting(spec.window * len(spec.features), outputs)
"""
"""A module of a user's own, whose model fails after some steps as long as there is a file of this name."""
SCRIPT = """
import sys
from pathlib import Path
from typing import Any
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
"""A training of a user's own, with a metric of its own; ``full`` as above."""
FIELDS = (
    *("training.max_steps=12", "training.gradient_accumulation_steps=1", "training.warmup_steps=1"),
    *("training.log_frequency=1", "training.checkpoint_frequency=2"),
)
COMMAND = (
    *("train", "--dataset", "walks", "--model", "halting_model:make", "--name", "halted", "--nodes", "1"),
    *(word for field in FIELDS for word in ("--set", field)),
)


@dataclass
class Trained:
    """A home with a training of two launches, and what each start of it has said: the third one is refused."""

    shell: Shell
    said: tuple[str, ...]

    @property
    def job(self) -> RunDir:
        return self.shell.job("halted")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    shell = Shell(folder, DTRAIN_THREADS_PER_RANK="1", DTRAIN_FACTORY_MODULES="halting_model")
    copy_tables(shell.home / "mlflow.db")
    write_dataset(shell.home / "storage" / "datasets" / "walks")
    (folder / "halting_model.py").write_text(MODEL)
    (folder / "full").touch()
    first = shell.here(*COMMAND, code=1)
    (folder / "full").unlink()
    shell.job("halted").write_json(OWNER, {"dagster_run_id": "ended"})  # as if Dagster had begun it
    go_on = ("train", "--name", "halted", "--nodes", "1")
    return Trained(shell, (first, shell.here(*go_on), shell.refused(*COMMAND)))


@pytest.mark.slow
def test_a_training_that_failed_goes_on_where_it_was(trained: Trained):
    first, second, third = trained.said
    assert "the disk is full" in first
    assert re.search(r"^failed · step \d+/12 · epoch 1 · .*; its checkpoint is of step \d+$", first, re.M), first
    assert re.search(r"^so far: .+; 0.0\d+ node-hours; \$0.\d+ \(stand-in price, nothing was billed\)$", first, re.M)
    assert "\ngo on: dtrain train --name halted --nodes 1\n" in first
    assert "step 12/12" in second
    assert "12 steps on 1 rank" in second
    assert "has succeeded already" in third
    assert trained.job.read_json(OWNER)["dagster_run_id"] is None, "it is a person's by now"
    assert trained.job.read_json("status.json")["launch"] == 2
    [resumed] = trained.job.events("resume")
    assert resumed["step"] > 0


@pytest.mark.slow
def test_every_total_is_of_both_launches(trained: Trained):
    job = trained.job
    first, second = ((node.ended_at or 0.0) - node.started_at for node in job.nodes())
    both = f"{format_duration(first + second)} over 2 launches, of which the last took {format_duration(second)}"
    hours = f"{(first + second) / 3600:.4f} node-hours (the last launch: {second / 3600:.4f})"
    assert f"{both}; {hours}" in trained.shell.here("status", "halted")
    assert f"{hours} in {both}" in trained.shell.here("cost", "halted")
    [row] = [line for line in trained.shell.here("jobs").splitlines() if line.startswith("halted")]
    assert f" {format_duration(first + second)} " in row
    losses = [event["loss"] for event in job.events("step")]
    usd = trained.shell.read("jobs")[0]["usd"]
    assert (row.split()[2], row.split()[-3:]) == (f"${usd:.4f}", [f"{losses[-1]:.4f}", "12", "1"])
    cost = trained.shell.read("cost", "halted")
    assert cost["metrics"]["training_duration_hours"] == pytest.approx((first + second) / 3600, rel=1e-4)
    assert cost["launches"]["last"]["usd"] == pytest.approx(cost["total_usd"] * second / (first + second), abs=2e-6)
    assert sum(row["usd"] for row in cost["ledger"]) == pytest.approx(cost["total_usd"], abs=1e-9)
    assert {"productive", "start-up", "finish"} <= {row["cause"] for row in cost["ledger"]}
    board = JobBoard(job.uri.rpartition("/")[0], "dedicated").open("halted", time.time())
    assert board is not None
    assert board.row.seconds == pytest.approx(first + second), "the list of the dashboard"
    shown = {item["label"]: item for item in headline(board, time.time())}
    assert shown["took"]["value"] == format_duration(first + second)
    assert shown["took"]["note"].startswith("over 2 launches, of which the last took ")
    training = [event for event in job.events("phase") if event["name"] == "training"]
    of_launches = [max(event["seconds"] for event in training if event["generation"] == number) for number in (1, 2)]
    assert read_phase_totals(job, list(job.events()))["training"] == pytest.approx(sum(of_launches))
    assert job.read_json("result.json")["train_seconds"] == pytest.approx(of_launches[1], abs=0.01)


@pytest.mark.slow
def test_its_result_and_its_bill_are_told(trained: Trained):
    summary = " ".join(trained.shell.here("status", "halted").split())
    assert "12 steps on 1 rank" in summary
    assert "NLL " in summary
    assert "earned over ridge: " in summary
    export = trained.shell.folder / "usage.csv"
    export.write_text("Date,MeterCategory,CostInBillingCurrency,BillingCurrency,ResourceId\n")
    said = trained.shell.here("cost", "halted", "--usage-export", str(export))
    assert "stand-in price, nothing was billed" in said
    assert "no row of the export belongs to this job" in said
    export.write_text("Date,Cost\n")
    assert "has no column for currency" in trained.shell.refused("cost", "halted", "--usage-export", str(export))


def run_of(shell: Shell) -> tuple[Any, Any, set[str]]:
    """The client of the home's MLflow, the one run in it, and the run's artifacts."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{shell.home}/mlflow.db")
    [experiment] = [found for found in client.search_experiments() if found.name == "dtrain"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return client, run, {item.path for item in client.list_artifacts(run.info.run_id)}


@pytest.mark.slow
def test_it_is_one_run_in_mlflow_with_its_dollars(trained: Trained):
    assert "in MLflow: experiment dtrain, run halted" in trained.said[1]
    client, run, artifacts = run_of(trained.shell)
    assert run.data.params["learning_rate"] == "0.002"
    metrics = run.data.metrics
    assert metrics["cost/total_usd"] == pytest.approx(trained.shell.read("cost", "halted")["total_usd"], abs=1e-5)
    assert {"train/loss", "valid/loss", "test/nll", "test/margin", "valid/best_step"} <= metrics.keys()
    assert (metrics["lost/nodes"], len(metrics) <= 25) == (0, True)
    own = {name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.")}
    assert own["gate"] in ("passed", "not passed")
    assert own["nodes"] == "1"
    assert len(own) <= 12
    folder = str(trained.shell.folder)
    figures = json.loads(Path(client.download_artifacts(run.info.run_id, "figures.json", folder)).read_text())
    assert {"train/loss", "node_0/cpu_percent", "time/forward_milliseconds"} <= figures.keys(), "what is no metric"
    assert figures["train/loss"]["last"] == pytest.approx(metrics["train/loss"])
    assert run.data.tags["mlflow.source.name"] == "dtrain train"
    assert "for $" in run.data.tags["mlflow.note.content"]
    assert {"job.json", "result.json", "reports"} <= artifacts


@pytest.mark.slow
def test_the_ceilings_count_it_and_refuse_the_next_one(trained: Trained):
    trained.shell.here("cost", "ceilings", "--per-month", "0.000001")
    try:
        refused = trained.shell.refused(*("other" if word == "halted" else word for word in COMMAND))
        document = trained.shell.read("cost", "ceilings")
    finally:
        trained.shell.here("cost", "ceilings", "--none")
    assert "the ceiling of $0.0000 per month" in refused
    assert "raise it: dtrain cost ceilings --per-month AMOUNT" in refused
    assert [path.name for path in (trained.shell.home / "storage" / "jobs").iterdir()] == ["halted"]
    assert not list((trained.shell.home / "spending").glob("other*")), "nothing is promised"
    bill = trained.shell.read("cost", "halted")
    assert document["spent_usd"] == pytest.approx(bill["metrics"]["total_cost_usd"])


def test_a_training_may_be_kept_out_of_mlflow_by_an_option_or_with_all_others(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    cluster, project = cluster_of(settings)
    job = JobConfig(job_id="one", run_dir=str(tmp_path), dataset=DatasetRef(uri="script:points.py"))
    null, off = ["tracking.mlflow_tracking_uri=null"], settings.model_copy(update={"command_tracking": "off"})
    assert track(job, [], settings, cluster, project).job.tracking.mlflow_run_name == "one"
    for asked, used in ((null, settings), ([], off)):
        out = track(job, asked, used, cluster, project)
        assert (out.is_on, out.job.tracking.mlflow_tracking_uri) == (False, None)
        assert out.env, "a launch says so, for job.json stays as it was begun"


def test_a_training_that_says_something_of_tracking_goes_on_in_the_same_run(tmp_path: Path) -> None:
    job = JobConfig(job_id="one", run_dir=str(tmp_path), dataset=DatasetRef(uri="script:points.py"))
    first = TrackingConfig(
        tensorboard=False, mlflow_tracking_uri="sqlite:///x.db", mlflow_run_name="one", tags={"code_version": "a"}
    )
    RunDir(str(tmp_path)).write_job(replace(job, tracking=first))
    again = as_tracked_before(replace(job, tracking=TrackingConfig(tensorboard=False)), RunDir(str(tmp_path)))
    assert again.tracking == first
    other = as_tracked_before(replace(job, tracking=TrackingConfig(mlflow_experiment="x")), RunDir(str(tmp_path)))
    assert other.tracking == replace(first, mlflow_experiment="x"), "which is then refused as another configuration"


@pytest.mark.long
@pytest.mark.slow
def test_the_training_of_a_script_goes_on_by_its_name_and_is_in_mlflow_with_its_own_metrics(tmp_path: Path) -> None:
    """From another folder: the command goes on where the script was started."""
    one = {"DTRAIN_NODES": "1", "DTRAIN_THREADS_PER_RANK": "1"}
    shell, elsewhere = Shell(tmp_path, **one), tmp_path / "elsewhere"
    copy_tables(shell.home / "mlflow.db")
    (tmp_path / "points.py").write_text(SCRIPT)
    (tmp_path / "full").touch()
    words = ("--script", "points.py", "--name", "points", "--set", "training.seed=3", "--", "8")
    assert "the disk is full" in shell.here("train", *words, code=1)
    (tmp_path / "full").unlink()
    elsewhere.mkdir()
    other = Shell(elsewhere, **one, DTRAIN_HOME=str(shell.home))
    assert "run points" in other.here("train", "--name", "points", "--change", "training.epochs=4")
    assert shell.job("points").read_json("result.json")["epochs"] == 4
    assert (kept := script_of(shell.home, "points")) is not None
    assert (kept.folder, kept.arguments) == (str(tmp_path), ("8",))
    assert kept.overrides == ("training.seed=3", "training.epochs=4"), "it would go on with that, too"
    _, run, artifacts = run_of(shell)
    params, metrics = run.data.params, run.data.metrics
    assert (params["seed"], params["learning_rate"], params["model.class"]) == ("3", "0.05", "Sequential")
    assert (run.info.run_name, params["dataset"]) == ("points", "script:points.py")
    assert {"train/loss", "valid/loss", "valid/accuracy", "test/accuracy", "lost/nodes"} <= metrics.keys()
    assert 0.5 < metrics["test/accuracy"] <= 1
    assert metrics["cost/total_usd"] > 0
    assert run.data.tags["mlflow.source.name"] == "points.py"
    assert "Run directory: `" in run.data.tags["mlflow.note.content"]
    assert {"job.json", "result.json", "reports"} <= artifacts
