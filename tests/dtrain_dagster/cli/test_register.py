"""`dtrain train` of a model that is to be registered: refused beforehand, or caught up with later."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain_dagster.cli.common import Refusal, cluster_of
from dtrain_dagster.cli.tracking import refuse_unregistrable, unregistered_job
from dtrain_dagster.settings.environment import load_settings
from trainer.config import DatasetRef, JobConfig, TrackingConfig
from trainer.rundir import RunDir

DTRAIN = str(Path(sys.executable).parent / "dtrain")


def test_a_finished_training_that_waits_for_its_registration_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    settings = load_settings()
    rundir = RunDir(f"{settings.jobs_uri}/night")
    assert unregistered_job(settings, "night") is None, "there is no such job"
    job = JobConfig(job_id="night", run_dir=rundir.uri, dataset=DatasetRef(uri="script:train.py"))
    rundir.make()
    rundir.write_job(job)
    rundir.write_json("result.json", {"status": "succeeded"})
    assert unregistered_job(settings, "night") is None, "it was not to be registered"
    (Path(rundir.uri) / "job.json").unlink()
    rundir.write_job(replace(job, tracking=TrackingConfig(registered_model="nets")))
    found = unregistered_job(settings, "night")
    assert found is not None
    assert found.tracking.registered_model == "nets"
    assert unregistered_job(settings, "../night") is None
    rundir.write_json("registration.json", {"name": "nets", "version": "1", "alias": "challenger"})
    assert unregistered_job(settings, "night") is None
    (Path(rundir.uri) / "registration.json").unlink()
    rundir.write_json("result.json", {"status": "failed"})
    assert unregistered_job(settings, "night") is None


@pytest.mark.slow
def test_what_could_not_be_registered_is_refused_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    cluster, project = cluster_of(load_settings())
    own = DatasetRef(uri="factory:my_data:make")
    job = JobConfig(job_id="j", run_dir="r", dataset=own, tracking=TrackingConfig(registered_model="nets"))
    with pytest.raises(Refusal, match="the model of a dataset that a function makes is not registered: let a script"):
        refuse_unregistrable(cluster, project, job)
    with pytest.raises(Refusal, match=r"MLflow at http://127\.0\.0\.1:9 cannot be used"):
        refuse_unregistrable(cluster, project, replace(job, dataset=DatasetRef(uri="script:train.py")))
    refuse_unregistrable(cluster, project, replace(job, tracking=TrackingConfig()))


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Trainer


def data(rows, seed):
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


torch.manual_seed(0)
config = {"epochs": 2, "batch_size_per_gpu": 16}
Trainer(nn.Linear(4, 3), config, loss=nn.CrossEntropyLoss(), registry="nets").fit(data(96, 0), data(32, 1), data(32, 2))
"""


@pytest.mark.long
def test_a_script_on_the_cluster_is_registered_at_its_end(tmp_path: Path) -> None:
    """On two nodes, with its hours and dollars; again under the same name, it is only said to have succeeded."""
    (tmp_path / "net.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
    env |= {"DTRAIN_HOME": str(tmp_path / "home"), "DTRAIN_THREADS_PER_RANK": "1"}
    asked = [DTRAIN, "train", "--script", "net.py", "--nodes", "2", "--name", "night"]
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "registered: nets version 1, alias challenger" in done.stderr
    uri = f"sqlite:///{tmp_path}/home/mlflow.db"
    from mlflow import MlflowClient

    version = MlflowClient(uri).get_model_version("nets", "1")
    assert version.tags["nodes"] == "2"
    assert float(version.tags["node_hours"]) > 0
    assert float(version.tags["cost_usd_total"]) > 0
    found = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert found.returncode == 2
    assert "job night has succeeded already" in found.stderr
