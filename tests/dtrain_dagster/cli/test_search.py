"""`dtrain search` on a real cluster: its orchestrator is killed, and the same command goes on; nothing is bought twice,
and the settings of the best trial are what a training takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.job_options import Asked
from dtrain_dagster.cli.main import main
from dtrain_dagster.cli.search import trials_table
from dtrain_dagster.costs.ceilings import write_ceiling
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.resources import build_resources
from dtrain_dagster.search.results import trial_line
from dtrain_dagster.search.trials import Trial, TrialState
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.home import make_home
from harness.small_job import write_dataset
from trainer.rundir import RunDir

DTRAIN = str(Path(sys.executable).parent / "dtrain")
SPACE = {
    "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "model.args.channels": {"low": 8, "high": 16, "step": 8},
}


def test_what_is_not_said_is_as_in_the_asset() -> None:
    from dtrain_dagster.cli.search import search
    from dtrain_dagster.search.trials import SearchSettings

    said = {option.name: option.default for option in search.params}
    usual = SearchSettings()
    assert (said["sampler"], said["pruner"], said["trials"]) == (usual.sampler, usual.pruner, usual.trials)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DTRAIN_NODES", "2")
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "walks")
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    return tmp_path


def processes_of(home: Path) -> list[int]:
    """Whatever runs for a home: its orchestrator, supervisors and nodes, by the environment that they were given."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if int(path.parent.name) != os.getpid() and os.fsencode(str(home)) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_search_of_which_every_process_is_killed_goes_on_and_buys_nothing_twice(place: Path) -> None:
    """Orchestrator, supervisors and nodes die at once while two trials train."""
    size = ("--set", "training.batch_size_per_gpu=32", "--set", "training.gradient_accumulation_steps=1",
            "--set", "tracking.mlflow_tracking_uri=sqlite:///mlflow.db")  # fmt: skip
    asked = ("search", "--dataset", "walks", "--space", "space.json", "--epochs", "3", "--trials", "4", *size,
             "--pruner", "asha", "--name", "killed", "--json")  # fmt: skip
    first = subprocess.Popen([DTRAIN, *asked], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    jobs = place / "home" / "storage" / "jobs"
    deadline = time.monotonic() + 240
    while len(list(jobs.glob("killed-*/launch.json"))) < 2 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.2)
    while pids := processes_of(place / "home"):  # again, until nobody is left who could start another one
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        first.poll()
    assert first.wait() == -signal.SIGKILL
    begun = {path.parent.name: RunDir(str(path.parent)).read_job() for path in jobs.glob("killed-*/launch.json")}
    assert len(begun) >= 2
    done = subprocess.run([DTRAIN, *asked], cwd=place, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert [row["trial"] for row in result["trials"]] == [0, 1, 2, 3]
    assert result["best"]["score"] == min(row["score"] for row in result["trials"])
    manager = build_resources(Settings())["cluster"].manager()
    for row in result["trials"]:
        rundir = RunDir(f"{jobs}/killed-{row['trial']:04d}")
        job = rundir.read_job()
        assert job.training.learning_rate == row["values"]["training.learning_rate"]
        assert job.model.args == {"channels": row["values"]["model.args.channels"]}
        assert job.training.world_size == 2  # its batches are those of both nodes, and it had one
        assert begun.get(job.job_id, job).training.learning_rate == job.training.learning_rate
        usage = manager.node_usage(job.job_id)
        assert {item.node_id for item in usage} == {0}
        assert row["usd"] == pytest.approx(CostTracker("", usage, "dedicated").total_usd)
    billed = sum(row["usd"] for row in result["trials"]) + result["measuring_usd"]
    assert result["usd"] == pytest.approx(billed)
    assert 0 < result["usd"] <= result["budget_usd"]
    bill = subprocess.run([DTRAIN, "cost", "killed", "--json"], cwd=place, capture_output=True, text=True, timeout=100)
    cost = json.loads(bill.stdout)
    assert cost["usd"] == pytest.approx(result["usd"], abs=1e-5)
    assert cost["budget_usd"] == pytest.approx(result["budget_usd"])
    assert cost["causes"]["probe"]["usd"] == pytest.approx(result["measuring_usd"], abs=1e-5)

    again = subprocess.run([DTRAIN, *asked], cwd=place, capture_output=True, text=True, timeout=200)
    assert json.loads(again.stdout) == result  # it is over: nothing is run, and its result is the same
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("dtrain").experiment_id])  # type: ignore[union-attr]
    [parent] = [run for run in runs if "dtrain.trial" not in run.data.tags]
    nested = {run.data.tags["dtrain.trial"]: run for run in runs if run is not parent}
    assert len(runs) == 5  # three orchestrators, and each run once; the nodes wrote none of their own
    assert nested.keys() == {"0", "1", "2", "3"}
    assert {run.data.tags["mlflow.parentRunId"] for run in nested.values()} == {parent.info.run_id}
    assert parent.data.metrics["usd"] == pytest.approx(result["usd"])
    assert parent.data.metrics["best_loss"] == pytest.approx(result["best"]["score"])
    found, _ = Asked(dataset="walks", nodes=2).job(Settings(), [], "again", result["settings_file"])
    assert found.training.learning_rate == result["best"]["values"]["training.learning_rate"]
    assert found.model.args == {"channels": result["best"]["values"]["model.args.channels"]}
    other = subprocess.run([DTRAIN, *asked, "--seed", "1"], cwd=place, capture_output=True, text=True, timeout=200)
    assert other.returncode == 2
    assert "search killed was begun with another seed" in other.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--space", "{}"], "it is empty"),
        pytest.param(  # this one tries the model
            ["--space", '{"model.args.chanels": {"low": 8, "high": 16}}'],
            "argument 'chanels'; it accepts: channels",
            marks=pytest.mark.slow,
        ),
        (["--space", "nowhere.json"], "nowhere.json: there is no such file"),
        (["--space", "{"], "is not JSON"),
        (["--space", "space.json", "--sampler", "tp"], "'tp' is not one of 'gp', 'random'"),
        (["--space", "space.json", "--pruner", "ash"], "'ash' is not one of 'asha', 'none'"),
        (["--space", "space.json", "--nodes-per-trial", "3"], "there are 2 node(s)"),
        (["--space", "space.json", "--trials", "0"], "0 is not in the range"),
        (["--space", "space.json", "--name", "a/b"], "--name 'a/b'"),
    ],
)
def test_a_mistake_is_named_before_anything_is_bought(place: Path, options: list[str], words: str) -> None:
    found = CliRunner().invoke(main, ["search", "--dataset", "walks", *options])
    assert found.exit_code == 2, found.output
    assert words in found.output.replace("\n", " ")
    assert not (place / "home" / "storage" / "jobs").exists()
    assert not (place / "home" / "searches").exists()


def test_a_search_without_a_budget_counts_an_hour_of_its_nodes_until_a_trial_was_measured(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_OPTIONS", "command_tracking=off")
    monkeypatch.setattr("dtrain_dagster.cli.search.check_space", lambda *_: ())  # it tries models
    write_ceiling(make_home(place / "home"), Decimal(6))
    found = CliRunner().invoke(main, ["search", "--dataset", "walks", "--space", "space.json"])
    assert found.exit_code != 0
    assert "the ceiling of $6.00 per month" in found.output
    assert "this start adds $6.12" in found.output
    assert not list((place / "home").glob("storage/jobs/*"))


def test_lines_for_people_are_whole() -> None:
    trial = Trial(
        number=3, values={"training.learning_rate": 0.0123456, "model.factory": "tcn"}, of=8, scores=(0.5, 0.25),
        times=(1.0, 2.0), steps=(1, 2), state=TrialState.PRUNED, reason="not worth it", usd=0.5,
    )  # fmt: skip
    assert trial_line(trial, 1.0) == (
        "trial 3 pruned, 0.25 after 2/8 evaluations, $0.5000 (training.learning_rate = 0.01235, model.factory = tcn): "
        "not worth it"
    )
    assert trials_table([], "loss").row_count == 0
