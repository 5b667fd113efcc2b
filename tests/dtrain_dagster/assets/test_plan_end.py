"""A plan is refused where the end of its graph lacks something, before anything of it is run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets.dataset import build_given_dataset
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.planning import build_cost_estimate
from dtrain_dagster.planning.check_job import ROOM, room_needed, try_places
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.graph_names import GraphNames
from harness.tables import copy_tables
from tests.kinds import build_table
from trainer.performance.memory import ModelBytes

NAMES = GraphNames("mine")


def test_a_plan_is_refused_where_its_model_could_not_be_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, home = build_table(tmp_path).uri, tmp_path / "home"
    copy_tables(home / "mlflow.db")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    client.delete_experiment(client.create_experiment("dtrain"))
    monkeypatch.setattr("dtrain_dagster.assets.planning.measure_pace", lambda *args: pytest.fail("a probe was bought"))
    pipeline = Pipeline(names=NAMES, source="folder", defaults={"sharded_dataset": {"folder": folder}})
    resources = {**build_resources(Settings(home=home), NAMES), NAMES.values: dg.mem_io_manager}
    assets = [build_given_dataset(pipeline), build_cost_estimate(pipeline)]
    result = dg.materialize(assets, resources=resources, raise_on_error=False)
    [event] = [event for event in result.all_events if event.is_step_failure]
    failed: Any = event.step_failure_data
    assert failed.user_failure_data is not None, failed.error
    assert "experiment 'dtrain' was deleted" in failed.user_failure_data.description
    assert "nothing was started" in failed.user_failure_data.description


def test_places_that_cannot_be_written_to_or_are_full_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project: Any = build_resources(Settings(home=tmp_path))["project"]
    needed = room_needed(ModelBytes(parameters=1000, trained=800), keep_checkpoints=3)
    assert needed == {"storage": ROOM + 1000 + 5 * 2600, "home": ROOM + 1000, "temporary": ROOM + 4000}
    assert try_places(project.shared_uri, project.home, needed) == []
    assert [path for path in Path(project.shared_uri).rglob("*") if path.is_file()] == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=sum(needed.values()) - 1))
    [said] = try_places(project.shared_uri, project.home, needed)
    assert f"the disk of {tmp_path} has 0.201 GB left, and this training needs 0.201 GB" in said
    (tmp_path / "file").write_text("")
    found = try_places(f"{tmp_path}/file/storage", f"{tmp_path}/file/home", dict.fromkeys(needed, 0))
    assert len(found) == 3
    assert all("cannot be written to" in line for line in found)
