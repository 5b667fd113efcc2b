"""The dataset of a test year: trained and validated on what came before, tested on the year, blind to what came after.

Prices after the year are not read at all (`PricesUntil`), so neither features, nor masks of faults, nor the
normalisation can know them. A sample belongs to a split only where its label ends inside it: windows whose label would
cross a boundary are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path

import pyarrow.parquet as pq

from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import PricesRef, write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import Provenance
from dtrain_dagster.data.validation import validate_prices


@dataclass(frozen=True, slots=True)
class PricesUntil:
    """A source of prices (`dtrain_dagster.data.sources.PriceSource`): the rows of others up to a day, YYYY-MM-DD."""

    prices: PricesRef
    last: str

    @property
    def provenance(self) -> Provenance:
        """The origin and licence of the prices."""
        source = self.prices.manifest()["source"]
        return Provenance(**{field.name: source[field.name] for field in fields(Provenance)})

    def local_file(self, scratch: Path) -> Path:
        """Return a Parquet file of the rows, whose bytes depend on nothing else."""
        path = scratch / "until.parquet"
        rows = pq.read_table(self.prices.path, filters=[("date", "<=", date.fromisoformat(self.last))])
        pq.write_table(rows.combine_chunks(), path)
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class YearSplit:
    """The split of the days for one test year."""

    year: int
    valid_years: int = 2
    """The years before the test year in which weights are chosen. One may be calm throughout, and then chooses badly
    for a turbulent one; each further year is one that the training does not learn from."""

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
    prices: PricesRef, storage_uri: str, split: YearSplit, shape: DatasetParams, calendar: str | None = "XNYS"
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
    known = write_prices(PricesUntil(prices, split.last), storage_uri)
    params = replace(shape, train_last=split.train_last, valid_last=split.valid_last)
    return build_dataset(known, validate_prices(known, calendar), storage_uri, params, calendar)
