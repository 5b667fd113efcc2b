"""The builder of datasets of rows: a table becomes shards of standardised numbers and codes, and a manifest.

Two streaming passes over the table, some rows at a time: the first learns what the columns are (moments and categories
of the training split, classes), the second writes the shards. So the table may be larger than memory.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.build_once import FinishedDataset, TableShards, build_once, digest_files, id_of
from dtrain_dagster.data.errors import DataError, refuse
from dtrain_dagster.data.price_columns import is_nameless
from dtrain_dagster.data.row_splits import (
    MOST_NAMES,
    SPLIT_NAMES,
    RowParams,
    hashed_shares,
    numbered_shares,
    splits_of,
)
from dtrain_dagster.data.table_columns import (
    DATE_UNIT,
    MOST_SAMPLED,
    CategoryColumn,
    NumberColumn,
    TargetColumn,
    TargetCopy,
    check_name,
    class_name,
    date_parts,
    numbers_of,
    texts_of,
)
from dtrain_dagster.data.table_file import Table, files_of, open_table
from trainer.data.manifest import SPLITS, STANDARDISED
from trainer.runtime.scratch import scratch_folder
from trainer.spec import DATE_CATEGORIES, DATE_NUMBERS, REGRESSION, ROWS

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

CODE_VERSION = 3
"""The version of the builder. Raise it when the same table would give other rows."""
LEAST_ROWS, FEW_ROWS = 2, 30
"""The rows of a split below which it is refused, and below which its size is told."""


def build_rows(source: str, storage_uri: str, params: RowParams) -> FinishedDataset:
    """Build ``<storage>/datasets/<id>`` from a Parquet or CSV file, or from all those in a folder, unless it exists;
    return a reference. Raise `DataError`, which names each column that cannot be used, and the remedy."""
    files = files_of(Path(source))
    digests = digest_files(files)
    dataset_id = id_of({"kind": ROWS, "code": CODE_VERSION, "files": digests, "params": asdict(params)})

    def write(folder: Path) -> dict[str, Any]:
        scratch = folder / "read"
        scratch.mkdir()
        manifest = _Builder(open_table(files, scratch), params, folder).build(dataset_id)
        shutil.rmtree(scratch)
        return manifest | {"source": {"title": Path(source).name, "sha256": digests[0], "files": len(files)}}

    return build_once(storage_uri, dataset_id, write)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnReport:
    """What a column of a table holds."""

    name: str
    type: str
    """One of `trainer.spec.RAW_TYPES`; "" for one without any value."""
    missing: int
    """Rows without a value."""
    remark: str
    """What it is for, or why it is left out."""
    is_like_id: bool
    """Whether it has another value in nearly every row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableReport:
    """What a table holds, and what becomes of it with some parameters."""

    rows: int
    task: str
    """"" where there is a problem with the target."""
    classes: Mapping[str, int]
    """The rows of the training split of each class; none of a target that is a number."""
    columns: Sequence[ColumnReport]
    notes: Sequence[str]
    problems: Sequence[str]
    """Why no dataset can be built, each with the remedy."""


def examine_rows(source: str, params: RowParams) -> TableReport:
    """Return what a table holds, of which nothing is built. Raise `DataError` for one that cannot be read, or has no
    such columns as are named."""
    with scratch_folder("table") as scratch:
        return _Builder(open_table(files_of(Path(source)), scratch), params, scratch).report()


@dataclass(slots=True)
class _Builder:
    """A single build of a dataset."""

    table: Table
    params: RowParams
    folder: Path
    problems: list[str] = field(default_factory=list)
    """What a person has to mend, told together."""
    numbers: dict[str, NumberColumn] = field(default_factory=dict)
    categories: dict[str, CategoryColumn] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Features, in the order of the table: each date is followed by its parts."""
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Features that are the part of a date: the column of the table, and which part."""
    copies: dict[str, TargetCopy] = field(default_factory=dict)
    """Of each column of the table, whether it is the target."""
    split_of: dict[str, int] = field(default_factory=dict)
    """The place in `SPLITS` that each value of ``split_by`` names; empty where it names none."""
    groups: int = 0
    """The different values of ``split_by``, counted up to `MOST_NAMES`."""
    target: TargetColumn = field(default_factory=lambda: TargetColumn(""))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Rows of each split."""
    excluded: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def build(self, dataset_id: str) -> dict[str, Any]:
        """Write the shards; return the manifest."""
        self._choose_columns()
        self._read_splits()
        self._learn()
        task, classes = self._judge_target()
        refuse(self.problems)
        kept = [name for name in self.names if name not in self.excluded and self._has_use(name)]
        if not kept:
            raise DataError(f"no column varies over the training split: {', '.join(self.excluded)}")
        shards = self._write(kept, task, classes)
        samples = {split: sum(shard["rows"] for shard in shards if shard["split"] == split) for split in SPLITS}
        self._judge_splits(samples)
        return {
            "schema_version": STANDARDISED,
            "kind": ROWS,
            "dataset_id": dataset_id,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "task": task,
            "classes": [class_name(value) for value in classes],
            "inputs": [self._input(name) for name in kept if name not in self.parts],
            "columns": [*map(self._column, kept), {"name": self.params.target, "type": "number", "role": "target"}],
            "normalisation": self._normalisation(kept, task),
            "params": asdict(self.params),
            "samples": samples,
            "excluded": self.excluded,
            "notes": self.notes,
            "shards": shards,
        }

    def report(self) -> TableReport:
        """Return what the table holds."""
        self._choose_columns()
        self._read_splits()
        self._learn()
        task, classes = self._judge_target()
        try:
            self._judge_splits(self.counts)
        except DataError as error:
            self.problems.append(str(error))
        columns = [self._report(name) for name in self.table.kinds]
        return TableReport(
            rows=self.table.rows,
            task=task,
            classes={class_name(value): self.target.counts[value] for value in classes},
            columns=columns,
            notes=self.notes,
            problems=self.problems,
        )

    def _report(self, name: str) -> ColumnReport:
        params, found = self.params, self.numbers.get(name) or self.categories.get(name)
        remark = self.excluded.get(name, "")
        for role, given in (("target", (params.target,)), ("--split-by", (params.split_by,)), ("--drop", params.drop)):
            remark = role if name in given else remark
        is_whole = isinstance(found, CategoryColumn) or self.table.types.get(name) == "integer"
        return ColumnReport(
            name=name,
            type=self.table.types.get(name, ""),
            missing=found.missing if found else 0,
            remark=remark,
            is_like_id=found is not None and not remark and is_whole and found.is_like_id,
        )

    def _choose_columns(self) -> None:
        """Find out what the columns are for. Raise `DataError` where the target is not there, since nothing else can be
        judged without it."""
        params, kinds = self.params, self.table.kinds
        wanted = {"--target": [params.target], "--drop": params.drop, "--split-by": [params.split_by or params.target]}
        for option, names in wanted.items():
            for name in names:
                if name not in kinds:
                    self.problems.append(
                        f"{option} {name}: the table has no such column; its columns are {', '.join(kinds)}"
                    )
        for name, said in self.table.problems.items():
            if name not in params.drop:
                self.problems += said
        if params.target in params.drop:
            self.problems.append(f"--drop {params.target}: that is the target: leave the option out")
        if params.target not in kinds or (params.split_by or params.target) not in kinds:
            refuse(self.problems)
        self.target = TargetColumn(params.target, is_text=kinds[params.target] == "category")
        if kinds[params.target] == "date":
            self.target.problem = f"the target {params.target!r} is a date: give a number, such as days from a day"
        for name, kind in kinds.items():
            if name in (params.target, params.split_by, *params.drop):
                continue
            if why := self.table.index.get(name):
                self.excluded[name] = why
                continue
            self.names.append(name)
            if name in self.table.problems:
                continue
            self.copies[name] = TargetCopy()
            if kind in ("number", "date"):
                self.numbers[name] = NumberColumn(name)
            else:
                self.categories[name] = CategoryColumn(name)
            if kind == "date":
                self._choose_parts(name)
        if not self.names:
            self.problems.append("the table has no column besides the target to learn from")
            refuse(self.problems)

    def _choose_parts(self, date: str) -> None:
        """Add the parts of a date to the features."""
        for part in (*DATE_NUMBERS, *DATE_CATEGORIES):
            name = f"{date}.{part}"
            if name in self.table.kinds:
                self.problems.append(f"the column {name!r} has the name of a part of the date {date!r}: rename it")
                continue
            try:
                check_name(name)
            except DataError as error:
                self.problems.append(str(error))
            self.names.append(name)
            self.parts[name] = date, part
            if part in DATE_NUMBERS:
                self.numbers[name] = NumberColumn(name)
            else:
                self.categories[name] = CategoryColumn(name)

    def _columns_in(self, batch: pa.RecordBatch) -> Callable[[str], pa.Array]:
        """Return what gives the column of a feature: of the table, or a part of a date."""
        of_date: dict[str, dict[str, pa.Array]] = {}

        def column(name: str) -> pa.Array:
            if name not in self.parts:
                return batch.column(name)
            date, part = self.parts[name]
            if date not in of_date:
                of_date[date] = date_parts(batch.column(date))
            return of_date[date][part]

        return column

    def _read_splits(self) -> None:
        """Find out whether ``split_by`` names splits. Names that are mixed with others are a problem."""
        by = self.params.split_by
        if by is None:
            return
        counts: Counter[str] = Counter()
        for first, batch in self.table.batches([by]):
            values = texts_of(batch.column(by))
            if None in values:
                row = first + values.index(None)
                self.problems.append(f"--split-by {by}: the column is empty in row {row}, counted from 0: fill it")
                return
            if len(counts) <= MOST_NAMES:
                counts.update(map(str, values))
        self.groups = len(counts)
        if self.groups > MOST_NAMES:
            return
        known = {value: SPLIT_NAMES.get(value.strip().lower()) for value in counts}
        if all(known.values()):
            self.split_of = {value: SPLITS.index(split) for value, split in known.items() if split}
        elif any(known.values()):
            found = ", ".join(f"{value!r} ({count:,} rows)" for value, count in counts.most_common())
            self.problems.append(
                f"--split-by {by}: its values are {found}, but not all of them name a split: use train, valid and test"
            )

    def _learn(self) -> None:
        """Learn what the columns hold, some rows at a time, and note what is wrong with them."""
        by, every = self.params.split_by, max(1, self.table.rows // MOST_SAMPLED)
        target = [] if self.params.target in self.table.problems or self.target.problem else [self.params.target]
        columns = [*self._of_table([*self.numbers, *self.categories]), *target, *([by] if by else [])]
        for first, batch in self.table.batches(columns) if columns else ():
            splits, column = self._splits(first, batch), self._columns_in(batch)
            is_train = splits == 0
            for place, split in enumerate(SPLITS):
                self.counts[split] += int((splits == place).sum())
            for name, number in self.numbers.items():
                number.learn(column(name), is_train, first, every)
            for name, category in self.categories.items():
                category.learn(texts_of(column(name)), is_train)
            for name in target:
                self.target.learn(batch.column(name), is_train, first, every)
                self._compare_with_target(batch)
        for name in self.names:
            if name not in self.table.problems:
                self._judge_column(name)

    def _compare_with_target(self, batch: pa.RecordBatch) -> None:
        def values(name: str) -> list[Any]:
            column = batch.column(name)
            return texts_of(column) if self.table.kinds[name] == "category" else numbers_of(column).tolist()

        copies = {name: copy for name, copy in self.copies.items() if copy.is_same or copy.is_renamed}
        target = values(self.params.target) if copies else []
        for name, copy in copies.items():
            copy.learn(values(name), target)

    def _of_table(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the table that features are made of."""
        return list(dict.fromkeys(self.parts[name][0] if name in self.parts else name for name in names))

    def _has_use(self, name: str) -> bool:
        """Return whether a part of a date says more than that."""
        if name not in self.parts:
            return True
        varies = self.categories[name].varies if name in self.categories else bool(self.numbers[name].std)
        return varies and self.parts[name][0] not in self.excluded

    def _judge_target(self) -> tuple[str, list[Any]]:
        """Return the task, and the values of the classes in the order of their codes. What is wrong is noted."""
        if self.params.target not in self.table.problems:
            try:
                return self.target.task(self.params.task)
            except DataError as error:
                self.problems.append(str(error))
        return "", []

    def _judge_column(self, name: str) -> None:
        """Note why a column is left out, or is a problem."""
        leave = f"leave it out (--drop {name})"
        if name in self.parts:
            return
        copy = self.copies[name]
        if copy.is_same:
            self.problems.append(f"the column {name!r} is the target {self.params.target!r} in each row: {leave}")
        elif copy.is_renamed and len(copy.meant) > 1:
            self.notes.append(
                f"{name} says the target {self.params.target} in other words, one value for each of its own: if it is "
                f"not known before, {leave}"
            )
        like_id = (
            f"{name} has another value in nearly every row, as an identifier does: if it measures nothing, {leave}"
        )
        if name in self.categories:
            category = self.categories[name]
            if is_nameless(name) and category.values:
                self.problems.append(f"the column {name!r} is an index without a name: give it one, or {leave}")
            elif category.problem:
                self.problems.append(f"the column {name!r} {category.problem}, or {leave}")
            elif not category.values:
                self.excluded[name] = "has no value in the training split"
            elif not category.varies:
                self.excluded[name] = "does not vary over the training split"
            elif category.is_like_id:
                self.notes.append(like_id)
            return
        number = self.numbers[name]
        if name in self.table.index:
            if number.is_counter:
                self.excluded[name] = "counts rows, as the index of a table does"
                return
            if is_nameless(name):
                self.problems.append(f"the column {name!r} is an index without a name: give it one, or {leave}")
        if number.missing and self.params.missing == "refuse":
            self.problems.append(
                f"the column {name!r} lacks {number.missing} numbers (the first in row {number.first_missing}, counted "
                f"from 0): {leave}, or let them count as the mean, with an input that says so (--missing mean)"
            )
        number.judge()
        if number.problem:
            self.problems.append(f"the column {name!r} {number.problem}, or {leave}")
        elif not number.moments.count:
            self.excluded[name] = "has no value in the training split"
        elif not number.std and not number.missing_train:
            self.excluded[name] = "does not vary over the training split"
        elif number.is_in_order:
            self.notes.append(
                f"{name} counts the rows in their order: if it measures nothing, leave it out (--drop {name})"
            )
        elif self.table.types[name] == "integer" and number.is_like_id:
            self.notes.append(like_id)

    def _splits(self, first: int, batch: pa.RecordBatch) -> NDArray[np.int64]:
        import numpy as np

        by, valid, test = self.params.split_by, self.params.valid_fraction, self.params.test_fraction
        if by is None:
            return splits_of(numbered_shares(first, len(batch), self.params.seed), valid, test)
        values = [str(value) for value in texts_of(batch.column(by))]
        if self.split_of:
            return np.array([self.split_of[value] for value in values], dtype=np.int64)
        return splits_of(hashed_shares(values, self.params.seed), valid, test)

    def _judge_splits(self, samples: Mapping[str, int]) -> None:
        """Raise `DataError` for a split without rows, or with too few to say anything; note one with few."""
        by, counts = self.params.split_by, ", ".join(f"{split} {count:,}" for split, count in samples.items())
        remedy = "give more rows, or other fractions"
        if self.split_of:
            remedy = f"--split-by {by} names them ({', '.join(map(repr, self.split_of))}): name more rows of it"
        elif by is not None:
            few = f", and there are only {self.groups} values" if self.groups <= MOST_NAMES else ""
            remedy = f"rows of one value of {by!r} stay together{few}: give another --split-by, --seed or fractions"
        for split, count in samples.items():
            if count < LEAST_ROWS:
                held = f"only {count} row" if count else "no rows"
                raise DataError(f"the {split} split has {held} ({counts}): {remedy}")
            if count < FEW_ROWS:
                self.notes.append(f"the {split} split has {count} rows: its figures are little more than chance")

    def _input(self, name: str) -> dict[str, Any]:
        """Return what is kept of a column of the table."""
        missing = (self.categories[name] if name in self.categories else self.numbers[name]).missing > 0
        return {"name": name, "type": self.table.types[name], "missing": missing}

    def _column(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": name, "role": "feature"}
        if name in self.parts:
            entry |= dict(zip(("of", "part"), self.parts[name], strict=True))
        if name in self.categories:
            return entry | {"type": "category", "values": self.categories[name].ordered()}
        unit = {"unit": DATE_UNIT} if self.table.kinds.get(name) == "date" else {}
        missing = name not in self.parts and self.numbers[name].missing_train > 0  # of a date said once
        return entry | {"type": "number", "missing": missing} | unit

    def _normalisation(self, kept: Sequence[str], task: str) -> dict[str, Any]:
        features = {name: {"mean": 0.0, "std": 1.0} for name in kept}
        for name in kept:
            if name in self.numbers:  # one that varies in what is missing alone has no deviation
                features[name] = {"mean": self.numbers[name].mean, "std": self.numbers[name].std or 1.0}
        number = self.target.number
        target = {"mean": number.mean, "std": number.std} if task == REGRESSION else {"mean": 0.0, "std": 1.0}
        return {"fitted_on": "train", "features": features, "target": target}

    def _write(self, kept: Sequence[str], task: str, classes: Sequence[Any]) -> list[dict[str, Any]]:
        """Write the shards of all splits; return their entries. Numbers are stored in deviations from the mean, a
        target that is a number as it is. Raise `DataError` for a number that is too far from the training rows."""
        import numpy as np
        import pyarrow as pa

        fields = [pa.field(name, pa.int32() if name in self.categories else pa.float32()) for name in kept]
        target = pa.field(self.params.target, pa.float64() if task == REGRESSION else pa.int32())
        schema = pa.schema([*fields, target])
        codes = {
            name: {value: code for code, value in enumerate(category.ordered(), 1)}
            for name, category in self.categories.items()
        }
        code_of_class = {value: code for code, value in enumerate(classes)}
        writers = [TableShards(self.folder, split, schema, self.params.shard_rows) for split in SPLITS]
        by = [self.params.split_by] if self.params.split_by else []
        for first, batch in self.table.batches([*self._of_table(kept), self.params.target, *by]):
            arrays: list[NDArray[Any]] = []
            column_of = self._columns_in(batch)
            for name in kept:
                if name in codes:
                    found = [codes[name].get(value, 0) for value in texts_of(column_of(name))]
                    arrays.append(np.array(found, dtype=np.int32))
                    continue
                values = numbers_of(column_of(name))
                arrays.append(self.numbers[name].standardise(values))
                if np.isinf(arrays[-1]).any():
                    row = int(np.flatnonzero(np.isinf(arrays[-1]))[0])
                    raise DataError(
                        f"the column {name!r} has {values[row]} in row {first + row}, counted from 0, and a deviation "
                        f"of {self.numbers[name].std:.3g} over the training split: correct it, or leave the column out "
                        f"(--drop {name})"
                    )
            column = batch.column(self.params.target)
            if task == REGRESSION:
                arrays.append(numbers_of(column))
            else:
                classes_here = self.target.classes_of(column).tolist()
                arrays.append(np.array([code_of_class[value] for value in classes_here], dtype=np.int32))
            table = pa.Table.from_arrays([pa.array(values) for values in arrays], schema=schema)
            splits = self._splits(first, batch)
            for place, writer in enumerate(writers):
                if (splits == place).any():
                    writer.add(table.filter(pa.array(splits == place)))
        return [shard for writer in writers for shard in writer.close()]
