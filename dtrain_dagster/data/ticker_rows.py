"""What a dataset holds of one ticker: its segments, their features, and what is summed of them.

All here is a function of one ticker's prices and of what is the same for all tickers, so any engine may compute it
anywhere (`dtrain_dagster.data.engines`). Joining tickers, in their order, belongs in `dtrain_dagster.data.sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.features import FEATURES, TARGET, stored_table, ticker_features
from dtrain_dagster.data.validation import Mask, gaps

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray


@dataclass(slots=True)
class Moments:
    """Count, mean and squared deviations of columns, joined without loss of digits (Chan et al. 1979)."""

    count: int = 0
    mean: Any = 0.0
    deviations: Any = 0.0

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Moments:
        """Return those of the columns of values (n, columns), or of values (n,)."""
        mean = values.mean(axis=0)
        return cls(len(values), mean, ((values - mean) ** 2).sum(axis=0))

    def join(self, other: Moments) -> None:
        """Add those of other rows. The last digits depend on the order in which parts are joined."""
        step, total = other.mean - self.mean, self.count + other.count
        self.deviations += other.deviations + step**2 * self.count * other.count / total
        self.mean = self.mean + step * other.count / total
        self.count = total

    def mean_std(self) -> tuple[Any, Any]:
        """Return mean and standard deviation of each column."""
        return self.mean, (self.deviations / self.count) ** 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class TickerRules:
    """What is the same for all tickers of a dataset."""

    window: int
    horizon: int
    masks: dict[str, tuple[Mask, ...]]
    """Masks by ticker; tickers without any are missing."""
    sessions: NDArray[np.datetime64] | None
    """The exchange's trading days; None where no calendar applies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TickerRows:
    """What a dataset holds of one ticker."""

    ticker: str
    days: int
    """Days of prices that there are."""
    longest: int
    """Rows of its longest segment, stored or not."""
    table: pa.Table | None
    """The stored rows of all segments, one after the other; None where no segment is long enough for a window."""
    segments: list[dict[str, Any]]
    """What the manifest says of each: its rows [first, stop) of the table, and those at which its samples end, by
    split."""
    moments: list[tuple[Moments, Moments]]
    """Those of features and target in the rows of training windows, of each segment that has such windows."""


def segments(frame: pd.DataFrame, rules: TickerRules) -> Iterator[pd.DataFrame]:
    """Yield the segments of a ticker's history that no gap and no mask interrupts.

    The first return after either is no daily return and belongs to no segment: a segment begins with its first price.
    """
    import numpy as np

    dates = frame["date"].to_numpy().astype("datetime64[D]")
    masked = np.zeros(len(frame), dtype=bool)
    for mask in rules.masks.get(str(frame["ticker"].iloc[0]), ()):
        masked |= (dates >= np.datetime64(mask.first)) & (dates <= np.datetime64(mask.last))
    breaks = gaps(dates, rules.sessions) | np.concatenate([[False], masked[1:] != masked[:-1]])
    number = np.cumsum(breaks)
    for part in np.unique(number[~masked]):
        rows = np.flatnonzero((number == part) & ~masked)
        yield frame.iloc[rows[0] : rows[-1] + 1].reset_index(drop=True)


def daily_returns(rules: TickerRules, frame: pd.DataFrame) -> list[pd.Series]:
    """Return the daily log returns of each segment of a ticker, by date."""
    import numpy as np
    import pandas as pd

    return [
        pd.Series(np.log(segment["adj_close"]).diff().to_numpy(), index=segment["date"]).dropna()
        for segment in segments(frame, rules)
    ]


def ticker_rows(
    rules: TickerRules, index: pd.DataFrame, splits: dict[str, dict[str, str]], frame: pd.DataFrame
) -> TickerRows:
    """Return what a dataset holds of a ticker. ``index``: `index_features`; ``splits``: first and last day of each."""
    import pandas as pd

    parts = []
    for segment in segments(frame, rules):
        rows = ticker_features(segment, index, rules.horizon)
        parts.append(rows.dropna(subset=list(FEATURES)).reset_index(drop=True))
    kept = [part for part in parts if len(part) >= rules.window + rules.horizon]
    ticker, start, entries, moments = str(frame["ticker"].iloc[0]), 0, [], []
    for part in kept:
        samples = _samples(part, rules, splits)
        first, stop = samples["train"]
        if stop > first:
            features = part.iloc[first - rules.window + 1 : stop][list(FEATURES)].to_numpy()
            moments.append((Moments.of(features), Moments.of(part[TARGET].to_numpy()[first:stop])))
        ends = {split: [start + end for end in found] if found[1] else found for split, found in samples.items()}
        entries.append({"ticker": ticker, "rows": [start, start + len(part)], "samples": ends})
        start += len(part)
    return TickerRows(
        ticker=ticker,
        days=len(frame),
        longest=max(map(len, parts), default=0),
        table=stored_table(pd.concat(kept, ignore_index=True)) if kept else None,
        segments=entries,
        moments=moments,
    )


def _samples(part: pd.DataFrame, rules: TickerRules, splits: dict[str, dict[str, str]]) -> dict[str, list[int]]:
    """Return the rows [first, stop) of a segment at which samples end, by split; [0, 0] where there are none."""
    import numpy as np

    dates = part["date"].to_numpy().astype("datetime64[D]")
    ends = np.arange(rules.window - 1, len(part) - rules.horizon)
    samples = {}
    for split, bounds in splits.items():
        first, last = np.datetime64(bounds["first"]), np.datetime64(bounds["last"])
        inside = ends[(dates[ends] >= first) & (dates[ends + rules.horizon] <= last)]
        samples[split] = [int(inside[0]), int(inside[-1]) + 1] if len(inside) else [0, 0]
    return samples
