"""Datasets: what is stored, which windows belong to which split, what they are called, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from price_files import Panel, assert_nothing_half_written, long_frame, prepare, save, write

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.features import AUXILIARY, FEATURES, TARGET, WARM_UP
from dtrain_dagster.data.prices import iter_tickers, write_prices
from dtrain_dagster.data.sharding import BuiltDataset, DatasetParams, build_dataset, verify_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import Mask, Validation, validate_prices

SMALL = DatasetParams(window=20, horizon=5, shards=2)


def build(frame: pd.DataFrame, folder: Path, params: DatasetParams = SMALL, masks: tuple[Mask, ...] = ()) -> Any:
    ref = write(frame, folder)
    validation = validate_prices(ref)
    validation = Validation(checks=validation.checks, masks=validation.masks + masks)
    return build_dataset(ref, validation, str(folder / "storage"), params)


def stored(dataset: BuiltDataset) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """(entry in the manifest, rows) of each shard."""
    found = []
    for shard in dataset.manifest()["shards"]:
        found.append((shard, pq.read_table(Path(dataset.uri) / shard["path"]).to_pandas()))
    return found


def windows(dataset: BuiltDataset) -> dict[str, set[tuple[str, str]]]:
    """Ticker and day of the last row of every window, by split."""
    found: dict[str, set[tuple[str, str]]] = {}
    for shard, rows in stored(dataset):
        for segment in shard["segments"]:
            for split, (first, stop) in segment["samples"].items():
                ends = rows.iloc[first:stop]
                assert set(ends["ticker"]) <= {segment["ticker"]}
                found.setdefault(split, set()).update(zip(ends["ticker"], ends["date"].astype(str), strict=True))
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> BuiltDataset:
    """Three tickers, one listed later, one with a gap."""
    frame = long_frame(days=400, tickers=("AAA", "BBB", "CCC"))
    frame = frame.drop(index=[*range(400, 480), 1000, 1001]).reset_index(drop=True)
    return build(frame, tmp_path_factory.mktemp("small"))


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


def test_no_window_of_the_panel_touches_a_masked_day(panel: Panel) -> None:
    [rrc] = [shard for shard in stored(panel.dataset) if "RRC" in shard[0]["tickers"]]
    rows = rrc[1][rrc[1]["ticker"] == "RRC"]
    assert len(panel.validation.masks) == 8
    for mask in panel.validation.masks:
        assert not rows["date"].astype(str).between(mask.first, mask.last).any()
    assert rows["log_return"].abs().max() < 0.5  # a real fall of 2020; the division by three would be 1.1
    everywhere = pd.concat([rows for _, rows in stored(panel.dataset)])
    fall = everywhere[(everywhere["ticker"] == "AAPL") & (everywhere["date"].astype(str) == "2000-09-29")]
    assert fall["log_return"].item() == pytest.approx(-0.73, abs=0.01)  # genuine: it stays


def test_windows_are_those_that_the_definition_gives(small: BuiltDataset) -> None:
    """Every row of every stretch is tried by the rule in words: window and label without a gap, label in the split."""
    expected: dict[str, set[tuple[str, str]]] = {split: set() for split in ("train", "valid", "test")}
    splits = small.manifest()["splits"]
    for shard, rows in stored(small):
        for segment in shard["segments"]:
            first, stop = segment["rows"]
            days = list(rows["date"].astype(str)[first:stop])
            for place in range(len(days)):
                if place - SMALL.window + 1 < 0 or place + SMALL.horizon >= len(days):
                    continue
                for split, bounds in splits.items():
                    if bounds["first"] <= days[place] and days[place + SMALL.horizon] <= bounds["last"]:
                        expected[split].add((segment["ticker"], days[place]))
    assert windows(small) == expected
    assert small.samples == {split: len(ends) for split, ends in expected.items()}
    assert min(small.samples.values()) > 100


def test_between_splits_lies_an_embargo_of_the_horizon(small: BuiltDataset) -> None:
    """The last label of a split ends before the first window of the next does: nobody trains on a later answer."""
    days = sorted({str(day) for _, rows in stored(small) for day in rows["date"]})
    splits, found = small.manifest()["splits"], windows(small)
    for before, after in (("train", "valid"), ("valid", "test")):
        last = max(day for _, day in found[before])
        first = min(day for _, day in found[after])
        assert days.index(first) - days.index(last) == SMALL.horizon + 1
        assert days[days.index(last) + SMALL.horizon] == splits[before]["last"]
        assert splits[before]["last"] < splits[after]["first"]


def test_a_gap_and_a_mask_divide_a_ticker(tmp_path: Path) -> None:
    frame = long_frame(days=400)
    days = frame["date"].dt.strftime("%Y-%m-%d")
    whole = build(frame, tmp_path / "whole")
    gap = build(frame.drop(index=150), tmp_path / "gap")
    mask = Mask(ticker="AAA", first=days[150], last=days[150], reason="a test")
    masked = build(frame, tmp_path / "masked", masks=(mask,))

    def segments(dataset: BuiltDataset) -> list[int]:
        return [
            segment["rows"][1] - segment["rows"][0] for shard, _ in stored(dataset) for segment in shard["segments"]
        ]

    assert segments(whole) == [400 - WARM_UP] * 2
    # After the missing day the next return spans two days and belongs to nobody: features warm up anew.
    assert segments(gap) == segments(masked) == [150 - WARM_UP, 249 - WARM_UP, 400 - WARM_UP]
    assert masked.manifest()["masks"][0]["reason"] == "a test"
    missing = {day for _, rows in stored(whole) for day in rows["date"]} - {
        day for _, rows in stored(masked) for day in rows["date"][rows["ticker"] == "AAA"]
    }
    assert sorted(map(str, missing)) == list(days[150 : 150 + WARM_UP + 1])


def test_files_are_what_the_manifest_says(panel: Panel) -> None:
    manifest = panel.dataset.manifest()
    columns = {column["name"]: (column["type"], column["role"]) for column in manifest["columns"]}
    assert list(columns) == ["ticker", "date", "adj_close", *FEATURES, *AUXILIARY, TARGET]
    assert len(manifest["shards"]) == 5
    for number, shard in enumerate(manifest["shards"]):
        assert shard["path"] == f"data/shard-{number:05d}-of-00005.parquet"
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


def test_stored_targets_are_the_prices_returns(panel: Panel) -> None:
    prices = dict(iter_tickers(panel.prices))
    shard, rows = stored(panel.dataset)[2]
    part = rows[rows["ticker"] == shard["tickers"][0]]
    close = prices[shard["tickers"][0]].set_index("date")["adj_close"]
    expected = (np.log(close.shift(-5)) - np.log(close)).loc[pd.to_datetime(part["date"])]
    np.testing.assert_allclose(part[TARGET], expected, rtol=1e-5, atol=1e-7)
    assert part[TARGET].isna().sum() == 5


def test_the_scale_is_that_of_training_rows_alone(small: BuiltDataset, tmp_path: Path) -> None:
    """Streaming moments equal those of all rows that a training window touches; later rows do not count."""
    used, targets = [], []
    for shard, rows in stored(small):
        for segment in shard["segments"]:
            first, stop = segment["samples"]["train"]
            if stop > first:
                used.append(rows.iloc[first - SMALL.window + 1 : stop])
                targets.append(rows[TARGET].iloc[first:stop])
    assert len(used) > 2
    touched, answers = pd.concat(used), pd.concat(targets)
    scale = small.manifest()["normalisation"]
    assert scale["fitted_on"] == "train"
    for name in FEATURES:
        assert scale["features"][name]["mean"] == pytest.approx(touched[name].mean(), rel=1e-4, abs=1e-7)
        assert scale["features"][name]["std"] == pytest.approx(touched[name].std(ddof=0), rel=1e-4)
    assert scale["target"]["mean"] == pytest.approx(answers.mean(), rel=1e-4, abs=1e-7)
    assert scale["target"]["std"] == pytest.approx(answers.std(ddof=0), rel=1e-4)


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


def test_the_same_input_is_built_once_and_equal_everywhere(tmp_path: Path) -> None:
    frame = long_frame()
    first, again = build(frame, tmp_path), build(frame, tmp_path)
    assert (first.built, again.built) == (True, False)
    assert (again.uri, again.samples, again.rows) == (first.uri, first.samples, first.rows)
    elsewhere = build(frame, tmp_path / "elsewhere")
    assert (elsewhere.built, elsewhere.dataset_id) == (True, first.dataset_id)
    assert [shard for shard, _ in stored(elsewhere)] == [shard for shard, _ in stored(first)]
    others = [
        build(frame, tmp_path, DatasetParams(window=21, shards=2)),
        build(frame, tmp_path, DatasetParams(window=20, horizon=4, shards=2)),
        build(frame, tmp_path, DatasetParams(window=20, shards=1)),
        build(frame, tmp_path, DatasetParams(window=20, shards=2, train_last="2015-12-31")),
        build(frame.assign(adj_close=frame["adj_close"] * 2), tmp_path),
    ]
    assert len({first.dataset_id, *(other.dataset_id for other in others)}) == 6
    assert_nothing_half_written(tmp_path / "storage")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_dataset_is_not_taken_for_good(damage: str, tmp_path: Path) -> None:
    dataset = build(long_frame(), tmp_path)
    verify_dataset(dataset.uri)
    path = Path(dataset.uri) / ("manifest.json" if damage == "manifest" else dataset.manifest()["shards"][1]["path"])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises(DataError, match=r"manifest|missing|not what its manifest says"):
        verify_dataset(dataset.uri)
    with pytest.raises(DataError, match="build the dataset anew"):
        build(long_frame(), tmp_path)
    shutil.rmtree(dataset.uri)
    assert build(long_frame(), tmp_path).built


def test_a_ticker_with_ten_rows_is_left_out_and_told(tmp_path: Path) -> None:
    frame = pd.concat([long_frame(), long_frame(days=10, tickers=["TEN"])])
    dataset = build(frame, tmp_path)
    assert list(dataset.excluded) == ["TEN"]
    assert "its 10 days give no window: 47 in a row are needed" in dataset.excluded["TEN"]
    assert dataset.manifest()["excluded"] == dataset.excluded
    assert {ticker for shard, _ in stored(dataset) for ticker in shard["tickers"]} == {"AAA", "BBB"}


REFUSED = {
    "window longer than the history": (
        400,
        {"window": 500},
        r"window = 500: no ticker .* 378 days, and 505 are needed",
    ),
    "all too short": (10, {"window": 20}, "window = 20: no ticker has that many days"),
    "one day": (1, {}, "fewer than three days"),
    "empty train split": (400, {"train_last": "2015-02-10"}, r"the train split \(.*to 2015-02-10\) has no window"),
    "empty test split": (400, {"valid_last": "2016-08-01"}, "the test split .* has no window"),
    "after the end": (400, {"train_last": "2030-01-01"}, "train_last = 2030-01-01 .* must lie in this order inside"),
    "wrong order": (400, {"train_last": "2016-02-01", "valid_last": "2016-01-01"}, "must lie in this order"),
    "no date": (400, {"train_last": "31.12.2015"}, "train_last = '31.12.2015' is no date: write it as 2009-12-31"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_on_is_refused_with_the_remedy(case: str, tmp_path: Path) -> None:
    days, params, message = REFUSED[case]
    with pytest.raises(DataError, match=re.compile(message)):
        build(long_frame(days=days), tmp_path, DatasetParams(**{"window": 20, **params}))
    assert not list((tmp_path / "storage" / "datasets").iterdir())


def test_prices_that_never_move_are_refused(tmp_path: Path) -> None:
    ref = write(long_frame().assign(adj_close=1.0), tmp_path)
    checks = validate_prices(ref).checks
    with pytest.raises(DataError, match="does not vary over the training split"):
        build_dataset(ref, Validation(checks=checks, masks=()), str(tmp_path / "storage"), SMALL)
    assert_nothing_half_written(tmp_path / "storage")


@pytest.mark.parametrize("name", ["window", "horizon", "shards"])
def test_parameters_have_a_least_value(name: str) -> None:
    with pytest.raises(DataError, match=f"{name} = 0: must be at least"):
        DatasetParams(**{name: 0})


@pytest.mark.parametrize("calendar", [None, "none"])
def test_without_a_calendar_weekends_are_no_gap(calendar: str | None, tmp_path: Path) -> None:
    ref = write(long_frame(), tmp_path)
    dataset = build_dataset(ref, validate_prices(ref, calendar), str(tmp_path / "storage"), SMALL, calendar)
    assert dataset.manifest()["calendar"] is None
    assert [len(shard["segments"]) for shard, _ in stored(dataset)] == [1, 1]


def test_the_other_panel_is_split_by_share(tmp_path: Path) -> None:
    dataset = prepare("us_ohlcv", tmp_path).dataset
    splits = dataset.manifest()["splits"]
    assert (splits["train"]["last"], splits["valid"]["last"]) == ("2009-04-07", "2011-03-17")
    assert dataset.samples["train"] > 3 * dataset.samples["test"] > 0


FILL_DISK = """
import json, resource, sys
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
prices = write_prices(price_source(sys.argv[1]), sys.argv[2])
validation = validate_prices(prices)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    build_dataset(prices, validation, sys.argv[2], DatasetParams(window=20, shards=2))
except OSError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_000, 60_000])
def test_a_full_disk_leaves_no_dataset(limit: int, tmp_path: Path) -> None:
    """The limit on a file's size stands in for the disk."""
    address = save(long_frame(days=1500, tickers=list("ABCD")), tmp_path / "prices.csv")
    command = [sys.executable, "-c", FILL_DISK, address, str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "too large" in json.loads(done.stdout)  # EFBIG, as a full disk would say ENOSPC
    assert not list((tmp_path / "datasets").iterdir())
    assert prepare(address, tmp_path, DatasetParams(window=20, shards=2)).dataset.built
    assert write_prices(price_source(address), str(tmp_path)).built is False
