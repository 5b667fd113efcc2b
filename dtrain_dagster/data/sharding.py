"""The builder of datasets that nodes read: Parquet shards of features, and a manifest that is written last.

Two streaming passes over the tickers (the index, then the features) keep memory bounded by a few tickers' history; an
engine computes what each ticker gives, and here it is joined in the order of tickers, so that bytes are the same. The
manifest, which is held besides, has an entry for each uninterrupted segment of a ticker. The folder is named after its
inputs, so the same input is never built twice, and it appears whole or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.build_once import BuiltDataset, build_once, id_of, shard_entry
from dtrain_dagster.data.engines import DUCKDB, DataEngine
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.features import FEATURES, MAY_BE_FLAT, TARGET, WARM_UP, index_features, stored_columns
from dtrain_dagster.data.prices import PricesRef, iter_tickers
from dtrain_dagster.data.ticker_rows import Moments, TickerRules, daily_returns, ticker_rows
from dtrain_dagster.data.validation import Mask, Validation, exchange_sessions
from dtrain_dagster.support.secrets import redact

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

SCHEMA_VERSION = 1
CODE_VERSION = 4
"""The version of the builder. Raise it when the same prices would give other rows: older datasets are then not
reused."""
SPLITS = ("train", "valid", "test")
PANEL_TRAIN_LAST, PANEL_VALID_LAST = "2009-12-31", "2013-12-31"
TRAIN_SHARE, VALID_SHARE = 0.70, 0.15
FLAT = 1e-12
"""The standard deviation at and below which a column does not vary."""
LEAST = {"window": 2, "horizon": 1, "shards": 1}
"""The least values of the numbers of `DatasetParams`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetParams:
    """The parameters of a dataset besides its prices."""

    window: int = 60
    """The number of past days in a sample."""
    horizon: int = 5
    """The number of days from a sample's last day to its target."""
    train_last: str | None = None
    """Last day of training labels; None: 2009-12-31 where the history spans it well, else after 70 % of the days."""
    valid_last: str | None = None
    """Last day of validation labels; None: 2013-12-31, else after 85 % of the days."""
    shards: int = 5

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise DataError(f"{name} = {getattr(self, name)}: must be at least {least}")


def build_dataset(
    prices: PricesRef,
    validation: Validation,
    storage_uri: str,
    params: DatasetParams = DatasetParams(),
    calendar: str | None = "XNYS",
    engine: DataEngine = DUCKDB,
) -> BuiltDataset:
    """Build ``<storage>/datasets/<id>``, unless it exists; return a reference. The dataset is the same with each
    engine.

    Raise `DataError` where a check of severity "error" failed, a window is longer than the history, a split has no
    samples, a feature does not vary, or the existing dataset is damaged. Raise what the engine raises.
    """
    failed = [check.name for check in validation.checks if check.severity == "error" and not check.passed]
    if failed:
        raise DataError(f"{prices.uri} failed {', '.join(failed)}: no dataset is built from it; correct the prices")
    calendar = None if calendar is None or calendar.lower() == "none" else calendar
    identity = {
        "code": CODE_VERSION,
        "prices": prices.prices_id,
        "params": asdict(params),
        "calendar": calendar,
        "masks": [asdict(mask) for mask in validation.masks],
    }
    dataset_id = id_of(identity)

    def write(folder: Path) -> dict[str, Any]:
        return _Builder(prices, validation, params, calendar, folder, engine).build(dataset_id)

    return build_once(storage_uri, dataset_id, write)


def split_dates(dates: NDArray[np.datetime64], params: DatasetParams) -> dict[str, dict[str, str]]:
    """Return the first and last day of each split, from all days (sorted, distinct). Raise `DataError` for a wrong
    order."""
    import numpy as np

    first, last = str(dates[0]), str(dates[-1])
    spans = first < "2000-01-01" and last > "2018-01-01"

    def chosen(name: str, panel: str, share: float) -> str:
        given = getattr(params, name)
        if given is not None:
            return str(_day_of(name, given))
        return panel if spans else str(dates[int(share * (len(dates) - 1))])

    train_last = chosen("train_last", PANEL_TRAIN_LAST, TRAIN_SHARE)
    valid_last = chosen("valid_last", PANEL_VALID_LAST, TRAIN_SHARE + VALID_SHARE)
    if not first < train_last < valid_last < last:
        raise DataError(
            f"train_last = {train_last} and valid_last = {valid_last} must lie in this order inside the history "
            f"{first} to {last}; leave them out for 70 % / 15 % / 15 % of the days"
        )
    after = {day: str(dates[dates > np.datetime64(day)][0]) for day in (train_last, valid_last)}
    return {
        "train": {"first": first, "last": train_last},
        "valid": {"first": after[train_last], "last": valid_last},
        "test": {"first": after[valid_last], "last": last},
    }


def _day_of(name: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise DataError(f"{name} = {text!r} is not a date: write it as 2009-12-31") from error


class Shard:
    """A Parquet file that is being written: one row group per ticker."""

    def __init__(self, folder: Path, number: int, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self.folder, self.name, self.rows = folder, f"data/shard-{number:05d}.parquet", 0
        self._writer: Any = pq.ParquetWriter(folder / self.name, schema, compression="zstd", use_dictionary=["ticker"])
        self._segments: list[dict[str, Any]] = []
        self._dates: list[str] = []

    def add(self, table: pa.Table, segments: Sequence[dict[str, Any]]) -> None:
        """Append a ticker's rows, and its segments, whose rows count from the ticker's first."""
        import pyarrow.compute as pc

        self._writer.write_table(table, row_group_size=len(table))
        for segment in segments:
            samples = {split: self._moved(ends) if ends[1] else ends for split, ends in segment["samples"].items()}
            self._segments.append(segment | {"rows": self._moved(segment["rows"]), "samples": samples})
        self.rows += len(table)
        self._dates += map(str, pc.min_max(table["date"]).as_py().values())

    def _moved(self, rows: Sequence[int]) -> list[int]:
        return [self.rows + row for row in rows]

    def close(self) -> dict[str, Any]:
        """Finish the file; return its entry in the manifest."""
        self._writer.close()
        return shard_entry(self.folder, self.name, self.rows) | {
            "first_date": min(self._dates),
            "last_date": max(self._dates),
            "tickers": list(dict.fromkeys(segment["ticker"] for segment in self._segments)),
            "segments": self._segments,
        }


@dataclass(slots=True)
class _Builder:
    """A single build of a dataset."""

    prices: PricesRef
    validation: Validation
    params: DatasetParams
    calendar: str | None
    folder: Path
    engine: DataEngine
    splits: dict[str, dict[str, str]] = field(default_factory=dict)
    features: Moments = field(default_factory=Moments)
    target: Moments = field(default_factory=Moments)
    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    excluded: dict[str, str] = field(default_factory=dict)

    def build(self, dataset_id: str) -> dict[str, Any]:
        """Write the shards; return the manifest."""
        source = self.prices.manifest()["source"]
        sessions = exchange_sessions(self.calendar, self.prices.first_date, self.prices.last_date)
        masks: dict[str, list[Mask]] = defaultdict(list)
        for mask in self.validation.masks:
            masks[mask.ticker].append(mask)
        rules = TickerRules(
            window=self.params.window,
            horizon=self.params.horizon,
            masks={ticker: tuple(found) for ticker, found in masks.items()},
            sessions=sessions,
        )
        index = self._index(rules)
        self.splits = split_dates(index.index.to_numpy().astype("datetime64[D]"), self.params)
        shards = self._write_shards(index, rules)
        self._refuse_what_cannot_be_trained_on()
        return {
            "schema_version": SCHEMA_VERSION,
            "dataset_id": dataset_id,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "source": redact(source),
            "calendar": self.calendar,
            "window": self.params.window,
            "horizon": self.params.horizon,
            "columns": stored_columns(),
            "splits": self.splits,
            "normalisation": self._normalisation(),
            "samples": self.samples,
            "excluded": self.excluded,
            "masks": [asdict(mask) for mask in self.validation.masks],
            "checks": [asdict(check) for check in self.validation.checks],
            "shards": shards,
        }

    def _index(self, rules: TickerRules) -> pd.DataFrame:
        """Return the features of all tickers together, by date."""
        import pandas as pd

        total, squares, count = (pd.Series(dtype=float) for _ in range(3))
        for found in self.engine.map_tickers(iter_tickers(self.prices), partial(daily_returns, rules)):
            for returns in found:
                total = total.add(returns, fill_value=0.0)
                squares = squares.add(returns**2, fill_value=0.0)
                count = count.add(pd.Series(1.0, index=returns.index), fill_value=0.0)
        if len(total) < 2:
            raise DataError(f"{self.prices.uri} has fewer than three days of prices: there is nothing to learn from")
        return index_features((total / count).sort_index(), (squares / count).sort_index())

    def _write_shards(self, index: pd.DataFrame, rules: TickerRules) -> list[dict[str, Any]]:
        """Write tickers into shards in order, each shard with about the same number of rows; return the shards'
        entries."""
        shards: list[dict[str, Any]] = []
        open_shard: Shard | None = None
        longest = seen = 0
        needed = rules.window + rules.horizon
        work = partial(ticker_rows, rules, index, self.splits)
        for found in self.engine.map_tickers(iter_tickers(self.prices), work):
            seen += found.days
            longest = max(longest, found.longest)
            if found.table is None:
                self.excluded[found.ticker] = (
                    f"its {found.days} days give no window: {WARM_UP + needed} in a row are needed (22 to warm up, "
                    f"window {self.params.window}, horizon {self.params.horizon})"
                )
                continue
            if open_shard is None:
                open_shard = Shard(self.folder, len(shards), found.table.schema)
            open_shard.add(found.table, found.segments)
            for segment in found.segments:
                for split, (first, stop) in segment["samples"].items():
                    self.samples[split] += stop - first
            for features, target in found.moments:
                self.features.join(features)
                self.target.join(target)
            # Counted in days of prices: the warm-up that is not stored would make every shard a ticker too long.
            if seen * self.params.shards >= self.prices.rows * (len(shards) + 1):
                shards.append(open_shard.close())
                open_shard = None
        if open_shard is not None:
            shards.append(open_shard.close())
        if not shards:
            raise DataError(
                f"window = {self.params.window}: no ticker has that many days in a row; after 22 days of warm-up the "
                f"longest history is {longest} days, and {needed} are needed. Give more history or a shorter window"
            )
        return shards

    def _refuse_what_cannot_be_trained_on(self) -> None:
        import numpy as np

        for split, count in self.samples.items():
            if not count:
                raise DataError(
                    f"the {split} split ({self.splits[split]['first']} to {self.splits[split]['last']}) has no window "
                    f"of {self.params.window} days with a label inside: give more history, a shorter window, or other "
                    "train_last and valid_last"
                )
        _, std = self.features.mean_std()
        flat = [name for name, value in zip(FEATURES, std, strict=True) if not value > FLAT]
        flat = [name for name in flat if name not in MAY_BE_FLAT]
        target_std = float(np.atleast_1d(self.target.mean_std()[1])[0])
        if flat or not target_std > FLAT:
            raise DataError(f"{', '.join(flat) or TARGET} does not vary over the training split: are these prices?")

    def _normalisation(self) -> dict[str, Any]:
        mean, std = self.features.mean_std()
        std = [1.0 if value <= FLAT else float(value) for value in std]  # what may be flat is then zero throughout
        target_mean, target_std = self.target.mean_std()
        return {
            "fitted_on": "train",
            "features": {name: {"mean": float(mean[place]), "std": std[place]} for place, name in enumerate(FEATURES)},
            "target": {"mean": float(target_mean), "std": float(target_std)},
        }
