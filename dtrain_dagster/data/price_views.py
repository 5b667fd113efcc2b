"""The views of a database over a user's price file: its cells as texts, then one row per ticker and day, then checked.

Which column is what is decided in `dtrain_dagster.data.price_columns`; writing is `dtrain_dagster.data.prices`.
"""

from __future__ import annotations

import datetime
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError, refuse
from dtrain_dagster.data.price_columns import (
    ADJUSTED,
    EXTRA,
    Name,
    PriceColumns,
    find_columns,
    level_names,
    pair_of,
)

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from dtrain_dagster.data.price_file import GivenFile

FIRST_DAY, LAST_DAY = datetime.date(1800, 1, 1), datetime.date(2200, 1, 1)
MOST_DAYS = (LAST_DAY - FIRST_DAY).days + 1
"""The most rows of a ticker."""
MOST_COLUMNS = 50_000
"""The most columns of a file. No market has more tickers; the engine holds a part of each."""
COLUMN_MEMORY = 0.75
"""Further megabytes for each column: of a wide file the engine holds a part of each column at a time."""
_MANY_COLUMNS = 100
"""The number of columns from which on one thread reads, since each thread holds a part of each column."""
_LONGEST_TICKER = 64
_NAME = f"a name of {_LONGEST_TICKER} letters at most, on one line"
_CSV_BUFFER = 8 << 20
_MOST_HEADERS = 3
"""Lines of a header with two levels of names, and the line that names the column of dates."""
_DAY = r"^\s*(\d{4}[-/]\d{1,2}[-/]\d{1,2})"
_TIME = r"([T ]+(\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?))?"
_ZONE = r"\s*(Z|[+-]\d{2}(:?\d{2})?|[A-Z]{2,5}|[A-Za-z]+/[A-Za-z_/+-]+\d*)?\s*$"
_WHEN = f"{_DAY}{_TIME}{_ZONE}"
"""A day as its first group, the time of that day as its third, and the zone as its sixth."""
_UTC = ("UTC", "GMT", "Zulu", "Universal", "UCT", "Greenwich", "GMT0", "GMT+0", "GMT-0")
_NUMBER = re.compile(r"[-+.\d]")
_OFFSET = re.compile(r"([+-])(\d{2}):?(\d{2})")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileColumns:
    """The columns of a file as the engine has them."""

    names: Sequence[Name]
    texts: Sequence[str]
    """The SQL of each column's cells as text; a time with a zone is shown in that zone."""
    index: frozenset[str]
    """The names of those that pandas has written as its index."""
    days: frozenset[int]
    """The places of those that hold a day or a time, as far as that is known without reading them."""
    headers: int
    """The lines of the header; 0 of Parquet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceViews:
    """What was made of a file."""

    origin: str
    headers: int
    numbers: tuple[str, ...]
    """The columns of ``clean`` that are numbers, the price first."""
    notes: tuple[str, ...]
    """What a person should know of the choice of columns."""
    calendar: str | None
    """The exchange in whose zone the days are; None where they are as the file shows them."""

    def place(self, line: int) -> str:
        """Return the words for a row of ``clean``."""
        return _place(line, self.headers)


def make_views(
    database: duckdb.DuckDBPyConnection, given: GivenFile, memory_limit: int, calendar: str | None
) -> PriceViews:
    """Create the view ``clean``: line (counted from 1), ticker, date and numbers of each row.

    ``calendar``: the exchange in whose zone a time in UTC has its day. Raise `DataError` for columns and cells that
    cannot be used, and what the engine raises for a file that is none.
    """
    found = _load(database, given, memory_limit)
    try:
        columns = find_columns(found.names, found.index, found.days)
        tickers, notes = _without_counters(database, found, columns)
        zone = _zone_of_days(database, found, columns.date, calendar)
        numbers = _to_long(database, found, columns, tickers)
        _refuse_bad_cells(database, numbers, found.headers, zone)
    except DataError as error:
        raise DataError(f"{given.origin}: {error}") from None
    return PriceViews(
        origin=given.origin,
        headers=found.headers,
        numbers=numbers,
        notes=(*columns.notes, *notes),
        calendar=calendar if zone else None,
    )


def open_calendar(code: str, **bounds: Any) -> Any:
    """Return an exchange's calendar. Raise `DataError` for an unknown one, ValueError where it has no such days."""
    import exchange_calendars as xc

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of pandas, about how this package uses it
            return xc.get_calendar(code, **bounds)
    except xc.errors.InvalidCalendarName as error:
        raise DataError(
            f"DTRAIN_CALENDAR={code!r} is not an exchange calendar: use a code such as XNYS or XLON, or none"
        ) from error


def refuse_bad_rows(database: duckdb.DuckDBPyConnection, views: PriceViews) -> None:
    """Raise `DataError` for the first row that is repeated or out of order."""
    order = (
        "SELECT line, ticker, date, lag(date) OVER before AS earlier FROM clean "
        "WINDOW before AS (PARTITION BY ticker ORDER BY line)"
    )
    twice = database.execute(
        "SELECT line, ticker, date FROM (SELECT *, row_number() OVER (PARTITION BY ticker, date ORDER BY line) AS nth "
        "FROM clean) WHERE nth > 1 ORDER BY line LIMIT 1"
    ).fetchone()
    if twice:
        line, ticker, date = twice
        raise DataError(
            f"{views.origin}: {views.place(line)}: {ticker} has {date} a second time; remove one of the rows"
        )
    back = database.execute(f"SELECT * FROM ({order}) WHERE earlier > date ORDER BY line LIMIT 1").fetchone()
    if back:
        line, ticker, date, earlier = back
        raise DataError(
            f"{views.origin}: {views.place(line)}: {ticker} goes back from {earlier} to {date}; sort the rows by date"
        )


def _load(database: duckdb.DuckDBPyConnection, given: GivenFile, memory_limit: int) -> FileColumns:
    """Create the view ``raw`` of the file's cells, with ``__line`` counting rows from 1; return its columns."""
    path = given.engine_path  # made here: nothing in it needs quoting
    reader = (
        f"read_parquet('{path}')"
        if given.is_parquet
        else f"read_csv('{path}', all_varchar=true, header=false, null_padding=true, quote='\"', escape='\"', "
        f"buffer_size={_CSV_BUFFER}, compression='{given.packing}')"
    )
    columns = [row[0] for row in database.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()]
    if len(columns) > MOST_COLUMNS:
        raise DataError(f"{given.origin} has {len(columns):,} columns; at most {MOST_COLUMNS:,} are read")
    threads = 1 if len(columns) > _MANY_COLUMNS else 2
    memory = memory_limit + math.ceil(COLUMN_MEMORY * len(columns))
    database.execute(f"SET memory_limit='{memory}MB'; SET threads={threads}")
    database.execute("SET lock_configuration=true")
    cells = [f"{_quoted(name)}" for name in columns]
    numbered = f'SELECT row_number() OVER () AS "__line", * FROM {reader}'
    if given.is_parquet:
        database.execute(f"CREATE VIEW raw AS {numbered}")
        return _parquet_columns(database, given.parquet_schema(), cells, given.origin)
    head = database.execute(f"SELECT * FROM {reader} LIMIT {_MOST_HEADERS + 1}").fetchall()
    names, headers = _csv_names(head)
    database.execute(
        f'CREATE VIEW raw AS SELECT "__line" - {headers} AS "__line", {", ".join(cells)} FROM ({numbered}) '
        f'WHERE "__line" > {headers}'
    )
    for place, name in enumerate(names):
        if place and not str(name).strip():
            found = database.execute(f'SELECT min("__line") FROM raw WHERE {cells[place]} IS NOT NULL').fetchall()[0][0]
            if found:
                raise DataError(
                    f"{given.origin}: {_place(found, headers)} has a cell in column {place + 1}, which has no name"
                )
    is_dated = len(head) > headers and re.match(_DAY, head[headers][0] or "")
    return FileColumns(
        names=names, texts=cells, index=frozenset(), days=frozenset([0] if is_dated else []), headers=headers
    )


def _csv_names(head: Sequence[tuple[Any, ...]]) -> tuple[list[Name], int]:
    """Return the names of the columns of a CSV file, and the lines of its header, by its first lines. Pure. Columns
    with two levels of names have a line for each, and mostly a third that names the dates."""
    lines = [[str(cell or "").strip() for cell in line] for line in head]
    if not lines:
        return [], 1
    if len(lines) > 2 and lines[0][1:] and all(lines[1][1:]) and not re.match(_DAY, lines[1][0]):
        levels: list[Name] = list(zip(lines[0][1:], lines[1][1:], strict=True))
        if all(pair is not None and not _NUMBER.match(pair[0]) for pair in map(pair_of, levels)):
            is_third = bool(lines[2][0]) and not any(lines[2][1:])
            return [lines[2][0] if is_third else "", *levels], _MOST_HEADERS if is_third else _MOST_HEADERS - 1
    return list(lines[0]), 1


def _parquet_columns(
    database: duckdb.DuckDBPyConnection, schema: pa.Schema, cells: Sequence[str], origin: str
) -> FileColumns:
    """Return the columns of a Parquet file. Raise `DataError` for a time zone that is not known."""
    import pyarrow as pa

    texts, days = [], set()
    for place, (field, cell) in enumerate(zip(schema, cells, strict=True)):
        if pa.types.is_temporal(field.type):
            days.add(place)
        zone = field.type.tz if pa.types.is_timestamp(field.type) else None
        texts.append(f"{cell}::VARCHAR" if zone is None else _shown_in(database, zone, cell, f"{origin}: {field.name}"))
    index = (schema.pandas_metadata or {}).get("index_columns", ())
    return FileColumns(
        names=[level_names(name) for name in schema.names],
        texts=texts,
        index=frozenset(name for name in index if isinstance(name, str)),
        days=frozenset(days),
        headers=0,
    )


def _shown_in(database: duckdb.DuckDBPyConnection, zone: str, cell: str, what: str) -> str:
    """Return the SQL of a time as text, as it is in its zone; one in UTC says so."""
    shown, form = f"timezone('UTC', {cell})", "'%Y-%m-%d %H:%M:%S'"
    name = zone.removeprefix("Etc/")
    offset = _OFFSET.fullmatch(zone)
    if name in _UTC or (offset and not int(offset[2] + offset[3])):
        return f"strftime({shown}, {form}) || 'Z'"
    if offset:
        minutes = int(f"{offset[1]}{int(offset[2]) * 60 + int(offset[3])}")
        return f"strftime({shown} + INTERVAL '{minutes} minutes', {form})"
    if not database.execute("SELECT count(*) FROM pg_timezone_names() WHERE name = ?", [zone]).fetchall()[0][0]:
        raise DataError(f"{what} is in the time zone {zone!r}, which is not known: convert it to dates first")
    return f"strftime(timezone('{zone}', {cell}), {form})"


def _quoted(name: str) -> str:
    """Return a name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    """Return a text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def _place(line: int, headers: int) -> str:
    return f"line {line + headers}" if headers else f"row {line}"


def _without_counters(
    database: duckdb.DuckDBPyConnection, found: FileColumns, columns: PriceColumns
) -> tuple[Mapping[str, Mapping[str, int]], list[str]]:
    """Return the columns of each ticker, and notes: of columns that may be the index of a table, one that counts rows
    is left out, and another is a ticker if that can be. Raise `DataError` where it cannot."""
    tickers, notes = dict(columns.series), []
    for place, surely in columns.counters.items():
        name, text = str(found.names[place]), f"trim({found.texts[place]})"
        filled, different, whole = database.execute(
            f"SELECT count(*), count(DISTINCT x), coalesce(bool_and(x = floor(x)), false) FROM "
            f"(SELECT TRY_CAST({text} AS DOUBLE) AS x FROM raw WHERE {text} <> '')"
        ).fetchall()[0]
        if whole and filled == different:
            notes.append(f"the column {name!r} counts rows, as the index of a table does: it is left out")
        elif filled and surely:
            raise DataError(
                f"the column {name!r} is the index of a table, not a ticker: leave it out (index=False), or give it "
                "a name"
            )
        elif filled:
            tickers[name] = {ADJUSTED: place}
    if not tickers:
        raise DataError("there is no column of prices besides the index; add one column of prices per ticker")
    return tickers, notes


def _zone_of_days(
    database: duckdb.DuckDBPyConnection, found: FileColumns, date: int, calendar: str | None
) -> str | None:
    """Return the zone in which times have their day; None where they have it as they are shown, in their own zone.

    Times that are all in UTC, and not all at midnight, are of a zone that the file does not say. Raise `DataError`
    where no exchange says it either.
    """
    text = found.texts[date]
    zone, clock = (f"regexp_extract({text}, '{_WHEN}', {group})" for group in (6, 3))
    late = "FILTER (WHERE is_utc AND is_late)"  # than midnight
    line, shown, others = database.execute(
        f"SELECT min(line) {late}, arg_min(shown, line) {late}, count(*) FILTER (WHERE zone <> '' AND NOT is_utc) FROM "
        f'(SELECT "__line" AS line, {text} AS shown, {zone} AS zone, {_is_utc(zone)} AS is_utc, '
        f"regexp_matches({clock}, '[1-9]') AS is_late FROM raw)"
    ).fetchall()[0]
    if line is None or others:
        return None
    if calendar is None:
        raise DataError(
            f"{_place(line, found.headers)}: {shown!r} is a time in UTC, but the time zone of its day is not known: "
            "give dates, or times with the exchange's zone, or name the exchange in DTRAIN_CALENDAR"
        )
    return str(open_calendar(calendar).tz)


def _is_utc(zone: str) -> str:
    return f"regexp_full_match({zone}, 'Z|UTC|GMT|[+-]00(:?00)?')"


def _to_long(
    database: duckdb.DuckDBPyConnection,
    found: FileColumns,
    columns: PriceColumns,
    tickers: Mapping[str, Mapping[str, int]],
) -> tuple[str, ...]:
    """Create the view ``long`` of texts (line, date, ticker, numbers); return the names of the numbers."""
    given = {name for fields in tickers.values() for name in fields}
    numbers = (ADJUSTED, *(name for name in EXTRA if name in given))
    texts = found.texts
    start = f'"__line" AS line, {texts[columns.date]} AS date'
    if columns.ticker is not None:
        fields = tickers[""]
        cells = ", ".join(f"{texts[fields[name]]} AS {name}" for name in numbers)
        database.execute(
            f"CREATE VIEW long AS SELECT {start}, trim({texts[columns.ticker]}) AS ticker, {cells} FROM raw"
        )
        return numbers
    used = sorted({place for fields in tickers.values() for place in fields.values()})
    cells = ", ".join(f"coalesce({texts[place]}, '') AS c{place}" for place in used)
    sets = ", ".join(
        f"({', '.join(f'c{fields[name]}' if name in fields else 'nothing' for name in numbers)}) AS {_literal(ticker)}"
        for ticker, fields in tickers.items()
    )
    database.execute(
        f"CREATE VIEW long AS SELECT * FROM (UNPIVOT (SELECT {start}, {cells}, '' AS nothing FROM raw) "
        f" ON {sets} INTO NAME ticker VALUE {', '.join(numbers)}) WHERE trim({ADJUSTED}) <> ''"
    )  # an empty cell: not listed on that day
    return numbers


def _refuse_bad_cells(
    database: duckdb.DuckDBPyConnection, numbers: Sequence[str], headers: int, zone: str | None
) -> None:
    """Create the view ``clean``. Raise `DataError` with the first cell of each column that it must not hold."""
    day = (
        f"coalesce(TRY_CAST(regexp_extract(date, '{_WHEN}', 1) AS DATE), CASE WHEN regexp_full_match(trim(date), "
        "'[0-9]{8}') THEN TRY_STRPTIME(trim(date), '%Y%m%d')::DATE END)"
    )
    if zone is not None:
        utc = _is_utc(f"regexp_extract(date, '{_WHEN}', 6)")
        day = f"CASE WHEN {utc} THEN (TRY_CAST(date AS TIMESTAMPTZ) AT TIME ZONE '{zone}')::DATE ELSE {day} END"
    checks = {
        "date": f"NOT coalesce({day} BETWEEN DATE '{FIRST_DAY}' AND DATE '{LAST_DAY}', false)",
        "ticker": f"coalesce(ticker, '') = '' OR length(ticker) > {_LONGEST_TICKER} "
        "OR regexp_matches(ticker, '[[:cntrl:]]')",
        ADJUSTED: f"NOT coalesce(isfinite(TRY_CAST({ADJUSTED} AS DOUBLE)), false)",
        **{
            name: f"coalesce(trim({name}), '') <> '' AND NOT coalesce(isfinite(TRY_CAST({name} AS DOUBLE)), false)"
            for name in numbers[1:]
        },
    }
    firsts = ", ".join(f"min(line) FILTER (WHERE {is_bad})" for is_bad in checks.values())
    lines = database.execute(f"SELECT {firsts} FROM long").fetchall()[0]
    problems = []
    for (column, is_bad), line in zip(checks.items(), lines, strict=True):
        if line is not None:
            ticker, value = database.execute(
                f"SELECT ticker, {column} FROM long WHERE line = {line} AND {is_bad}"
            ).fetchall()[0]
            what = "a date such as 2020-01-31" if column == "date" else _NAME if column == "ticker" else "a number"
            held = "is empty" if value is None or not str(value).strip() else f"holds {value!r}"
            problems.append(f"{_place(line, headers)}, ticker {ticker!r}: {column} {held}, not {what}")
    refuse(problems)
    more = "".join(f", TRY_CAST({name} AS DOUBLE) AS {name}" for name in numbers)
    database.execute(f"CREATE VIEW clean AS SELECT line, ticker, {day} AS date{more} FROM long")
