"""The asset check `endpoint_compatible`, run alone as from the UI: a real MLflow scoring server, a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster import registry
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.settings.environment import Settings
from harness import small_job
from harness.tables import copy_tables
from tests.azure.planted import leaks, planted

WARN, ERROR = dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dg.AssetCheckEvaluation]:
    """Runs the check for a run directory, as a registration left it, against an endpoint."""
    home = tmp_path / "dagster"
    home.mkdir()
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))

    def run(run_dir: str, **settings: Any) -> dg.AssetCheckEvaluation:
        stored = {"name": "forecaster", "version": "7", "uri": "", "run_dir": run_dir}
        defs = build_defs(Settings(home=tmp_path / "home", **settings))
        alone = dg.define_asset_job(
            "alone", dg.AssetSelection.checks(dg.AssetCheckKey(dg.AssetKey("registered_model"), "endpoint_compatible"))
        )
        with dg.DagsterInstance.local_temp(str(home)) as instance:
            dg.materialize([dg.asset(name="registered_model")(lambda: stored)], instance=instance)
            job = dg.Definitions.merge(defs, dg.Definitions(jobs=[alone])).resolve_job_def("alone")
            result = job.execute_in_process(instance=instance)
            assert result.success, "it blocks nothing"
            [evaluation] = result.get_asset_check_evaluations()
        return evaluation

    return run


@pytest.mark.long
@pytest.mark.slow
def test_what_an_endpoint_answers_is_told_and_how_much_it_matters(
    tmp_path: Path, check: Callable[..., dg.AssetCheckEvaluation], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_job.write_dataset(tmp_path / "data")
    own = small_job.train(tmp_path, data, "own", steps=5)
    older = small_job.train(tmp_path, data, "older", steps=3)
    other = small_job.train(tmp_path, data, "other", steps=3, loss="gaussian")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    copy_tables(tmp_path / "mlflow.db")
    model = registry.MLflowRegistry(uri).register_model(own, "forecaster", {}, "# card")
    with registry.MLflowRegistry(uri).served(model) as server:
        url = server.url
        good = check(own, endpoint=url)
        assert (good.passed, good.blocking) == (True, False), good.metadata
        told = {name: value.value for name, value in good.metadata.items()}
        assert (told["name"], told["version"], told["rows"]) == ("forecaster", "7", 32)
        assert 0 <= told["max_relative_difference"] < 1e-4

        another_version = check(older, endpoint=url)
        assert (another_version.passed, another_version.severity) == (False, WARN)
        assert "NOT with the model's numbers" in str(another_version.metadata["message"].value)

        another_form = check(other, endpoint=url)
        assert (another_form.passed, another_form.severity) == (False, ERROR)
        assert "schema: it answers with" in str(another_form.metadata["message"].value)

        token = planted("endpoint")
        monkeypatch.setenv("DTRAIN_SOMEBODYS_TOKEN", token)
        open_to_all = check(own, endpoint=url, endpoint_token="env:DTRAIN_SOMEBODYS_TOKEN")
        assert (open_to_all.passed, open_to_all.severity) == (False, ERROR)
        assert "status 200 without credentials" in str(open_to_all.metadata["message"].value)
    gone = check(own, endpoint=url, endpoint_token="env:DTRAIN_SOMEBODYS_TOKEN")
    assert (gone.passed, gone.severity) == (False, WARN)
    assert "cannot be reached" in str(gone.metadata["message"].value)
    without = check(own, endpoint=url, endpoint_token="env:DTRAIN_NOBODYS_TOKEN")
    assert (without.passed, without.severity) == (False, WARN)
    assert "env:DTRAIN_NOBODYS_TOKEN is empty or not set" in str(without.metadata["message"].value)
    assert leaks([tmp_path], [token]) == []
