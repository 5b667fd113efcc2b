"""The dataset of a test year knows nothing of what comes after the year, and little enough before it is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from price_files import long_frame, write

from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.sharding import DatasetParams
from examples.walk_forward.years import YearSplit, build_year

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
def both(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> list[BuiltDataset]:
    """A year's dataset from prices that agree up to the end of the year, and from then on do not."""
    made = []
    for name, prices in (("known", frame), ("other", later_days_changed(frame, YEAR.last))):
        folder = tmp_path_factory.mktemp(name)
        made.append(build_year(write(prices, folder), str(folder / "storage"), YEAR, SHAPE))
    return made


def test_prices_after_the_year_do_not_change_the_dataset(both: list[BuiltDataset]) -> None:
    one, other = both
    assert one.uri != other.uri
    assert one.dataset_id == other.dataset_id
    parts = ("splits", "normalisation", "samples", "masks", "shards")
    first, second = one.manifest(), other.manifest()
    assert {name: first[name] for name in parts} == {name: second[name] for name in parts}
    for shard in first["shards"]:
        contents = {hashlib.sha256(Path(found.uri, shard["path"]).read_bytes()).hexdigest() for found in (one, other)}
        assert contents == {shard["sha256"]}


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (YearSplit(year=2030), "the test year 2030 is not in the prices, which end on 2020-03-03"),
        (YearSplit(year=2016, valid_years=2), "the prices begin on 2015-01-02: take a later year"),
    ],
)
def test_a_year_out_of_reach_is_refused(frame: pd.DataFrame, tmp_path: Path, split: YearSplit, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_year(write(frame, tmp_path), str(tmp_path / "storage"), split, SHAPE)
