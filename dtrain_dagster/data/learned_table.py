"""What is learned of a table before anything of it is stored: its columns, splits and target, and what is wrong there.

One streaming pass, some rows at a time. What columns are is `table_columns`; writing what is stored is `rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

LEAST_ROWS, FEW_ROWS = 2, 30
"""The rows of a split below which it is refused, and below which its size is told."""


@dataclass(slots=True)
class LearnedTable:
    """A table and what is learned of it, by `learn`."""

    table: Table
    params: RowParams
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
    task: str = ""
    """"" where there is a problem with the target."""
    classes: list[Any] = field(default_factory=list)
    """The values of the classes in the order of their codes; none of a target that is a number."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Rows of each split."""
    excluded: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def learn(self) -> None:
        """Find out what the columns are for, and learn what they hold. What a person has to mend is noted."""
        self._choose_columns()
        self._read_splits()
        self._learn()
        if self.params.target not in self.table.problems:
            try:
                self.task, self.classes = self.target.task(self.params.task)
            except DataError as error:
                self.problems.append(str(error))

    def kept(self) -> list[str]:
        """Return the features that are stored, in their order. Raise `DataError` where none varies."""
        found = [name for name in self.names if name not in self.excluded and self._has_use(name)]
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

    def columns_in(self, batch: pa.RecordBatch) -> Callable[[str], pa.Array]:
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

    def _learn(self) -> None:
        """Learn what the columns hold, some rows at a time, and note what is wrong with them."""
        by, every = self.params.split_by, max(1, self.table.rows // MOST_SAMPLED)
        target = [] if self.params.target in self.table.problems or self.target.problem else [self.params.target]
        columns = [*self.of_table([*self.numbers, *self.categories]), *target, *([by] if by else [])]
        for first, batch in self.table.batches(columns) if columns else ():
            splits, column = self.splits(first, batch), self.columns_in(batch)
            is_train = splits == 0
            for place, split in enumerate(SPLITS):
                self.counts[split] += int((splits == place).sum())
            for name, number in self.numbers.items():
                number.learn(column(name), is_train, first, every)
            for name, category in self.categories.items():
                category.learn(column(name).to_pylist(), is_train)
            for name in target:
                self.target.learn(batch.column(name), is_train, first, every)
                self._compare_with_target(batch)
        for name in self.names:
            if name not in self.table.problems:
                self._judge_column(name)

    def _compare_with_target(self, batch: pa.RecordBatch) -> None:
        def values(name: str) -> list[Any]:
            column = batch.column(name)
            return column.to_pylist() if self.table.kinds[name] == "category" else numbers_of(column).tolist()

        copies = {name: copy for name, copy in self.copies.items() if copy.is_same or copy.is_renamed}
        target = values(self.params.target) if copies else []
        for name, copy in copies.items():
            copy.learn(values(name), target)

    def of_table(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the table that features are made of."""
        return list(dict.fromkeys(self.parts[name][0] if name in self.parts else name for name in names))

    def _has_use(self, name: str) -> bool:
        """Return whether a part of a date says more than that."""
        if name not in self.parts:
            return True
        varies = self.categories[name].varies if name in self.categories else bool(self.numbers[name].std)
        return varies and self.parts[name][0] not in self.excluded

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
            if category.problem:
                self.problems.append(f"the column {name!r} {category.problem}, or {leave}")
            elif not category.values:
                self.excluded[name] = "has no value in the training split"
            elif not category.varies:
                self.excluded[name] = "does not vary over the training split"
            elif category.is_like_id:
                self.notes.append(like_id)
            return
        number = self.numbers[name]
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
        elif self.table.types[name] == "integer" and number.is_like_id:
            self.notes.append(like_id)

    def splits(self, first: int, batch: pa.RecordBatch) -> NDArray[np.int64]:
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

    def input_entry(self, name: str) -> dict[str, Any]:
        """Return what is kept of a column of the table."""
        missing = (self.categories[name] if name in self.categories else self.numbers[name]).missing > 0
        return {"name": name, "type": self.table.types[name], "missing": missing}

    def column_entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": name, "role": "feature"}
        if name in self.parts:
            entry |= dict(zip(("of", "part"), self.parts[name], strict=True))
        if name in self.categories:
            return entry | {"type": "category", "values": self.categories[name].ordered()}
        unit = {"unit": DATE_UNIT} if self.table.kinds.get(name) == "date" else {}
        missing = name not in self.parts and self.numbers[name].missing_train > 0  # of a date said once
        return entry | {"type": "number", "missing": missing} | unit
