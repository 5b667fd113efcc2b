"""Columns of a price file are those of one of two layouts, or refused by name."""

from __future__ import annotations

import re

import pytest

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.price_views import find_columns


def test_two_layouts() -> None:
    long = find_columns(["Ticker", "Date", "Open", "colour", "Volume", "Adj Close", "Unnamed: 6"])
    assert (long.date, long.ticker, long.prices) == (1, 0, {"adj_close": 5})
    wide = find_columns(["\ufeffdate", "AAA", "BRK.B", "LOW", "OPEN", "ID", "O", "S&P 500"])
    assert (wide.date, wide.ticker) == (0, None)
    assert wide.prices == {"AAA": 1, "BRK.B": 2, "LOW": 3, "OPEN": 4, "ID": 5, "O": 6, "S&P 500": 7}


REFUSED = [
    *[
        (["date", "AAA", name], f"{re.escape(repr(name))} does not look like one")
        for name in (
            "Close", "CLOSE", "Low", "open", "volume", "4. close", "AAA.Close", "Close_AAA", "('Close', 'AAA')",
            "adjusted", "bereinigter close", "vwap", "Dividends", "stock split", "year", "timestamp", "symbol", "index",
            "row_id", "", "Unnamed: 0", "__index_level_0__",
        )
    ],
    (["date", "OPEN", "HIGH", "LOW", "CLOSE", "VOLUME"], "'CLOSE' does not look like one"),
    (["Date", "Open", "High", "Low", "Close", "Adj Close"], "'adj_close' but no column 'ticker'"),
    (["date", "ticker", "close"], "no column 'adj_close' among .* adjusted for splits and dividends"),
    (["date", "AAA", "BBB", "AAA"], "two columns are called 'AAA'"),
    (["date", "aaa", "AAA"], "two columns are called 'aaa', apart from case"),
    (["date", "BRK-B", "BRK_B"], "two columns are called 'BRK-B'"),
    (["AAA", "__index_level_0__"], "no column 'date'"),
    (["Price", "Close", "Volume"], "no column 'date' among .*: give the columns date, ticker and adj_close"),
    (["date"], "no column besides 'date'"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "message"), REFUSED)
def test_what_is_of_neither_layout_is_refused_by_name(names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_columns(names)
