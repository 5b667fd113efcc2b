"""The conversion of any price file into one shape: Parquet, sorted by ticker and date, one row group per ticker.

The folder is named after the content. A database engine that spills to disk reads, unpivots and sorts the file, so the
file may be larger than memory: `MEMORY_LIMIT` bounds the engine. The rest of the memory holds one ticker's history,
which the accepted range of dates bounds, and the header of a wide file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.build_once import give_name  # not above: loading the code location needs none of these
from dtrain_dagster.data.engines import DUCKDB, DataEngine
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.price_file import opened, opened_database
from dtrain_dagster.data.price_views import ADJUSTED, make_views, place_of
from dtrain_dagster.support.building import building_in
from dtrain_dagster.support.secrets import redact
from trainer.documents.reader import read_document
from trainer.documents.schemas import record, text, whole
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from dtrain_dagster.data.price_file import GivenFile
    from dtrain_dagster.data.sources import PriceSource

SCHEMA_VERSION = 3
"""The version of the conversion. Raise it when the same file would give other rows."""
MEMORY_LIMIT = 256
"""Megabytes that the engine may take for a file of a few columns."""
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


def write_prices(
    source: PriceSource,
    storage_uri: str,
    memory_limit: int = MEMORY_LIMIT,
    engine: DataEngine = DUCKDB,
) -> PricesRef:
    """Convert prices into the one shape under ``<storage>/prices/<id>``, unless they exist there; return a reference.

    Raise `DataError` for a file that cannot be read as prices: empty, a missing column, one that is no ticker, text or
    nothing in place of a price, a row twice. Raise `OSError` where the disk is full. Nothing
    half-written is left behind.
    """
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
            figures = _convert(given, building / "prices.parquet", scratch, memory_limit, engine)
            given.refuse_changed()
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "prices_id": prices_id,
            "source": redact(asdict(source.provenance)) | {"sha256": content} | figures,
        }
        (building / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))
        give_name(building, target)
        return _ref(target, built=True)


def iter_tickers(ref: PricesRef) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield (ticker, its rows in order of date), one ticker in memory at a time. ``date`` is datetime64, prices
    float64."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(ref.path)  # a Path: a text could be taken for an address
    for group in range(file.num_row_groups):
        frame = file.read_row_group(group).to_pandas(date_as_object=False, use_threads=False)
        frame["date"] = frame["date"].astype("datetime64[s]")
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


def _convert(given: GivenFile, target: Path, scratch: Path, memory_limit: int, engine: DataEngine) -> dict[str, Any]:
    """Write the Parquet file; return the number of rows and tickers, and the dates. Raise `OSError` where the disk
    cannot hold the engine's files."""
    import duckdb

    try:
        with opened_database(given, scratch) as database:
            headers = make_views(database, given, memory_limit)
            schema, batches = engine.sorted_rows(database, f"SELECT ticker, date, {ADJUSTED}, line FROM clean")
            figures = _write_tickers(schema, _tickers(batches, given.origin, headers), target)
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        if "Could not write" in str(error) or isinstance(error, duckdb.OutOfMemoryException):
            raise OSError(f"no room to sort {given.origin} under {scratch.parent}: {reason}") from error
        if isinstance(error, duckdb.InvalidInputException | duckdb.IOException | duckdb.ConversionException):
            reason = reason.replace(given.engine_path, "the file")
            raise DataError(f"{given.origin} cannot be read as CSV or Parquet: {reason}") from error
        raise
    if not figures["rows"]:
        raise DataError(f"{given.origin} has a header but no prices: there is nothing to train on")
    return figures


def _tickers(batches: Iterator[pa.Table], origin: str, headers: int) -> Iterator[pa.Table]:
    """Yield the rows of each ticker from sorted batches. Raise `DataError` for a day that is there twice: before more
    rows of a ticker are held than there are days."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    held: list[pa.Table] = []
    current, last = None, np.datetime64("NaT")
    for table in batches:
        for ticker in pc.unique(table["ticker"]).to_pylist():
            if held and ticker != current:
                yield pa.concat_tables(held).combine_chunks()
                held, last = [], np.datetime64("NaT")
            part = table.filter(pc.equal(table["ticker"], ticker))
            dates = part["date"].to_numpy()
            twice = np.flatnonzero(dates == np.concatenate([[last], dates[:-1]]))
            if len(twice):
                line, date = part["line"][int(twice[0])].as_py(), dates[twice[0]]
                raise DataError(
                    f"{origin}: {place_of(line, headers)}: {ticker} has {date} a second time; remove one of the rows"
                )
            held.append(part)
            current, last = ticker, dates[-1]
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _write_tickers(schema: pa.Schema, tickers: Iterator[pa.Table], target: Path) -> dict[str, Any]:
    """Write one row group per ticker; return rows, tickers and dates."""
    import pyarrow.parquet as pq

    rows, dates = [], []
    schema = schema.remove(schema.get_field_index("line"))
    with pq.ParquetWriter(target, schema, compression="zstd", use_dictionary=["ticker"]) as writer:
        for table in tickers:
            writer.write_table(table.drop_columns("line"), row_group_size=len(table))
            rows.append(len(table))
            dates += [table["date"][0].as_py(), table["date"][-1].as_py()]
    return {
        "rows": sum(rows),
        "tickers": len(rows),
        "first_date": str(min(dates, default="")),
        "last_date": str(max(dates, default="")),
    }
