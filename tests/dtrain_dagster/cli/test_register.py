"""`dtrain train` of a model that is to be registered: refused beforehand, or caught up with later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtrain_dagster.cli.common import Refusal, cluster_of
from dtrain_dagster.cli.register import refuse_unregistrable, unregistered_job
from dtrain_dagster.settings.environment import load_settings
from trainer.config import DatasetRef, JobConfig, TrackingConfig
from trainer.rundir import RunDir


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
