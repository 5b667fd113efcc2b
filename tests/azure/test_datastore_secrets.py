"""The ways in which a workspace's datastores reach the storage account: code goes up, logs and models come down with
each."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml import jobs
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.support.user_code import stage_for_nodes
from harness.azure.emulator.storage import DATASTORE_AUTHS
from harness.waiting import until
from tests.azure.stage import Stage, end


@pytest.mark.parametrize(
    "auth", ["key", pytest.param("sas", marks=pytest.mark.long), pytest.param("identity", marks=pytest.mark.long)]
)
def test_a_job_runs_and_its_logs_are_read(stage: Stage, auth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage_new_code(folder: Path, *of_the_job: Any) -> None:
        stage_for_nodes(folder, *of_the_job)
        (folder / "new.txt").write_text(uuid.uuid4().hex)

    monkeypatch.setattr(jobs, "stage_for_nodes", stage_new_code)  # code that the workspace has is not sent again
    assert stage.control("datastore", auth=auth) == auth
    manager, spec = stage.run("succeed()")
    assert end(manager, spec).state is JobState.SUCCEEDED
    until(lambda: "rank 0 of 2" in manager.job_logs(spec.job_id), "the log")


@pytest.mark.parametrize("auth", DATASTORE_AUTHS)
def test_a_model_comes_back_as_it_went(stage: Stage, auth: str, tmp_path: Path) -> None:
    from azure.ai.ml.entities import Model

    stage.control("datastore", auth=auth)
    (tmp_path / "made").mkdir()
    (tmp_path / "made/weights").write_text(auth)
    client = stage.manager().service.ml
    made = client.models.create_or_update(Model(name=f"sums-{auth}", path=str(tmp_path / "made")))
    before = len(stage.control("requests", operation="datastores.secrets"))
    client.models.download(made.name, str(made.version), download_path=str(tmp_path / "back"))
    [found] = (tmp_path / "back").rglob("weights")
    assert found.read_text() == auth
    asked = stage.control("requests", operation="datastores.secrets")[before:]
    assert bool(asked) == (auth != "identity"), "an identity has no secret to ask for"
    assert all(seen["body"] == {"expirableSecret": True, "expireAfterHours": 1} for seen in asked)
