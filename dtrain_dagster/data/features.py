"""Features and target of one ticker, from its adjusted closes and the index. Features look at their day and before
only.

Definitions (r: daily log return, RV_k: realised volatility over k days, in units of a daily return):

- ``scaled_return`` r / RV_22; ``log_return`` r; ``log_rv_k`` log RV_k, RV_k² = mean of r² over the last k days + 1e-8;
- ``index_return``: mean return of all tickers that day, and ``log_rv`` of it;
- ``ewma_variance``: RiskMetrics' variance, 0.94 of yesterday's and 0.06 of today's r² (J.P. Morgan 1996);
- ``target_return``: log return over the next ``horizon`` days; ``target_log_rv``: log RV over those days.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

FEATURES = {
    "scaled_return": "log return / realised volatility over 22 days",
    "log_return": "log return of the day",
    "log_rv_1": "log realised volatility over 1 day",
    "log_rv_5": "log realised volatility over 5 days",
    "log_rv_22": "log realised volatility over 22 days",
    "index_return": "equal-weighted mean log return of all tickers that day",
    "index_log_rv_5": "log realised volatility of the index over 5 days",
    "index_log_rv_22": "log realised volatility of the index over 22 days",
}
AUXILIARY = {
    "ewma_variance": "RiskMetrics variance of the daily return, lambda 0.94",
    "target_log_rv": "log realised volatility over the horizon ahead",
}
TARGET = "target_return"
WARM_UP = 22
"""The number of returns that the slowest feature needs."""
_FLOOR = 1e-8


def log_rv(returns: pd.Series, days: int) -> pd.Series:
    """Return the log realised volatility over the last ``days`` days; NaN until there are that many."""
    import numpy as np

    return 0.5 * np.log((returns**2).rolling(days).mean() + _FLOOR)


def index_features(index_returns: pd.Series) -> pd.DataFrame:
    """Return the features of the index by date, from its daily log returns (indexed by date, sorted)."""
    import pandas as pd

    return pd.DataFrame(
        {
            "index_return": index_returns,
            "index_log_rv_5": log_rv(index_returns, 5),
            "index_log_rv_22": log_rv(index_returns, 22),
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
        ewma_variance=(returns**2).ewm(alpha=0.06, adjust=False).mean() + _FLOOR,
        target_log_rv=log_rv(returns, horizon).shift(-horizon),
        target_return=prices.shift(-horizon) - prices,
    )
