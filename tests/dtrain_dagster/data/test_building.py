"""The dataset: named after what goes in, whole or not there, verified, and read by the trainer bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from price_files import Panel, assert_nothing_half_written, long_frame, prepare, save, write

from dtrain_dagster.data import sharding
from dtrain_dagster.data.build_once import BuiltDataset, build_once, verify_shards
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.features import FEATURES, TARGET
from dtrain_dagster.data.prices import PricesRef
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.validation import Mask, Validation
from trainer.data.shards import DatasetError, DataShardManager

NOTHING = Validation(checks=(), masks=())
PARAMS = DatasetParams(window=20, horizon=5, shards=3)

FILL_DISK = """
import resource, sys
from pathlib import Path
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import Validation
storage = sys.argv[2]
def fill(limit, work, kind):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        return work()
    except OSError as error:
        print(" ".join(str(error).split()), len(list(Path(storage, kind).iterdir())))
def convert():
    return write_prices(price_source(sys.argv[1]), storage)
for limit in (10_000, 100_000):
    fill(limit, convert, "prices")
prices = fill(1 << 30, convert, "prices")
for limit in (2_000, 100_000):
    params = DatasetParams(window=20, shards=3)
    fill(limit, lambda: build_dataset(prices, Validation(checks=(), masks=()), storage, params), "datasets")
"""


def interrupted() -> pd.DataFrame:
    """Five tickers; BBB misses sessions at two places, CCC stands still for 30 days."""
    frame = long_frame(days=500, tickers=("AAA", "BBB", "CCC", "DDD", "EEE"))
    frame.loc[1200:1229, "adj_close"] = frame.loc[1200, "adj_close"]
    return frame.drop(index=[650, 651, 700]).reset_index(drop=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("small")
    return prepare(save(interrupted(), folder / "prices.csv"), folder, PARAMS)


def tables(dataset: BuiltDataset) -> list[pd.DataFrame]:
    """One per shard."""
    return [pd.read_parquet(Path(dataset.uri) / shard["path"]) for shard in dataset.manifest()["shards"]]


def test_the_trainer_reads_every_window_bit_for_bit(small: Panel, tmp_path: Path) -> None:
    manager = DataShardManager(small.dataset.uri, tmp_path)
    frames = tables(small.dataset)
    for split, count in small.dataset.samples.items():
        assert manager.count(split) == count > 0
        windows, targets, dates = [], [], []
        for shard, table in zip(small.dataset.manifest()["shards"], frames, strict=True):
            features = table[list(FEATURES)].to_numpy(np.float32)
            for segment in shard["segments"]:
                for end in range(*segment["samples"][split]):
                    windows.append(features[end - PARAMS.window + 1 : end + 1])
                    targets.append(table[TARGET].iloc[end])
                    dates.append(table["date"].iloc[end])
        rows = manager.end_rows(split, np.arange(count))
        got, got_targets = manager.gather(rows)
        np.testing.assert_array_equal(got.numpy(), np.stack(windows))
        np.testing.assert_array_equal(got_targets.numpy(), np.array(targets, dtype=np.float32))
        np.testing.assert_array_equal(manager.dates(rows), np.array(dates, dtype="datetime64[D]"))


def test_scaling_equals_numpy_s_over_the_rows_of_training_windows(tmp_path: Path) -> None:
    """To six digits, with one ticker five times as volatile as the other and in another shard."""
    frame = long_frame()
    frame.loc[400:, "adj_close"] = (frame.loc[400:, "adj_close"] / 50) ** 5
    dataset = prepare(save(frame, tmp_path / "prices.csv"), tmp_path, PARAMS).dataset
    rows, targets = [], []
    for shard, table in zip(dataset.manifest()["shards"], tables(dataset), strict=True):
        ends = {end for segment in shard["segments"] for end in range(*segment["samples"]["train"])}
        rows.append(table.iloc[sorted({row for end in ends for row in range(end - PARAMS.window + 1, end + 1)})])
        targets.append(table[TARGET].iloc[sorted(ends)])
    assert len(rows) == 2
    norm = dataset.manifest()["normalisation"]
    assert norm["fitted_on"] == "train"
    for name in FEATURES:
        values = pd.concat(rows)[name].to_numpy(np.float64)
        assert norm["features"][name]["std"] == pytest.approx(values.std(), rel=1e-6)
        assert norm["features"][name]["mean"] == pytest.approx(values.mean(), abs=1e-6 * values.std())
    answers = pd.concat(targets).to_numpy(np.float64)
    assert norm["target"]["std"] == pytest.approx(answers.std(), rel=1e-6)
    assert norm["target"]["mean"] == pytest.approx(answers.mean(), abs=1e-6 * answers.std())


def test_whatever_changes_the_dataset_changes_its_name(
    small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "build_once", lambda storage, dataset_id, write: dataset_id)

    def name(
        prices: PricesRef = small.prices, masks: tuple[Mask, ...] = (), calendar: str | None = "XNYS", **changes: Any
    ) -> Any:
        masks = (*small.validation.masks, *masks)
        params = dataclasses.replace(PARAMS, **changes)
        return build_dataset(prices, dataclasses.replace(small.validation, masks=masks), "", params, calendar)

    frame = interrupted()
    frame.loc[300, "adj_close"] += 0.01
    others = [
        *(name(**{field: 21}) for field in ("window", "horizon", "shards")),
        *(name(**{field: "2016-01-04"}) for field in ("train_last", "valid_last")),
        name(masks=(Mask(ticker="AAA", first="2015-06-01", last="2015-06-30", reason="a test"),)),
        name(calendar="none"),
        name(write(frame, tmp_path)),
    ]
    assert name() == small.dataset.dataset_id
    assert name(calendar=None) == name(calendar="none"), "no calendar has one name"
    assert len({name(), *others}) == 1 + len(others)


def test_a_manifest_that_counts_other_rows_is_refused(small: Panel, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(small.dataset.uri, tmp_path / "copy"))
    manifest = small.dataset.manifest()
    manifest["shards"][1]["rows"] += 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"shard-00001\.parquet does not match its manifest"):
        verify_shards(str(copy))
    with pytest.raises(DatasetError, match=r"rows, the shards hold .* rebuild it"):
        DataShardManager(str(copy), tmp_path / "cache")


@pytest.mark.parametrize(("days", "kept"), [(46, False), (47, True)])
def test_the_number_of_days_that_are_needed_is_told_rightly(days: int, kept: bool, tmp_path: Path) -> None:
    frame = pd.concat([long_frame(days=300), long_frame(days=days, tickers=["NEW"])])
    panel = prepare(save(frame, tmp_path / "prices.csv"), tmp_path, PARAMS)
    assert list(panel.dataset.excluded) == ([] if kept else ["NEW"])
    assert kept or "its 46 days give no window: 47 in a row are needed" in panel.dataset.excluded["NEW"]


BAD_DATASETS: dict[str, tuple[dict[str, Any], str]] = {
    "window longer than a split": ({"window": 60}, "the train split .* has no window of 60 days"),
    "window longer than the history": ({"window": 380}, r"window = 380: no ticker has .* longest history is 378 days"),
    "no date": ({"train_last": "31.12.2015"}, "train_last = '31.12.2015' is not a date: write it as 2009-12-31"),
    "in the wrong order": ({"train_last": "2016-03-01", "valid_last": "2015-12-31"}, "must lie in this order"),
    "before the history": ({"train_last": "2009-12-31"}, "must lie in this order inside the history 2015-01-05 to"),
    "nothing between": ({"train_last": "2016-02-01", "valid_last": "2016-02-02"}, "the valid split .* has no window"),
}


@pytest.mark.parametrize("case", BAD_DATASETS)
def test_what_cannot_be_built_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    change, message = BAD_DATASETS[case]
    prices = write(long_frame() if case != "window longer than a split" else long_frame(days=100), tmp_path)
    assert_not_built(prices, tmp_path, message, **change)


@pytest.mark.parametrize(("days", "message"), [(2, "fewer than three days"), (10, "no ticker has that many days")])
def test_a_few_days_are_refused(days: int, message: str, tmp_path: Path) -> None:
    assert_not_built(write(long_frame(days=days), tmp_path), tmp_path, message)


@pytest.mark.parametrize("growth", [0.0, 0.001])
def test_prices_that_do_not_vary_are_refused(growth: float, tmp_path: Path) -> None:
    frame = long_frame(tickers=["AAA"])
    prices = write(frame.assign(adj_close=100 * np.exp(growth * np.arange(len(frame)))), tmp_path)
    assert_not_built(prices, tmp_path, "log_return.* does not vary over the training split")


def assert_not_built(prices: PricesRef, folder: Path, message: str, **change: Any) -> None:
    with pytest.raises(DataError, match=message):
        build_dataset(prices, NOTHING, str(folder), dataclasses.replace(PARAMS, **change))
    assert not list((folder / "datasets").iterdir())


@pytest.mark.parametrize("change", [{"window": 1}, {"horizon": 0}, {"shards": 0}, {"window": -60}])
def test_impossible_parameters_are_refused_by_name(change: dict[str, int]) -> None:
    [(name, value)] = change.items()
    with pytest.raises(DataError, match=f"{name} = {value}: must be at least"):
        DatasetParams(**change)


def test_two_may_build_the_same_dataset_at_once(small: Panel, tmp_path: Path) -> None:
    both_began = threading.Barrier(2, timeout=60)

    def write(folder: Path) -> dict[str, Any]:
        both_began.wait()  # both have seen that there is none
        shutil.copytree(Path(small.dataset.uri, "data"), folder / "data", dirs_exist_ok=True)
        return small.dataset.manifest()

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(build_once, str(tmp_path), small.dataset.dataset_id, write) for _ in range(2)]
        uris = {each.result().uri for each in asked}
    assert uris == {str(tmp_path / "datasets" / small.dataset.dataset_id)}
    verify_shards(uris.pop())
    assert_nothing_half_written(tmp_path)


@pytest.mark.slow
def test_a_full_disk_leaves_neither_prices_nor_a_dataset(tmp_path: Path) -> None:
    """The limit on a file's size stands in for the disk: full at the first or at later rows."""
    address = save(long_frame(days=2000, tickers=[f"T{number}" for number in range(20)]), tmp_path / "prices.csv")
    command = [sys.executable, "-c", FILL_DISK, address, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    said = done.stdout.splitlines()
    assert len(said) == 4
    assert all(re.search("(no room to sort|File too large).* 0$", line) for line in said), said
    assert_nothing_half_written(tmp_path)
    assert prepare(address, tmp_path, PARAMS).dataset.built
