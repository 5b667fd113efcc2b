"""The builder of datasets of rows: a table becomes shards of standardised numbers and codes, and a manifest.

The table is loaded into a database on disk, where queries find out what its columns are (moments and categories of the
training split, classes); the shards are written from there. So the table may be larger than memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.build_once import (
    GROUP_ROWS,
    BuiltDataset,
    build_once,
    digest_files,
    id_of,
    write_table_shards,
)
from dtrain_dagster.data.errors import refuse
from dtrain_dagster.data.learned_table import Feature, LearnedTable, opened_rows
from dtrain_dagster.data.row_splits import RowParams
from dtrain_dagster.data.table_columns import CategoryColumn, codes_of
from dtrain_dagster.data.table_file import files_of, open_table
from trainer.data.manifest import SPLITS, STANDARDISED
from trainer.spec import REGRESSION, ROWS

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = 6
"""The version of the builder. Raise it when the same table would give other rows."""


def build_rows(source: str, storage_uri: str, params: RowParams) -> BuiltDataset:
    """Build ``<storage>/datasets/<id>`` from a Parquet or CSV file, or from all those in a folder, unless it exists;
    return a reference. Raise `DataError`, which names each column that cannot be used, and the remedy."""
    files = files_of(Path(source))
    digests = digest_files(files)
    dataset_id = id_of({"kind": ROWS, "code": CODE_VERSION, "files": digests, "params": asdict(params)})

    def write(folder: Path) -> dict[str, Any]:
        scratch = folder / "read"
        scratch.mkdir()
        with opened_rows(scratch) as database:
            manifest = _build(LearnedTable(open_table(files, scratch), params, database), folder, dataset_id)
        shutil.rmtree(scratch)
        return manifest | {"source": {"title": Path(source).name, "sha256": digests[0], "files": len(files)}}

    return build_once(storage_uri, dataset_id, write)


def _build(learned: LearnedTable, folder: Path, dataset_id: str) -> dict[str, Any]:
    """Write the shards; return the manifest."""
    learned.learn()
    refuse(learned.problems)
    kept, params = learned.kept(), learned.params
    samples = learned.samples()
    number = learned.target
    target = {"mean": number.mean, "std": number.std} if learned.task == REGRESSION else {"mean": 0.0, "std": 1.0}
    return {
        "schema_version": STANDARDISED,
        "kind": ROWS,
        "dataset_id": dataset_id,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": learned.task,
        "classes": learned.classes,
        "inputs": [learned.input_entry(column) for column in kept if not column.part],
        "columns": [*(column.entry() for column in kept), {"name": params.target, "type": "number", "role": "target"}],
        "normalisation": {
            "fitted_on": "train",
            "features": {column.name: column.scale for column in kept},
            "target": target,
        },
        "params": asdict(params),
        "samples": samples,
        "excluded": learned.excluded,
        "notes": learned.notes,
        "shards": _write(learned, folder, kept),
    }


def _write(learned: LearnedTable, folder: Path, kept: Sequence[Feature]) -> list[dict[str, Any]]:
    """Write the shards of all splits; return their entries. Numbers are stored in deviations from the mean, a target
    that is a number as it is."""
    import pyarrow as pa

    params, is_regression = learned.params, learned.task == REGRESSION
    types = [pa.int32() if isinstance(column, CategoryColumn) else pa.float32() for column in kept]
    fields = [pa.field(column.name, of) for column, of in zip(kept, types, strict=True)]
    schema = pa.schema([*fields, pa.field(params.target, pa.float64() if is_regression else pa.int32())])
    target = "target" if is_regression else "class"
    query = f"SELECT {', '.join([*(column.key for column in kept), target])} FROM rows WHERE split = ?"

    def rows(place: int) -> Iterator[pa.Table]:
        for batch in learned.database.execute(query, [place]).to_arrow_reader(GROUP_ROWS):
            *values, answers = batch.columns
            arrays = [pa.array(column.stored(of)) for column, of in zip(kept, values, strict=True)]
            arrays.append(answers if is_regression else pa.array(codes_of(answers, learned.classes)))
            yield pa.Table.from_arrays(arrays, schema=schema)

    shards = (
        write_table_shards(folder, split, schema, rows(place), params.shard_rows) for place, split in enumerate(SPLITS)
    )
    return [shard for of_split in shards for shard in of_split]
