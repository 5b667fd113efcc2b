"""Features are what their definitions say, computed the long way, and none looks ahead."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from price_files import Panel, long_frame, prepare, save

from dtrain_dagster.data.features import FEATURES, TARGET
from dtrain_dagster.data.sharding import DatasetParams

HORIZON = 5


def stored(panel: Panel) -> pd.DataFrame:
    paths = [Path(panel.dataset.uri) / shard["path"] for shard in panel.dataset.manifest()["shards"]]
    return pd.concat([pq.read_table(path).to_pandas() for path in paths], ignore_index=True)


def built(frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    folder.mkdir()
    panel = prepare(save(frame, folder / "prices.csv"), folder, DatasetParams(window=10, horizon=HORIZON, shards=2))
    return stored(panel).assign(date=lambda rows: pd.to_datetime(rows["date"]))


@pytest.fixture(scope="module")
def prices() -> pd.DataFrame:
    """CCC is listed 60 days after the others."""
    frame = long_frame(days=220, tickers=("AAA", "BBB", "CCC"))
    return frame.drop(index=range(440, 500)).reset_index(drop=True)


@pytest.fixture(scope="module")
def rows(prices: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return built(prices, tmp_path_factory.mktemp("features") / "data")


def log_rv(returns: list[float]) -> float:
    return math.log(math.sqrt(sum(r * r for r in returns) / len(returns) + 1e-8))


def test_every_column_is_what_its_definition_says(prices: pd.DataFrame, rows: pd.DataFrame) -> None:
    """One row at a time, from lists of numbers."""
    closes = {name: dict(zip(part["date"], part["adj_close"], strict=True)) for name, part in prices.groupby("ticker")}
    returns: dict[str, dict[pd.Timestamp, float]] = {}
    for name, series in closes.items():
        days = list(series)
        returns[name] = {b: math.log(series[b]) - math.log(series[a]) for a, b in itertools.pairwise(days)}
    market, stocks = {}, {}
    for day in sorted(set().union(*returns.values())):
        today = [series[day] for series in returns.values() if day in series]
        market[day] = sum(today) / len(today)
        stocks[day] = math.sqrt(sum(r * r for r in today) / len(today))
    expected = []
    for name, series in returns.items():
        days, index_days = list(series), list(market)
        variance = series[days[0]] ** 2
        for place, day in enumerate(days):
            past = [series[d] for d in days[: place + 1]]
            if place:
                variance = 0.94 * variance + 0.06 * past[-1] ** 2
            if place < 21:
                continue
            known_days = index_days[: index_days.index(day) + 1]
            index_past, stocks_past = ([series[d] for d in known_days] for series in (market, stocks))
            scaled = [0.0] * 10 + [
                min(8.0, abs(past[at]) / math.exp(log_rv(past[max(0, at - 60) : at]))) for at in range(10, len(past))
            ]
            echoes = [place + 1 - 63 * quarters for quarters in (1, 2, 3, 4)]
            future = [series[d] for d in days[place + 1 : place + 1 + HORIZON]]
            known = len(future) == HORIZON
            expected.append(
                {
                    "ticker": name,
                    "date": day,
                    "adj_close": closes[name][day],
                    "scaled_return": past[-1] / math.exp(log_rv(past[-22:])),
                    "log_return": past[-1],
                    "log_rv_1": log_rv(past[-1:]),
                    "log_rv_5": log_rv(past[-5:]),
                    "log_rv_22": log_rv(past[-22:]),
                    "index_return": index_past[-1],
                    "index_log_rv_5": log_rv(index_past[-5:]),
                    "index_log_rv_22": log_rv(index_past[-22:]),
                    "stocks_log_rv_1": log_rv(stocks_past[-1:]),
                    "stocks_log_rv_22": log_rv(stocks_past[-22:]),
                    "log_rv_250": log_rv(past[-250:]),
                    "quarter_echo": sum(max(scaled[first - 2 : first + HORIZON + 2]) for first in echoes if first > 1),
                    "ewma_variance": variance + 1e-8,
                    "target_log_rv": log_rv(future) if known else math.nan,
                    "target_return": sum(future) if known else math.nan,
                }
            )
    naive = pd.DataFrame(expected)
    assert list(rows) == list(naive)
    assert list(rows["ticker"]) == list(naive["ticker"])
    assert list(rows["date"]) == list(naive["date"])
    assert list(rows["adj_close"]) == list(naive["adj_close"])
    for name in list(naive)[3:]:
        np.testing.assert_allclose(rows[name], naive[name], rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("place", [80, 150])
def test_no_feature_looks_ahead(place: int, prices: pd.DataFrame, rows: pd.DataFrame, tmp_path: Path) -> None:
    """Other prices after a day change no bit of any feature up to that day, and no target that ends by then."""
    days = sorted(prices["date"].unique())
    later = prices["date"] > days[place]
    random = np.random.default_rng(1)
    changed = prices.assign(adj_close=prices["adj_close"].where(~later, random.uniform(40, 60, len(prices)).round(6)))
    other = built(changed, tmp_path / "changed")
    known = rows["date"] <= days[place]
    causal = ["ticker", "date", "adj_close", *FEATURES, "ewma_variance"]
    pd.testing.assert_frame_equal(rows.loc[known, causal], other.loc[known, causal], check_exact=True)
    ended = rows["date"] <= days[place - HORIZON]
    targets = [TARGET, "target_log_rv"]
    pd.testing.assert_frame_equal(rows.loc[ended, targets], other.loc[ended, targets], check_exact=True)
    for name in FEATURES:  # the change would have been seen
        echo = rows["date"] > days[min(place + 63, len(days) - 1)]  # of a change, a quarter later
        later_rows = echo if name == "quarter_echo" else ~known
        if later_rows.any():
            assert (rows.loc[later_rows, name] != other.loc[later_rows, name]).mean() > 0.9
    reaches_over = known & ~ended
    assert (rows.loc[reaches_over, TARGET] != other.loc[reaches_over, TARGET]).all()
