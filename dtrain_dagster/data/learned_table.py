"""What is learned of a table before anything of it is stored: its columns, splits and target, and what is wrong there.

The rows are loaded once, some at a time, into the table `rows` of a database on disk; all that is said of a column is
then a query, so the table may be larger than memory. What columns are is `table_columns`; writing what is stored is
`rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError, refuse
from dtrain_dagster.data.row_splits import (
    MOST_NAMES,
    RowParams,
    hashed_shares,
    named_split,
    numbered_shares,
    splits_of,
)
from dtrain_dagster.data.table_columns import (
    DATE_UNIT,
    LARGEST,
    MOST_SAMPLED,
    CategoryColumn,
    NumberColumn,
    check_name,
    class_name,
    date_parts,
    group_of,
)
from dtrain_dagster.data.table_file import Table
from trainer.data.manifest import MOST_CLASSES, SPLITS
from trainer.spec import BINARY, DATE_CATEGORIES, DATE_NUMBERS, MULTICLASS, REGRESSION

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

Feature = NumberColumn | CategoryColumn
LEAST_ROWS, FEW_ROWS = 2, 30
"""The rows of a split below which it is refused, and below which its size is told."""
FEW_VALUES = 20
"""A target of whole numbers with at most this many values is taken for classes, unless a task is given."""
MEMORY_LIMIT = 256
"""Megabytes that the database may take."""


@contextmanager
def opened_rows(scratch: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield an empty database, which spills to disk. One thread, so that the same table gives the same last digits.
    Raise `OSError` where the disk is full."""
    import duckdb

    config: dict[str, Any] = {"memory_limit": f"{MEMORY_LIMIT}MB", "threads": 1, "temp_directory": str(scratch)}
    with duckdb.connect(config=config) as database:
        database.execute("SET enable_progress_bar=false")
        try:
            yield database
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            raise OSError(f"no room for the rows of the table under {scratch}: {error}") from error


@dataclass(slots=True)
class LearnedTable:
    """A table and what is learned of it, by `learn`."""

    table: Table
    params: RowParams
    database: duckdb.DuckDBPyConnection
    problems: list[str] = field(default_factory=list)
    """What a person has to mend, told together."""
    features: dict[str, Feature] = field(default_factory=dict)
    """In the order of the table: each date is followed by its parts."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Columns that are left out, and why."""
    notes: list[str] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    """The different values of ``split_by``, the first `MOST_NAMES` and one, and their rows."""
    names_splits: bool = False
    """Whether they name splits."""
    has_target: bool = False
    """Whether the target can be used, as far as its type tells."""
    target: NumberColumn = field(default_factory=lambda: NumberColumn("", "", "target"))
    """What is known of a target that is a number."""
    task: str = ""
    """"" where there is a problem with the target."""
    classes: list[str] = field(default_factory=list)
    """The names of the classes in the order of their codes; none of a target that is a number."""

    @property
    def is_text(self) -> bool:
        """Whether the target is text."""
        return self.table.kinds[self.params.target] == "category"

    def learn(self) -> None:
        """Find out what the columns are for, and learn what they hold. What a person has to mend is noted."""
        self._choose_columns()
        self._load()
        self._read_splits()
        for column in self.features.values():
            column.learn(self.database)
            if not column.part:
                self._judge_column(column)
        if self.has_target:
            try:
                self._judge_target()
            except DataError as error:
                self.problems.append(str(error))

    def kept(self) -> list[Feature]:
        """Return the features that are stored, in their order: a part of a date where it varies. Raise `DataError`
        where none does."""
        used = [column for column in self.features.values() if column.source not in self.excluded]
        found = [column for column in used if column.varies or not column.part]
        if not found:
            raise DataError(f"no column varies over the training split: {', '.join(self.excluded)}")
        return found

    def samples(self) -> dict[str, int]:
        """Return the rows of each split. Raise `DataError` for one without rows, or with too few to say anything; note
        one with few."""
        found = dict(self.database.execute("SELECT split, count(*) FROM rows GROUP BY split").fetchall())
        samples = {split: found.get(place, 0) for place, split in enumerate(SPLITS)}
        by, counts = self.params.split_by, ", ".join(f"{split} {count:,}" for split, count in samples.items())
        remedy = "give more rows, or other fractions"
        if self.names_splits:
            remedy = f"--split-by {by} names them ({', '.join(map(repr, self.groups))}): name more rows of it"
        elif by is not None:
            few = f", and there are only {len(self.groups)} values" if len(self.groups) <= MOST_NAMES else ""
            remedy = f"rows of one value of {by!r} stay together{few}: give another --split-by, --seed or fractions"
        for split, count in samples.items():
            if count < LEAST_ROWS:
                held = f"only {count} row" if count else "no rows"
                raise DataError(f"the {split} split has {held} ({counts}): {remedy}")
            if count < FEW_ROWS:
                self.notes.append(f"the {split} split has {count} rows: its figures are little more than chance")
        return samples

    def input_entry(self, column: Feature) -> dict[str, Any]:
        """Return what the manifest says of a column of the table."""
        return {"name": column.name, "type": self.table.types[column.name], "missing": column.missing > 0}

    def _choose_columns(self) -> None:
        """Find out what the columns are for. Raise `DataError` where the target is not there, since nothing else can be
        judged without it."""
        params, kinds = self.params, self.table.kinds
        target, by = params.target, params.split_by or params.target
        for option, names in {"--target": [target], "--drop": params.drop, "--split-by": [by]}.items():
            for name in names:
                if name not in kinds:
                    self.problems.append(
                        f"{option} {name}: the table has no such column; its columns are {', '.join(kinds)}"
                    )
        for name, said in self.table.problems.items():
            if name not in params.drop:
                self.problems += said
        if target in params.drop:
            self.problems.append(f"--drop {target}: that is the target: leave the option out")
        if target not in kinds or by not in kinds:
            refuse(self.problems)
        if kinds[target] == "date":
            self.problems.append(f"the target {target!r} is a date: give a number, such as days from a day")
        self.has_target = target not in self.table.problems and kinds[target] != "date"
        taken = {target, params.split_by, *params.drop}
        self.excluded = {name: why for name, why in self.table.index.items() if name not in taken}
        for name, kind in kinds.items():
            if not (name in taken or name in self.excluded or name in self.table.problems):
                self._choose_features(name, kind)
        if not self.features:
            refuse(self.problems or ["the table has no column besides the target to learn from"])
        if not self.table.rows:
            raise DataError("the table has no rows")

    def _choose_features(self, name: str, kind: str) -> None:
        """Add a column, and the parts of a date, to the features."""
        key = f"column{len(self.features)}"
        if kind == "number":
            self.features[name] = NumberColumn(name, name, key)
        elif kind != "date":
            self.features[name] = CategoryColumn(name, name, key)
        else:
            self.features[name] = NumberColumn(name, name, key, unit=DATE_UNIT)
            for part in (*DATE_NUMBERS, *DATE_CATEGORIES):
                of_part = f"{name}.{part}"
                if of_part in self.table.kinds:
                    self.problems.append(
                        f"the column {of_part!r} has the name of a part of the date {name!r}: rename it"
                    )
                    continue
                try:
                    check_name(of_part)
                except DataError as error:
                    self.problems.append(str(error))
                kind_of_part = NumberColumn if part in DATE_NUMBERS else CategoryColumn
                self.features[of_part] = kind_of_part(of_part, name, f"column{len(self.features)}", part)

    def _load(self) -> None:
        """Load the rows, each with the place in `SPLITS` that chance gives it, its group, and the place that this
        names."""
        import numpy as np
        import pyarrow as pa

        more = [name for name in (self.params.target if self.has_target else None, self.params.split_by) if name]
        for first, batch in self.table.batches([*(column.source for column in self.features.values()), *more]):
            numbers = np.arange(first, first + len(batch))
            is_sampled = pa.array(numbers % max(1, self.table.rows // MOST_SAMPLED) == 0)
            loaded = {"n": pa.array(numbers), **self._splits(first, batch)}
            parts: dict[str, dict[str, pa.Array]] = {}
            for column in self.features.values():
                values = batch.column(column.source)
                if column.part:
                    parts[column.source] = parts.get(column.source) or date_parts(values)
                    values = parts[column.source][column.part]
                loaded[column.key] = column.loaded(values, is_sampled)
            if self.has_target:
                values = batch.column(self.params.target)
                loaded["class"] = pa.array([class_name(value) for value in values.to_pylist()], pa.string())
                loaded["target"] = pa.nulls(len(batch), pa.float64())
                if not self.is_text:
                    loaded["target"] = self.target.loaded(values, is_sampled)
            self.database.register("batch", pa.table(loaded))
            self.database.execute("CREATE TABLE IF NOT EXISTS loaded AS SELECT * FROM batch LIMIT 0")
            self.database.execute("INSERT INTO loaded SELECT * FROM batch")
            self.database.unregister("batch")

    def _splits(self, first: int, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Return what tells the splits of some rows, of which ``first`` is the number of the first."""
        import pyarrow as pa

        by, params = self.params.split_by, self.params
        names: list[str | None] = [None] * len(batch)
        if by is not None:
            names = [None if value is None else group_of(value) for value in batch.column(by).to_pylist()]
        shares = numbered_shares(first, len(batch), params.seed) if by is None else hashed_shares(names, params.seed)
        return {
            "by_chance": pa.array(splits_of(shares, params.valid_fraction, params.test_fraction)),
            "name": pa.array(names, pa.string()),
            "by_name": pa.array([named_split(name) for name in names], pa.int64()),
        }

    def _read_splits(self) -> None:
        """Find out whether ``split_by`` names splits, and so which split each row of the table is in. Names that are
        mixed with others are a problem."""
        by = self.params.split_by
        if by is not None:
            query = "SELECT name, count(*) FROM loaded GROUP BY name ORDER BY count(*) DESC, min(n) LIMIT ?"
            self.groups = dict(self.database.execute(query, [MOST_NAMES + 1]).fetchall())
            [(gone,)] = self.database.execute("SELECT min(n) FROM loaded WHERE name IS NULL").fetchall()
            is_known = [named_split(name) is not None for name in self.groups if len(self.groups) <= MOST_NAMES]
            if gone is not None:
                self.problems.append(f"--split-by {by}: the column is empty in row {gone}, counted from 0: fill it")
            elif any(is_known) and not all(is_known):
                found = ", ".join(f"{value!r} ({count:,} rows)" for value, count in self.groups.items())
                self.problems.append(
                    f"--split-by {by}: its values are {found}, but not all of them name a split: use train, valid and "
                    "test"
                )
            self.names_splits = any(is_known)
        split = "by_name" if self.names_splits else "by_chance"
        self.database.execute(f"CREATE VIEW rows AS SELECT *, {split} AS split FROM loaded")

    def _judge_column(self, column: Feature) -> None:
        """Note why a column is left out, or is a problem."""
        name, leave = column.name, f"leave it out (--drop {column.name})"
        is_same, is_renamed = self._says_target(column) if self.has_target else (False, False)
        if is_same:
            self.problems.append(f"the column {name!r} is the target {self.params.target!r} in each row: {leave}")
        elif is_renamed:
            self.notes.append(
                f"{name} says the target {self.params.target} in other words, one value for each of its own: if it is "
                f"not known before, {leave}"
            )
        if isinstance(column, NumberColumn) and column.missing and self.params.missing == "refuse":
            self.problems.append(
                f"the column {name!r} lacks {column.missing} numbers (the first in row {column.first_missing}, counted "
                f"from 0): {leave}, or let them count as the mean, with an input that says so (--missing mean)"
            )
        if column.problem:
            self.problems.append(f"the column {name!r} {column.problem}, or {leave}")
        elif not column.trained:
            self.excluded[name] = "has no value in the training split"
        elif not column.varies:
            self.excluded[name] = "does not vary over the training split"
        elif self.table.types[name] in ("integer", "string") and column.is_like_id:
            self.notes.append(
                f"{name} has another value in nearly every row, as an identifier does: if it measures nothing, {leave}"
            )

    def _says_target(self, column: Feature) -> tuple[bool, bool]:
        """Return whether a column is the target once more: in each row, or in other words, so that each of its few
        values goes with one value of the target, and that with no other."""
        is_number, target = isinstance(column, NumberColumn), "class" if self.is_text else "target"
        if is_number != self.is_text:
            query = f"SELECT bool_and({column.key} IS NOT DISTINCT FROM {target}) FROM rows"
            if self.database.execute(query).fetchall()[0][0]:
                return True, False
        if column.different > FEW_VALUES:
            return False, False
        query = f"SELECT DISTINCT {column.key}, {target} FROM rows LIMIT {FEW_VALUES + 1}"
        pairs = self.database.execute(query).fetchall()
        values, meant = {value for value, _ in pairs}, {value for _, value in pairs}
        is_whole = len(pairs) <= FEW_VALUES and not (is_number and None in values)
        return False, is_whole and 1 < len(pairs) == len(values) == len(meant)

    def _judge_target(self) -> None:
        """Find the task and the classes. Raise `DataError` where the task that was asked for does not fit, or the
        target cannot be learned."""
        name, number = self.params.target, self.target
        is_gone = "class IS NULL" if self.is_text else f"NOT coalesce(abs(target) <= {LARGEST!r}, false)"
        query = f"SELECT min(n) FILTER ({is_gone}), coalesce(bool_or(target <> floor(target)), false) FROM rows"
        row, is_fraction = self.database.execute(query).fetchall()[0]
        if row is not None:
            raise DataError(
                f"the target {name!r} is missing, or too large, in row {row}, counted from 0: leave such rows out, or "
                "give them a target"
            )
        query = "SELECT class, bool_or(split = 0) AS is_train FROM rows GROUP BY class ORDER BY is_train DESC LIMIT ?"
        found = [] if is_fraction else self.database.execute(query, [MOST_CLASSES + 2]).fetchall()
        classes = sorted((value for value, is_train in found if is_train), key=None if self.is_text else int)
        usual = BINARY if len(classes) == 2 else MULTICLASS
        if not self.is_text and (is_fraction or len(classes) > FEW_VALUES):
            usual = REGRESSION
        task = self.params.task or usual
        if task == REGRESSION:
            if self.is_text:
                raise DataError(f"the target {name!r} is text, and a regression needs numbers: leave --task out")
            number.learn(self.database)
            if number.problem:
                raise DataError(f"the target {name!r} {number.problem}")
            if not number.high > number.low:
                raise DataError(f"the target {name!r} does not vary over the training split")
            self.task = task
            return
        fits = len(classes) == 2 if task == BINARY else 2 < len(classes) <= MOST_CLASSES
        if not fits or is_fraction:
            what = "values that are not whole numbers" if is_fraction else f"{len(classes)} values"
            raise DataError(
                f"the target {name!r} has {what} in the training split, and {task} needs "
                f"{'two classes' if task == BINARY else f'3 to {MOST_CLASSES:,} classes'}: choose another --task"
            )
        if unknown := sorted(value for value, is_train in found if not is_train):
            raise DataError(
                f"the target {name!r} has the class {unknown[0]!r} only in the validation or test split: give more "
                "rows of it, or leave it out"
            )
        self.task, self.classes = task, classes
