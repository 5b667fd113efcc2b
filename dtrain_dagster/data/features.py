"""Features and target of one ticker, from its adjusted closes and the index. Features look at their day and before
only.

Definitions (r: daily log return, RV_k: realised volatility over k days, in units of a daily return):

- ``scaled_return`` r / RV_22; ``log_return`` r; ``log_rv_k`` log RV_k, RV_k² = mean of r² over the last k days + 1e-8;
- ``index_return``: mean return of all tickers that day, and ``log_rv`` of it;
- ``stocks_log_rv_k``: log RV_k whose r² is the mean of r² of all tickers that day: many stocks tell a day's volatility
  with less noise than one;
- ``quarter_echo``: results come every quarter, and prices jump with them. For one, two, three and four quarters of 63
  days before the horizon, the largest |r| / RV_60 of the day before, at most 8, over its days and two around; their
  sum, 0 for days before the first;
- ``ewma_variance``: RiskMetrics' variance, 0.94 of yesterday's and 0.06 of today's r² (J.P. Morgan 1996);
- ``target_return``: log return over the next ``horizon`` days; ``target_log_rv``: log RV over those days.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

FEATURES = {
    "scaled_return": "log return / realised volatility over 22 days",
    "log_return": "log return of the day",
    "log_rv_1": "log realised volatility over 1 day",
    "log_rv_5": "log realised volatility over 5 days",
    "log_rv_22": "log realised volatility over 22 days",
    "index_return": "equal-weighted mean log return of all tickers that day",
    "index_log_rv_5": "log realised volatility of the index over 5 days",
    "index_log_rv_22": "log realised volatility of the index over 22 days",
    "stocks_log_rv_1": "log root mean square of all tickers' log returns that day",
    "stocks_log_rv_22": "log root mean square of all tickers' log returns over 22 days",
    "log_rv_250": "log realised volatility over 250 days, or as many as there are",
    "quarter_echo": "largest scaled returns one to four quarters before the horizon, summed",
}
MAY_BE_FLAT = ("quarter_echo",)
"""Features that are the same everywhere in a history of a few months."""
AUXILIARY = {
    "ewma_variance": "RiskMetrics variance of the daily return, lambda 0.94",
    "target_log_rv": "log realised volatility over the horizon ahead",
}
TARGET = "target_return"
WARM_UP = 22
"""The number of returns that the slowest feature needs."""
_FLOOR = 1e-8
QUARTER, AROUND, LARGEST = 63, 2, 8.0
"""Trading days of a quarter, days around the echo of a day, and the largest scaled return that counts."""


def log_rv(returns: pd.Series, days: int, at_least: int | None = None) -> pd.Series:
    """Return the log realised volatility over the last ``days`` days; NaN until there are that many, or ``at_least``
    so many."""
    import numpy as np

    return 0.5 * np.log((returns**2).rolling(days, min_periods=at_least).mean() + _FLOOR)


def quarter_echo(returns: pd.Series, horizon: int) -> pd.Series:
    """Return for each day the sum of the largest scaled returns around the days of its horizon, one to four quarters
    before."""
    import numpy as np

    usual = np.exp(log_rv(returns, 60, at_least=10)).shift(1)
    scaled = (returns.abs() / usual).clip(upper=LARGEST).fillna(0.0)
    around = scaled.rolling(horizon + 2 * AROUND).max()
    return sum(around.shift(quarters * QUARTER - horizon - AROUND).fillna(0.0) for quarters in range(1, 5))


def index_features(index_returns: pd.Series, squares: pd.Series) -> pd.DataFrame:
    """Return the features of all tickers by date, from the means of their daily log returns and of the squares of these
    (both indexed by date, sorted)."""
    import numpy as np
    import pandas as pd

    root = np.sqrt(squares)

    return pd.DataFrame(
        {
            "index_return": index_returns,
            "index_log_rv_5": log_rv(index_returns, 5),
            "index_log_rv_22": log_rv(index_returns, 22),
            "stocks_log_rv_1": log_rv(root, 1),
            "stocks_log_rv_22": log_rv(root, 22),
        }
    )


def ticker_features(frame: pd.DataFrame, index: pd.DataFrame, horizon: int) -> pd.DataFrame:
    """Return features, auxiliary columns and target of one segment without gaps or masked days.

    ``frame``: ``ticker``, ``date``, ``adj_close`` in order of date; ``index``: `index_features`. The result has the
    same rows with the new columns, NaN where they are not defined: during warm-up, and targets beyond the end.
    """
    import numpy as np

    prices = np.log(frame["adj_close"])
    returns = prices.diff()
    volatility = log_rv(returns, 22)
    return frame[["ticker", "date", "adj_close"]].assign(
        scaled_return=returns / np.exp(volatility),
        log_return=returns,
        log_rv_1=log_rv(returns, 1),
        log_rv_5=log_rv(returns, 5),
        log_rv_22=volatility,
        **{name: frame["date"].map(index[name]) for name in index},
        log_rv_250=log_rv(returns, 250, at_least=WARM_UP),
        quarter_echo=quarter_echo(returns, horizon),
        ewma_variance=(returns**2).ewm(alpha=0.06, adjust=False).mean() + _FLOOR,
        target_log_rv=log_rv(returns, horizon).shift(-horizon),
        target_return=prices.shift(-horizon) - prices,
    )


def stored_table(frame: pd.DataFrame) -> pa.Table:
    """Return the stored columns of one ticker's rows, in their stored types."""
    import pyarrow as pa

    columns = stored_columns()
    kinds = {"string": pa.string(), "date32": pa.date32(), "float64": pa.float64(), "float32": pa.float32()}
    schema = pa.schema([(column["name"], kinds[column["type"]]) for column in columns])
    table = pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False, safe=False, nthreads=1)
    return table.replace_schema_metadata(None)  # what pandas notes of its columns differs between its versions


def stored_columns() -> list[dict[str, str]]:
    """Return every stored column: name, type, role, description."""
    rows = [
        ("ticker", "string", "key", "symbol"),
        ("date", "date32", "key", "trading day"),
        ("adj_close", "float64", "price", "close, adjusted for splits and dividends"),
        *((name, "float32", "feature", text) for name, text in FEATURES.items()),
        *((name, "float32", "auxiliary", text) for name, text in AUXILIARY.items()),
        (TARGET, "float32", "target", "log return over the horizon ahead"),
    ]
    return [dict(zip(("name", "type", "role", "description"), row, strict=True)) for row in rows]
