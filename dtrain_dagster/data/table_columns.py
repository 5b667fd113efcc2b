"""What the columns of a table are for a training: numbers, categories, the target and its classes.

Decisions, and what is learned of a column from its rows, belong here. Reading and writing files is
`dtrain_dagster.data.rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.ticker_rows import Moments
from trainer.data.kinds import MOST_CLASSES
from trainer.spec import BINARY, MULTICLASS, REGRESSION

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

Task = Literal["regression", "binary", "multiclass"]
Kind = Literal["number", "category"]
TASKS = (REGRESSION, BINARY, MULTICLASS)
MOST_VALUES = 1000
"""The most values of a category, each of which is an input of the model."""
FEW_VALUES = 20
"""A target of whole numbers with at most this many values is taken for classes, unless a task is given."""


def kind_of_column(field: pa.Field) -> Kind:
    """Return what a column is, by its type. Raise `DataError` for a type that is neither number nor text."""
    import pyarrow as pa

    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "category"
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    raise DataError(
        f"the column {field.name!r} has the type {field.type}, which is neither a number nor text: leave it out "
        f"(--drop {field.name}), or convert it before"
    )


def check_name(name: str) -> None:
    """Raise `DataError` for the name of a column that cannot be kept."""
    if not name or len(name) > 200 or not name.isprintable():
        raise DataError(f"the column {name[:80]!r} has a name that is empty, longer than 200 or not printable: rename")


def numbers_of(column: pa.Array) -> NDArray[np.float64]:
    """Return the numbers of a column (n,), not a number where they are missing."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    if column.null_count == 0 and not pa.types.is_boolean(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    return np.asarray(pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def texts_of(column: pa.Array) -> list[Any]:
    """Return the values of a column as they are, None where they are missing."""
    return column.to_pylist()


@dataclass(slots=True)
class NumberColumn:
    """What is learned of a column of numbers."""

    name: str
    moments: Moments = field(default_factory=Moments)
    missing: int = 0
    """Rows without a number, in any split."""

    def learn(self, values: NDArray[np.float64], is_train: NDArray[np.bool_], first_row: int) -> None:
        """Add some rows; ``first_row`` is the number of the first of them in the table. Raise `DataError` for a number
        that float32 does not have."""
        import numpy as np

        gone = np.isnan(values)
        self.missing += int(gone.sum())
        large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
        if len(large):
            raise DataError(
                f"the column {self.name!r} has {values[large[0]]} in row {first_row + int(large[0])}, counted from 0, "
                f"which is too large for float32: correct it, or leave the column out (--drop {self.name})"
            )
        known = values[~gone & is_train]
        if len(known):
            self.moments.join(Moments.of(known))

    @property
    def mean(self) -> float:
        """Return the mean over the training split, 0 where it has no number."""
        return float(self.moments.mean)

    @property
    def std(self) -> float:
        """Return the standard deviation over the training split, 0 where it does not vary."""
        return float(self.moments.mean_std()[1]) if self.moments.count else 0.0


@dataclass(slots=True)
class CategoryColumn:
    """What is learned of a category: its values in the training split."""

    name: str
    values: set[str] = field(default_factory=set)

    def learn(self, values: Sequence[Any], is_train: NDArray[np.bool_]) -> None:
        """Add some rows. Raise `DataError` for more values than a model is given inputs for."""
        self.values |= {value for value, train in zip(values, is_train, strict=True) if train and value}
        if len(self.values) > MOST_VALUES:
            raise DataError(
                f"the column {self.name!r} has more than {MOST_VALUES} values, each of which would be an input: leave "
                f"it out (--drop {self.name}), or group its values"
            )
        for value in self.values:
            if len(value) > 200 or not value.isprintable():
                raise DataError(
                    f"the column {self.name!r} has the value {value[:80]!r}, which is longer than 200 characters or "
                    f"not printable: it is no category; leave it out (--drop {self.name})"
                )

    def ordered(self) -> list[str]:
        """Return the values in the order of their codes, which begin at 1."""
        return sorted(self.values)


@dataclass(slots=True)
class TargetColumn:
    """What is learned of the target."""

    name: str
    counts: Counter[Any] = field(default_factory=Counter)
    """How often each value is in the training split, while there are no more than there can be classes."""
    elsewhere: set[Any] = field(default_factory=set)
    """Values of the other splits."""
    moments: Moments = field(default_factory=Moments)
    is_fraction: bool = False
    """Whether some value is no whole number."""

    def learn(self, column: pa.Array, is_train: NDArray[np.bool_], first_row: int) -> None:
        """Add some rows. Raise `DataError` for a target that is missing, or too large for float32."""
        import numpy as np

        is_text = kind_of_column(_field(self.name, column)) == "category"
        values = np.array(texts_of(column), dtype=object) if is_text else numbers_of(column)
        gone = (
            np.array([not value for value in values], dtype=bool)
            if is_text
            else ~(np.abs(values) <= np.finfo(np.float32).max)
        )
        if gone.any():
            row = first_row + int(np.flatnonzero(gone)[0])
            raise DataError(
                f"the target {self.name!r} is missing, or too large for float32, in row {row}, counted "
                "from 0: leave such rows out, or give them a target"
            )
        if not is_text:
            self.is_fraction = self.is_fraction or bool((values != np.floor(values)).any())
            if is_train.any():
                self.moments.join(Moments.of(values[is_train]))
        if len(self.counts) <= MOST_CLASSES:
            self.counts.update(values[is_train].tolist())
        if len(self.elsewhere) <= MOST_CLASSES:
            self.elsewhere.update(values[~is_train].tolist())

    def task(self, asked: str | None) -> tuple[str, list[Any]]:
        """Return the task, and the values of the classes in the order of their codes. Raise `DataError` where the task
        that was asked for does not fit."""
        is_text = any(isinstance(value, str) for value in self.counts)
        usual = REGRESSION if not is_text and (self.is_fraction or len(self.counts) > FEW_VALUES) else MULTICLASS
        if usual == MULTICLASS and len(self.counts) == 2:
            usual = BINARY
        task = asked or usual
        if task == REGRESSION:
            if is_text:
                raise DataError(f"the target {self.name!r} is text, and a regression needs numbers: leave --task out")
            return task, []
        classes = sorted(self.counts)
        fits = len(classes) == 2 if task == BINARY else 2 < len(classes) <= MOST_CLASSES
        if not fits or self.is_fraction:
            what = "values that are no whole numbers" if self.is_fraction else f"{len(classes)} values"
            raise DataError(
                f"the target {self.name!r} has {what} in the training split, and {task} needs "
                f"{'two classes' if task == BINARY else f'3 to {MOST_CLASSES:,} classes'}: choose another --task"
            )
        if unknown := sorted(self.elsewhere - set(classes), key=str):
            raise DataError(
                f"the target {self.name!r} has the class {unknown[0]!r} in the validation or test split alone: give "
                "more rows of it, or leave it out"
            )
        return task, classes


def class_name(value: Any) -> str:
    """Return the name of a class: text as it is, a whole number without its point."""
    return value if isinstance(value, str) else str(int(value))


def _field(name: str, column: pa.Array) -> pa.Field:
    import pyarrow as pa

    return pa.field(name, column.type)
