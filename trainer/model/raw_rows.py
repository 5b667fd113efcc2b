"""Rows of a table as people have them, and as they are stored: one way there, and one back.

The builder of datasets, the registered model and the checks of it all go through here, so that a row means the same to
each of them. Columns are numpy arrays by name: numbers, whole numbers and booleans as they are (not a number, or None,
where one is missing), text as objects (None where it is missing), dates as datetime64 without a zone (NaT where one is
missing). Reading files and tables of pandas does not belong here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.spec import RawColumn, RowSpec

_DAY = 86_400_000_000


def date_days(dates: NDArray[np.datetime64]) -> NDArray[np.float64]:
    """Return the days since 1970-01-01 (n,) of dates, not a number where one is missing."""
    time = dates.astype("datetime64[us]")
    micros = time.astype(np.int64)
    return np.where(np.isnat(time), np.nan, micros // _DAY + (micros % _DAY) / _DAY)


def date_number(dates: NDArray[np.datetime64], part: str) -> NDArray[np.float64]:
    """Return a part of `trainer.spec.DATE_NUMBERS` (n,), not a number where a date is missing."""
    if part == "year":
        found = dates.astype("datetime64[Y]").astype(np.int64) + 1970
    else:
        found = (dates.astype("datetime64[D]") - dates.astype("datetime64[M]")).astype(np.int64) + 1
    return np.where(np.isnat(dates), np.nan, found)


def date_category(dates: NDArray[np.datetime64], part: str) -> NDArray[Any]:
    """Return a part of `trainer.spec.DATE_CATEGORIES` as text (n,), None where a date is missing: months from 1, hours
    from 0, days of the week from 1 for Monday."""
    if part == "month":
        found = dates.astype("datetime64[M]").astype(np.int64) % 12 + 1
    elif part == "weekday":
        found = (dates.astype("datetime64[D]").astype(np.int64) + 3) % 7 + 1  # 1970-01-01 was a Thursday
    else:
        found = dates.astype("datetime64[h]").astype(np.int64) % 24
    texts = found.astype(str).astype(object)
    texts[np.isnat(dates)] = None
    return texts


def stored_rows(spec: RowSpec, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return rows (n, stored columns) as `trainer.model.saved_model.SavedModel.predict` takes them. An optional column
    may be left out: then each row lacks it. Values of a category that no training row had are 0, as missing ones are.
    Raise ValueError for another column that is missing, and for values of another type, by name."""
    raw = {column.name: column for column in spec.raw}
    if gone := [name for name, column in raw.items() if name not in columns and not column.missing]:
        raise ValueError(f"the input lacks the column {gone[0]!r}: give {', '.join(raw)}")
    count = max((len(values) for values in columns.values()), default=0)
    given = {name: _typed(column, columns[name]) for name, column in raw.items() if name in columns}
    stored = np.empty((count, len(spec.features)))
    for place, (name, part, values) in enumerate(zip(spec.sources, spec.parts, spec.categories, strict=True)):
        stored[:, place] = 0 if values else np.nan
        if name not in given:
            continue
        column = given[name]
        if values:
            texts = date_category(column, part) if part else column
            codes = {value: code for code, value in enumerate(values, 1)}
            stored[:, place] = [_code(codes, text) for text in texts]
        elif raw[name].type == "datetime":
            stored[:, place] = date_number(column, part) if part else date_days(column)
        else:
            stored[:, place] = column
    return stored


def _code(codes: Mapping[str, int], text: Any) -> int:
    """Return the code of a value; without the spaces around it, as cells of a CSV file are read, where it has none."""
    return codes.get(text) or (codes.get(text.strip(), 0) if isinstance(text, str) else 0)


def raw_columns(spec: RowSpec, rows: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Return the columns of a table for rows (n, stored columns) that were stored, the reverse of `stored_rows`. A date
    is exact to its hour, and to the precision of what is stored below that; a whole number is rounded to one."""
    return {column.name: _raw(spec, column, rows) for column in spec.raw}


def _raw(spec: RowSpec, column: RawColumn, rows: NDArray[np.float64]) -> NDArray[Any]:
    places = {
        part: place
        for place, (name, part) in enumerate(zip(spec.sources, spec.parts, strict=True))
        if name == column.name
    }
    if column.type == "datetime":
        return _dates(spec, rows, places)
    values = rows[:, places[""]]
    if column.type == "string":
        names = np.array([None, *spec.categories[places[""]]], dtype=object)
        return names[values.astype(np.int64)]
    if column.type == "number":
        return values
    if column.type == "integer":
        whole = np.rint(values)
        return whole if column.missing else whole.astype(np.int64)
    is_true = values > 0.5
    if not column.missing:
        return is_true
    known = is_true.astype(object)
    known[np.isnan(values)] = None
    return known


def _dates(spec: RowSpec, rows: NDArray[np.float64], places: Mapping[str, int]) -> NDArray[np.datetime64]:
    """Return dates for their stored parts. The days since 1970 are in single precision, which may round a date over the
    border of a day or an hour, where the other parts say on which side it was."""
    days = rows[:, places[""]]
    is_gone = np.isnan(days)
    micros = np.rint(np.where(is_gone, 0, days) * _DAY).astype(np.int64)
    unit = 3_600_000_000 if "hour" in places else _DAY
    border = np.rint(micros / unit).astype(np.int64) * unit
    mean, std = spec.feature_mean[places[""]], spec.feature_std[places[""]]
    step = 2.0**-22 * np.maximum(std, np.abs(np.where(is_gone, mean, days) - mean)) * _DAY  # what is lost in storage
    micros = np.where(np.abs(micros - border) <= step, border, micros)
    best: NDArray[Any] = micros.astype("datetime64[us]")
    for moment in (border, border - 1):
        time = moment.astype("datetime64[us]")
        best = np.where(_fits(spec, rows, places, best) | ~_fits(spec, rows, places, time), best, time)
    return np.where(is_gone, np.datetime64("NaT", "us"), best)


def _fits(
    spec: RowSpec, rows: NDArray[np.float64], places: Mapping[str, int], dates: NDArray[np.datetime64]
) -> NDArray[np.bool_]:
    """Return which dates (n,) have the stored parts."""
    found: NDArray[np.bool_] = np.ones(len(rows), dtype=bool)
    for part, place in places.items():
        if spec.categories[place]:
            names = np.array(["", *spec.categories[place]], dtype=object)[rows[:, place].astype(np.int64)]
            found &= (names == date_category(dates, part)) | (names == "")
        elif part:
            found &= np.abs(rows[:, place] - date_number(dates, part)) < 0.5
    return found


def _typed(column: RawColumn, values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of a column as its type has them. Raise ValueError for those of another type."""
    if column.type == "boolean":
        if values.dtype.kind == "O":
            values = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        if odd := [value for value in values.tolist() if value not in (0, 1) and value == value]:
            raise ValueError(f"the column {column.name!r} holds {odd[0]!r}, and is true or false")
        return values
    kinds = {"datetime": "M", "string": "OU"}.get(column.type, "biuf")
    if values.dtype.kind not in kinds:
        raise ValueError(f"the column {column.name!r} holds {values.dtype}, and is a {column.type}: convert it")
    return values
