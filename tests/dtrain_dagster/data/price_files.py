"""Small price files, and what must not be left behind when one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import exchange_calendars as xc
import numpy as np
import pandas as pd

from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.data.prices import PricesRef, write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import Validation, validate_prices


@dataclass(frozen=True)
class Panel:
    prices: PricesRef
    validation: Validation
    dataset: BuiltDataset


def prepare(address: str, storage: Path, params: DatasetParams | None = None) -> Panel:
    prices = write_prices(price_source(address), str(storage))
    validation = validate_prices(prices)
    return Panel(prices, validation, build_dataset(prices, validation, str(storage), params or DatasetParams()))


def sessions(days: int, first: str = "2015-01-02") -> pd.DatetimeIndex:
    """Trading days of New York."""
    return new_york().sessions_window(pd.Timestamp(first), days)


@cache
def new_york() -> xc.ExchangeCalendar:
    return xc.get_calendar("XNYS", start="2010-01-01", end="2024-12-31")


def walk(days: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.round(50 * np.exp(np.cumsum(random.normal(0, 0.01, days))), 6)


def long_frame(days: int = 400, tickers: Sequence[str] = ("AAA", "BBB")) -> pd.DataFrame:
    """Random walks in long form, in order of ticker and date."""
    dates = sessions(days)
    frames = [
        pd.DataFrame({"date": dates, "ticker": name, "adj_close": walk(days, seed)})
        for seed, name in enumerate(tickers)
    ]
    return pd.concat(frames, ignore_index=True)


def save(frame: pd.DataFrame, path: Path) -> str:
    """As CSV; the address."""
    frame.to_csv(path, index=False, date_format="%Y-%m-%d")
    return str(path)


def write(frame: pd.DataFrame, folder: Path, name: str = "prices.csv") -> PricesRef:
    folder.mkdir(exist_ok=True, parents=True)
    return write_prices(price_source(save(frame, folder / name)), str(folder / "storage"))


def assert_nothing_half_written(storage: Path) -> None:
    """No scratch folder, and no folder of prices or of a dataset without its commit mark."""
    assert not list(storage.rglob("*.tmp"))
    for kind in ("prices", "datasets"):
        for folder in (storage / kind).glob("*"):
            assert (folder / "manifest.json").exists(), folder
