"""Is the champion still good enough? Real prices, a real saved model, the check and the sensor in one instance."""

from __future__ import annotations

import hashlib
import html
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pytest
import torch

from dtrain_dagster.assets.checks import build_champion_holds, build_leakage_checks
from dtrain_dagster.assets.pipeline import STOCK
from dtrain_dagster.automation.retraining import CHAMPION_CHECK, registrations
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings, load_settings
from dtrain_dagster.support.graph_names import STOCK_NAMES
from tests.page import Page
from tests.trained import record_training
from trainer.config import DatasetRef, FactoryConfig, JobConfig
from trainer.data.shards import DataShardManager
from trainer.model.build import build_loss, build_model
from trainer.model.saved_model import DESCRIPTION, FOLDER, WEIGHTS
from trainer.rundir import RunDir

champion_holds = build_champion_holds(STOCK_NAMES)

leakage_checks = build_leakage_checks(STOCK)


def save_untrained_model(run_dir: str, dataset_uri: str) -> None:
    """A model that knows nothing, as a job leaves one behind."""
    spec = DataShardManager(dataset_uri).spec
    torch.manual_seed(0)
    model, loss = FactoryConfig(factory="tcn"), FactoryConfig(factory="student_t")
    buffer = io.BytesIO()
    torch.save(build_model(model, spec, build_loss(loss, spec).outputs).state_dict(), buffer)
    storage = RunDir(run_dir).storage
    job_id = run_dir.rsplit("/", 1)[-1]
    RunDir(run_dir).write_job(JobConfig(job_id=job_id, run_dir=run_dir, dataset=DatasetRef(uri=dataset_uri)))
    storage.write(f"{FOLDER}/{WEIGHTS}", buffer.getvalue())
    description = {"model": asdict(model), "loss": asdict(loss), "spec": asdict(spec)}
    description["file_sha256"] = hashlib.sha256(buffer.getvalue()).hexdigest()
    storage.write(f"{FOLDER}/{DESCRIPTION}", json.dumps(description).encode())


def latest_dataset_id(instance: dg.DagsterInstance) -> str:
    event = instance.get_latest_materialization_event(dg.AssetKey("sharded_dataset"))
    return str(Page(event.asset_materialization.metadata)["dataset_id"])  # type: ignore[union-attr]


def check_alone(instance: dg.DagsterInstance, settings: Settings, uri: str) -> dg.AssetCheckResult:
    """What the check says of a dataset that is there, without a run that builds it."""
    dataset_id = uri.rsplit("/", 1)[-1]
    newer = BuiltDataset(uri=uri, dataset_id=dataset_id, rows=1, samples={}, excluded={}, built=True)
    context = dg.build_asset_check_context(instance=instance, resources=build_resources(settings))
    found = champion_holds(context, newer)
    assert isinstance(found, dg.AssetCheckResult)
    return found


@pytest.mark.long
@pytest.mark.slow
def test_a_champion_that_a_baseline_beats_on_new_days_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = pd.read_csv(price_source("sp500_panel").local_file(tmp_path), usecols=["Date", "JNJ", "KO", "PG", "XOM"])
    prices = tmp_path / "prices.csv"
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_PRICES", str(prices))
    settings = load_settings()
    defs = build_defs(settings)
    data = dg.AssetSelection.groups("data") - dg.AssetSelection.checks(leakage_checks)  # which take their time
    job = dg.Definitions.merge(defs, dg.Definitions(jobs=[dg.define_asset_job("data", data)])).resolve_job_def("data")
    with dg.DagsterInstance.ephemeral() as instance:

        def with_prices_up_to(day: str) -> tuple[bool, dict[str, Any]]:
            panel[panel["Date"].between("2013-01-01", day)].to_csv(prices, index=False)
            result = job.execute_in_process(instance=instance)
            [evaluation] = [e for e in result.get_asset_check_evaluations() if e.check_name == CHAMPION_CHECK]
            return evaluation.passed, {name: entry.value for name, entry in evaluation.metadata.items()}

        def tick() -> Any:
            with dg.build_sensor_context(instance=instance, resources=build_resources(settings)) as context:
                return defs.resolve_sensor_def("staleness").evaluate_tick(context)

        assert with_prices_up_to("2017-06-30") == (True, {"not_judged": "no champion was registered yet"})
        dataset_id = latest_dataset_id(instance)
        run_dir = f"{settings.jobs_uri}/train-00000000-11111111"
        save_untrained_model(run_dir, f"{settings.shared_uri}/datasets/{dataset_id}")
        tags = dg.JsonMetadataValue({"dataset_id": dataset_id, "run_dir": run_dir})
        metadata = {"version": "7", "alias": "champion", "tags": tags}
        instance.report_runless_asset_event(dg.AssetMaterialization("registered_model", metadata=metadata))

        passed, said = with_prices_up_to("2017-07-20")
        assert passed
        assert "of its days came since, 20 are enough" in said["not_judged"]
        assert not tick().run_requests

        passed, said = with_prices_up_to("2017-12-29")
        assert not passed
        assert "har_x" in html.unescape(said["better"])
        assert 100 < said["days"] < 130
        [request] = tick().run_requests
        assert request.run_key.startswith("accuracy-v7-")

        monkeypatch.setattr("dtrain_dagster.assets.checks.REASSESS_SECONDS", 0.01)
        judged = check_alone(instance, settings, f"{settings.shared_uri}/datasets/{latest_dataset_id(instance)}")
        assert judged.passed
        assert "longer than 0.01 s" in str(judged.metadata["not_judged"].value)


def test_a_champion_that_cannot_be_judged_now_ends_no_run_and_tells_no_secret(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    folder = tmp_path / "newer"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"source": {"last_date": "2020-02-01"}}))
    with dg.DagsterInstance.ephemeral() as instance:
        record_training(instance, settings.shared_uri, "0" * 64, "2020-01-02")
        champion, _ = registrations(instance)
        assert champion is not None
        tags = dg.JsonMetadataValue({"dataset_id": champion.dataset_id, "run_dir": f"{tmp_path}/gone?sig=h0nter22"})
        metadata = {"version": "1", "alias": "champion", "tags": tags}
        instance.report_runless_asset_event(dg.AssetMaterialization("registered_model", metadata=metadata))

        def said() -> str:
            found = check_alone(instance, settings, str(folder))
            assert found.passed
            return str(found.metadata["not_judged"].value)

        assert (why := said()).count("sig=[secret]")
        assert "h0nter22" not in why
