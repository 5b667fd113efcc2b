"""Engines of data: who sorts the rows of prices, and computes what a dataset holds of each ticker.

An engine decides where something is computed, never what: prices and datasets have the same bytes with each. What is
computed belongs in `dtrain_dagster.data.ticker_rows`; the engine on Ray is in `dtrain_dagster.data.ray_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow as pa

Result = TypeVar("Result")
ORDER = ("ticker", "date", "line")
"""The columns that rows of prices are sorted by; ``line`` counts the rows of the file, and is in each row another."""
_BATCH_ROWS = 1 << 16


class DataEngine(Protocol):
    """Where the rows of prices are sorted, and where tickers are computed."""

    @property
    def name(self) -> str:
        """The engine's name, as ``DTRAIN_DATA_ENGINE`` has it."""

    def sorted_rows(self, database: duckdb.DuckDBPyConnection, select: str) -> tuple[pa.Schema, Iterator[pa.Table]]:
        """Return the schema of the rows of a query, and the rows in the order of `ORDER`.

        Raise `OSError` where a disk is full, `DataEngineError` where the engine cannot go on.
        """

    def map_tickers(
        self, frames: Iterator[tuple[str, pd.DataFrame]], work: Callable[[pd.DataFrame], Result]
    ) -> Iterator[Result]:
        """Yield what ``work``, which can be pickled, returns for each ticker, in the order of the tickers. Raise what
        it raises, `OSError` where a disk is full, `DataEngineError` where the engine cannot go on."""


@dataclass(frozen=True, slots=True)
class DuckDBEngine:
    """All in this process: the database sorts, and spills to disk; tickers are computed one after the other."""

    name: str = "duckdb"

    def sorted_rows(self, database: duckdb.DuckDBPyConnection, select: str) -> tuple[pa.Schema, Iterator[pa.Table]]:
        """See `DataEngine`."""
        import pyarrow as pa

        reader: Any = database.execute(f"{select} ORDER BY {', '.join(ORDER)}").to_arrow_reader(_BATCH_ROWS)
        return reader.schema, (pa.Table.from_batches([batch]) for batch in reader)

    def map_tickers(
        self, frames: Iterator[tuple[str, pd.DataFrame]], work: Callable[[pd.DataFrame], Result]
    ) -> Iterator[Result]:
        """See `DataEngine`."""
        for _, frame in frames:
            yield work(frame)


DUCKDB = DuckDBEngine()
"""The engine that is used unless another is asked for."""
