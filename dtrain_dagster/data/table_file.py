"""The files of a table: Parquet as it is, and CSV, which becomes Parquet once the type of each column is known.

Types of CSV columns are decided by all of their cells, and a column that is mostly of one type is refused with the cell
that is not: it would be a category of numbers. What columns are for a training is `dtrain_dagster.data.table_columns`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.price_file import GivenFile, opened, opened_database, quoted
from dtrain_dagster.data.price_views import is_nameless
from dtrain_dagster.data.table_columns import KINDS, check_name, type_of_column

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

BATCH = 1 << 16
"""Rows that are held at once."""
_ENDINGS = (".csv", ".tsv", ".txt")
_PACKED = ("", ".gz", ".zst")
_MEMORY, _COLUMN_MEMORY = 256, 2
"""Megabytes that the engine may take for a CSV file, and for each of its columns besides."""
_PANDAS = "is the index of a pandas table; reset_index() makes a column of it"
_INDEXES = frozenset({"index", "id", "row_id"})
_INDEX = "is the index of a table, by its name: give it another to train on it"
_GONE = "('na', 'n/a', '#n/a', '<na>', 'nan', 'null', 'none')"
"""Words for a missing number, in small letters."""
_TIME = "[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?)? ?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?"
_WHOLE = "regexp_full_match({x}, '[+-]?(0|[1-9][0-9]*)')"
_FORMS = {
    "BOOLEAN": "lower({x}) IN ('true', 'false')",
    "BIGINT": f"{_WHOLE} AND TRY_CAST({{x}} AS BIGINT) IS NOT NULL",
    "DECIMAL(38, 0)": f"{_WHOLE} AND TRY_CAST({{x}} AS DECIMAL(38, 0)) IS NOT NULL",
    "DOUBLE": "TRY_CAST({x} AS DOUBLE) IS NOT NULL AND NOT regexp_matches({x}, '^[+-]?0[0-9]')",
    "TIMESTAMP": f"regexp_full_match({{x}}, '{_TIME}') AND TRY_CAST({{x}} AS TIMESTAMPTZ) IS NOT NULL",
}
"""Types of columns, and what each cell of them fulfils. A number with zeros before it is a code, and so is text."""
_CODE = "TRY_CAST({x} AS DOUBLE) IS NOT NULL"
_COMMA = "regexp_full_match({x}, '[+-]?[0-9.,]*[0-9]') AND {x} LIKE '%,%'"
_DAY_FIRST = "regexp_full_match({x}, '[0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2,4}')"


@dataclass(frozen=True, slots=True)
class Table:
    """The files of a table, as Parquet, and what they agree on."""

    files: Sequence[Path]
    types: dict[str, str]
    """The type of each column as people have it, one of `trainer.spec.RAW_TYPES`, in the order of the first file; ""
    of one without a value, or of none that can be used."""
    rows: int
    index: dict[str, str]
    """Columns that are the index of a table: why they are left out."""
    problems: dict[str, list[str]]
    """Why columns cannot be used."""

    @property
    def kinds(self) -> dict[str, str]:
        """Return what each column is for a training."""
        return {name: KINDS[kind] for name, kind in self.types.items()}

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the number of the first row, and some rows. Raise `DataError` for a file that is damaged."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        first = 0
        for path in self.files:
            try:
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):  # one by one: a reader of all keeps what it has read
                    for batch in file.iter_batches(BATCH, [group], columns=list(dict.fromkeys(columns))):
                        yield first, batch
                        first += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} cannot be read to its end: {error}") from None


def files_of(source: Path) -> list[Path]:
    """Return the files of a table: one, or all Parquet or CSV files of a folder. Raise `DataError` where there are
    none, or of both kinds."""
    packed = [f"*{ending}{packing}" for ending in _ENDINGS for packing in _PACKED]
    found = {
        "Parquet": sorted(source.glob("*.parquet")),
        "CSV": sorted({path for name in packed for path in source.glob(name)}),
    }
    files = [path for paths in found.values() for path in paths] if source.is_dir() else [source]
    if not files or not all(path.is_file() for path in files):
        raise DataError(f"{source}: there is no Parquet or CSV file; give one, or a folder that holds some")
    if all(found.values()):
        raise DataError(
            f"{source} holds Parquet and CSV files ({found['Parquet'][0].name}, {found['CSV'][0].name}): name one"
        )
    return files


def open_table(files: Sequence[Path], scratch: Path) -> Table:
    """Return a table of these files. CSV files are written into ``scratch`` as Parquet. Raise `DataError` for files
    that cannot be read, or have other columns than the first."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    problems: dict[str, list[str]] = defaultdict(list)
    read, schemas, rows = [], [], 0
    for number, path in enumerate(files):
        with open(path, "rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        plain = path if is_parquet else scratch / f"{number:05d}.parquet"
        if not is_parquet:
            _convert_csv(path, plain, scratch, problems)
        try:
            opened = pq.ParquetFile(plain)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a Parquet file that can be read: {error}") from None
        read.append(plain)
        schemas.append(opened.schema_arrow)
        rows += opened.metadata.num_rows
    names = schemas[0].names
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{files[0]} has two columns with the name {twice[0]!r}: rename one, or leave it out")
    for path, schema in zip(files, schemas, strict=True):
        if sorted(schema.names) != sorted(names):
            odd = sorted(set(schema.names) ^ set(names)) or sorted(schema.names)
            raise DataError(
                f"{path} has different columns from {files[0]} ({', '.join(odd[:5])}): all files need the same"
            )
    types = dict.fromkeys(names, "")
    for name in names:
        try:
            check_name(name)
            found: dict[str, Path] = {}
            for path, schema in zip(files, schemas, strict=True):
                found.setdefault(type_of_column(schema.field(name)), path)
            found.pop("", None)
            if len({KINDS[kind] for kind in found}) > 1:
                types_found = " and ".join(f"{kind} in {path}" for kind, path in found.items())
                raise DataError(f"the column {name!r} is {types_found}: convert it to one of them")
            types[name] = "number" if len(found) > 1 else "".join(found)
        except DataError as error:
            problems[name].append(str(error))
    index = (schemas[0].pandas_metadata or {}).get("index_columns", ())
    left = {name: _PANDAS for name in index if isinstance(name, str) and name in types}
    left = {name: _INDEX for name in names if is_nameless(name) or name.lower() in _INDEXES} | left
    return Table(read, types, rows, left, {name: said for name, said in problems.items() if said})


def _convert_csv(path: Path, target: Path, scratch: Path, problems: dict[str, list[str]]) -> None:
    """Write a CSV file as Parquet. Raise `DataError` where it is none, or a name occurs twice."""
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = path.name.lower()
    if not any(name.endswith(f"{ending}{packing}") for ending in _ENDINGS for packing in _PACKED):
        raise DataError(f"{path} is not a Parquet file, and by its name not a CSV file either ({', '.join(_ENDINGS)})")
    with opened(path, str(path)) as given:
        given.refuse_unusable()
        with opened_database(given, scratch) as database:
            try:
                select = _typed(database, given, problems)
                reader: Any = database.execute(select).to_arrow_reader(BATCH)
                empty = [field.type == pa.int32() for field in reader.schema]  # other whole numbers are longer
                types = zip(reader.schema, empty, strict=True)
                schema = pa.schema([pa.field(field.name, pa.null()) if gone else field for field, gone in types])
                with pq.ParquetWriter(target, schema, compression="zstd") as writer:
                    for batch in reader:
                        columns = zip(batch.columns, empty, strict=True)
                        arrays = [pa.nulls(len(batch)) if gone else column for column, gone in columns]
                        writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=BATCH)
            except (duckdb.Error, pa.ArrowException) as error:
                if "Could not write" in str(error):
                    raise OSError(f"no room to read {path} under {scratch}") from error
                reason = str(error).splitlines()[0].replace(given.engine_path, "the file")
                raise DataError(f"{path} cannot be read as CSV: {reason}") from None
        given.refuse_changed()
    (scratch / "sort.duckdb").unlink(missing_ok=True)


def _is_filled(cell: str) -> str:
    """Return the SQL that is true for a cell that holds something else than a word for nothing."""
    return f"{cell} <> '' AND lower({cell}) NOT IN {_GONE}"


def _typed(database: duckdb.DuckDBPyConnection, given: GivenFile, problems: dict[str, list[str]]) -> str:
    """Return the SQL that reads a CSV file with the types of its columns."""
    reader, origin = given.csv, given.origin
    cells = [row[0] for row in database.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()]
    database.execute(f"SET memory_limit='{_MEMORY + math.ceil(_COLUMN_MEMORY * len(cells))}MB'; SET threads=2")
    names = given.header(database)
    if twice := [name for name, count in Counter(names).items() if count > 1 and name]:
        raise DataError(f"{origin} has two columns with the name {twice[0]!r}: rename one, or leave it out")
    trimmed = ", ".join(f"coalesce(trim({cell}), '') AS {cell}" for cell in cells)
    database.execute(
        f'CREATE VIEW rows AS SELECT * FROM (SELECT row_number() OVER () AS "__line", {trimmed} FROM {reader}) '
        'WHERE "__line" > 1'
    )
    typed = []
    for place, (cell, kind) in enumerate(zip(cells, _types(database, cells, names, problems), strict=True)):
        name = names[place] or ("Unnamed: 0" if not place else "")
        if not kind and not names[place]:
            continue
        if not name:
            problems[""].append(f"column {place + 1} of {origin} has cells but no name: give it one")
            continue
        text = f"nullif({cell}, '')" if kind == "VARCHAR" else f"CASE WHEN {_is_filled(cell)} THEN {cell} END"
        value = f"CAST({text} AS {kind})" if kind else "NULL"
        if kind == "TIMESTAMP":
            value = f"timezone('UTC', CAST({text} AS TIMESTAMPTZ))"
        typed.append(f"{value} AS {quoted(name)}")
    if not typed:
        raise DataError(f"{origin} is empty: no header and no rows")
    return f"SELECT {', '.join(typed)} FROM rows"


def _types(
    database: duckdb.DuckDBPyConnection, cells: Sequence[str], names: Sequence[str], problems: dict[str, list[str]]
) -> list[str]:
    """Return the type of each column of a CSV file, "" for one without a cell."""
    forms = [*_FORMS.values(), _CODE, _COMMA, _DAY_FIRST]
    counts = []
    for cell in cells:
        counts.append(f"count(*) FILTER (WHERE {_is_filled(cell)})")
        counts += [f"count(*) FILTER (WHERE {_is_filled(cell)} AND {form.replace('{x}', cell)})" for form in forms]
    found = database.execute(f"SELECT {', '.join(counts)} FROM rows").fetchall()[0]
    types = []
    for place, (cell, name) in enumerate(zip(cells, names, strict=True)):
        filled, *fitting = found[place * (len(forms) + 1) : (place + 1) * (len(forms) + 1)]
        *typed, codes, commas, days_first = fitting
        by_type = dict(zip(_FORMS, typed, strict=True))
        types.append(next((kind for kind in _FORMS if filled and by_type[kind] == filled), "VARCHAR" if filled else ""))
        if types[-1] != "VARCHAR" or codes == filled:
            continue
        if commas and commas + by_type["DOUBLE"] == filled:
            problems[name].append(
                f"the column {name!r} has numbers with commas: write 1234.5, or leave it out (--drop {name})"
            )
        elif days_first == filled:
            problems[name].append(
                f"the column {name!r} has dates that do not begin with the year: write 2020-12-31, or leave it out "
                f"(--drop {name})"
            )
        for form, words in (("DOUBLE", "numbers"), ("TIMESTAMP", "dates")):
            if commas + by_type[form] < filled <= 2 * by_type[form]:
                line, text = database.execute(
                    f'SELECT min("__line"), arg_min({cell}, "__line") FROM rows WHERE '
                    f"{_is_filled(cell)} AND NOT ({_FORMS[form].replace('{x}', cell)})"
                ).fetchall()[0]
                problems[name].append(
                    f"line {line}: the column {name!r} holds {text[:80]!r} among {words}: correct it, or leave the "
                    f"column out (--drop {name})"
                )
    return types
