"""The builder of datasets of rows: a Parquet table becomes shards of numbers and codes, and a manifest.

Two streaming passes over the table, some rows at a time: the first learns what the columns are (moments and categories
of the training split, classes), the second writes the shards. So the table may be larger than memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dtrain_dagster.data.build_once import (
    SCHEMA_VERSION,
    FinishedDataset,
    build_once,
    digest_files,
    id_of,
    shard_entry,
)
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.table_columns import (
    TASKS,
    CategoryColumn,
    NumberColumn,
    TargetColumn,
    check_name,
    class_name,
    kind_of_column,
    numbers_of,
    texts_of,
)
from trainer.data.kinds import SPLITS
from trainer.spec import REGRESSION, ROWS

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

CODE_VERSION = 1
"""The version of the builder. Raise it when the same table would give other rows."""
BATCH = 1 << 16
"""Rows that are held at once."""
_SCALE = 2.0**-64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParams:
    """The parameters of a dataset besides its table."""

    target: str
    task: Literal["regression", "binary", "multiclass"] | None = None
    """None: by the target's values."""
    drop: tuple[str, ...] = ()
    """Columns that are left out."""
    split_by: str | None = None
    """A column that says the split of each row (train, valid, test), or whose equal values stay together; it is no
    feature. None: each row by itself."""
    valid_fraction: float = 0.1
    test_fraction: float = 0.1
    missing: Literal["refuse", "mean"] = "refuse"
    """Numbers that are missing: refused, or counted as the mean, with a further input that says so."""
    seed: int = 0
    """Of the division of rows among the splits."""
    shard_rows: int = 1 << 20
    """Rows of one shard, about."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise DataError(f"task = {self.task!r}: must be one of {', '.join(TASKS)}")
        check_fractions(self.valid_fraction, self.test_fraction)


def check_fractions(valid: float, test: float) -> None:
    """Raise `DataError` for shares of the validation and test split that leave nothing."""
    if not (0 < valid < 1 and 0 < test < 1 and valid + test < 1):
        raise DataError(
            f"valid_fraction = {valid} and test_fraction = {test}: each lies between 0 and 1, and their sum below 1"
        )


def build_rows(source: str, storage_uri: str, params: RowParams) -> FinishedDataset:
    """Build ``<storage>/datasets/<id>`` from a Parquet file, or from all those in a folder, unless it exists; return a
    reference. Raise `DataError`, which names the column and the remedy, for a table that cannot be used."""
    files = _parquet_files(Path(source))
    digests = digest_files(files)
    dataset_id = id_of({"kind": ROWS, "code": CODE_VERSION, "files": digests, "params": asdict(params)})

    def write(folder: Path) -> dict[str, Any]:
        builder = _Builder(files, params, folder)
        manifest = builder.build(dataset_id)
        return manifest | {"source": {"title": Path(source).name, "sha256": digests[0], "files": len(files)}}

    return build_once(storage_uri, dataset_id, write)


def _parquet_files(source: Path) -> list[Path]:
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not files or not all(path.is_file() for path in files):
        raise DataError(f"{source}: there is no Parquet file; give one, or a folder that holds some")
    return files


def hashed_shares(values: Sequence[str], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each value, the same for equal values. Pure."""
    import numpy as np

    digests = (hashlib.sha256(f"{seed}/{value}".encode()).digest()[:8] for value in values)
    return np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.float64) * _SCALE


def numbered_shares(first: int, count: int, seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each of the rows first … first + count - 1 (splitmix64 of their numbers). Pure."""
    import numpy as np

    with np.errstate(over="ignore"):
        mixed = np.arange(first, first + count, dtype=np.uint64) + np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
        mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).astype(np.float64) * _SCALE


def splits_of(shares: NDArray[np.float64], valid: float, test: float) -> NDArray[np.int64]:
    """Return the place in `SPLITS` of rows with these shares, for these fractions of validation and test. Pure."""
    import numpy as np

    is_valid = shares >= 1 - valid - test
    return np.where(shares >= 1 - test, 2, is_valid.astype(np.int64))


class _ShardWriter:
    """The shards of one split, written as rows come."""

    def __init__(self, folder: Path, split: str, schema: pa.Schema, most_rows: int) -> None:
        self.folder, self.split, self.schema, self.most_rows = folder, split, schema, most_rows
        self.shards: list[dict[str, Any]] = []
        self._waiting: list[pa.Table] = []
        self._writer: Any = None
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        """Append rows, which are written once there are enough for a row group."""
        self._waiting.append(table)
        if sum(len(part) for part in self._waiting) >= min(BATCH, self.most_rows - self._rows):
            self._write()

    def close(self) -> list[dict[str, Any]]:
        """Write what is left, and return the entries of the shards."""
        self._write()
        self._finish()
        return self.shards

    @property
    def _name(self) -> str:
        return f"data/{self.split}-{len(self.shards):05d}.parquet"

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.folder / self._name, self.schema, compression="zstd")
        self._writer.write_table(table, row_group_size=BATCH)
        self._rows += len(table)
        if self._rows >= self.most_rows:
            self._finish()

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self.shards.append(shard_entry(self.folder, self._name, self.split, self._rows))
            self._writer, self._rows = None, 0


@dataclass(slots=True)
class _Builder:
    """A single build of a dataset."""

    files: Sequence[Path]
    params: RowParams
    folder: Path
    numbers: dict[str, NumberColumn] = field(default_factory=dict)
    categories: dict[str, CategoryColumn] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Features, in the order of the table."""
    named_splits: bool = False
    """Whether the column ``split_by`` says the split itself."""
    target: TargetColumn = field(default_factory=lambda: TargetColumn(""))

    def build(self, dataset_id: str) -> dict[str, Any]:
        """Write the shards; return the manifest."""
        self._read_schema()
        self._learn()
        task, classes = self.target.task(self.params.task)
        excluded = {
            name: "does not vary over the training split"
            for name in self.names
            if name in self.numbers and not self.numbers[name].std > 0 and not self.numbers[name].missing
        }
        excluded |= {name: "has no value in the training split" for name in self._empty()}
        self._refuse_what_cannot_be_trained_on(task, excluded)
        kept = [name for name in self.names if name not in excluded]
        shards = self._write(kept, task, classes)
        samples = {split: sum(shard["rows"] for shard in shards if shard["split"] == split) for split in SPLITS}
        for split, count in samples.items():
            if not count:
                raise DataError(f"the {split} split has no rows: give more rows, or other fractions")
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": ROWS,
            "dataset_id": dataset_id,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "task": task,
            "classes": [class_name(value) for value in classes],
            "columns": [*map(self._column, kept), {"name": self.params.target, "type": "number", "role": "target"}],
            "normalisation": self._normalisation(kept, task),
            "params": asdict(self.params),
            "samples": samples,
            "excluded": excluded,
            "shards": shards,
        }

    def _read_schema(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schemas = []
        for path in self.files:
            try:
                schemas.append(pq.ParquetFile(path).schema_arrow)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} is no Parquet file that can be read: {error}") from None
        schema, params = schemas[0], self.params
        for path, other in zip(self.files, schemas, strict=True):
            if other.names != schema.names or other.types != schema.types:
                raise DataError(f"{path} has other columns than {self.files[0]}: all files need the same")
        if len(set(schema.names)) < len(schema.names):
            raise DataError(f"{self.files[0]} has two columns of one name: rename one")
        wanted = {"--target": [params.target], "--drop": params.drop, "--split-by": [params.split_by or params.target]}
        for option, names in wanted.items():
            for name in names:
                if name not in schema.names:
                    raise DataError(f"{option} {name}: the table has no such column, but {', '.join(schema.names)}")
        self.target.name = params.target
        kind_of_column(schema.field(params.target))
        for name in schema.names:
            check_name(name)
            if name in (params.target, params.split_by, *params.drop):
                continue
            self.names.append(name)
            if kind_of_column(schema.field(name)) == "number":
                self.numbers[name] = NumberColumn(name)
            else:
                self.categories[name] = CategoryColumn(name)
        if not self.names:
            raise DataError(f"{self.files[0]} has no column besides the target to learn from")

    def _batches(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the number of the first row, and some rows."""
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

    def _learn(self) -> None:
        """Learn what the columns hold, some rows at a time."""
        by = self.params.split_by
        if by is not None:
            self.named_splits = all(
                set(map(str, texts_of(batch.column(by)))) <= set(SPLITS) for _, batch in self._batches([by])
            )
        for first, batch in self._batches([*self.names, self.params.target, *([by] if by else [])]):
            is_train = self._splits(first, batch) == 0
            for name, number in self.numbers.items():
                number.learn(numbers_of(batch.column(name)), is_train, first)
                if number.missing and self.params.missing == "refuse":
                    raise DataError(
                        f"the column {name!r} lacks {number.missing} numbers up to row {first + len(batch) - 1}: leave "
                        f"it out (--drop {name}), or let them count as the mean, with an input that says so "
                        "(--missing mean)"
                    )
            for name, category in self.categories.items():
                category.learn(texts_of(batch.column(name)), is_train)
            self.target.learn(batch.column(self.params.target), is_train, first)

    def _splits(self, first: int, batch: pa.RecordBatch) -> NDArray[np.int64]:
        import numpy as np

        by, valid, test = self.params.split_by, self.params.valid_fraction, self.params.test_fraction
        if by is None:
            return splits_of(numbered_shares(first, len(batch), self.params.seed), valid, test)
        values = [str(value) for value in texts_of(batch.column(by))]
        if self.named_splits:
            return np.array([SPLITS.index(value) for value in values], dtype=np.int64)
        return splits_of(hashed_shares(values, self.params.seed), valid, test)

    def _empty(self) -> list[str]:
        gone = [name for name, number in self.numbers.items() if not number.moments.count]
        return [*gone, *(name for name, category in self.categories.items() if not category.values)]

    def _refuse_what_cannot_be_trained_on(self, task: str, excluded: Mapping[str, str]) -> None:
        if len(excluded) == len(self.names):
            raise DataError(f"no column varies over the training split: {', '.join(excluded)}")
        if task == REGRESSION and not float(self.target.moments.mean_std()[1]) > 0:
            raise DataError(f"the target {self.params.target!r} does not vary over the training split")

    def _column(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": name, "role": "feature"}
        if name in self.categories:
            return entry | {"type": "category", "values": self.categories[name].ordered()}
        return entry | {"type": "number", "missing": self.numbers[name].missing > 0}

    def _normalisation(self, kept: Sequence[str], task: str) -> dict[str, Any]:
        features = {name: {"mean": 0.0, "std": 1.0} for name in kept}
        for name in kept:
            if name in self.numbers:  # one that varies in what is missing alone has no deviation
                features[name] = {"mean": self.numbers[name].mean, "std": self.numbers[name].std or 1.0}
        mean, std = map(float, self.target.moments.mean_std()) if task == REGRESSION else (0.0, 1.0)
        return {"fitted_on": "train", "features": features, "target": {"mean": mean, "std": std}}

    def _write(self, kept: Sequence[str], task: str, classes: Sequence[Any]) -> list[dict[str, Any]]:
        """Write the shards of all splits; return their entries."""
        import numpy as np
        import pyarrow as pa

        fields = [pa.field(name, pa.int32() if name in self.categories else pa.float32()) for name in kept]
        target = pa.field(self.params.target, pa.float32() if task == REGRESSION else pa.int32())
        schema = pa.schema([*fields, target])
        codes = {
            name: {value: code for code, value in enumerate(category.ordered(), 1)}
            for name, category in self.categories.items()
        }
        code_of_class = {value: code for code, value in enumerate(classes)}
        writers = [_ShardWriter(self.folder, split, schema, self.params.shard_rows) for split in SPLITS]
        by = [self.params.split_by] if self.params.split_by else []
        for first, batch in self._batches([*kept, self.params.target, *by]):
            arrays: list[NDArray[Any]] = []
            for name in kept:
                if name in codes:
                    found = [codes[name].get(value, 0) for value in texts_of(batch.column(name))]
                    arrays.append(np.array(found, dtype=np.int32))
                else:
                    arrays.append(numbers_of(batch.column(name)).astype(np.float32))
            column = batch.column(self.params.target)
            if task == REGRESSION:
                arrays.append(numbers_of(column).astype(np.float32))
            else:
                is_text = kind_of_column(pa.field(self.params.target, column.type)) == "category"
                values = texts_of(column) if is_text else numbers_of(column).tolist()
                arrays.append(np.array([code_of_class[value] for value in values], dtype=np.int32))
            table = pa.Table.from_arrays([pa.array(values) for values in arrays], schema=schema)
            splits = self._splits(first, batch)
            for place, writer in enumerate(writers):
                if (splits == place).any():
                    writer.add(table.filter(pa.array(splits == place)))
        return [shard for writer in writers for shard in writer.close()]
