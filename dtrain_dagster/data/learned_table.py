"""What is learned of a table before anything of it is stored: its columns, splits and target, and what is wrong there.

One streaming pass, some rows at a time. What columns are is `table_columns`; writing what is stored is `rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError, refuse
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
    check_name,
    date_parts,
    group_of,
    numbers_of,
)
from dtrain_dagster.data.table_file import Table
from dtrain_dagster.data.target_column import TargetColumn, TargetCopy
from trainer.data.manifest import SPLITS
from trainer.spec import DATE_CATEGORIES, DATE_NUMBERS

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

Feature = NumberColumn | CategoryColumn
LEAST_ROWS, FEW_ROWS = 2, 30
"""The rows of a split below which it is refused, and below which its size is told."""


@dataclass(slots=True)
class LearnedTable:
    """A table and what is learned of it, by `learn`."""

    table: Table
    params: RowParams
    problems: list[str] = field(default_factory=list)
    """What a person has to mend, told together."""
    features: dict[str, Feature] = field(default_factory=dict)
    """In the order of the table: each date is followed by its parts."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Columns that are left out, and why."""
    notes: list[str] = field(default_factory=list)
    copies: dict[str, TargetCopy] = field(default_factory=dict)
    """Of each column of the table, whether it is the target; none where the target cannot be used."""
    split_of: dict[str, int] = field(default_factory=dict)
    """The place in `SPLITS` that each value of ``split_by`` names; empty where it names none."""
    groups: int = 0
    """The different values of ``split_by``, counted up to `MOST_NAMES`."""
    target: TargetColumn = field(default_factory=lambda: TargetColumn(""))
    task: str = ""
    """"" where there is a problem with the target."""
    classes: list[Any] = field(default_factory=list)
    """The values of the classes in the order of their codes; none of a target that is a number."""

    def learn(self) -> None:
        """Find out what the columns are for, and learn what they hold. What a person has to mend is noted. Raise
        `DataError` for a table without rows."""
        if not self.table.rows:
            raise DataError("the table has no rows")
        self._choose_columns()
        self._read_splits()
        self._read_rows()
        for column in self.features.values():
            if not column.part:
                self._judge_column(column)
        if self.params.target not in self.table.problems:
            try:
                self.task, self.classes = self.target.task(self.params.task)
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
        taken = {params.target, params.split_by, *params.drop}
        self.excluded = {name: why for name, why in self.table.index.items() if name not in taken}
        for name, kind in kinds.items():
            if not (name in taken or name in self.excluded or name in self.table.problems):
                self._choose_features(name, kind)
        if not self.features and not self.problems:
            raise DataError("the table has no column besides the target to learn from")

    def _choose_features(self, name: str, kind: str) -> None:
        """Add a column, and the parts of a date, to the features."""
        if kind == "number":
            self.features[name] = NumberColumn(name, name)
        elif kind != "date":
            self.features[name] = CategoryColumn(name, name)
        else:
            self.features[name] = NumberColumn(name, name, unit=DATE_UNIT)
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
                self.features[of_part] = kind_of_part(of_part, name, part)

    def _read_splits(self) -> None:
        """Find out whether ``split_by`` names splits. Names that are mixed with others are a problem."""
        by = self.params.split_by
        if by is None:
            return
        counts: Counter[str] = Counter()
        for first, batch in self.table.batches([by]):
            values = batch.column(by).to_pylist()
            if None in values:
                row = first + values.index(None)
                self.problems.append(f"--split-by {by}: the column is empty in row {row}, counted from 0: fill it")
                return
            if len(counts) <= MOST_NAMES:
                counts.update(map(group_of, values))
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

    def _read_rows(self) -> None:
        """Learn what the columns hold, some rows at a time."""
        every = max(1, self.table.rows // MOST_SAMPLED)
        target = self.params.target
        has_target = target not in self.table.problems and not self.target.problem
        if has_target:
            self.copies = {column.source: TargetCopy() for column in self.features.values()}
        columns = self.columns_of(self.features.values(), [target] if has_target else [])
        for first, batch in self.table.batches(columns) if columns else ():
            is_train = self.splits(first, batch) == 0
            for column, values in values_in(batch, self.features.values()):
                column.learn(values, is_train, first, every)
            if has_target:
                self.target.learn(batch.column(target), is_train, first, every)
                self._compare_with_target(batch)

    def columns_of(self, features: Iterable[Feature], more: Iterable[str]) -> list[str]:
        """Return the columns of the table that features are made of, with others, and what tells the splits."""
        by = [self.params.split_by] if self.params.split_by else []
        return list(dict.fromkeys([*(column.source for column in features), *more, *by]))

    def _compare_with_target(self, batch: pa.RecordBatch) -> None:
        def values(name: str) -> list[Any]:
            column = batch.column(name)
            return column.to_pylist() if self.table.kinds[name] == "category" else numbers_of(column).tolist()

        copies = {name: copy for name, copy in self.copies.items() if copy.is_same or copy.is_renamed}
        target = values(self.params.target) if copies else []
        for name, copy in copies.items():
            copy.learn(values(name), target)

    def _judge_column(self, column: Feature) -> None:
        """Note why a column is left out, or is a problem."""
        name, copy, leave = column.name, self.copies.get(column.name), f"leave it out (--drop {column.name})"
        if copy and copy.is_same:
            self.problems.append(f"the column {name!r} is the target {self.params.target!r} in each row: {leave}")
        elif copy and copy.is_renamed and len(copy.meant) > 1:
            self.notes.append(
                f"{name} says the target {self.params.target} in other words, one value for each of its own: if it is "
                f"not known before, {leave}"
            )
        if isinstance(column, NumberColumn) and column.missing and self.params.missing == "refuse":
            self.problems.append(
                f"the column {name!r} lacks {column.missing} numbers (the first in row {column.first_missing}, counted "
                f"from 0): {leave}, or let them count as the mean, with an input that says so (--missing mean)"
            )
        column.judge()
        if column.problem:
            self.problems.append(f"the column {name!r} {column.problem}, or {leave}")
        elif not column.has_values:
            self.excluded[name] = "has no value in the training split"
        elif not column.varies:
            self.excluded[name] = "does not vary over the training split"
        elif self.table.types[name] in ("integer", "string") and column.is_like_id:
            self.notes.append(
                f"{name} has another value in nearly every row, as an identifier does: if it measures nothing, {leave}"
            )

    def splits(self, first: int, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the place in `SPLITS` of some rows (n,), of which ``first`` is the number of the first."""
        import numpy as np

        by, valid, test = self.params.split_by, self.params.valid_fraction, self.params.test_fraction
        if by is None:
            return splits_of(numbered_shares(first, len(batch), self.params.seed), valid, test)
        values = [group_of(value) for value in batch.column(by).to_pylist()]
        if self.split_of:
            return np.array([self.split_of[value] for value in values], dtype=np.int64)
        return splits_of(hashed_shares(values, self.params.seed), valid, test)

    def judge_splits(self, samples: Mapping[str, int]) -> None:
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

    def input_entry(self, column: Feature) -> dict[str, Any]:
        """Return what the manifest says of a column of the table."""
        return {"name": column.name, "type": self.table.types[column.name], "missing": column.missing > 0}


def values_in(batch: pa.RecordBatch, features: Iterable[Feature]) -> Iterator[tuple[Feature, pa.Array]]:
    """Yield features with their values in some rows."""
    parts: dict[str, dict[str, pa.Array]] = {}
    for column in features:
        if column.part and column.source not in parts:
            parts[column.source] = date_parts(batch.column(column.source))
        yield column, parts[column.source][column.part] if column.part else batch.column(column.source)
