"""The walk forward as a gate: five years of a small model are trained, and a registration is judged by them."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.definitions import build_defs
from dtrain_dagster.settings.environment import load_settings

from .conftest import checks, metadata

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

YEARS = range(2013, 2018)
GRAPH = ("sharded_dataset", "cost_estimate", "trained_checkpoint", "registered_model")


def ten_years(folder: Path) -> Path:
    """A CSV of one's own: eight tickers and ten years of the bundled panel, wide."""
    import pandas as pd

    from dtrain_dagster.data.sources import price_source

    panel = pd.read_csv(price_source("sp500_panel").local_file(folder), parse_dates=["Date"])
    part = panel.loc[panel["Date"].between("2008-01-01", "2017-12-31")].iloc[:, :9]
    path = folder / "my_prices.csv"
    part.to_csv(path, index=False)
    return path


def test_a_registration_is_judged_by_the_walk_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DTRAIN_NODES": "1",
        "DTRAIN_THREADS_PER_RANK": "1",
        "DTRAIN_PRICES": str(ten_years(tmp_path)),
        "DTRAIN_WALK_FORWARD_FIRST_YEAR": str(YEARS[0]),
        "DTRAIN_WALK_FORWARD_LAST_YEAR": str(YEARS[-1]),
        "DTRAIN_WALK_FORWARD_VALID_YEARS": "1",
        "DTRAIN_GATE": "walk_forward",
    }.items():
        monkeypatch.setenv(name, value)
    defs = build_defs(load_settings())
    whole, walk = defs.resolve_implicit_global_asset_job_def(), defs.resolve_job_def("walk_forward")
    options = {"epochs": 2, "warmup_steps": 3}

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:

        def make(*assets: str, **more: Any) -> dg.ExecuteInProcessResult:
            config = {"ops": {"cost_estimate": {"config": {**options, **more}}}} if "cost_estimate" in assets else {}
            keys = [dg.AssetKey(asset) for asset in assets]
            return whole.execute_in_process(
                run_config=config, instance=instance, asset_selection=keys, raise_on_error=False
            )

        assert make("stock_prices").success
        early = make(*GRAPH)
        [event] = early.filter_events(lambda event: event.is_step_failure)
        assert event.step_key == "cost_estimate", "nothing was bought"
        assert "stock.json: run the walk forward first (dagster job backfill -j walk_forward" in str(
            event.step_failure_data
        )
        for year in YEARS:
            config = {"ops": {"walk_forward__cost_estimate": {"config": options}}}
            assert walk.execute_in_process(partition_key=str(year), run_config=config, instance=instance).success
        path = tmp_path / "home" / "storage" / "walk_forward" / "stock.json"
        report = json.loads(path.read_text())
        assert report["years"] == list(YEARS)

        made = make(*GRAPH)
        assert checks(made)["serving_endpoint_answers"]
        assert_judged(made, report)

        # The other verdict on the same years: the model, its version and its own test are as they were.
        first = metadata(made, "registered_model")
        reasons = [] if report["gate"]["reasons"] else ["ridge is better beyond chance"]
        path.write_text(json.dumps({**report, "gate": {"passed": not reasons, "reasons": reasons}}))
        other = make("registered_model")
        assert_judged(other, json.loads(path.read_text()))
        assert metadata(other, "registered_model")["version"] == first["version"]

        # Another training than was walked forward: it is not judged by these years.
        foreign = make(*GRAPH, learning_rate=1e-3)
        said = metadata(foreign, "registered_model")
        assert said["alias"] == "challenger"
        assert "the walk forward judged training.learning_rate = " in said["reason"]
        assert "and this is 0.001: run the walk forward with these settings" in said["reason"]


def assert_judged(made: dg.ExecuteInProcessResult, report: dict[str, Any]) -> None:
    """The alias is that of both verdicts, of the model's own test and of the years, and the reasons say so."""
    said, passed = metadata(made, "registered_model"), checks(made)["promotion_gate"]
    assert made.success == passed
    assert said["alias"] == ("champion" if passed else "challenger")
    own = [
        html.unescape(line.removeprefix("- "))
        for item in made.get_asset_check_evaluations()
        if item.check_name == "promotion_gate" and item.metadata["reasons"].value != "none"
        for line in item.metadata["reasons"].value.splitlines()
    ]
    assert [each for each in own if each.startswith("walk forward: ")] == [
        f"walk forward: {reason}" for reason in report["gate"]["reasons"]
    ]
    assert passed == (not own)
