"""`hyperparameter_search` through Dagster: real trials, its page, MLflow, and the settings that a plan takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from played_search import PRICE, USUAL, play, source_of

from dtrain_dagster.assets.search import search_page, steps_of, trial_rows
from dtrain_dagster.pipelines import Cluster, build_training_assets
from dtrain_dagster.search.results import improvement_lines, result_document
from dtrain_dagster.search.run import Measured, Search, SearchRequest
from dtrain_dagster.search.tracking import SearchTracker
from dtrain_dagster.search.trials import Sampler, SearchSettings
from harness.small_job import write_dataset
from tests.dtrain_dagster.page_order import check_order
from tests.page import Page
from trainer.config import DatasetRef, JobConfig

SPACE = {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "model.args.channels": [8, 16]}


@pytest.mark.slow
def test_the_page_and_the_runs_of_a_search_that_was_played(tmp_path: Path) -> None:
    """Nothing is trained: the page, and MLflow's parent and nested runs, written twice and there once."""
    settings = SearchSettings(trials=5, parallel=2, sampler=Sampler.random)
    source = play(source_of(settings), [])
    base = JobConfig(job_id="search", run_dir=f"{tmp_path}/jobs/search", dataset=DatasetRef(uri="/tmp/data"))
    request = SearchRequest(
        name="played", space={"training.seed": [1]}, settings=settings, base=base, samples={}, budget_usd=None, nodes=2,
        usd_per_node_hour=PRICE,
    )  # fmt: skip
    search = Search(tmp_path, request, None, {}, Measured(USUAL, 0.25))  # type: ignore[arg-type]
    addresses = {"dashboard": "http://127.0.0.1:8060/find/played", "run_page": ""}
    page = search_page(search, search.result_of(source), "stand-in price", 1.0, addresses)
    check_order(page, links=1)
    assert page["best_trial"] == source.best.number  # type: ignore[union-attr]
    assert page["cost_usd"] == pytest.approx(0.25 + sum(trial.usd for trial in source.trials), abs=1e-6)
    for _ in range(2):
        tracker = SearchTracker(f"sqlite:///{tmp_path}/mlflow.db", "studies", "played", "loss", 1.0)
        assert tracker.write(source.trials[:3]) == ""
        assert tracker.write(source.trials, 0.5) == ""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("studies").experiment_id])  # type: ignore[union-attr]
    nested = {run.data.tags["dtrain.trial"]: run for run in runs if "dtrain.trial" in run.data.tags}
    assert len(runs) == 6
    assert nested.keys() == {"0", "1", "2", "3", "4"}
    assert {run.data.tags["mlflow.parentRunId"] for run in nested.values()} == {tracker.run_id}
    first = source.trials[0]
    curve = client.get_metric_history(nested["0"].info.run_id, "loss")
    assert [item.value for item in sorted(curve, key=lambda item: item.step)] == list(first.scores)
    assert nested["0"].data.params["training.schedule"] == first.values["training.schedule"]


def test_the_ten_best_trials_are_shown_and_the_file_has_all() -> None:
    settings = SearchSettings(trials=14, parallel=2, sampler=Sampler.random)
    source = play(source_of(settings), [])
    result = result_document(source.trials, settings, 0.0, {})
    rows = trial_rows(result, 1.0)
    scores = sorted(score for trial in source.trials if (score := trial.best(1.0)) is not None)
    assert [row["loss"] for row in rows] == [f"{score:.6g}" for score in scores[:10]]
    assert list(rows[0]) == ["trial", "loss", "usd", "evaluations", "values"]
    assert trial_rows(result, -1.0)[0]["loss"] == f"{scores[-1]:.6g}"


def test_each_improvement_has_its_price() -> None:
    found: list[dict[str, Any]] = [
        {"trial": 0, "score": 0.5, "usd": 0.02, "gained": None, "usd_since": 0.02},
        {"trial": 3, "score": 0.375, "usd": 0.05, "gained": 0.125, "usd_since": 0.03},
    ]
    result = {"metric": "loss", "improvements": found, "usd": 0.09}
    assert improvement_lines(result) == ["trial 3: loss 0.375, better by 0.125 for $0.0300"]
    assert steps_of(result) == [(0.02, 0.5), (0.05, 0.5), (0.05, 0.375), (0.09, 0.375)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_page_of_a_search_shows_what_was_found_and_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    size = {"epochs": 3, "batch_size_per_gpu": 32, "gradient_accumulation_steps": 1}
    defs = build_training_assets(
        "walks", dataset=write_dataset(tmp_path / "data"), training=size, cluster=Cluster(nodes=2)
    )
    search, instance = dg.AssetKey(["walks", "hyperparameter_search"]), dg.DagsterInstance.ephemeral()
    selection = dg.AssetSelection.assets(search).upstream()
    job = dg.define_asset_job("search", selection=selection, executor_def=dg.in_process_executor)
    whole = dg.Definitions.merge(defs, dg.Definitions(jobs=[job]))
    config = {"ops": {"walks__hyperparameter_search": {"config": {"space": SPACE, "trials": 4, "pruner": "asha"}}}}
    done = whole.resolve_job_def("search").execute_in_process(run_config=config, instance=instance)
    [made] = done.asset_materializations_for_node("walks__hyperparameter_search")
    page = Page(made.metadata)
    value = done.output_for_node("walks__hyperparameter_search")
    found = json.loads(Path(value["settings_file"]).read_text())
    assert found["training"]["learning_rate"] == value["best"]["values"]["training.learning_rate"]
    assert page["best_loss"] == pytest.approx(value["best"]["score"], abs=1e-6)
    assert len(page["best_trials"]) == page["trials"] == 4
    assert len(json.loads(Path(page["all_trials"]).read_text())["trials"]) == 4
    assert page["cost_usd"] > 0

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/home/mlflow.db")
    experiment = client.get_experiment_by_name("walks")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    [parent] = [run for run in runs if "dtrain.trial" not in run.data.tags and "dtrain.search" in run.data.tags]
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.data.tags["dtrain.trial"] for run in nested} == {"0", "1", "2", "3"}
    assert parent.data.metrics["best_loss"] == pytest.approx(page["best_loss"], abs=1e-6)
    assert sum(run.data.metrics["usd"] for run in nested) == pytest.approx(page["cost_usd"], abs=1e-6)

    again = whole.resolve_job_def("search").execute_in_process(run_config=config, instance=instance)
    assert again.output_for_node("walks__hyperparameter_search") == value  # nothing was trained again
    assert len(client.search_runs([experiment.experiment_id])) == len(runs)
    plan = {"walks__cost_estimate": {"config": {"settings_file": value["settings_file"]}}}
    estimate = dg.AssetSelection.assets(dg.AssetKey(["walks", "cost_estimate"])).upstream()
    planned = dg.Definitions.merge(
        defs, dg.Definitions(jobs=[dg.define_asset_job("plan", estimate, executor_def=dg.in_process_executor)])
    )
    done = planned.resolve_job_def("plan").execute_in_process(run_config={"ops": plan}, instance=instance)
    used = done.output_for_node("walks__cost_estimate")
    assert used.job["training"]["learning_rate"] == found["training"]["learning_rate"]
    assert used.job["model"]["args"] == found["model"]["args"]
