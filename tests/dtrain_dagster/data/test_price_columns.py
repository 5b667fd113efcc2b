"""Columns of price files are recognised by the names that data vendors give them, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.price_columns import find_columns, level_names

LONG = {
    "plain": "date,ticker,adj_close",
    "tidyquant": "symbol,date,open,high,low,close,volume,adj_close=adjusted",
    "Quandl": "ticker,date,open,high,low,close,volume,Ex-Dividend,Split Ratio,Adj. Open,adj_close=Adj. Close",
    "Sharadar": "ticker,date,open,high,low,close,volume,adj_close=closeadj,closeunadj,lastupdated",
    "Alpha Vantage": "symbol,date=timestamp,open=1. open,high=2. high,low=3. low,close=4. close,"
    "adj_close=5. adjusted close,volume=6. volume,7. dividend amount,8. split coefficient",
    "Alpha Vantage, crypto": "symbol,date=timestamp,open=1a. open (EUR),adj_close=4a. close (EUR),volume=5. volume",
    "EODHD": "code,Date,open=Open,high=High,low=Low,close=Close,adj_close=Adjusted_close,volume=Volume",
    "Tiingo": "symbol,date,close,high,low,open,volume,adj_close=adjClose,adjHigh,adjVolume,divCash,splitFactor",
    "IEX": "symbol,date,close,high,low,open,volume,uClose,adj_close=fClose",
    "Yahoo's page": "symbol,Date,open=Open,close=Close*,adj_close=Adj Close**,volume=Volume",
    "stooq": "<TICKER>,<PER>,date=<DATE>,<TIME>,open=<OPEN>,high=<HIGH>,low=<LOW>,adj_close=<CLOSE>,volume=<VOL>",
    "polygon": "ticker,date,volume=v,open=o,adj_close=c,high=h,low=l,vw,n",
    "Kaggle": "date,open,high,low,adj_close=close,volume,Name",
    "Bloomberg": "ticker,date,open=PX_OPEN,adj_close=PX_LAST,volume=PX_VOLUME",
    "German": "Symbol,date=Datum,open=Erster,high=Hoch,low=Tief,adj_close=Schlusskurs,volume=Volumen",
    "raw": "date,symbol,adj_close=close_unadj",
    "an index beside": "index,date,ticker,adj_close",
    "tickers among names": "date,name,ticker,adj_close",
}  # fmt: skip
RAW = {"Alpha Vantage, crypto", "stooq", "polygon", "Kaggle", "Bloomberg", "German", "raw"}


@pytest.mark.parametrize("case", LONG)
def test_fields_of_the_long_layout(case: str) -> None:
    names, expected = [], {}
    for place, text in enumerate(LONG[case].split(",")):
        field, _, name = text.rpartition("=")
        names.append(name)
        if (field or name) in ("adj_close", "open", "high", "low", "close", "volume"):
            expected[field or name] = place
    found = find_columns(names)
    assert found.series == {"": expected}
    assert names[found.date].lower().strip("<>") in ("date", "timestamp", "datum")
    assert found.ticker is not None
    told = any("there is no adjusted close" in note for note in found.notes)
    assert told == (case in RAW), "raw closes are told, never taken in silence"


def closes(*names: str) -> dict[str, dict[str, int]]:
    """Each column behind the date is a ticker."""
    return {name: {"adj_close": place} for place, name in enumerate(names, 1)}


WIDE: list[tuple[list[Any], dict[str, dict[str, int]]]] = [
    (["Date", "AAA", "BRK.B"], closes("AAA", "BRK.B")),
    (["date", "AAPL", "LOW", "OPEN"], closes("AAPL", "LOW", "OPEN")),
    (["date", "C", "H", "L", "O", "V", "AAPL"], closes("C", "H", "L", "O", "V", "AAPL")),
    (
        [("Adj Close", "AAA"), ("Close", "AAA"), ("Volume", "AAA"), ("Adj Close", "BBB"), "Date"],
        {"AAA": {"adj_close": 0, "close": 1, "volume": 2}, "BBB": {"adj_close": 3}},
    ),
    (
        [("AAA", "Close"), ("AAA", "Open"), ("BBB", "Close"), "Date"],
        {"AAA": {"adj_close": 0, "open": 1}, "BBB": {"adj_close": 2}},
    ),
    (["date", "AAPL.Open", "AAPL.Close", "AAPL.Adjusted"], {"AAPL": {"adj_close": 3, "open": 1, "close": 2}}),
    (
        ["date", "Adj Close S&P 500", "close_BBB", "BBB_volume"],
        {"S&P 500": {"adj_close": 1}, "BBB": {"adj_close": 2, "volume": 3}},
    ),
]


@pytest.mark.parametrize(("names", "series"), WIDE)
def test_tickers_of_the_wide_layout(names: list[Any], series: dict[str, dict[str, int]]) -> None:
    assert find_columns(names).series == series


REFUSED: list[tuple[list[Any], str]] = [
    (["date", "4. close", "2. high", "5. volume"], r"'4. close', '2. high', '5. volume'\) but no column 'ticker'"),
    (["date", "Open", "High", "Low"], r"'Open', 'High', 'Low'\) but no column 'ticker'"),
    (["date", "o", "h", "l", "c", "v"], r"'o', 'h', 'l', 'c', 'v'\) but no column 'ticker'"),
    (["date", "AAA", "Close"], r"'Close' does not look like one: leave it out"),
    (["date", "AAA", "Volume"], r"'Volume' does not look like one"),
    (["date", "AAA", "vwap", "Dividends"], r"'vwap', 'Dividends' does not look like one"),
    (["date", "AAA", "Low"], r"'Low' does not look like one"),
    (["date", "OPEN", "HIGH", "LOW", "LAST"], r"'OPEN', 'HIGH', 'LOW', 'LAST'\) but no column 'ticker'"),
    (["date", "year", "AAA"], r"'year' does not look like one"),
    (["date", "timestamp", "AAA"], r"'timestamp' does not look like one"),
    (["date", "AAA", "AAA_volume"], r"what the column 'AAA' is: 'AAA_volume' looks like the field of a ticker"),
    ([("Close", "AAA"), ("Beta", "AAA"), "Date"], r"what the column \"\('Beta', 'AAA'\)\" is"),
    ([("x", "Close", "AAA"), "Date"], r"what the column \"\('x', 'Close', 'AAA'\)\" is"),
    ([("Volume", "AAA"), "Date"], r"of 'AAA' there are .* but no close"),
    (["date", "ticker", "close", "adj_factor"], r"'adj_factor' looks like an adjusted price or a factor"),
    (["date", "ticker", "close", "adj_cls"], r"'adj_cls' looks like an adjusted price"),
    (["date", "ticker", "Schlusskurs", "bereinigter Kurs"], r"'bereinigter Kurs' looks like an adjusted price"),
    (["date", "ticker", "close", "total_return_index"], r"'total_return_index' looks like an adjusted price"),
    (["date", "ticker", "adjusted", "adj_close"], r"'adjusted' and 'adj_close' are both adjusted closes"),
    (["date", "ticker", "volume"], r"no column 'adj_close'"),
    (["date", "AAA", "BBB", "AAA"], r"two columns are called 'AAA'"),
    (["date", "aaa", "AAA"], r"two columns are called 'aaa', apart from case"),
    (["AAA", "__index_level_0__"], r"no column 'date'"),
    (["date", "__index_level_0__"], r"no column besides 'date'"),
]


@pytest.mark.parametrize(("names", "message"), REFUSED)
def test_what_cannot_be_attributed_is_refused_by_name(names: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_columns(names)


def test_levels_of_names_and_an_index_without_a_name() -> None:
    assert level_names("('Close', 'AAA')") == ("Close", "AAA")
    assert level_names("('Date', '')") == "Date"
    for odd in ("AAA", "(AAA", "(1, 2)", "('A')", "(" * 300):
        assert level_names(odd) == odd
    found = find_columns(["AAA", "__index_level_0__"], index={"__index_level_0__"}, days={1})
    assert (found.date, found.counters) == (1, {})
    assert find_columns(["Unnamed: 0", "date", "AAA", "index", "row_id"]).counters == {0: True, 3: False, 4: False}
