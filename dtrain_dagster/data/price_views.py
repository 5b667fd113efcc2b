"""The views of a database over a user's price file: its cells as texts, then one row per ticker and day, then checked.

A file has one of two layouts: the columns ``date``, ``ticker`` and ``adj_close``, beside which others are not read; or
``date`` and a column of adjusted closes per ticker. A column of the second layout that does not look like a ticker is
refused: it would be trained on as one. Writing is `dtrain_dagster.data.prices`.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain_dagster.data.errors import DataError, refuse
from dtrain_dagster.data.price_file import GivenFile, quoted

if TYPE_CHECKING:
    import duckdb

FIRST_DAY, LAST_DAY = datetime.date(1800, 1, 1), datetime.date(2200, 1, 1)
MOST_COLUMNS = 50_000
"""The most columns of a file. No market has more tickers; the engine holds a part of each."""
COLUMN_MEMORY = 0.75
"""Further megabytes for each column: of a wide file the engine holds a part of each column at a time."""
_MANY_COLUMNS = 100
"""The number of columns from which on one thread reads, since each thread holds a part of each column."""
DATE, TICKER, ADJUSTED = "date", "ticker", "adj_close"
_LAYOUTS = "give the columns date, ticker and adj_close, or date and a column of adjusted closes per ticker"
_FIELD = re.compile(
    "adj(usted|close)?|close|prices?|volume|vwap|dividends?|splits?|symbol|ticker|date|day|datetime|timestamp|year|"
    "quarter|month|week|weekday|hour|minute|time"
)
"""Words in names of fields, which no ticker has."""
_FIELD_OR_TICKER = re.compile("open|high|low|last|vol|id|index|idx|row")
"""Words that are names of fields, and in capitals of tickers."""
_NAMELESS = re.compile(r"__index_level_\d+__|unnamed: *\d+(\.\d+)?|level_\d+|", re.IGNORECASE)
_LONGEST_TICKER = 64
_NAME = f"a name of {_LONGEST_TICKER} letters at most, on one line"
_WHEN = r"^\s*(\d{4}[-/]\d{1,2}[-/]\d{1,2})([T ]0{1,2}:00(:00([.]0+)?)?)?\s*$"
"""A day as its first group, perhaps with its midnight. Another time may be of another day, in the exchange's zone."""


@dataclass(frozen=True, slots=True)
class PriceColumns:
    """The places of columns in a file."""

    date: int
    ticker: int | None
    """None where each ticker has a column of its own."""
    prices: Mapping[str, int]
    """The place of ``adj_close``, or of each ticker's adjusted closes."""


def find_columns(names: Sequence[str]) -> PriceColumns:
    """Return what the columns of these names are, apart from case, blanks, ``-`` and ``_``. Pure. Raise `DataError`,
    which names the column and the remedy."""
    keys = [re.sub(r"[ _-]+", "_", name.strip().lstrip("\ufeff").lower()) for name in names]
    count = Counter(keys)
    if twice := [name for name, key in zip(names, keys, strict=True) if count[key] > 1 and not is_nameless(name)]:
        raise DataError(
            f"two columns are called {twice[0]!r}, apart from case, '-' and '_'; rename one, or leave it out"
        )
    places = {key: place for place, key in enumerate(keys)}
    shown = f"{list(names[:8])}{' …' if len(names) > 8 else ''}"
    if DATE not in places:
        raise DataError(f"there is no column 'date' among {shown}: {_LAYOUTS}")
    date = places[DATE]
    if TICKER in places:
        if ADJUSTED not in places:
            raise DataError(
                f"there is no column 'adj_close' among {shown}: give the closes that are adjusted for splits and "
                "dividends this name"
            )
        return PriceColumns(date, places[TICKER], {ADJUSTED: places[ADJUSTED]})
    if ADJUSTED in places:
        raise DataError(f"there is a column 'adj_close' but no column 'ticker' among {shown}: {_LAYOUTS}")
    prices = {name: place for place, name in enumerate(names) if place != date}
    if not prices:
        raise DataError(f"there is no column besides {names[date]!r}; add one column of prices per ticker")
    odd = next((name for name in prices if not _may_be_ticker(name)), None)
    if odd is not None:
        raise DataError(
            f"every column besides the date is a ticker, and {odd!r} does not look like one: leave it out (index=False "
            f"for the index of a table), rename it, or {_LAYOUTS}"
        )
    return PriceColumns(date, None, prices)


def _may_be_ticker(name: str) -> bool:
    words = re.split(r"[\W_]+", name.lower())
    if is_nameless(name) or any(map(_FIELD.fullmatch, words)):
        return False
    return not any(map(_FIELD_OR_TICKER.fullmatch, words)) or (name.isupper() and len(words) == 1)


def is_nameless(name: str) -> bool:
    """Return whether a name is none: empty, or what programs call an index that has none. Pure."""
    return bool(_NAMELESS.fullmatch(name.strip().lstrip("\ufeff")))


def make_views(database: duckdb.DuckDBPyConnection, given: GivenFile, memory_limit: int) -> int:
    """Create the view ``clean``: line (counted from 1), ticker, date and adjusted close of each row; return
    the lines of the header, 0 of Parquet.

    Raise `DataError` for columns and cells that cannot be used, and what the engine raises for a file that is none.
    """
    names, cells, headers = _load(database, given, memory_limit)
    try:
        _to_long(database, find_columns(names), cells)
        _refuse_bad_cells(database, headers)
    except DataError as error:
        raise DataError(f"{given.origin}: {error}") from None
    return headers


def _load(database: duckdb.DuckDBPyConnection, given: GivenFile, memory_limit: int) -> tuple[list[str], list[str], int]:
    """Create the view ``raw`` of the file's cells, with ``__line`` counting rows from 1; return the names of its
    columns, the SQL of each one's cells as text, and the lines of the header."""
    reader = f"read_parquet('{given.engine_path}')" if given.is_parquet else given.csv
    columns = database.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()
    if len(columns) > MOST_COLUMNS:
        raise DataError(f"{given.origin} has {len(columns):,} columns; at most {MOST_COLUMNS:,} are read")
    threads = 1 if len(columns) > _MANY_COLUMNS else 2
    memory = memory_limit + math.ceil(COLUMN_MEMORY * len(columns))
    database.execute(f"SET memory_limit='{memory}MB'; SET threads={threads}")
    database.execute("SET lock_configuration=true")
    cells = [quoted(column[0]) for column in columns]
    numbered = f'SELECT row_number() OVER () AS "__line", * FROM {reader}'
    if given.is_parquet:
        if zoned := [column[0] for column in columns if column[1] == "TIMESTAMP WITH TIME ZONE"]:
            raise DataError(f"{given.origin}: {zoned[0]} has times with a zone: convert them to dates")
        database.execute(f"CREATE VIEW raw AS {numbered}")
        return given.parquet_schema().names, [f"{cell}::VARCHAR" for cell in cells], 0
    database.execute(
        f'CREATE VIEW raw AS SELECT "__line" - 1 AS "__line", {", ".join(cells)} FROM ({numbered}) WHERE "__line" > 1'
    )
    names = given.header(database)
    for place, name in enumerate(names):
        if place and not name:
            found = database.execute(f'SELECT min("__line") FROM raw WHERE {cells[place]} IS NOT NULL').fetchall()[0][0]
            if found:
                raise DataError(
                    f"{given.origin}: {place_of(found, 1)} has a cell in column {place + 1}, which has no name"
                )
    return names, cells, 1


def place_of(line: int, headers: int) -> str:
    """Return where a row is in its file, in words. Pure."""
    return f"line {line + headers}" if headers else f"row {line}"


def _to_long(database: duckdb.DuckDBPyConnection, columns: PriceColumns, texts: Sequence[str]) -> None:
    """Create the view ``long`` of texts: line, date, ticker and adjusted close."""
    start = f'"__line" AS line, {texts[columns.date]} AS date'
    if columns.ticker is not None:
        ticker, price = texts[columns.ticker], texts[columns.prices[ADJUSTED]]
        database.execute(
            f"CREATE VIEW long AS SELECT {start}, trim({ticker}) AS ticker, {price} AS {ADJUSTED} FROM raw"
        )
        return
    cells = ", ".join(f"coalesce({texts[place]}, '') AS c{place}" for place in columns.prices.values())
    sets = ", ".join("c{} AS '{}'".format(place, name.replace("'", "''")) for name, place in columns.prices.items())
    database.execute(
        f"CREATE VIEW long AS SELECT * FROM (UNPIVOT (SELECT {start}, {cells} FROM raw) "
        f" ON {sets} INTO NAME ticker VALUE {ADJUSTED}) WHERE trim({ADJUSTED}) <> ''"
    )  # an empty cell: not listed on that day


def _refuse_bad_cells(database: duckdb.DuckDBPyConnection, headers: int) -> None:
    """Create the view ``clean``. Raise `DataError` with the first cell of each column that it must not hold."""
    day = f"TRY_CAST(regexp_extract(date, '{_WHEN}', 1) AS DATE)"
    checks = {
        "date": f"NOT coalesce({day} BETWEEN DATE '{FIRST_DAY}' AND DATE '{LAST_DAY}', false)",
        "ticker": f"coalesce(ticker, '') = '' OR length(ticker) > {_LONGEST_TICKER} "
        "OR regexp_matches(ticker, '[[:cntrl:]]')",
        ADJUSTED: f"NOT coalesce(isfinite(TRY_CAST({ADJUSTED} AS DOUBLE)), false)",
    }
    wanted = {"date": "a date such as 2020-01-31, without a time", "ticker": _NAME, ADJUSTED: "a number"}
    firsts = ", ".join(f"min(line) FILTER (WHERE {is_bad})" for is_bad in checks.values())
    lines = database.execute(f"SELECT {firsts} FROM long").fetchall()[0]
    problems = []
    for (column, is_bad), line in zip(checks.items(), lines, strict=True):
        if line is not None:
            ticker, value = database.execute(
                f"SELECT ticker, {column} FROM long WHERE line = {line} AND {is_bad}"
            ).fetchall()[0]
            held = "is empty" if value is None or not str(value).strip() else f"holds {value!r}"
            problems.append(f"{place_of(line, headers)}, ticker {ticker!r}: {column} {held}, not {wanted[column]}")
    refuse(problems)
    price = f"TRY_CAST({ADJUSTED} AS DOUBLE) AS {ADJUSTED}"
    database.execute(f"CREATE VIEW clean AS SELECT line, ticker, {day} AS date, {price} FROM long")
