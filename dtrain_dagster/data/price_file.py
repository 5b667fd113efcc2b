"""A user's price file, opened once: its format, its digest, and the check that it is whole.

Everything after this works with the file that was opened, not with its name: the engine takes names for patterns, and a
name may lead to another file a moment later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_BLOCK, _CSV_BUFFER = 1 << 20, 8 << 20
_PACKINGS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class GivenFile:
    """An open price file. ``origin`` is its name in errors."""

    handle: BufferedReader
    origin: str
    packing: str
    """The engine's name of its compression: ``gzip``, ``zstd`` or ``none``."""
    is_parquet: bool
    before: tuple[int, int, int]

    @property
    def engine_path(self) -> str:
        """The path under which the engine opens this very file; no character in it is special to the engine."""
        return f"/dev/fd/{self.handle.fileno()}"

    @property
    def csv(self) -> str:
        """The SQL that reads its cells as texts, those of the header among them."""
        return (
            f"read_csv('{self.engine_path}', all_varchar=true, header=false, null_padding=true, quote='\"', "
            f"escape='\"', buffer_size={_CSV_BUFFER}, compression='{self.packing}')"
        )

    def header(self, database: duckdb.DuckDBPyConnection) -> list[str]:
        """Return the cells of the first line of a CSV file, as names of columns."""
        cells = database.execute(f"SELECT * FROM {self.csv} LIMIT 1").fetchone() or ()
        return [str(cell or "").strip().lstrip("\ufeff") for cell in cells]

    def digest(self) -> str:
        """Return the sha256 of its content."""
        self.handle.seek(0)
        return hashlib.file_digest(self.handle, "sha256").hexdigest()

    def parquet_schema(self) -> pa.Schema:
        """Return the schema of a Parquet file. Raise `DataError` where it cannot be read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.handle.seek(0)
        try:
            return pq.read_schema(self.handle)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{self.origin} cannot be read as CSV or Parquet: {reason}") from error

    def refuse_unusable(self) -> None:
        """Raise `DataError` for a file that is empty or cut short: the engine would take half a packed file for a whole
        one."""
        import pyarrow as pa

        if not os.fstat(self.handle.fileno()).st_size:
            raise DataError(f"{self.origin} is empty: no header and no rows")
        if self.is_parquet:
            self.parquet_schema()
        elif self.packing != "none":
            try:
                with pa.input_stream(self.engine_path, compression=self.packing) as content:
                    while content.read(_BLOCK):
                        pass
            except OSError as error:
                raise DataError(
                    f"{self.origin} is not a complete {self.packing} file ({error}); fetch or compress it again"
                ) from error

    def refuse_changed(self) -> None:
        """Raise `DataError` where it was written since it was opened: its digest would belong to other rows."""
        if _state(self.handle) != self.before:
            raise DataError(f"{self.origin} was written while it was read; try again once it is complete")


@contextmanager
def opened(file: Path, origin: str) -> Iterator[GivenFile]:
    """Yield a price file, open while it is read. Raise `DataError` for anything but a regular file."""
    if not file.is_file():  # before it is opened: opening a pipe would wait for its writer
        raise DataError(f"{origin} is not a regular file")
    with open(file, "rb") as handle:
        packing = _PACKINGS.get(file.suffix, "none")
        yield GivenFile(handle, origin, packing, handle.read(4) == b"PAR1", _state(handle))


@contextmanager
def opened_database(given: GivenFile, scratch: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a database engine in ``scratch`` that can open this one file, nothing else of this machine or of the
    network."""
    import duckdb

    settings: dict[str, Any] = {
        "temp_directory": str(scratch / "spill"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    with duckdb.connect(str(scratch / "sort.duckdb"), config=settings) as database:
        database.execute("SET enable_progress_bar=false")
        database.execute("SET TimeZone='UTC'")  # not this machine's: the same file gives the same days everywhere
        database.execute(f"SET allowed_paths=['{given.engine_path}']")
        database.execute("SET enable_external_access=false")
        yield database


def quoted(name: str) -> str:
    """Return a name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _state(handle: BufferedReader) -> tuple[int, int, int]:
    found = os.fstat(handle.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
