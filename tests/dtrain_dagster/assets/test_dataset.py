"""The data assets: which engine made a dataset is told, and its name and data version do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pandas as pd
import pytest

from dtrain_dagster.assets.dataset import _asset_check, build_sharded_dataset, build_stock_prices
from dtrain_dagster.assets.pipeline import STOCK
from dtrain_dagster.data.sources import PANEL, known_findings
from dtrain_dagster.data.validation import CheckResult
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import load_settings
from tests.page import Page

sharded_dataset = build_sharded_dataset(STOCK)
stock_prices = build_stock_prices(STOCK)

NO_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'dtrain[ray]'")


def materialized(home: Path, engine: str) -> dict[str, Any]:
    """The metadata of a dataset of five stocks, in this home, with its data version."""
    walks = np.random.default_rng(0).normal(0, 0.01, (1500, 5)).cumsum(axis=0)
    frame = pd.DataFrame(np.exp(walks), columns=list("ABCDE"), index=pd.bdate_range("2000-01-03", periods=1500))
    home.mkdir(exist_ok=True)
    frame.rename_axis("date").to_csv(home / "prices.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_HOME", str(home))
        patch.setenv("DTRAIN_PRICES", str(home / "prices.csv"))
        patch.setenv("DTRAIN_OPTIONS", f"calendar=none data_engine={engine}")
        result = dg.materialize([stock_prices, sharded_dataset], resources=build_resources(load_settings()))
    [made] = result.asset_materializations_for_node("sharded_dataset")
    found = Page(made.metadata)
    return {**found, "version": (made.tags or {})["dagster/data_version"]}


@pytest.mark.slow
def test_the_engine_is_told_where_a_dataset_is_made(tmp_path: Path):
    made, again = (materialized(tmp_path, "duckdb") for _ in range(2))
    assert (made["rebuilt"], made["data_engine"]) == (True, "duckdb")
    assert (again["rebuilt"], again["data_engine"]) == (False, "not asked: it already existed")


@NO_RAY
@pytest.mark.long
def test_another_engine_makes_the_same_dataset(tmp_path: Path):
    import ray

    ray.init(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    try:
        one, other = (materialized(tmp_path / engine, engine) for engine in ("duckdb", "ray"))
    finally:
        ray.shutdown()
    assert other["data_engine"] == "ray"
    for name in ("dataset_id", "version", "bytes", "train_samples", "dagster/row_count"):
        assert other[name] == one[name]


def test_what_is_masked_is_told_where_the_command_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    days = pd.bdate_range("2020-01-01", periods=40).strftime("%Y-%m-%d")
    closes = [*(100.0 + day % 3 for day in range(20)), *(50.0 + day % 2 for day in range(20))]
    frame = pd.DataFrame({"date": days, "ticker": "AAA", "adj_close": closes})
    frame.to_csv(tmp_path / "raw.csv", index=False)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DTRAIN_PRICES", str(tmp_path / "raw.csv"))
    monkeypatch.setenv("DTRAIN_OPTIONS", "calendar=none")
    dg.materialize([stock_prices], resources=build_resources(load_settings()))
    said = capfd.readouterr().err
    assert "WARNING" in said
    assert f"1 masked, the first AAA, {days[20]} to {days[20]}: the price jumps by a ratio of 0.495" in said


def test_what_is_known_of_bundled_prices_is_no_failure_and_anything_else_is():
    """In the very first run nothing is to look broken; a file of the user's own is judged as it is."""
    found = {"found": 11, "examples": ["AAPL 2000-09-29: -0.73"]}
    check = CheckResult(name="large_moves", passed=False, severity="warning", description="", metadata=found)
    known = known_findings(PANEL.sha256)
    assert _asset_check(check, known["large_moves"]).passed
    assert not _asset_check(check, 10).passed, "one more than is known"
    assert not _asset_check(check, 0).passed
    assert known_findings("ab" * 32) == {}, "of a file of the user's own nothing is known"
    assert _asset_check(replace(check, passed=True), 11).passed
