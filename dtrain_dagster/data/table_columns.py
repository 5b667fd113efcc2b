"""What the columns of a table are for a training: numbers, categories, the target and its classes.

Decisions, and what is learned of a column from its rows, belong here. Reading and writing files is
`dtrain_dagster.data.rows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.ticker_rows import Moments
from trainer.model.raw_rows import date_category, date_number
from trainer.spec import BINARY, DATE_CATEGORIES, DATE_NUMBERS, MULTICLASS, REGRESSION

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

KINDS = {
    "": "", "boolean": "number", "integer": "number", "number": "number", "datetime": "date", "string": "category",
}  # fmt: skip
"""Type of a column → what it is for a training; "" of one without any value."""
TASKS = (REGRESSION, BINARY, MULTICLASS)
MOST_VALUES = 1000
"""The most values of a category, each of which is an input of the model."""
MOST_SAMPLED = 4096
"""The rows, at even distances, whose values are compared before and after they are standardised."""
MERGED_SHARE = 0.02
"""The share of different numbers that may become the same. Of a smooth column hardly one does, as single precision has
some 10 million numbers within a deviation of the mean; with logarithms of a deviation of 3, one in a hundred."""
ID_SHARE, ID_ROWS = 0.95, 20
"""The share of different values of a column that looks like an identifier, and the rows that it has at least."""
NOTHING = frozenset((
    None, "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
))  # fmt: skip
"""What is no value of a category: the words that pandas reads from a CSV file as missing. It would do so with the rows
that a model is asked about, too."""
DATE_UNIT = "days since 1970-01-01"
"""What a date counts as; one with a zone in UTC."""
_UNITS = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
"""The units of a day."""
LARGEST = float(2**127)
"""The largest number that is taken: its square has a double, and it has a float."""


def type_of_column(field: pa.Field) -> str:
    """Return the type of a column as people have it, one of `trainer.spec.RAW_TYPES`; "" where it has no value at all.
    Raise `DataError` for another type."""
    from pyarrow import types

    kind = _plain(field.type)
    if types.is_null(kind):
        return ""
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "datetime"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) and not types.is_uint64(kind):  # of which a signature has the type
        return "integer"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    raise DataError(
        f"the column {field.name!r} has the type {field.type}, which is neither a number nor text: leave it out "
        f"(--drop {field.name}), or convert it before"
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type, or that of the values of a dictionary."""
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


def date_parts(column: pa.Array) -> dict[str, pa.Array]:
    """Return the parts of dates (`trainer.spec`) as columns of their own: numbers, and categories as text."""
    import pyarrow as pa

    dates = dates_of(column)
    numbers = {part: pa.array(date_number(dates, part)) for part in DATE_NUMBERS}
    return numbers | {part: pa.array(date_category(dates, part), pa.string()) for part in DATE_CATEGORIES}


def dates_of(column: pa.Array) -> NDArray[np.datetime64]:
    """Return dates (n,), one with a zone in UTC, NaT where they are missing."""
    import numpy as np
    import pyarrow as pa

    kind, (values, gone) = _plain(column.type), exact_numbers(column)
    unit = "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
    dates = values.astype(f"datetime64[{unit}]")
    dates[gone] = np.datetime64("NaT")
    return dates


def check_name(name: str) -> None:
    """Raise `DataError` for the name of a column that cannot be kept."""
    if not name or len(name) > 200 or not name.isprintable():
        raise DataError(
            f"the column {name[:80]!r} has a name that is empty, longer than 200 characters or not printable: rename it"
        )


def exact_numbers(column: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the numbers of a column (n,) without a loss of digits: whole numbers stay whole, a date is a number of its
    type's units, a decimal is an object; and which are missing (n,), where the number is 0."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pc.cast(column, _plain(column.type))
    if pa.types.is_null(column.type):
        return np.zeros(len(column)), np.ones(len(column), dtype=bool)
    gone = pc.is_null(column, nan_is_null=pa.types.is_floating(column.type)).to_numpy(zero_copy_only=False)
    if pa.types.is_temporal(column.type):
        column = column.view(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
    elif pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.int8())
    filled = pc.fill_null(column, 0 if pa.types.is_decimal(column.type) else pa.scalar(0, column.type))
    values = filled.to_numpy(zero_copy_only=False)
    return np.where(gone, 0, values), np.asarray(gone, dtype=bool)


def numbers_of(column: pa.Array) -> NDArray[np.float64]:
    """Return the numbers of a column (n,), not a number where they are missing; dates as `DATE_UNIT`."""
    import numpy as np
    import pyarrow as pa

    kind, (values, gone) = _plain(column.type), exact_numbers(column)
    if pa.types.is_date64(kind) or pa.types.is_timestamp(kind):
        unit = _UNITS["ms" if pa.types.is_date64(kind) else kind.unit]
        numbers = values // unit + (values % unit) / unit
    else:
        numbers = values.astype(np.float64)
    return np.where(gone, np.nan, numbers)


def group_of(value: Any) -> str:
    """Return the name of a value by which rows are held together: the same for a number or a date that another file
    has in another type, such as 1 and 1.0, or a day and its first moment in UTC. Pure."""
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return str(moment.date() if moment == datetime.combine(moment.date(), time()) else moment)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(float(value))
    return str(value)


@dataclass(slots=True)
class Column:
    """A feature, and what is learned of it."""

    name: str
    source: str
    """The column of the table that it is, or is a part of."""
    part: str = ""
    """Which part of a date it is (`trainer.spec`)."""
    problem: str = ""
    """Why it cannot be used; further rows are then not looked at."""
    missing: int = 0
    """Rows without a value, in any split."""

    def entry(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        of_date = {"of": self.source, "part": self.part} if self.part else {}
        return {"name": self.name, "role": "feature", **of_date}


@dataclass(slots=True)
class NumberColumn(Column):
    """A column of numbers, or a target that is a number."""

    unit: str = ""
    moments: Moments = field(default_factory=Moments)
    """Of the training split."""
    missing_train: int = 0
    """Rows of the training split without a number."""
    first_missing: int = -1
    low: float = math.inf
    high: float = -math.inf
    """The least and the greatest number in the training split."""
    sampled: list[pa.Array] = field(default_factory=list)
    """Some of its values, at even distances."""

    def learn(self, column: pa.Array, is_train: NDArray[np.bool_], first_row: int, every: int) -> None:
        """Add some rows. ``first_row``: the number of the first of them in the table; ``every``: rows from one that is
        sampled to the next."""
        import numpy as np
        import pyarrow.compute as pc

        if self.problem:
            return
        values = numbers_of(column)
        gone = np.isnan(values)
        if gone.any() and not self.missing:
            self.first_missing = first_row + int(np.flatnonzero(gone)[0])
        self.missing += int(gone.sum())
        self.missing_train += int((gone & is_train).sum())
        large = np.flatnonzero(np.abs(values) > LARGEST)
        if len(large):
            self.problem = (
                f"has {values[large[0]]} in row {first_row + int(large[0])}, counted from 0, which is too large: "
                "correct it"
            )
            return
        known = values[~gone & is_train]
        if len(known):
            self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))
            self.moments.join(Moments.of(known))
        is_sampled = np.arange(first_row, first_row + len(values)) % every == 0
        sampled = column.take(np.flatnonzero(is_sampled & ~gone))
        self.sampled.append(pc.cast(sampled, _plain(sampled.type)))  # a dictionary would be kept as a whole

    @property
    def has_values(self) -> bool:
        """Whether the training split has any."""
        return self.moments.count > 0

    @property
    def varies(self) -> bool:
        """Whether it tells rows of the training split apart, if only by what is missing (of a date said once)."""
        return bool(self.std) or (self.missing_train > 0 and not self.part)

    @property
    def is_like_id(self) -> bool:
        """Return whether it has another whole number in nearly every row, as an identifier does. Of those that were
        sampled all may differ by chance, unless the range has room for as many."""
        has_room, different = self.high - self.low + 1 >= ID_SHARE * self.moments.count, self._different()
        is_whole = has_room and all(value == int(value) for value in different)
        return is_whole and is_like_id(len(different), sum(map(len, self.sampled)))

    @property
    def mean(self) -> float:
        """Return the mean over the training split, 0 where it has no number."""
        return float(self.moments.mean)

    @property
    def std(self) -> float:
        """Return the standard deviation over the training split, 0 where it does not vary."""
        return float(self.moments.mean_std()[1]) if self.high > self.low else 0.0

    def entry(self) -> dict[str, Any]:
        """See `Column`."""
        unit = {"unit": self.unit} if self.unit else {}
        found = {"type": "number", "missing": self.missing_train > 0 and not self.part, **unit}
        return super(NumberColumn, self).entry() | found

    def stored(self, column: pa.Array, first_row: int) -> NDArray[np.float32]:
        """Return what is stored of some rows (n,). Raise `DataError` for a number that is too far from those of the
        training split."""
        import numpy as np

        values = numbers_of(column)
        found = self._standardise(values)
        if (odd := np.flatnonzero(np.isinf(found))).size:
            raise DataError(
                f"the column {self.name!r} has {values[odd[0]]} in row {first_row + int(odd[0])}, counted from 0, and "
                f"a deviation of {self.std:.3g} over the training split: correct it, or leave the column out "
                f"(--drop {self.name})"
            )
        return found

    def _standardise(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return numbers in deviations from the mean. Not finite where one is too far off."""
        import numpy as np

        with np.errstate(over="ignore"):
            return ((values - self.mean) / (self.std or 1.0)).astype(np.float32)

    def _different(self) -> set[Any]:
        """Return the different numbers that were sampled, exactly."""
        return {value for part in self.sampled for value in exact_numbers(part)[0].tolist()}

    def judge(self) -> None:
        """Note the problem of a column that would lose its information where it is standardised."""
        import numpy as np

        if self.problem or not self.sampled:
            return
        there, numbers = len(self._different()), np.concatenate([numbers_of(part) for part in self.sampled])
        if not self.high > self.low:
            if there > 1 == len(np.unique(numbers)):
                self.problem = (
                    f"has {there:,} different numbers, which are one in double precision, {self.low:.0f}: subtract a "
                    "constant from it"
                )
            return
        if not (math.isfinite(self.std) and math.isfinite(1 / self.std if self.std else math.inf)):
            self.problem = (
                f"varies from {self.low} to {self.high}, which is too little for a deviation in double precision: "
                "multiply it by a constant"
            )
            return
        left = len(np.unique(self._standardise(numbers)))
        if there - left > MERGED_SHARE * there:
            self.problem = (
                f"has {there:,} different numbers in {len(numbers):,} of its rows, of which {left:,} "
                f"are left in single precision, standardised by mean {self.mean:.6g} and deviation {self.std:.3g}: "
                "subtract a constant from whole numbers beyond 2^53, cut off outliers, or take logarithms"
            )


@dataclass(slots=True)
class CategoryColumn(Column):
    """A category, with its values in the training split."""

    values: set[str] = field(default_factory=set)
    trained: int = 0
    """Rows of the training split, and those of them with a value."""
    filled: int = 0

    def learn(self, column: pa.Array, is_train: NDArray[np.bool_], first_row: int, every: int) -> None:
        """Add some rows, as `NumberColumn.learn`."""
        if self.problem:
            return
        values = column.to_pylist()
        known = [value for value, train in zip(values, is_train, strict=True) if train and value not in NOTHING]
        self.missing += sum(value in NOTHING for value in values)
        self.trained, self.filled = self.trained + int(is_train.sum()), self.filled + len(known)
        self.values.update(known)
        if len(self.values) > MOST_VALUES:
            like = ", and another in nearly every row, as an identifier does" if self.is_like_id else ""
            self.problem = f"has more than {MOST_VALUES} values{like}, each of which would be an input: group them"
        elif odd := [value for value in self.values if len(value) > 200 or not value.isprintable()]:
            self.problem = (
                f"has the value {odd[0][:80]!r}, which is longer than 200 characters or not printable: it is no "
                "category"
            )

    def judge(self) -> None:
        """Its problems are noted as they are found."""

    @property
    def has_values(self) -> bool:
        """Whether the training split has any."""
        return bool(self.values)

    @property
    def varies(self) -> bool:
        """Whether it tells rows of the training split apart."""
        return len(self.values) > 1 or (bool(self.values) and self.filled < self.trained)

    @property
    def is_like_id(self) -> bool:
        """Return whether it has another value in nearly every row, as an identifier does."""
        return is_like_id(len(self.values), self.filled)

    def entry(self) -> dict[str, Any]:
        """See `Column`. The codes of values begin at 1, in their order."""
        return super(CategoryColumn, self).entry() | {"type": "category", "values": sorted(self.values)}

    def stored(self, column: pa.Array, first_row: int) -> NDArray[np.int32]:
        """Return the codes of some rows (n,), 0 for what the training split has not."""
        import numpy as np

        codes = {value: code for code, value in enumerate(sorted(self.values), 1)}
        return np.array([codes.get(value, 0) for value in column.to_pylist()], dtype=np.int32)


def is_like_id(different: int, rows: int) -> bool:
    """Return whether so many different values are those of an identifier. Pure."""
    return rows >= ID_ROWS and different >= ID_SHARE * rows
