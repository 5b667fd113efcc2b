"""Whatever would keep a trained model from being registered is found before it is trained."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dtrain_dagster.registry.local import MLflowRegistry
from dtrain_dagster.registry.versions import RegistryError
from harness.tables import copy_tables


@pytest.fixture
def uri(tmp_path: Path) -> str:
    copy_tables(tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def refuse_writes(uri: str, table: str) -> None:
    """As a database that may be read alone."""
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database, database:
        database.execute(
            f"CREATE TRIGGER no_{table} BEFORE INSERT ON {table} BEGIN SELECT RAISE(FAIL, 'may only be read'); END"
        )


def test_what_is_tried_leaves_nothing_but_an_experiment_and_an_empty_model(uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    for _ in range(2):
        MLflowRegistry(uri).try_out("my model", "mine")
    assert client.get_experiment_by_name("mine").lifecycle_stage == "active"  # type: ignore[union-attr]
    assert client.get_registered_model("my model").tags == {}
    assert client.search_model_versions("name = 'my model'") == []
    assert client.search_runs([client.get_experiment_by_name("mine").experiment_id]) == []  # type: ignore[union-attr]
    assert [path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()] == []


def test_a_deleted_experiment_is_refused_with_the_command_that_brings_it_back(uri: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    number = client.create_experiment("mine")
    client.delete_experiment(number)
    said = rf"experiment 'mine' was deleted: .*mlflow experiments restore --experiment-id {number}.*DTRAIN_OPTIONS"
    with pytest.raises(RegistryError, match=said):
        MLflowRegistry(uri).try_out("m", "mine")
    client.restore_experiment(number)
    MLflowRegistry(uri).try_out("m", "mine")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("experiments", r"experiment 'mine' cannot be written to .*may only be read.*experiment in DTRAIN_OPTIONS"),
        ("experiment_tags", r"experiment 'mine' cannot be written to .*experiment in DTRAIN_OPTIONS"),
        ("registered_models", r"registered model 'm' cannot be written to .*DTRAIN_MODEL_NAME"),
        ("registered_model_tags", r"registered model 'm' cannot be written to .*DTRAIN_MODEL_NAME"),
    ],
)
def test_what_may_only_be_read_is_refused_by_name(uri: str, table: str, message: str) -> None:
    refuse_writes(uri, table)
    with pytest.raises(RegistryError, match=message):
        MLflowRegistry(uri).try_out("m", "mine")


def test_a_place_of_files_that_cannot_be_written_is_refused(uri: str, tmp_path: Path) -> None:
    (tmp_path / "mlartifacts").write_text("no folder")
    with pytest.raises(RegistryError, match=r"mlartifacts, where the MLflow experiment 'mine' keeps files, cannot be"):
        MLflowRegistry(uri).try_out("m", "mine")


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:////dev/null/mlflow.db"])
def test_a_registry_that_cannot_be_reached_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RegistryError, match=rf"MLflow at {uri} cannot be used .*DTRAIN_MLFLOW_TRACKING_URI"):
        MLflowRegistry(uri).try_out("m", "mine")
