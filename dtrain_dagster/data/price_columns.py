"""What the columns of a price file are, by their names: the date, the ticker, prices and volume, or a ticker each.

Decisions only: the file is read in `dtrain_dagster.data.price_views`. A name that looks like a price but cannot be
attributed is refused: it would be trained on as a ticker, or left out where it is the adjusted price.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dtrain_dagster.data.errors import DataError

Name = str | tuple[str, ...]
"""The name of a column; a tuple where columns have several levels of names, as those of yfinance have."""
ADJUSTED, CLOSE = "adj_close", "close"
EXTRA = ("open", "high", "low", CLOSE, "volume")
_DATES = ("date", "day", "timestamp", "datetime", "datum", "tradedate", "tradingdate", "tradingday", "pricedate")
_TICKERS = (
    "ticker", "symbol", "tickersymbol", "tic", "ric", "isin", "cusip", "figi", "wkn", "permno", "instrument",
    "security", "stock", "asset", "code", "name",
)  # fmt: skip
_FIELDS = {
    ADJUSTED: (
        "adjclose", "adjustedclose", "adjprice", "adjustedprice", "adjusted", "closeadj", "closeadjusted", "priceadj",
        "priceadjusted", "adjcloseprice", "adjustedcloseprice", "adjclosingprice", "adjustedclosingprice", "adjlast",
        "adjprc", "fclose",
    ),
    CLOSE: (
        "close", "closeprice", "closingprice", "priceclose", "pxlast", "last", "lastprice", "price", "schlusskurs",
        "schluss", "kurs", "closeunadj", "closeunadjusted", "unadjclose", "unadjustedclose", "rawclose", "uclose",
    ),
    "open": ("open", "openprice", "openingprice", "priceopen", "pxopen", "eröffnung", "eroeffnung", "erster"),
    "high": ("high", "highprice", "pricehigh", "pxhigh", "hoch", "tageshoch"),
    "low": ("low", "lowprice", "pricelow", "pxlow", "tief", "tagestief"),
    "volume": ("volume", "vol", "pxvolume", "volumen", "totalvolume", "tradedvolume"),
}  # fmt: skip
"""Fields, and the names that each has, without spaces, points, hyphens and underscores. The first one counts that is
there; of several adjusted closes none."""
_LETTERS = {"open": "o", "high": "h", "low": "l", CLOSE: "c", "volume": "v"}
"""Abbreviations of fields. All are tickers, too."""
_BESIDE = frozenset({
    "vwap", "dividends", "dividendamount", "divcash", "exdividend", "stocksplits", "splitratio", "splitfactor",
    "splitcoefficient", "capitalgains", "openinterest", "openint", "adjopen", "adjhigh", "adjlow", "adjvolume",
})  # fmt: skip
"""What often comes with prices, and is not read."""
_CALENDAR = frozenset({"year", "quarter", "month", "week", "weekday", "dayofweek", "hour", "minute", "time"})
_KNOWN = {alias: field for field, aliases in _FIELDS.items() for alias in aliases} | dict.fromkeys(_BESIDE, "")
_TICKERS_TOO = frozenset({*_FIELDS["open"], *_FIELDS["high"], *_FIELDS["low"], "last", "vol", "kurs"})
_MANY = 3
"""Fields in a file from which on LOW and OPEN are no tickers in it."""
_COUNTERS = frozenset({"index", "idx", "id", "row", "rowid", "rowindex", "rownumber", "nr", "obs"})
_ADJUSTING = re.compile("(?<!un)(adj|bereinigt|ajust)|totalreturn")
"""What is in the names of adjusted prices, in some languages, and in those of factors by which prices are adjusted."""
_NAMELESS = re.compile(r"__index_level_\d+__|unnamed: *\d+(\.\d+)?|level_\d+|", re.IGNORECASE)
_DECORATION = re.compile(r"^\ufeff?\s*\d+[a-z]?\.\s+|\s*\([^)]*\)\s*$")
"""The number before a name of Alpha Vantage, and a currency in brackets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceColumns:
    """The places of columns in a file, by what they are."""

    date: int
    ticker: int | None
    """None where each ticker has columns of its own."""
    series: Mapping[str, Mapping[str, int]]
    """The places of ``adj_close`` and of `EXTRA`, by ticker; by "" where a column says the ticker."""
    counters: Mapping[int, bool]
    """Columns that may be the index of a table, beside tickers, and whether they can be nothing else."""
    notes: tuple[str, ...]
    """What a person should know of the choice."""


def level_names(name: str) -> Name:
    """Return the levels of a name that pandas has written as a tuple, any other name as it is. Pure."""
    if name.startswith("("):
        try:
            found = ast.literal_eval(name)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return name
        if isinstance(found, tuple) and len(found) > 1 and all(isinstance(part, str) for part in found):
            return found if any(found[1:]) else found[0]
    return name


def is_nameless(name: str) -> bool:
    """Return whether a name is none: empty, or what programs call an index that has none. Pure."""
    return bool(_NAMELESS.fullmatch(name.strip().lstrip("\ufeff")))


def may_count_rows(name: str) -> bool:
    """Return whether a column of this name is the index of a table, if it holds nothing but whole numbers, each once.
    Pure."""
    return is_nameless(name) or _key(name) in _COUNTERS


def find_columns(names: Sequence[Name], index: Collection[str] = (), days: Collection[int] = ()) -> PriceColumns:
    """Return what the columns are. ``index``: the names of those that pandas has written as its index; ``days``: the
    places of those whose type is a day or a time. Pure. Raise `DataError`, whose message names the column and the
    remedy."""
    shown = [name if isinstance(name, str) else str(name) for name in names]
    _refuse_twice(shown)
    keys = [_key(name) for name in names]
    counters = {
        place: is_nameless(name) or name in index
        for place, name in enumerate(shown)
        if name in index or may_count_rows(name)
    }
    date = _first(dict(enumerate(keys)), _DATES)
    if date is None:  # an index of dates has no name until it is given one
        date = next((place for place in counters if place in days), None)
    if date is None:
        raise DataError(f"there is no column 'date' among {_few(shown)}; give the column of dates this name")
    ticker = _first(dict(enumerate(keys)), _TICKERS)
    others = {place: name for place, name in enumerate(names) if place not in (date, ticker, *counters)}
    if ticker is not None:
        fields, notes = _fields_of(others, may_be_letters=True)
        if ADJUSTED not in fields:
            raise DataError(f"there is no column 'adj_close' among {_few(shown)}; add the adjusted close")
        return PriceColumns(date=date, ticker=ticker, series={"": fields}, counters={}, notes=notes)
    counters.pop(date, None)
    if not others and all(counters.values()):
        raise DataError(f"there is no column besides {shown[date]!r}; add one column of prices per ticker")
    pairs = {place: pair_of(name) for place, name in others.items()}
    if any(pairs.values()) or any(not isinstance(name, str) for name in others.values()):
        series, notes = _by_ticker(pairs, shown)
    else:
        _refuse_fields({place: keys[place] for place in others}, shown)
        series, notes = {shown[place]: {ADJUSTED: place} for place in others}, ()
    return PriceColumns(date=date, ticker=None, series=series, counters=counters, notes=notes)


def _key(name: Name) -> str:
    """Return a name as the lists above have it: "4. close", "<CLOSE>" and "Close*" are "close"."""
    return re.sub(r"[\W_]", "", _DECORATION.sub("", name.lower())) if isinstance(name, str) else ""


def _first(keys: Mapping[int, str], aliases: Sequence[str]) -> int | None:
    """Return the place of the first alias that is among the keys."""
    places = {key: place for place, key in reversed(list(keys.items()))}
    return next((places[alias] for alias in aliases if alias in places), None)


def _few(names: Sequence[str]) -> str:
    return f"{list(names[:8])}{' …' if len(names) > 8 else ''}"


def _refuse_twice(names: Sequence[str]) -> None:
    """Raise `DataError` for two columns of one name: a reader renames the second, and it would be another ticker."""
    plain = [name.strip().lstrip("\ufeff").lower().replace(" ", "_").replace("-", "_") for name in names]
    count = Counter(plain)
    twice = [name for name, text in zip(names, plain, strict=True) if count[text] > 1 and not is_nameless(name)]
    if twice:
        raise DataError(
            f"two columns are called {twice[0]!r}, apart from case, '-' and '_'; rename one, or leave it out"
        )


def _fields_of(columns: Mapping[int, Name], may_be_letters: bool = False) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the places of the fields among columns, with ``adj_close`` where there is any price, and notes. Raise
    `DataError` where it cannot be said which the adjusted close is."""
    keys = {place: _key(name) for place, name in columns.items()}
    found = {field: place for field in EXTRA if (place := _first(keys, _FIELDS[field])) is not None}
    adjusted = [place for place, key in keys.items() if _KNOWN.get(key) == ADJUSTED]
    if len(adjusted) > 1:
        raise DataError(
            f"{' and '.join(repr(columns[place]) for place in adjusted)} are both adjusted closes: call the one to "
            "train on adj_close, and leave the other out"
        )
    if adjusted:
        return {ADJUSTED: adjusted[0], **found}, ()
    if odd := [place for place, key in keys.items() if _ADJUSTING.search(key)]:
        raise DataError(
            f"the column {columns[odd[0]]!r} looks like an adjusted price or a factor, but none is called adj_close: "
            "give the adjusted close this name, or leave this column out to train on closes as they are"
        )
    if may_be_letters and CLOSE not in found:
        letters = {field: _first(keys, [letter]) for field, letter in _LETTERS.items()}
        found = {field: place for field, place in letters.items() if place is not None} | found
    if CLOSE not in found:
        return {}, ()
    close = found.pop(CLOSE)
    note = (
        f"there is no adjusted close: {columns[close]!r} is taken as it is. Where it is not adjusted for splits and "
        "dividends, returns on those days are wrong; give adjusted closes as adj_close"
    )
    return {ADJUSTED: close, **found}, (note,)


def pair_of(name: Name) -> tuple[str, str] | None:
    """Return the ticker and the field of a name that holds both, in any order: "AAA.Close", ("Close", "AAA")."""
    if not isinstance(name, str):
        cuts = [name] if len(name) == 2 else []
    elif _key(name) in _KNOWN:
        return None
    else:
        cuts = [(name[: cut.start()], name[cut.end() :]) for cut in re.finditer(r"[ ._/|:-]+", name)]
    for left, right in cuts:
        for ticker, field in ((left, right), (right, left)):
            if _key(field) in _KNOWN and ticker.strip():
                return ticker.strip(), field
    return None


def _by_ticker(
    pairs: Mapping[int, tuple[str, str] | None], shown: Sequence[str]
) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
    """Return the fields of each ticker, and notes. Raise `DataError` where a column is of no ticker, or has no field
    that is known."""
    columns: dict[str, dict[int, Name]] = {}
    for place, pair in pairs.items():
        if pair is None:
            other = next((shown[each] for each, found in pairs.items() if found), None)
            raise DataError(
                f"it is not clear what the column {shown[place]!r} is"
                + (f": {other!r} looks like the field of a ticker, but it does not" if other else "")
                + ". Give one column of adjusted closes per ticker, or the columns date, ticker and adj_close"
            )
        columns.setdefault(pair[0], {})[place] = pair[1]
    series, notes = {}, dict[str, None]()
    for ticker, found in columns.items():
        series[ticker], more = _fields_of(found)
        notes |= dict.fromkeys(more)
        if ADJUSTED not in series[ticker]:
            raise DataError(f"of {ticker!r} there are {_few([shown[place] for place in found])}, but no close; add it")
    return series, tuple(notes)


def _refuse_fields(keys: Mapping[int, str], shown: Sequence[str]) -> None:
    """Raise `DataError` for columns that would be taken for tickers, and look like fields of one ticker."""
    fields = [place for place, key in keys.items() if key in _KNOWN]
    if set(_LETTERS.values()) - {"v"} <= set(keys.values()) <= {*_LETTERS.values(), *_KNOWN, "n", "vw"}:
        fields = list(keys)
    odd = [place for place in fields if keys[place] not in _TICKERS_TOO or not shown[place].isupper()]
    odd += [place for place, key in keys.items() if key in _CALENDAR or key in _DATES]
    if len(fields) >= _MANY:
        odd = sorted({*odd, *fields})
    if not odd:
        return
    names = ", ".join(repr(shown[place]) for place in odd[:8])
    if len(fields) == len(keys):
        raise DataError(
            f"there are columns of one ticker ({names}) but no column 'ticker' among {_few(shown)}; add it, or give "
            "one column of prices per ticker"
        )
    raise DataError(
        f"every column besides the date is a ticker, and {names} does not look like one: leave it out, rename it, or "
        "give the columns date, ticker and adj_close"
    )
