"""The builder of datasets of rows: a table becomes shards of standardised numbers and codes, and a manifest.

Two streaming passes over the table, some rows at a time: the first learns what the columns are (moments and categories
of the training split, classes), the second writes the shards. So the table may be larger than memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.build_once import BuiltDataset, TableShards, build_once, digest_files, id_of
from dtrain_dagster.data.errors import refuse
from dtrain_dagster.data.learned_table import Feature, LearnedTable, values_in
from dtrain_dagster.data.row_splits import RowParams
from dtrain_dagster.data.table_columns import CategoryColumn, NumberColumn, numbers_of
from dtrain_dagster.data.table_file import files_of, open_table
from dtrain_dagster.data.target_column import class_name
from trainer.data.manifest import SPLITS, STANDARDISED
from trainer.spec import REGRESSION, ROWS

if TYPE_CHECKING:
    from numpy.typing import NDArray

CODE_VERSION = 5
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
        manifest = _build(LearnedTable(open_table(files, scratch), params), folder, dataset_id)
        shutil.rmtree(scratch)
        return manifest | {"source": {"title": Path(source).name, "sha256": digests[0], "files": len(files)}}

    return build_once(storage_uri, dataset_id, write)


def _build(learned: LearnedTable, folder: Path, dataset_id: str) -> dict[str, Any]:
    """Write the shards; return the manifest."""
    learned.learn()
    refuse(learned.problems)
    kept, params, is_regression = learned.kept(), learned.params, learned.task == REGRESSION
    shards = _write(learned, folder, kept)
    samples = {split: sum(shard["rows"] for shard in shards if shard["split"] == split) for split in SPLITS}
    learned.judge_splits(samples)
    scales = {column.name: {"mean": 0.0, "std": 1.0} for column in kept}
    for column in kept:
        if isinstance(column, NumberColumn):  # one that varies in what is missing alone has no deviation
            scales[column.name] = {"mean": column.mean, "std": column.std or 1.0}
    number = learned.target.number
    target = {"mean": number.mean, "std": number.std} if is_regression else {"mean": 0.0, "std": 1.0}
    return {
        "schema_version": STANDARDISED,
        "kind": ROWS,
        "dataset_id": dataset_id,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": learned.task,
        "classes": [class_name(value) for value in learned.classes],
        "inputs": [learned.input_entry(column) for column in kept if not column.part],
        "columns": [*(column.entry() for column in kept), {"name": params.target, "type": "number", "role": "target"}],
        "normalisation": {"fitted_on": "train", "features": scales, "target": target},
        "params": asdict(params),
        "samples": samples,
        "excluded": learned.excluded,
        "notes": learned.notes,
        "shards": shards,
    }


def _write(learned: LearnedTable, folder: Path, kept: Sequence[Feature]) -> list[dict[str, Any]]:
    """Write the shards of all splits; return their entries. Numbers are stored in deviations from the mean, a target
    that is a number as it is. Raise `DataError` for a number that is too far from the training rows."""
    import numpy as np
    import pyarrow as pa

    params, is_regression = learned.params, learned.task == REGRESSION
    types = [pa.int32() if isinstance(column, CategoryColumn) else pa.float32() for column in kept]
    fields = [pa.field(column.name, of) for column, of in zip(kept, types, strict=True)]
    schema = pa.schema([*fields, pa.field(params.target, pa.float64() if is_regression else pa.int32())])
    code_of_class = {value: code for code, value in enumerate(learned.classes)}
    writers = [TableShards(folder, split, schema, params.shard_rows) for split in SPLITS]
    for first, batch in learned.table.batches(learned.columns_of(kept, [params.target])):
        arrays: list[NDArray[Any]] = [column.stored(values, first) for column, values in values_in(batch, kept)]
        target = batch.column(params.target)
        if is_regression:
            arrays.append(numbers_of(target))
        else:
            found = learned.target.classes_of(target)
            arrays.append(np.array([code_of_class[value] for value in found.tolist()], dtype=np.int32))
        table = pa.Table.from_arrays([pa.array(values) for values in arrays], schema=schema)
        splits = learned.splits(first, batch)
        for place, writer in enumerate(writers):
            if (splits == place).any():
                writer.add(table.filter(pa.array(splits == place)))
    return [shard for writer in writers for shard in writer.close()]
