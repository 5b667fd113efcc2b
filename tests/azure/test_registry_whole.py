"""From nodes to a registered model: ranks report to the workspace's experiment by the identity of their nodes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dtrain_dagster import registry
from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager
from dtrain_dagster.jobs.progress import start_job
from dtrain_dagster.registry.azure import AzureMLRegistry
from dtrain_dagster.registry.versions import open_client
from harness import small_job
from harness.azure.emulator import Emulator
from tests.azure.planted import ENVIRONMENT, leaks
from tests.azure.workspace import options
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.rundir import RunDir
from trainer.secrets import azure_token
from trainer.storage.open import open_storage


@pytest.mark.long
@pytest.mark.slow
def test_nodes_report_by_their_identity_and_the_model_carries_it(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.use(monkeypatch)
    for name, value in ENVIRONMENT.items():
        if name.startswith(("MLFLOW", "DTRAIN")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_AUTH", "")
    azure_token.credential.cache_clear()
    manager = AzureMLClusterManager(options(emulator), home=tmp_path / "home")
    models = AzureMLRegistry(manager.service.ml, manager.audit)
    data = open_storage(f"{manager.options.root_uri}/data")
    folder = small_job.write_dataset(tmp_path / "dataset")
    for path in folder.rglob("*"):
        if path.is_file():
            data.write(path.relative_to(folder).as_posix(), path.read_bytes())
    run_dir = f"{manager.jobs_uri}/train-1"
    job = JobConfig(
        job_id="train-1",
        run_dir=run_dir,
        dataset=DatasetRef(uri=data.uri),
        model=FactoryConfig(factory="tcn"),
        loss=FactoryConfig(factory="student_t"),
        training=DistributedTrainingConfig(world_size=2, max_steps=20, warmup_steps=5, threads_per_rank=1),
        tracking=TrackingConfig(tensorboard=False, mlflow_tracking_uri=models.tracking_uri),
    )
    manager.provision_cluster(2, "Standard_NC24ads_A100_v4")
    start_job(manager, job, 2, 1, {"DTRAIN_CACHE": str(tmp_path / "node-cache")})
    deadline = time.monotonic() + 240
    while not (status := manager.job_status("train-1")).state.is_final and time.monotonic() < deadline:
        time.sleep(0.5)
    assert status.state == "succeeded", (status, manager.job_logs("train-1", tail=60))
    rundir = RunDir(run_dir)
    errors = [item["message"] for item in rundir.events("error")]
    assert errors == []
    client = open_client(azure_token.tracking_address(models.tracking_uri))
    run = client.get_run(rundir.read_json("tracking.json")["mlflow_run_id"])
    assert {"train.loss", "valid.nll"} <= run.data.metrics.keys()
    assert run.data.tags["mlflow.parentRunId"]
    result = rundir.read_json("result.json")
    tags = registry.TrainingProvenance(
        nodes=2, node_hours=0.1, cost_usd="$1", code_version="c", dagster_run_id="d", sku="Standard_NC24ads_A100_v4"
    ).tags()
    model = models.register_model(registry.Candidate(run_dir), "whole", tags, "# card")
    assert model.created
    assert model.run_id == run.info.run_id
    assert model.tags["world_size_history"] == "2"
    assert model.tags["checkpoint_uri"] == f"{run_dir}/{result['checkpoint']}"
    here = tmp_path / "blobs"
    for kind in ("", "events", "logs", "nodes", "membership"):
        storage = open_storage(f"{run_dir}/{kind}".rstrip("/"))
        for name in storage.list():
            try:
                target = here / kind / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(storage.read(name))
            except (FileNotFoundError, IsADirectoryError):
                continue
    (here / "tags.json").write_text(json.dumps([dict(model.tags), run.data.tags, run.data.params]))
    assert (here / "job.json").exists()
    assert leaks([here, tmp_path / "home"], ENVIRONMENT.values()) == []
    azure_token.credential.cache_clear()
