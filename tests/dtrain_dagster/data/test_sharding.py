"""Datasets: what a person would count by hand, what lies between splits, and that nothing damaged is taken for good."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from price_files import Panel, long_frame, sessions, write

from dtrain_dagster.data.build_once import BuiltDataset, verify_shards
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.features import AUXILIARY, FEATURES, TARGET, WARM_UP
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.validation import CHECKS, Validation, validate_prices

SMALL = DatasetParams(window=20, horizon=5, shards=2)


def build(frame: pd.DataFrame, folder: Path, params: DatasetParams = SMALL) -> BuiltDataset:
    ref = write(frame, folder)
    return build_dataset(ref, validate_prices(ref), str(folder / "storage"), params)


def stored(dataset: BuiltDataset) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """(entry in the manifest, rows) of each shard."""
    found = []
    for shard in dataset.manifest()["shards"]:
        found.append((shard, pq.read_table(Path(dataset.uri) / shard["path"]).to_pandas()))
    return found


@pytest.mark.slow
def test_the_panel_s_windows_are_counted(panel: Panel) -> None:
    """8,312 days of returns give 8,291 rows after 22 days of warm-up; what RRC's masks take is all in training."""
    assert panel.dataset.samples == {"train": 98_538, "valid": 20_020, "test": 45_180}
    unmasked = build_dataset(
        panel.prices,
        Validation(checks=panel.validation.checks, masks=()),
        str(Path(panel.dataset.uri).parents[1]),
    )
    assert unmasked.samples == {"train": 99_140, "valid": 20_020, "test": 45_180}
    assert unmasked.dataset_id != panel.dataset.dataset_id
    splits = panel.dataset.manifest()["splits"]
    assert (splits["train"]["last"], splits["valid"]["last"]) == ("2009-12-31", "2013-12-31")


def test_the_panel_passes_what_blocks_and_its_faults_are_told(panel: Panel) -> None:
    """RRC stands still for 68 days and is then divided by three. AAPL's fall of 2000-09-29 was real."""
    assert [check.name for check in panel.validation.checks] == list(CHECKS)
    blocking = {name for name, (severity, _) in CHECKS.items() if severity == "error"}
    assert blocking == {"positive_prices", "trading_sessions", "unique_sorted_rows"}
    found = {check.name: check.metadata for check in panel.validation.checks if not check.passed}
    assert set(found) == {"stale_prices", "large_moves", "split_like_jumps", "survivorship"}
    assert "AAPL 2000-09-29: -0.73" in found["large_moves"]["examples"]
    assert found["large_moves"]["found"] == 11
    assert found["split_like_jumps"]["examples"] == ["RRC 1990-04-10: ratio 0.333"]
    assert found["survivorship"]["examples"] == ["all 20 tickers survive to 2022-12-28"]
    masks = panel.validation.masks
    assert (masks[0].first, masks[0].last) == ("1990-01-02", "1990-04-10")
    assert "68 sessions, then jumps by a ratio of 0.33" in masks[0].reason
    assert {mask.ticker for mask in masks} == {"RRC"}
    assert max(mask.last for mask in masks) == "1992-05-27"
    source = panel.prices.manifest()["source"]
    assert "BSD-3-Clause" in source["licence"]
    assert "survivorship" in source["notes"]
    assert source["is_synthetic"] is False
    assert (source["rows"], source["tickers"]) == (166_260, 20)
    assert (source["first_date"], source["last_date"]) == ("1990-01-02", "2022-12-28")


def test_files_are_what_the_manifest_says(panel: Panel) -> None:
    manifest = panel.dataset.manifest()
    columns = {column["name"]: (column["type"], column["role"]) for column in manifest["columns"]}
    assert list(columns) == ["ticker", "date", "adj_close", *FEATURES, *AUXILIARY, TARGET]
    assert len(manifest["shards"]) == 5
    for number, shard in enumerate(manifest["shards"]):
        assert shard["path"] == f"data/shard-{number:05d}.parquet"
        path = Path(panel.dataset.uri) / shard["path"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]
        assert path.stat().st_size == shard["bytes"]
        file = pq.ParquetFile(path)
        kinds = {"float": "float32", "double": "float64", "date32[day]": "date32"}
        found = {field.name: kinds.get(str(field.type), str(field.type)) for field in file.schema_arrow}
        assert found == {name: kind for name, (kind, _) in columns.items()}
        assert file.metadata.num_row_groups == len(shard["tickers"]) == 4
        assert file.metadata.row_group(0).column(2).compression == "ZSTD"
        rows = file.read().to_pandas()
        assert len(rows) == shard["rows"] == shard["segments"][-1]["rows"][1]
        assert rows[list(FEATURES)].notna().all(axis=None)
        assert list(rows["ticker"].unique()) == shard["tickers"] == sorted(shard["tickers"])
        assert (str(rows["date"].min()), str(rows["date"].max())) == (shard["first_date"], shard["last_date"])
        for _, part in rows.groupby("ticker"):
            assert part["date"].is_monotonic_increasing
    tickers = [ticker for shard in manifest["shards"] for ticker in shard["tickers"]]
    assert tickers == sorted(tickers)
    assert len(set(tickers)) == 20
    assert manifest["source"]["sha256"].startswith("ee21cac28b")
    assert (manifest["calendar"], manifest["window"], manifest["horizon"]) == ("XNYS", 60, 5)


def test_later_prices_change_no_scale(tmp_path: Path) -> None:
    frame = long_frame(days=400)
    params = DatasetParams(window=20, train_last="2015-12-31", valid_last="2016-03-31")
    wild = frame.copy()
    late = wild["date"] > "2016-01-05"
    wild.loc[late, "adj_close"] *= np.where(np.arange(late.sum()) % 2, 1.2, 1.0)
    one, other = build(frame, tmp_path / "one", params), build(wild, tmp_path / "other", params)
    assert one.manifest()["normalisation"] == other.manifest()["normalisation"]
    assert one.dataset_id != other.dataset_id


@pytest.mark.parametrize(("shards", "expected"), [(1, 1), (2, 2), (3, 3), (99, 3)])
def test_as_many_shards_as_asked_for_and_tickers_allow(shards: int, expected: int, tmp_path: Path) -> None:
    dataset = build(long_frame(tickers=("A", "B", "C")), tmp_path, DatasetParams(window=20, shards=shards))
    assert len(dataset.manifest()["shards"]) == expected
    assert sum(shard["rows"] for shard in dataset.manifest()["shards"]) == dataset.rows == 3 * (400 - WARM_UP)
    days, splits = sessions(400)[1:], dataset.manifest()["splits"]
    last = [str(days[int(share * 398)].date()) for share in (0.70, 0.85)]
    assert [splits["train"]["last"], splits["valid"]["last"]] == last, "by share of the days with returns"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_dataset_is_not_taken_for_good(damage: str, tmp_path: Path) -> None:
    dataset = build(long_frame(), tmp_path)
    verify_shards(dataset.uri)
    path = Path(dataset.uri) / ("manifest.json" if damage == "manifest" else dataset.manifest()["shards"][1]["path"])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises(DataError, match=r"manifest|missing|does not match its manifest"):
        verify_shards(dataset.uri)
    with pytest.raises(DataError, match="rebuild the dataset"):
        build(long_frame(), tmp_path)
    shutil.rmtree(dataset.uri)
    assert build(long_frame(), tmp_path).built
