"""One Parquet file of a dataset, and its entry in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.build_once import shard_entry
from dtrain_dagster.data.features import AUXILIARY, FEATURES, TARGET

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class Shard:
    """A Parquet file that is being written: one row group per ticker."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path = folder / "data" / f"part-{number:05d}.parquet"
        self.rows = 0
        self._writer: Any = None
        self._segments: list[dict[str, Any]] = []
        self._tickers: list[str] = []
        self._dates: list[str] = []
        self._pending = 0

    def add_segment(self, ticker: str, rows: int, samples: dict[str, list[int]]) -> None:
        """Register a segment of the rows that the next `write` gets; its sample ranges count from its own first row."""
        start = self.rows + self._pending
        self._pending += rows
        shifted = {
            split: [start + first, start + stop] if stop > first else [0, 0] for split, (first, stop) in samples.items()
        }
        self._segments.append({"ticker": ticker, "rows": [start, start + rows], "samples": shifted})

    def write(self, table: pa.Table) -> None:
        """Append one ticker's `stored_table` as a row group."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, table.schema, compression="zstd", use_dictionary=["ticker"])
        self._writer.write_table(table, row_group_size=len(table))
        self.rows += len(table)
        self._pending = 0
        self._tickers.append(table["ticker"][0].as_py())
        self._dates += [str(pc.min(table["date"]).as_py()), str(pc.max(table["date"]).as_py())]

    def close(self) -> dict[str, Any]:
        """Finish the file; return its entry in the manifest."""
        self._writer.close()
        return shard_entry(self.path.parent, self.path.name, self.rows) | {
            "first_date": min(self._dates),
            "last_date": max(self._dates),
            "tickers": self._tickers,
            "segments": self._segments,
        }


def rename_shards(folder: Path, shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the files their final names, now that their number is known; return their entries with these names."""
    for number, shard in enumerate(shards):
        path = f"data/shard-{number:05d}-of-{len(shards):05d}.parquet"
        (folder / "data" / shard["path"]).rename(folder / path)
        shard["path"] = path
    return shards


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
