"""The dataset of a test year knows nothing of what comes after the year, and little enough before it is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from price_files import long_frame, write

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import iter_tickers, write_prices
from dtrain_dagster.data.sharding import BuiltDataset, DatasetParams
from examples.walk_forward.years import PricesUntil, YearSplit, build_year
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.engine.run_job import run_job
from trainer.rundir import RESULT, RunDir

SHAPE = DatasetParams(window=20, horizon=5, shards=2)
YEAR = YearSplit(year=2018, valid_years=1)


def later_days_changed(frame: pd.DataFrame, after: str) -> pd.DataFrame:
    """The same prices up to a day; then others, a fault that would be masked, and a ticker that is new."""
    later = frame["date"] > after
    changed = frame.copy()
    changed.loc[later, "adj_close"] *= np.linspace(1.0, 3.0, int(later.sum()))
    changed.loc[frame.index[later & (frame["ticker"] == "AAA")][5:70], "adj_close"] = 42.0
    newcomer = changed[later & (frame["ticker"] == "BBB")].assign(ticker="NEW")
    return pd.concat([changed, newcomer], ignore_index=True)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return long_frame(days=1300, tickers=("AAA", "BBB", "CCC"))


@pytest.fixture(scope="module")
def both(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, BuiltDataset]]:
    """A year's dataset from prices that agree up to the end of the year, and from then on do not."""
    made = []
    for name, prices in (("known", frame), ("other", later_days_changed(frame, YEAR.last))):
        folder = tmp_path_factory.mktemp(name)
        made.append((folder, build_year(write(prices, folder), str(folder / "storage"), YEAR, SHAPE)))
    return made


def train(dataset: BuiltDataset, folder: Path) -> str:
    """The digest of the weights that a short training of the dataset ends with."""
    job = JobConfig(
        job_id="year",
        run_dir=str(folder / "run"),
        dataset=DatasetRef(uri=dataset.uri, dataset_id=dataset.dataset_id),
        model=FactoryConfig(factory="tcn"),
        training=DistributedTrainingConfig(
            world_size=1, batch_size_per_gpu=64, gradient_accumulation_steps=1, max_steps=6, threads_per_rank=1
        ),
        tracking=TrackingConfig(tensorboard=False),
    )
    run_job(job)
    result = RunDir(job.run_dir).read_json(RESULT)
    assert result is not None
    return result["weights_sha256"]


def test_prices_after_the_year_change_neither_dataset_nor_weights(
    both: list[tuple[Path, BuiltDataset]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, one), (_, other) = both
    assert one.uri != other.uri
    assert one.dataset_id == other.dataset_id
    parts = ("splits", "normalisation", "samples", "masks", "shards")
    first, second = one.manifest(), other.manifest()
    assert {name: first[name] for name in parts} == {name: second[name] for name in parts}
    for shard in first["shards"]:
        contents = {hashlib.sha256(Path(found.uri, shard["path"]).read_bytes()).hexdigest() for found in (one, other)}
        assert contents == {shard["sha256"]}
    weights = []
    for folder, dataset in both:
        monkeypatch.setenv("DTRAIN_CACHE", str(folder / "cache"))  # else the second would find the first one's arrays
        weights.append(train(dataset, folder))
    assert weights[0] == weights[1]


def test_a_price_within_the_year_changes_the_dataset(
    both: list[tuple[Path, BuiltDataset]], frame: pd.DataFrame, tmp_path: Path
) -> None:
    changed = frame.copy()
    changed.loc[changed.index[changed["date"] <= YEAR.last][-1], "adj_close"] *= 1.01
    assert build_year(write(changed, tmp_path), str(tmp_path / "s"), YEAR, SHAPE).dataset_id != both[0][1].dataset_id


def test_a_sample_belongs_to_a_split_only_with_its_whole_label(both: list[tuple[Path, BuiltDataset]]) -> None:
    dataset = both[0][1]
    manifest = dataset.manifest()
    assert manifest["splits"]["train"]["last"] == "2016-12-31"
    assert manifest["splits"]["valid"] == {"first": "2017-01-03", "last": "2017-12-31"}
    assert manifest["splits"]["test"] == {"first": "2018-01-02", "last": "2018-12-31"}
    for shard in manifest["shards"]:
        days = pq.read_table(Path(dataset.uri) / shard["path"])["date"].to_numpy().astype("datetime64[D]")
        assert days.max() == np.datetime64("2018-12-31")
        for segment in shard["segments"]:
            own = days[segment["rows"][0] : segment["rows"][1]]
            offset = segment["rows"][0]
            for split, bounds in manifest["splits"].items():
                first, stop = (place - offset for place in segment["samples"][split])
                assert own[first] >= np.datetime64(bounds["first"])
                assert own[stop - 1 + SHAPE.horizon] <= np.datetime64(bounds["last"])


def test_cut_prices_are_those_rows_and_no_others(frame: pd.DataFrame, tmp_path: Path) -> None:
    whole = write(frame, tmp_path)
    cut = write_prices(PricesUntil(whole, "2016-07-03"), str(tmp_path / "storage"))  # a Sunday
    assert (cut.rows, cut.tickers) == (int((frame["date"] <= "2016-07-03").sum()), 3)
    assert (cut.first_date, cut.last_date) == ("2015-01-02", "2016-07-01")
    assert max(rows["date"].max() for _, rows in iter_tickers(cut)) == pd.Timestamp("2016-07-01")
    assert cut.manifest()["source"]["licence"] == whole.manifest()["source"]["licence"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (YearSplit(year=2030), "the test year 2030 is not in the prices, which end on 2020-03-03"),
        (YearSplit(year=2016, valid_years=2), "the prices begin on 2015-01-02: take a later year"),
        (YearSplit(year=2017, valid_years=3), "the prices begin on 2015-01-02: take a later year"),
    ],
)
def test_a_year_out_of_reach_is_refused(frame: pd.DataFrame, tmp_path: Path, split: YearSplit, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_year(write(frame, tmp_path), str(tmp_path / "storage"), split, SHAPE)


def test_at_least_one_year_validates() -> None:
    with pytest.raises(DataError, match="valid_years = 0"):
        YearSplit(year=2010, valid_years=0)
