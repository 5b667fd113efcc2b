"""The walk forward, small: of two years one fails and is made again alone; and a backfill from the page of Dagster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.definitions import build_defs
from dtrain_dagster.settings.environment import load_settings
from tests.page import Page
from trainer.rundir import RunDir

from .conftest import Dagster, metadata, small_prices, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

YEARS = ("2016", "2017")
STUDY = ("sharded_dataset", "cost_estimate", "trained_checkpoint", "cost_breakdown", "year_scores")


def of_year(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    """The metadata of a year's asset, which is a materialization of that partition."""
    [event] = [
        event
        for event in result.get_asset_materialization_events()
        if event.asset_key == dg.AssetKey(["walk_forward", asset])
    ]
    return {**Page(event.materialization.metadata), "partition": event.partition}


@pytest.mark.long
def test_two_years_are_trained_and_a_failed_one_is_made_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DTRAIN_NODES": "1",
        "DTRAIN_THREADS_PER_RANK": "1",
        "DTRAIN_PRICES": str(small_prices(tmp_path)),
        "DTRAIN_WALK_FORWARD_FIRST_YEAR": YEARS[0],
        "DTRAIN_WALK_FORWARD_LAST_YEAR": YEARS[1],
        "DTRAIN_WALK_FORWARD_VALID_YEARS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    defs = build_defs(load_settings())
    job = defs.resolve_job_def("walk_forward")
    options = {"epochs": 2, "warmup_steps": 1, "more": {"log_frequency": 1}}

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:

        def make(year: str, **more: Any) -> dg.ExecuteInProcessResult:
            config = {"ops": {"walk_forward__cost_estimate": {"config": {**options, **more}}}}
            return job.execute_in_process(
                partition_key=year, run_config=config, instance=instance, raise_on_error=False
            )

        prices = defs.resolve_implicit_global_asset_job_def()
        assert prices.execute_in_process(instance=instance, asset_selection=[dg.AssetKey("stock_prices")]).success

        failed = make("2017", warm_start=True)
        [event] = failed.filter_events(lambda event: event.is_step_failure)
        assert "the year before, 2016, was not trained" in str(event.step_failure_data.error)
        first = make("2016")
        assert first.success
        report = metadata(first, "walk_forward_report")
        assert (report["years"], report["missing_years"]) == (1, [2017])
        again = make("2017", warm_start=True)
        assert again.success

        made = {"2016": first, "2017": again}
        for year, result in made.items():
            assert {of_year(result, asset)["partition"] for asset in STUDY} == {year}
            dataset = of_year(result, "sharded_dataset")
            assert dataset["splits"]["test"]["first"].startswith(year)
            assert dataset["splits"]["valid"]["last"] == f"{int(year) - 1}-12-31"
        starts = {
            year: RunDir(of_year(result, "trained_checkpoint")["run_dir"]).read_job().training.start_from
            for year, result in made.items()
        }
        assert starts == {"2016": None, "2017": of_year(first, "trained_checkpoint")["run_dir"]}
        observed = instance.fetch_observations(dg.AssetKey(["walk_forward", "trained_checkpoint"]), limit=100).records
        assert {record.partition_key for record in observed} == set(YEARS)

        report = metadata(again, "walk_forward_report")
        assert (report["years"], report["missing_years"]) == (2, [])
        paid = [of_year(result, "cost_breakdown")["total_usd"] for result in made.values()]
        assert report["total_usd"] == pytest.approx(sum(paid), rel=1e-3)
        kept = json.loads((tmp_path / "home" / "storage" / "walk_forward" / "stock.json").read_text())
        assert set(kept["all"]["gains"]) == {"constant", "last_value", "ewma", "har", "har_x", "ridge"}
        assert kept["by_year"].keys() == made.keys()
        assert "![Gain over each baseline" in report["charts"]
        assert kept["differences"] == []
        see_years_in_mlflow(
            tmp_path / "home", {year: of_year(result, "trained_checkpoint") for year, result in made.items()}
        )


def see_years_in_mlflow(home: Path, trained: dict[str, dict[str, Any]]) -> None:
    """One run of the walk forward, which has ended, and a run of each year's training below it."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    [experiment] = [found for found in client.search_experiments() if found.name == "dtrain"]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    jobs = {year: metadata["job_id"] for year, metadata in trained.items()}
    assert runs.keys() == {"walk_forward", *jobs.values()}
    parent = runs.pop("walk_forward")
    assert parent.info.status == "FINISHED"
    assert "mlflow.parentRunId" not in parent.data.tags
    for run in runs.values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
        assert run.data.metrics["cost/total_usd"] > 0
        assert {"train/loss", "valid/loss", "test/nll"} <= run.data.metrics.keys()
    starts = [runs[job].data.params["start_from"] for job in jobs.values()]
    assert starts == ["None", trained["2016"]["run_dir"]]


@pytest.mark.long
def test_a_backfill_of_two_years_from_the_page(dagster: Dagster) -> None:
    prices = dagster.launch("stock_prices")
    wait_for(lambda: dagster.status(prices) == "SUCCESS", 90, "the prices")
    selection = [{"path": ["walk_forward", asset]} for asset in STUDY] + [{"path": ["walk_forward_report"]}]
    text = (
        "mutation($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) { __typename "
        "... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"
    )
    params = {"assetSelection": selection, "partitionNames": list(YEARS)}
    begun = dagster.query(text, p=params)["launchPartitionBackfill"]
    assert begun["__typename"] == "LaunchBackfillSuccess", begun
    look = "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }"

    def status() -> str:
        return dagster.query(look, id=begun["backfillId"])["partitionBackfillOrError"]["status"]

    wait_for(lambda: status() not in ("REQUESTED",), 400, "the backfill")
    assert status() == "COMPLETED_SUCCESS"
    [report] = dagster.materializations("walk_forward_report")
    said = {entry["label"]: entry.get("text") for entry in report["metadataEntries"]}
    assert "Over 2 test year(s)" in said["verdict"]
