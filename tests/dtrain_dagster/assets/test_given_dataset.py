"""A dataset that was made elsewhere: found by its folder or id, or returned by another asset, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets.dataset import build_given_dataset
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.plan_options import TrainingOptions, with_usual_parts
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.registry.versions import TrainingProvenance, model_card
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.graph_names import GraphNames
from harness.small_job import write_dataset
from tests.kinds import build_table
from trainer.config import parse_job
from trainer.data.manifest import load_manifest
from trainer.evaluation.gate import RULE, Gate
from trainer.storage.open import open_storage

NAMES = GraphNames("mine")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "elsewhere")


def take(home: Path, returned: Any = None, folder: str = "") -> dg.ExecuteInProcessResult:
    """Materialize `sharded_dataset` of a graph on a folder, or on what the asset `made` returns."""

    @dg.asset(io_manager_key=NAMES.values)
    def made() -> Any:
        return returned

    upstream = dg.AssetKey("made") if returned is not None else None
    pipeline = Pipeline(
        names=NAMES, source="asset" if upstream else "folder", upstream=upstream,
        defaults={} if upstream else {"sharded_dataset": {"folder": folder}},
    )  # fmt: skip
    resources = {**build_resources(Settings(home=home), NAMES), NAMES.values: dg.mem_io_manager}
    assets = [build_given_dataset(pipeline), *([made] if upstream else [])]
    return dg.materialize(assets, resources=resources, raise_on_error=False)


def dataset_of(result: dg.ExecuteInProcessResult) -> BuiltDataset:
    assert result.success
    return result.output_for_node("mine__sharded_dataset")


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    [event] = [event for event in result.all_events if event.is_step_failure]
    return str(event.step_failure_data)


def test_a_folder_is_taken_as_it_is_where_nodes_see_this_machines_files(tmp_path: Path, folder: Path) -> None:
    taken = dataset_of(take(tmp_path, folder=str(folder)))
    assert (taken.uri, taken.shared_uri) == (str(folder), str(folder))
    assert taken.samples["train"] > 0
    assert taken.dataset_id == taken.manifest()["dataset_id"]


def test_an_id_is_found_in_the_home_and_all_places_that_were_looked_at_are_named(tmp_path: Path) -> None:
    there = write_dataset(tmp_path / "storage" / "datasets" / "abc")
    assert dataset_of(take(tmp_path, folder="abc")).uri == str(there)
    said = failure_of(take(tmp_path, folder="nowhere"))
    assert "no manifest.json in" in said
    assert f"{tmp_path}/storage/datasets/nowhere" in said


def test_what_an_asset_returns_is_a_folder_as_text_or_path(tmp_path: Path, folder: Path) -> None:
    assert dataset_of(take(tmp_path, returned=str(folder))).uri == str(folder)
    assert dataset_of(take(tmp_path, returned=folder)).uri == str(folder)
    assert "returned a int" in failure_of(take(tmp_path, returned=3))


def test_a_dataset_of_another_kind_has_its_usual_model_and_loss_unless_others_are_stated(tmp_path: Path) -> None:
    rows = build_table(tmp_path, "level")
    usual = with_usual_parts(TrainingOptions(), rows.manifest())
    assert (usual.model, usual.loss) == ("mlp", "cross_entropy")
    stated = with_usual_parts(TrainingOptions(model="linear"), rows.manifest())
    assert (stated.model, stated.loss) == ("linear", "cross_entropy")
    windows = with_usual_parts(TrainingOptions(), {})
    assert (windows.model, windows.loss) == ("har_tcn", "return_and_volatility")
    of_one_forecast = with_usual_parts(TrainingOptions(model="tcn"), {})
    assert (of_one_forecast.model, of_one_forecast.loss) == ("tcn", "student_t")


def test_a_model_of_rows_has_a_card_of_its_own(tmp_path: Path) -> None:
    manifest = load_manifest(open_storage(build_table(tmp_path).uri))
    job = parse_job(json.dumps({
        "job_id": "j", "run_dir": "r", "dataset": {"uri": "d"}, "model": {"factory": "mlp"},
        "loss": {"factory": "logistic"},
    }))  # fmt: skip
    result = {"train_seconds": 1.0, "world_size": 1, "steps": 3, "epochs": 1.0, "weights_sha256": "a" * 64}
    evaluation = {
        "model": {"log_loss": 0.25, "samples": 9}, "baselines": {"constant": {"log_loss": 0.6875}},
        "notes": ["a note"],
    }  # fmt: skip
    facts = TrainingProvenance(nodes=1, node_hours=0.1, cost_usd="$1", code_version="1", dagster_run_id="r")
    card = model_card("tumours", job, result, evaluation, manifest, facts, Gate(False, ("it is poor",)))
    for words in (
        "forecast of bought (binary: no, yes)", "| **this model** | 0.25 |", "a note",
        f"Gate **not passed**: it is poor. A model passes if {RULE}; the linear one is a linear or logistic regression",
    ):  # fmt: skip
        assert words in card
    assert "`(n, 3)`" in card
