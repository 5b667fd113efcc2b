"""`hyperparameter_search` through Dagster: real trials, its page, MLflow, and the settings that a plan takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from played_search import PRICE, USUAL, play, source_of
from small_job import write_dataset

from dtrain_dagster.assets.search import show_search
from dtrain_dagster.pipelines import Cluster, build_training_assets
from dtrain_dagster.search.run import Search, SearchRequest
from dtrain_dagster.search.sampling import Sampler
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.tracking import SearchTracker
from trainer.config import DatasetRef, JobConfig

SPACE = {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "model.args.channels": [8, 16]}


def test_the_page_and_the_runs_of_a_search_that_was_played(tmp_path: Path) -> None:
    """Nothing is trained: the page, and MLflow's parent and nested runs, written twice and there once."""
    settings = SearchSettings(trials=5, parallel=2, sampler=Sampler.RANDOM)
    source = play(source_of(settings), [])
    base = JobConfig(job_id="search", run_dir=f"{tmp_path}/jobs/search", dataset=DatasetRef(uri="/tmp/data"))
    request = SearchRequest(
        name="played", space={"training.seed": [1]}, settings=settings, base=base, samples={}, budget_usd=None, nodes=2,
        usd_per_node_hour=PRICE,
    )  # fmt: skip
    search = Search(tmp_path, request, None, {}, USUAL, before_usd=0.25)  # type: ignore[arg-type]
    plan = SimpleNamespace(price_words="stand-in price")
    page = show_search(search, source, plan)  # type: ignore[arg-type]
    assert page.metadata is not None
    assert page.metadata["best_trial"] == source.best.number  # type: ignore[union-attr]
    assert page.metadata["cost_usd"] == pytest.approx(0.25 + sum(trial.usd for trial in source.trials))
    for _ in range(2):
        tracker = SearchTracker(f"sqlite:///{tmp_path}/mlflow.db", "studies", "played", "loss", 1.0)
        assert tracker.try_to_write(source.trials[:3]) == ""
        assert tracker.try_to_finish(source.trials, 0.25) == ""
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
    page = {name: value.value for name, value in made.metadata.items()}
    pictures = page["pictures"]
    for title in ("History", "Score against dollars", "Learning curves", "Parallel coordinates"):
        assert f"![{title}](data:image/svg+xml;base64," in pictures
    value = done.output_for_node("walks__hyperparameter_search")
    found = json.loads(Path(value["settings_file"]).read_text())
    assert found["training"]["learning_rate"] == value["best"]["values"]["training.learning_rate"]
    assert page["best_loss"] == value["best"]["score"]
    assert len(page["trials"].records) == 4
    assert page["cost_usd"] > 0

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/home/mlflow.db")
    experiment = client.get_experiment_by_name("walks")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    [parent] = [run for run in runs if "dtrain.trial" not in run.data.tags and "dtrain.search" in run.data.tags]
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.data.tags["dtrain.trial"] for run in nested} == {"0", "1", "2", "3"}
    assert parent.data.metrics["best_loss"] == pytest.approx(page["best_loss"])
    assert sum(run.data.metrics["usd"] for run in nested) == pytest.approx(page["cost_usd"])

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
