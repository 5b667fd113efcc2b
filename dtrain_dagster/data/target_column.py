"""What is learned of the target of a table: its classes, or its numbers, and which columns are the same once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.table_columns import LARGEST, NumberColumn, exact_numbers, numbers_of
from trainer.data.manifest import MOST_CLASSES
from trainer.spec import BINARY, MULTICLASS, REGRESSION

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

FEW_VALUES = 20
"""A target of whole numbers with at most this many values is taken for classes, unless a task is given."""


@dataclass(slots=True)
class TargetCopy:
    """Whether a column is the target once more, as it is or in other words."""

    is_same: bool = True
    """Whether it has the target's value in each row."""
    is_renamed: bool = True
    """Whether each of its few values goes with one value of the target, and that with no other."""
    meant: dict[Any, Any] = field(default_factory=dict)

    def learn(self, values: Sequence[Any], target: Sequence[Any]) -> None:
        """Add some rows."""
        self.is_same = self.is_same and all(value == other for value, other in zip(values, target, strict=True))
        if not self.is_renamed:
            return
        for value, other in zip(values, target, strict=True):
            if value != value or self.meant.setdefault(value, other) != other or len(self.meant) > FEW_VALUES:
                break
        else:
            self.is_renamed = len(set(self.meant.values())) == len(self.meant)
            return
        self.is_renamed = False


@dataclass(slots=True)
class TargetColumn:
    """What is learned of the target."""

    name: str
    is_text: bool = False
    counts: Counter[Any] = field(default_factory=Counter)
    """How often each value is in the training split, while there are no more than there can be classes."""
    elsewhere: set[Any] = field(default_factory=set)
    """Values of the other splits."""
    is_fraction: bool = False
    """Whether some value is no whole number."""
    number: NumberColumn = field(default_factory=lambda: NumberColumn("", ""))
    problem: str = ""

    def learn(self, column: pa.Array, is_train: NDArray[np.bool_], first_row: int, every: int) -> None:
        """Add some rows, as `NumberColumn.learn`."""
        import numpy as np

        if self.problem:
            return
        values = self.classes_of(column)
        if self.is_text:
            gone = np.array([not value for value in values], dtype=bool)
        else:
            numbers = numbers_of(column)
            gone = ~(np.abs(numbers) <= LARGEST)
        if gone.any():
            row = first_row + int(np.flatnonzero(gone)[0])
            self.problem = (
                f"the target {self.name!r} is missing, or too large, in row {row}, counted from 0: leave such rows "
                "out, or give them a target"
            )
            return
        if not self.is_text:
            self.is_fraction = self.is_fraction or bool((numbers != np.floor(numbers)).any())
            self.number.learn(column, is_train, first_row, every)
        if len(self.counts) <= MOST_CLASSES:
            self.counts.update(values[is_train].tolist())
        if len(self.elsewhere) <= MOST_CLASSES:
            self.elsewhere.update(values[~is_train].tolist())

    def classes_of(self, column: pa.Array) -> NDArray[Any]:
        """Return the values of a column (n,) as classes: whole numbers with all their digits."""
        import numpy as np

        return np.array(column.to_pylist(), dtype=object) if self.is_text else exact_numbers(column)[0]

    def task(self, asked: str | None) -> tuple[str, list[Any]]:
        """Return the task, and the values of the classes in the order of their codes. Raise `DataError` where the task
        that was asked for does not fit, or the target cannot be learned."""
        if self.problem:
            raise DataError(self.problem)
        usual = REGRESSION if not self.is_text and (self.is_fraction or len(self.counts) > FEW_VALUES) else MULTICLASS
        if usual == MULTICLASS and len(self.counts) == 2:
            usual = BINARY
        task = asked or usual
        if task == REGRESSION:
            if self.is_text:
                raise DataError(f"the target {self.name!r} is text, and a regression needs numbers: leave --task out")
            if not self.number.high > self.number.low:
                raise DataError(f"the target {self.name!r} does not vary over the training split")
            self.number.judge()
            if self.number.problem:
                raise DataError(f"the target {self.name!r} {self.number.problem}")
            return task, []
        classes = sorted(self.counts)
        fits = len(classes) == 2 if task == BINARY else 2 < len(classes) <= MOST_CLASSES
        if not fits or self.is_fraction:
            what = "values that are not whole numbers" if self.is_fraction else f"{len(classes)} values"
            raise DataError(
                f"the target {self.name!r} has {what} in the training split, and {task} needs "
                f"{'two classes' if task == BINARY else f'3 to {MOST_CLASSES:,} classes'}: choose another --task"
            )
        if unknown := sorted(self.elsewhere - set(classes), key=str):
            raise DataError(
                f"the target {self.name!r} has the class {unknown[0]!r} only in the validation or test split: give "
                "more rows of it, or leave it out"
            )
        if odd := [value for value in classes if self.is_text and (len(value) > 200 or not value.isprintable())]:
            raise DataError(
                f"the target {self.name!r} has the class {odd[0][:80]!r}, which is longer than 200 characters or not "
                "printable: rename it"
            )
        return task, classes


def class_name(value: Any) -> str:
    """Return the name of a class: text as it is, a whole number without its point."""
    return value if isinstance(value, str) else str(int(value))
