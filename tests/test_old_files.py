"""What the version before the rooms wrote is still read: run directory, dataset, registered model, Dagster's values.

The files lie packed in ``tests/old_files``, whose README says how they were made. Tests of damaged or hostile files
belong to ``tests/abuse``.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest

from dtrain_dagster.jobs.orders import order_of
from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.packed import PackedError
from dtrain_dagster.registry.run_model import load_run_model
from trainer.config import JobConfig, TrackingConfig
from trainer.data.shards import DataShardManager
from trainer.isolation.runner import Isolated
from trainer.run import run_job
from trainer.rundir import RunDir

PACKED = Path(__file__).parent / "old_files" / "home.tar.xz"
PLACEHOLDER = b"@HOME@"
VALUES = {
    "stock_prices": ("dtrain_dagster.data.prices", "PricesRef"),
    "sharded_dataset": ("dtrain_dagster.data.sharding", "BuiltDataset"),
    "cost_estimate": ("dtrain_dagster.costs.plan", "TrainingPlan"),
    "trained_checkpoint": ("dtrain_dagster.assets.training", "FinishedJob"),
    "registered_model": ("builtins", "dict"),
}
"""Asset → where the class of its stored value was when it was stored."""
MODEL = "stock-return-distribution"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The old home, unpacked; texts name the place where it lies now."""
    folder = tmp_path / "home"
    with tarfile.open(PACKED) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4
    for path in (item for item in folder.rglob("*") if item.suffix in (".json", ".jsonl", ".sql")):
        if "mlartifacts" not in path.parts:
            path.write_bytes(path.read_bytes().replace(PLACEHOLDER, str(folder).encode()))
    return folder


@pytest.fixture
def run_dir(home: Path) -> Path:
    [folder] = (home / "storage" / "jobs").iterdir()
    return folder


@pytest.fixture
def registry(home: Path) -> str:
    """The address of the registry."""
    with sqlite3.connect(home / "mlflow.db") as database:
        database.executescript((home / "mlflow.sql").read_text())
    return f"sqlite:///{home}/mlflow.db"


def test_what_was_ordered_and_what_came_of_it(home: Path, run_dir: Path):
    rundir = RunDir(str(run_dir))
    job = rundir.read_job()
    assert (job.job_id, job.model.args) == (run_dir.name, {"channels": 4})
    order = order_of(home, rundir)
    assert order is not None
    assert order.job == job
    assert set(order.digests()) == {"model_json_sha256", "weights_file_sha256"}
    result = rundir.read_result()
    assert result is not None
    assert (result["status"], result["steps"], result["samples_seen"]) == ("succeeded", 30, 7380)
    status = rundir.read_json("status.json")
    assert (status["state"], status["exit_codes"]) == ("succeeded", {"0": 0})
    [node] = rundir.nodes()
    assert (node.node_id, node.launch) == (0, 1)


def test_its_events(run_dir: Path):
    told = list(RunDir(str(run_dir)).events(strict=True))
    assert len(told) > 20
    assert {"step", "phase", "membership"} <= {event["kind"] for event in told}
    lines = [line for path in run_dir.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    assert len(told) == len(lines)  # none was left aside as damaged


def test_its_dataset(home: Path, run_dir: Path):
    dataset = RunDir(str(run_dir)).read_job().dataset
    shards = DataShardManager(dataset.uri, str(home / "cache"), dataset.dataset_id)
    assert shards.count("train") == 1230
    windows, target = shards.gather(shards.end_rows("test", np.arange(5)))
    assert windows.shape == (5, 12, 8)
    assert bool(target.isfinite().all())


def rewound(run_dir: Path) -> tuple[JobConfig, dict[str, Any]]:
    """The job as if it had been ended after its first checkpoint, and what it had come to."""
    rundir = RunDir(str(run_dir))
    result = rundir.read_result()
    assert result is not None
    best = json.loads((run_dir / "checkpoints" / "BEST.json").read_text())
    latest = json.loads((run_dir / "checkpoints" / "LATEST.json").read_text())
    (run_dir / "checkpoints" / "LATEST.json").write_text(json.dumps(latest | best))
    (run_dir / "result.json").unlink()
    job = replace(rundir.read_job(), tracking=TrackingConfig(tensorboard=False))
    return job, result


def test_a_training_goes_on_from_its_checkpoint(run_dir: Path):
    job, before = rewound(run_dir)
    assert run_job(job) == 0
    rundir = RunDir(str(run_dir))
    [resumed] = list(rundir.events("resume"))
    assert resumed["step"] == 5
    after = rundir.read_result()
    assert after is not None
    assert (after["steps"], after["consumed"]) == (before["steps"], before["consumed"])
    # The same bits on the same machine; another processor may sum in another order.
    assert after["test"]["loss"] == pytest.approx(before["test"]["loss"], rel=1e-5)
    assert after["best_valid_loss"] == pytest.approx(before["best_valid_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_registered_model_answers_with_the_code_it_was_packed_with(home: Path, run_dir: Path, registry: str):
    rundir = RunDir(str(run_dir))
    job = rundir.read_job()
    own = load_run_model(rundir, order_of(home, rundir))
    shards = DataShardManager(job.dataset.uri, str(home / "cache"), job.dataset.dataset_id)
    windows = shards.gather(shards.end_rows("test", np.arange(20)))[0].numpy()
    with MLflowRegistry(registry).files(MODEL, "1") as folder:
        modules = {path.name for path in (folder / "code" / "trainer").iterdir()}
        assert {"saved_model.py", "model.py"} <= modules  # which this version has elsewhere
        served = Isolated(folder=folder, kind="mlflow", seconds=120.0).predict(windows)
    expected = own.predict(windows)
    assert served.keys() == expected.keys()
    for name, values in served.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-8)


def test_its_digest_is_still_the_one_that_was_noted(home: Path, registry: str):
    [weights] = home.glob("mlartifacts/*/artifacts/model/artifacts/files/weights.pt")
    with MLflowRegistry(registry).files(MODEL, "1"):
        pass
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(PackedError, match="changed"), MLflowRegistry(registry).files(MODEL, "1"):
        pass


def load_value(home: Path, asset: str) -> Any:
    """The value of an asset as Dagster's own storage gives it to the next asset."""
    manager = dg.FilesystemIOManager(base_dir=str(home / "dagster" / "storage")).create_io_manager(
        dg.build_init_resource_context()
    )
    key = dg.AssetKey(asset)
    with dg.build_input_context(asset_key=key, upstream_output=dg.build_output_context(asset_key=key)) as context:
        return manager.load_input(context)


@pytest.mark.parametrize("asset", VALUES)
def test_values_that_dagster_has_stored(home: Path, asset: str):
    stored = (home / "dagster" / "storage" / asset).read_bytes()
    module, name = VALUES[asset]
    assert module == "builtins" or (module.encode() in stored and name.encode() in stored)
    value = load_value(home, asset)
    assert type(value).__name__ == name
    if asset == "cost_estimate":
        assert value.estimate.usd.low <= value.estimate.usd.high
        assert value.job["training"]["max_steps"] == 40
    if asset == "sharded_dataset":
        [run_dir] = (home / "storage" / "jobs").iterdir()
        assert value.samples["train"] == 1230
        assert b"trainer.strict_json" in stored  # the class of `samples`, which has moved
        assert value.dataset_id == RunDir(str(run_dir)).read_job().dataset.dataset_id
