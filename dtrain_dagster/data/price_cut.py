"""Prices up to a day: what a training may know that is judged by a year, as if the later days had not come yet.

The rows stay in the one file of all prices. The reference has an id of its own, made of the rows that are read, so that
whatever is named after it is the same whatever comes later. How rows are left out is `prices.iter_tickers`.
"""

from __future__ import annotations

import hashlib

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import CutPrices, PricesRef, iter_tickers


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
