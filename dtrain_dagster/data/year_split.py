"""The dataset of a test year: trained and validated on what came before, tested on the year, blind to what came after.

Prices after the year are not read at all (`cut_prices`), so neither features, nor masks of faults,
nor the normalisation can know them. A sample belongs to a split only where its label ends inside it: windows whose
label would cross a boundary are left out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dtrain_dagster.data.engines import DUCKDB, DataEngine
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import CutPrices, PricesRef, iter_tickers
from dtrain_dagster.data.sharding import BuiltDataset, DatasetParams, build_dataset
from dtrain_dagster.data.validation import validated


def cut_prices(prices: PricesRef, until: str) -> CutPrices:
    """Return these prices without the days after ``until`` (YYYY-MM-DD). Raise `DataError` where none is left."""
    if until < prices.first_date:
        raise DataError(f"{prices.uri} has no prices up to {until}: they begin on {prices.first_date}")
    cut = CutPrices(
        uri=prices.uri, prices_id="", rows=0, tickers=0, first_date="", last_date="", built=False, until=until
    )
    digest, firsts, lasts, rows = hashlib.sha256(), [], [], 0
    for ticker, frame in iter_tickers(cut):
        digest.update(f"{ticker}\n{len(frame)}\n".encode())
        digest.update(frame["date"].to_numpy().astype("datetime64[D]").astype("<i8").tobytes())
        for name in frame.columns.drop(["ticker", "date"]):
            digest.update(f"{name}\n".encode())
            digest.update(frame[name].to_numpy().astype("<f8").tobytes())
        rows += len(frame)
        firsts.append(str(frame["date"].iloc[0].date()))
        lasts.append(str(frame["date"].iloc[-1].date()))
    return CutPrices(
        uri=prices.uri,
        prices_id=f"cut-{digest.hexdigest()[:16]}",
        rows=rows,
        tickers=len(firsts),
        first_date=min(firsts),
        last_date=max(lasts),
        built=False,
        until=until,
    )


VALID_YEARS = 2
"""The years before the test year in which weights are chosen. One may be calm throughout, and then chooses badly for a
turbulent one; each further year is one that the training does not learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YearSplit:
    """The split of the days for one test year."""

    year: int
    valid_years: int = VALID_YEARS

    def __post_init__(self) -> None:
        if self.valid_years < 1:
            raise DataError(f"valid_years = {self.valid_years}: at least one year is needed to choose the weights")

    @property
    def train_last(self) -> str:
        """Return the last day of training labels."""
        return f"{self.year - self.valid_years - 1:04}-12-31"

    @property
    def valid_last(self) -> str:
        """Return the last day of validation labels, the eve of the test year."""
        return f"{self.year - 1:04}-12-31"

    @property
    def last(self) -> str:
        """Return the last day of the test year."""
        return f"{self.year:04}-12-31"


def build_year(
    prices: PricesRef,
    storage_uri: str,
    split: YearSplit,
    shape: DatasetParams,
    calendar: str | None = "XNYS",
    engine: DataEngine = DUCKDB,
) -> BuiltDataset:
    """Build the dataset of a test year, unless it exists; return a reference. ``shape``: window, horizon and shards;
    its days are those of ``split``. Raise `DataError` for a year that the prices do not reach, or that has too little
    before it, and as `build_dataset` does."""
    first, newest = f"{split.year:04}-01-01", prices.last_date
    if newest < first:
        raise DataError(f"the test year {split.year} is not in the prices, which end on {newest}: take an earlier year")
    if prices.first_date >= split.train_last:
        raise DataError(
            f"the test year {split.year} with valid_years = {split.valid_years} would be trained on the days up to "
            f"{split.train_last}, and the prices begin on {prices.first_date}: take a later year"
        )
    cut = cut_prices(prices, split.last)
    params = DatasetParams(
        window=shape.window,
        horizon=shape.horizon,
        shards=shape.shards,
        train_last=split.train_last,
        valid_last=split.valid_last,
    )
    return build_dataset(cut, validated(cut, calendar), storage_uri, params, calendar, engine)
