"""The conversion of any price file into one shape: Parquet, sorted by ticker and date, one row group per ticker.

The folder is named after the content. A database engine that spills to disk reads, unpivots and sorts the file, so the
file may be larger than memory: `MEMORY_LIMIT` bounds the engine. The rest of the memory holds one ticker's history,
which the accepted range of dates bounds, and the header of a wide file.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.engines import DUCKDB, DataEngine
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.support.secrets import redact
from trainer.documents.reader import read_document
from trainer.documents.schemas import record, text, whole
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

    from dtrain_dagster.data.price_file import GivenFile
    from dtrain_dagster.data.sources import PriceSource

SCHEMA_VERSION = 1
MEMORY_LIMIT = 256
"""Megabytes that the engine may take for a file of a few columns."""
COLUMN_MEMORY = 0.75
"""Further megabytes for each column: of a wide file the engine holds a part of each column at a time."""
FIRST_DAY, LAST_DAY = datetime.date(1800, 1, 1), datetime.date(2200, 1, 1)
MOST_DAYS = (LAST_DAY - FIRST_DAY).days + 1
"""The most rows of a ticker."""
MOST_COLUMNS = 50_000
"""The most columns of a file. No market has more tickers; the engine holds a part of each."""
_LONGEST_TICKER = 64
_MANY_COLUMNS = 100
"""The number of columns from which on one thread reads, since each thread holds a part of each column."""
_DATE = ("date", "day", "timestamp", "datetime")
_TICKER = ("ticker", "symbol")
_PRICE = ("adj_close", "adjclose", "adjusted_close", "adj_price")
_EXTRA = ("open", "high", "low", "close", "volume")
_CSV_BUFFER = 8 << 20
_MANIFEST = record(
    {
        "prices_id": text,
        "source": record({"rows": whole(), "tickers": whole(), "first_date": text, "last_date": text, "sha256": text}),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PricesRef:
    """A reference to prices in the one shape."""

    uri: str
    """The folder with ``prices.parquet`` and ``manifest.json``."""
    prices_id: str
    rows: int
    tickers: int
    first_date: str
    last_date: str
    built: bool
    """False where the same content already existed."""

    @property
    def path(self) -> Path:
        """The Parquet file."""
        return Path(self.uri) / "prices.parquet"

    def manifest(self) -> dict[str, Any]:
        """Return the manifest. Raise `DataError` where there is none, `DamagedError` where it is damaged."""
        return _manifest(self.uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPrices(PricesRef):
    """A reference to the rows of prices up to a day, in the file of all (`dtrain_dagster.data.price_cut`)."""

    until: str
    """The last day that is read."""

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the file, with the figures of the rows that are read; raise as `PricesRef` does."""
        found = PricesRef.manifest(self)
        names = ("rows", "tickers", "first_date", "last_date", "until")
        return found | {"source": found["source"] | {name: getattr(self, name) for name in names}}


def write_prices(
    source: PriceSource, storage_uri: str, memory_limit: int = MEMORY_LIMIT, engine: DataEngine = DUCKDB
) -> PricesRef:
    """Convert prices into the one shape under ``<storage>/prices/<id>``, unless they exist there; return a reference.

    Raise `DataError` for a file that cannot be read as prices: empty, a missing column, text or nothing in place of a
    price, a row twice, a date out of order. Raise `OSError` where the disk is full. Nothing half-written is left
    behind.
    """
    from dtrain_dagster.data.price_file import opened  # not above: loading the code location needs neither
    from dtrain_dagster.support.building import building_in

    folder = Path(storage_uri) / "prices"
    with building_in(folder) as scratch:
        with opened(source.local_file(scratch), source.provenance.origin) as given:
            given.refuse_unusable()
            content = given.digest()
            prices_id = hashlib.sha256(f"{SCHEMA_VERSION}/{content}".encode()).hexdigest()[:16]
            target = folder / prices_id
            if (target / "manifest.json").exists():
                return _ref(target, built=False)
            building = scratch / "prices"
            building.mkdir()
            figures = _convert_on_disk(given, building / "prices.parquet", scratch, memory_limit, engine)
            given.refuse_changed()
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "prices_id": prices_id,
            "source": redact(asdict(source.provenance)) | {"sha256": content} | figures,
        }
        (building / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))
        try:
            building.rename(target)
        except OSError:
            if not (target / "manifest.json").exists():  # else another process has built it meanwhile
                raise
        return _ref(target, built=True)


def iter_tickers(ref: PricesRef) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield (ticker, its rows in order of date), one ticker in memory at a time. ``date`` is datetime64, prices
    float64. Of `CutPrices` no row after their last day is yielded, nor a ticker that begins later."""
    import pyarrow.parquet as pq

    until = ref.until if isinstance(ref, CutPrices) else None
    file = pq.ParquetFile(ref.path)  # a Path: a text could be taken for an address
    for group in range(file.num_row_groups):
        frame = file.read_row_group(group).to_pandas(date_as_object=False, use_threads=False)
        frame["date"] = frame["date"].astype("datetime64[s]")
        if until is not None:
            frame = frame[frame["date"] <= until]
        if len(frame):
            yield str(frame["ticker"].iloc[0]), frame


def _manifest(uri: str) -> dict[str, Any]:
    manifest = read_document(open_storage(uri), "manifest.json", _MANIFEST)
    if manifest is None:
        raise DataError(f"{uri} holds no manifest.json: delete the folder, and read the prices again")
    return manifest


def _ref(folder: Path, built: bool) -> PricesRef:
    manifest = _manifest(str(folder))
    figures = {name: manifest["source"][name] for name in ("rows", "tickers", "first_date", "last_date")}
    return PricesRef(uri=str(folder), prices_id=manifest["prices_id"], built=built, **figures)


def _convert_on_disk(
    given: GivenFile, target: Path, scratch: Path, memory_limit: int, engine: DataEngine
) -> dict[str, Any]:
    """Call `_convert`; raise `OSError` where the disk cannot hold the engine's files."""
    import duckdb

    try:
        return _convert(given, target, scratch, memory_limit, engine)
    except duckdb.Error as error:
        if "Could not write" in str(error) or isinstance(error, duckdb.OutOfMemoryException):
            reason = str(error).splitlines()[0]
            raise OSError(f"no room to sort {given.origin} under {scratch.parent}: {reason}") from error
        raise


def _convert(given: GivenFile, target: Path, scratch: Path, memory_limit: int, engine: DataEngine) -> dict[str, Any]:
    """Write the Parquet file; return the number of rows and tickers, and the dates."""
    import duckdb

    from dtrain_dagster.data.price_file import opened_database

    origin, is_csv = given.origin, not given.is_parquet
    with opened_database(given, scratch) as database:
        try:
            columns = _load(database, given, memory_limit)
            extra = _to_long(database, columns, origin)
            _refuse_bad_cells(database, ["adj_close", *extra], origin, is_csv)
            figures = _write_sorted(database, extra, target, engine)
        except (duckdb.InvalidInputException, duckdb.IOException, duckdb.ConversionException) as error:
            if "Could not write" in str(error):
                raise
            reason = str(error).splitlines()[0].replace(given.engine_path, "the file")
            raise DataError(f"{origin} cannot be read as CSV or Parquet: {reason}") from error
        if figures is None:
            _refuse_bad_rows(database, origin, is_csv)
    if not figures or not figures["rows"]:
        raise DataError(f"{origin} has a header but no prices: there is nothing to train on")
    return figures


def _load(database: duckdb.DuckDBPyConnection, given: GivenFile, memory_limit: int) -> dict[str, str]:
    """Create the view ``raw`` of texts, with ``line`` counting rows from 1; return normalised name → name in the
    file."""
    origin, path = given.origin, given.engine_path  # made here: nothing in it needs quoting
    reader = (
        f"read_parquet('{path}')"
        if given.is_parquet
        else f"read_csv('{path}', all_varchar=true, header=true, null_padding=true, quote='\"', escape='\"', "
        f"buffer_size={_CSV_BUFFER}, compression='{given.packing}')"
    )
    width = len(database.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall())
    if width > MOST_COLUMNS:
        raise DataError(f"{origin} has {width:,} columns; {MOST_COLUMNS:,} are the most that are read")
    threads = 1 if width > _MANY_COLUMNS else 2
    database.execute(f"SET memory_limit='{memory_limit + math.ceil(COLUMN_MEMORY * width)}MB'; SET threads={threads}")
    database.execute("SET lock_configuration=true")
    database.execute(f'CREATE VIEW raw AS SELECT row_number() OVER () AS "__line", * FROM {reader}')
    names = [row[0] for row in database.execute("DESCRIBE raw").fetchall() if row[0] != "__line"]
    for place, name in enumerate(names[1:], 1):
        if name == f"column{place}" and not given.is_parquet:  # the engine's name of a column without a name
            found = database.execute(f'SELECT min("__line") FROM raw WHERE {name} IS NOT NULL').fetchall()[0][0]
            if found:
                raise DataError(f"{origin}: {_place(found, True)} has a cell in column {place + 1}, which has no name")
    columns = {_normalise(name): name for name in names}
    lost = set(names) - set(columns.values())
    if lost:
        raise DataError(f"{origin}: two columns are called {sorted(lost)[0]!r}, but for case, '-' and '_'; rename one")
    return columns


def _quoted(name: str) -> str:
    """Return a column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _normalise(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_").lstrip("\ufeff")


def _to_long(database: duckdb.DuckDBPyConnection, columns: dict[str, str], origin: str) -> list[str]:
    """Create the view ``long`` of texts (line, date, ticker, adj_close, OHLCV columns); return the names of the
    numbers."""
    date = next((columns[name] for name in _DATE if name in columns), None)
    if date is None:
        raise DataError(f"{origin}: there is no column 'date' among {_few(columns)}; name the column of dates so")
    ticker = next((columns[name] for name in _TICKER if name in columns), None)
    price = next((columns[name] for name in (*_PRICE, "close", "price") if name in columns), None)
    if ticker is None and price is None:
        others = [name for name in columns.values() if name != date]
        if not others:
            raise DataError(f"{origin}: there is no column besides {date!r}; add one column of prices per ticker")
        cells = ", ".join(f"{_quoted(name)}::VARCHAR AS {_quoted(name)}" for name in others)
        wanted = ", ".join(map(_quoted, others))
        unpivot = (
            f'UNPIVOT (SELECT "__line" AS line, {_quoted(date)}::VARCHAR AS date, {cells} FROM raw) ON {wanted} '
            "INTO NAME ticker VALUE adj_close"
        )  # an empty cell: not listed on that day
        database.execute(f"CREATE VIEW long AS SELECT * FROM ({unpivot}) WHERE trim(adj_close) <> ''")
        return []
    if ticker is None:
        raise DataError(
            f"{origin}: there is a column {price!r} but no column 'ticker' among {_few(columns)}; add it, or give one "
            "column of prices per ticker"
        )
    if price is None:
        raise DataError(f"{origin}: there is no column 'adj_close' among {_few(columns)}; add the adjusted close")
    extra = [name for name in _EXTRA if name in columns and columns[name] != price]
    more = "".join(f", {_quoted(columns[name])}::VARCHAR AS {name}" for name in extra)
    database.execute(
        f'CREATE VIEW long AS SELECT "__line" AS line, {_quoted(date)}::VARCHAR AS date, '
        f"trim({_quoted(ticker)}::VARCHAR) AS ticker, {_quoted(price)}::VARCHAR AS adj_close{more} FROM raw"
    )
    return extra


def _few(columns: dict[str, str]) -> str:
    names = list(columns.values())
    return f"{names[:8]}{' …' if len(names) > 8 else ''}"


_NAME = f"a name of {_LONGEST_TICKER} letters at most, on one line"
_AS_DATE = "coalesce(TRY_CAST(date AS DATE), TRY_CAST(date AS TIMESTAMP)::DATE)"


def _refuse_bad_cells(database: duckdb.DuckDBPyConnection, numbers: list[str], origin: str, is_csv: bool) -> None:
    """Raise `DataError` for the first cell that its column must not hold."""
    checks = {
        "date": f"NOT coalesce({_AS_DATE} BETWEEN DATE '{FIRST_DAY}' AND DATE '{LAST_DAY}', false)",
        "ticker": f"coalesce(ticker, '') = '' OR length(ticker) > {_LONGEST_TICKER} "
        "OR regexp_matches(ticker, '[[:cntrl:]]')",
        "adj_close": "NOT coalesce(isfinite(TRY_CAST(adj_close AS DOUBLE)), false)",
        **{
            name: f"coalesce(trim({name}), '') <> '' AND NOT coalesce(isfinite(TRY_CAST({name} AS DOUBLE)), false)"
            for name in numbers[1:]
        },
    }
    firsts = ", ".join(f"min(line) FILTER (WHERE {is_bad})" for is_bad in checks.values())
    lines = database.execute(f"SELECT {firsts} FROM long").fetchall()[0]
    for (column, is_bad), line in zip(checks.items(), lines, strict=True):
        if line is not None:
            ticker, value = database.execute(
                f"SELECT ticker, {column} FROM long WHERE line = {line} AND {is_bad}"
            ).fetchall()[0]
            what = "a date such as 2020-01-31" if column == "date" else _NAME if column == "ticker" else "a number"
            held = "is empty" if value is None or not str(value).strip() else f"holds {value!r}"
            raise DataError(f"{origin}: {_place(line, is_csv)}, ticker {ticker!r}: {column} {held}, not {what}")
    more = "".join(f", TRY_CAST({name} AS DOUBLE) AS {name}" for name in numbers)
    database.execute(f"CREATE VIEW clean AS SELECT line, ticker, {_AS_DATE} AS date{more} FROM long")


def _refuse_bad_rows(database: duckdb.DuckDBPyConnection, origin: str, is_csv: bool) -> None:
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
        raise DataError(f"{origin}: {_place(line, is_csv)}: {ticker} has {date} a second time; remove one of the rows")
    back = database.execute(f"SELECT * FROM ({order}) WHERE earlier > date ORDER BY line LIMIT 1").fetchone()
    if back:
        line, ticker, date, earlier = back
        raise DataError(
            f"{origin}: {_place(line, is_csv)}: {ticker} goes back from {earlier} to {date}; sort the rows by date"
        )


def _place(line: int, is_csv: bool) -> str:
    return f"line {line + 1}" if is_csv else f"row {line}"


def _write_sorted(
    database: duckdb.DuckDBPyConnection, extra: list[str], target: Path, engine: DataEngine
) -> dict[str, Any] | None:
    """Write one row group per ticker; return rows, tickers and dates, or None where a row is repeated or out of order.

    Batches come sorted; a ticker's rows are held until the next ticker begins, or there are more of them than days.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = ", ".join(["ticker", "date", "adj_close", *extra])
    schema, batches = engine.sorted_rows(database, f"SELECT {names}, line FROM clean")
    schema = schema.remove(schema.get_field_index("line"))
    rows = tickers = 0
    firsts, lasts = [], []
    with pq.ParquetWriter(target, schema, compression="zstd", use_dictionary=["ticker"]) as writer:
        held: list[pa.Table] = []

        def flush() -> bool:
            """Return whether the ticker is in order."""
            nonlocal rows, tickers
            if not held:
                return True
            table = pa.concat_tables(held).combine_chunks()
            held.clear()
            dates, lines = (table[name].combine_chunks() for name in ("date", "line"))
            for column, is_wrong in ((dates, pc.less_equal), (lines, pc.less)):
                if pc.any(is_wrong(column[1:], column[:-1])).as_py():
                    return False
            writer.write_table(table.drop_columns("line"), row_group_size=len(table))
            rows, tickers = rows + len(table), tickers + 1
            firsts.append(dates[0].as_py())
            lasts.append(dates[-1].as_py())
            return True

        current = None
        for table in batches:
            for ticker in pc.unique(table["ticker"]).to_pylist():
                if ticker != current:
                    if not flush():
                        return None
                    current = ticker
                held.append(table.filter(pc.equal(table["ticker"], ticker)))
                if sum(map(len, held)) > MOST_DAYS:
                    return None
        if not flush():
            return None
    return {
        "rows": rows,
        "tickers": tickers,
        "first_date": str(min(firsts, default="")),
        "last_date": str(max(lasts, default="")),
    }
