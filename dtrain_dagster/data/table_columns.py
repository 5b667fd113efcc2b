"""What the columns of a table are for a training: numbers and categories, what rows say of them, and what is stored.

What is learned of a column is one query of the table `rows` that `dtrain_dagster.data.learned_table` loads: ``n``, the
number of a row, ``split``, its place in `SPLITS`, and a column for each feature, numbers in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError
from trainer.model.raw_rows import date_category, date_days, date_number
from trainer.spec import BINARY, DATE_CATEGORIES, DATE_NUMBERS, MULTICLASS, REGRESSION

if TYPE_CHECKING:
    import duckdb
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
_NOTHING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
"""What is no value of a category: the words that pandas reads from a CSV file as missing. It would do so with the rows
that a model is asked about, too."""
DATE_UNIT = "days since 1970-01-01"
"""What a date counts as; one with a zone in UTC."""
_WORDS = ", ".join(f"'{word}'" for word in _NOTHING)
_COUNTS = "count(*) - count(x), count(*) FILTER (x IS NULL AND split = 0), count(x) FILTER (split = 0)"
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

    dates = _dates_of(column)
    numbers = {part: pa.array(date_number(dates, part)) for part in DATE_NUMBERS}
    return numbers | {part: pa.array(date_category(dates, part), pa.string()) for part in DATE_CATEGORIES}


def _dates_of(column: pa.Array) -> NDArray[np.datetime64]:
    """Return dates (n,), one with a zone in UTC, NaT where they are missing."""
    dates: NDArray[np.datetime64] = plain_values(column).to_numpy(zero_copy_only=False)
    return dates


def plain_values(column: pa.Array) -> pa.Array:
    """Return a column, without a dictionary of its values."""
    import pyarrow.compute as pc

    return pc.cast(column, _plain(column.type))


def check_name(name: str) -> None:
    """Raise `DataError` for the name of a column that cannot be kept."""
    if not name or len(name) > 200 or not name.isprintable():
        raise DataError(
            f"the column {name[:80]!r} has a name that is empty, longer than 200 characters or not printable: rename it"
        )


def numbers_of(column: pa.Array) -> NDArray[np.float64]:
    """Return the numbers of a column (n,), not a number where they are missing; dates as `DATE_UNIT`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_temporal(_plain(column.type)):
        return date_days(_dates_of(column))
    numbers: NDArray[np.float64] = pc.cast(plain_values(column), pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return numbers


def group_of(value: Any) -> str:
    """Return the name of a value by which rows are held together: the same for a number or a date that another file
    has in another type, such as 1 and 1.0, or a day and its first moment in UTC. Pure."""
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return str(moment.date() if moment == datetime.combine(moment.date(), time()) else moment)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(float(value))
    return str(value)


def class_name(value: Any) -> str | None:
    """Return the name of a class: text as it is, a whole number without its point; None where there is none. Pure."""
    if value is None or isinstance(value, str):
        return value or None
    return str(int(value)) if math.isfinite(value) else None


@dataclass(slots=True)
class Column:
    """A feature, and what is learned of it."""

    name: str
    source: str
    """The column of the table that it is, or is a part of."""
    key: str
    """Its name in the loaded table."""
    part: str = ""
    """Which part of a date it is (`trainer.spec`)."""
    missing: int = 0
    """Rows without a value, in any split."""
    missing_train: int = 0
    """Rows of the training split without a value, and those with one."""
    trained: int = 0
    problem: str = ""
    """Why it cannot be used."""

    def entry(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        of_date = {"of": self.source, "part": self.part} if self.part else {}
        return {"name": self.name, "role": "feature", **of_date}


@dataclass(slots=True)
class NumberColumn(Column):
    """A column of numbers, or a target that is a number."""

    unit: str = ""
    sampled: list[pa.Array] = field(default_factory=list)
    """Some of its values, at even distances, with all their digits."""
    first_missing: int | None = None
    low: float = 0.0
    high: float = 0.0
    """The least and the greatest number in the training split."""
    mean: float = 0.0
    """Over the training split, 0 where it has no number."""
    std: float = 0.0
    """Standard deviation over the training split, 0 where it does not vary."""

    def loaded(self, values: pa.Array, is_sampled: pa.BooleanArray) -> pa.Array:
        """Return what is loaded of some rows (n,), and keep some of them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = pa.array(numbers_of(values), from_pandas=True)
        self.sampled.append(plain_values(values.filter(pc.and_(is_sampled, pc.is_valid(numbers)))))
        return numbers

    def learn(self, database: duckdb.DuckDBPyConnection) -> None:
        """Learn it from all rows, and note why it cannot be standardised."""
        usable, columns = f"split = 0 AND abs(x) <= {LARGEST!r}", f"SELECT n, split, {self.key} AS x FROM rows"
        found = database.execute(f"""
            SELECT {_COUNTS}, min(n) FILTER (x IS NULL), coalesce(min(x) FILTER ({usable}), 0),
                coalesce(max(x) FILTER ({usable}), 0), coalesce(any_value(mean), 0),
                coalesce(sqrt(favg((x - mean) ** 2) FILTER ({usable})), 0),
                arg_max(x, abs(x - mean)), arg_max(n, abs(x - mean))
            FROM ({columns}), (SELECT coalesce(favg(x), 0) AS mean FROM ({columns}) WHERE {usable})
        """).fetchall()[0]
        self.missing, self.missing_train, self.trained, self.first_missing, *figures, extreme, row = found
        self.low, self.high, self.mean, self.std = figures
        if not self.high > self.low:
            self.std = 0.0  # whatever the rounding of the mean
        if extreme is not None and (abs(extreme) > LARGEST or not math.isfinite(self._standardise(extreme))):
            beside = f" beside a deviation of {self.std:.3g} over the training split" if self.std else ""
            self.problem = f"has {extreme} in row {row}, counted from 0, which is too large{beside}: correct it"
        elif self.sampled:
            self.problem = self._loss()

    def _loss(self) -> str:
        """Return why numbers become the same where they are standardised; "" where they do not."""
        import numpy as np

        there, numbers = self.different, np.concatenate([numbers_of(part) for part in self.sampled])
        left = len(np.unique(self._standardise(numbers)))
        if not self.high > self.low:
            if there > 1 == len(np.unique(numbers)):
                return (
                    f"has {there:,} different numbers, which are one in double precision, {self.low:.0f}: subtract a "
                    "constant from it"
                )
        elif not (self.std and math.isfinite(1 / self.std)):
            return (
                f"varies from {self.low} to {self.high}, which is too little for a deviation in double precision: "
                "multiply it by a constant"
            )
        elif there - left > MERGED_SHARE * there:
            return (
                f"has {there:,} different numbers in {len(numbers):,} of its rows, of which {left:,} "
                f"are left in single precision, standardised by mean {self.mean:.6g} and deviation {self.std:.3g}: "
                "subtract a constant from whole numbers beyond 2^53, cut off outliers, or take logarithms"
            )
        return ""

    @property
    def _values(self) -> set[Any]:
        """The different numbers that were sampled, with all their digits."""
        return {value for part in self.sampled for value in part.to_pylist()}

    @property
    def different(self) -> int:
        """How many different numbers were sampled."""
        return len(self._values)

    @property
    def varies(self) -> bool:
        """Whether it tells rows of the training split apart, if only by what is missing (of a date said once)."""
        return bool(self.std) or (self.missing_train > 0 and not self.part)

    @property
    def is_like_id(self) -> bool:
        """Return whether it has another whole number in nearly every row, as an identifier does. Of those that were
        sampled all may differ by chance, unless the range has room for as many."""
        has_room = self.high - self.low + 1 >= ID_SHARE * self.trained
        is_whole = has_room and all(value == int(value) for value in self._values)
        return is_whole and is_like_id(self.different, sum(map(len, self.sampled)))

    def entry(self) -> dict[str, Any]:
        """See `Column`."""
        unit = {"unit": self.unit} if self.unit else {}
        found = {"type": "number", "missing": self.missing_train > 0 and not self.part, **unit}
        return super(NumberColumn, self).entry() | found

    @property
    def scale(self) -> dict[str, float]:
        """What the manifest says of its scale: one that varies in what is missing alone has no deviation."""
        return {"mean": self.mean, "std": self.std or 1.0}

    def stored(self, loaded: pa.Array) -> NDArray[np.float32]:
        """Return what is stored of some loaded rows (n,): deviations from the mean, not a number where one is
        missing."""
        return self._standardise(loaded.to_numpy(zero_copy_only=False).astype("float64"))

    def _standardise(self, values: Any) -> Any:
        """Return numbers in deviations from the mean. Not finite where one is too far off."""
        import numpy as np

        with np.errstate(over="ignore"):
            return np.float32((values - self.mean) / (self.std or 1.0))


@dataclass(slots=True)
class CategoryColumn(Column):
    """A category, with its values in the training split."""

    values: list[str] = field(default_factory=list)
    """In their order; none where there are more than `MOST_VALUES`."""
    different: int = 0
    """How many values there are."""

    def loaded(self, values: pa.Array, is_sampled: pa.BooleanArray) -> pa.Array:
        """Return what is loaded of some rows (n,)."""
        import pyarrow as pa
        import pyarrow.compute as pc

        return pc.cast(plain_values(values), pa.string())

    def learn(self, database: duckdb.DuckDBPyConnection) -> None:
        """Learn it from all rows, and note why it is no category."""
        value = f"CASE WHEN {self.key} NOT IN ({_WORDS}) THEN {self.key} END"
        columns = f"SELECT split, {value} AS x FROM rows"
        query = f"SELECT {_COUNTS}, count(DISTINCT x) FILTER (split = 0) FROM ({columns})"
        self.missing, self.missing_train, self.trained, self.different = database.execute(query).fetchall()[0]
        if self.different > MOST_VALUES:
            like = ", and another in nearly every row, as an identifier does" if self.is_like_id else ""
            self.problem = f"has more than {MOST_VALUES} values{like}, each of which would be an input: group them"
            return
        rows = database.execute(f"SELECT DISTINCT x FROM ({columns}) WHERE split = 0 AND x IS NOT NULL").fetchall()
        self.values = sorted(value for (value,) in rows)
        if odd := [value for value in self.values if len(value) > 200 or not value.isprintable()]:
            self.problem = (
                f"has the value {odd[0][:80]!r}, which is longer than 200 characters or not printable: it is no "
                "category"
            )

    @property
    def varies(self) -> bool:
        """Whether it tells rows of the training split apart."""
        return self.different > 1 or (self.different > 0 and self.missing_train > 0)

    @property
    def is_like_id(self) -> bool:
        """Return whether it has another value in nearly every row, as an identifier does."""
        return is_like_id(self.different, self.trained)

    def entry(self) -> dict[str, Any]:
        """See `Column`. The codes of values begin at 1, in their order."""
        return super(CategoryColumn, self).entry() | {"type": "category", "values": self.values}

    @property
    def scale(self) -> dict[str, float]:
        """See `NumberColumn`: it has none."""
        return {"mean": 0.0, "std": 1.0}

    def stored(self, loaded: pa.Array) -> NDArray[np.int32]:
        """Return the codes of some loaded rows (n,), 0 for what the training split has not."""
        return codes_of(loaded, self.values) + 1


def codes_of(values: pa.Array, known: Sequence[str]) -> NDArray[np.int32]:
    """Return the places of values (n,) in those that are known, -1 for others. Pure."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    places = pc.index_in(values, value_set=pa.array(known, pa.string()))
    return np.asarray(pc.fill_null(places, -1), dtype=np.int32)


def is_like_id(different: int, rows: int) -> bool:
    """Return whether so many different values are those of an identifier. Pure."""
    return rows >= ID_ROWS and different >= ID_SHARE * rows
